"""Layers of Llama on several devices through `torch.compile`, beside torch's own compiler.

    python -m tests.benchmarks --suite tensor_parallel --ranks 2 --out OUT.json
    python -m tests.benchmarks --suite tensor_parallel --simulate 2,4,8 --out OUT.json
    python -m tests.benchmarks --suite tensor_parallel --ranks 1 --peers tvm_fusion.plain

Each case has a process for each device; all cases compile at once and are timed one at a time.
`--simulate` has one process as the first of several that are not there: its kernels are measured,
and collectives are predicted. `tvm_fusion.plain` is our compile of the model before it is cut, in
the process of the one that is cut for a mesh of one.
"""
