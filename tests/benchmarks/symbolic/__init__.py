"""Programs whose sizes a call tells, compiled once, beside a compile for each size.

    python -m tests.benchmarks --suite symbolic --out tests/results/symbolic.json

Each program has a process of its own, in which it is compiled once by us and by inductor, and for
each of some sizes by both. They compile at once; when all are done, they are timed one at a time.
"""
