"""A model timed beside other compilers."""

SUITES_ELSEWHERE = (
    "suites of workloads are not installed; in a checkout: python -m tests.benchmarks --suite NAME"
)
