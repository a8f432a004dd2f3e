"""Long runs that are no tests: `python -m tests.benchmarks.<name>`; not installed."""
