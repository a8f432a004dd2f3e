"""Models in real sizes through `torch.compile`: by us with CUDA graphs, and by inductor.

    python -m tests.benchmarks --suite real_models --out tests/results/models_h200.json

Each case has a process of its own, in which all compilers are called in turn. They compile at once;
when all are done, they are timed one at a time.
"""
