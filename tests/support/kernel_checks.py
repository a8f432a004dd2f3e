"""Whether a generated CUDA kernel computes what a case says, on the CPU emulator."""

from collections.abc import Sequence

import numpy as np
from tvm import tirx

from .cuda_on_cpu import Lowered, run_cuda_on_cpu
from .kernel_cases import Case, assert_close, outputs_of


def assert_right(
    case: Case,
    func: tirx.PrimFunc,
    kernel: tirx.PrimFunc | Lowered,
    inputs: Sequence[np.ndarray] | None = None,
    seed: int | None = None,
) -> None:
    """Runs `kernel`, written for `func`, as one launch (the emulator checks all bounds), and
    compares every output with float64. `inputs` stand in for those of the case; `seed` is that of
    the order of warps.
    """
    inputs = case.arrays() if inputs is None else inputs
    outputs = outputs_of(func, len(inputs))
    assert run_cuda_on_cpu(kernel, [*inputs, *outputs], seed=seed) == 1
    for output, expected, param in zip(
        outputs, case.expected(inputs), func.params[len(inputs) :], strict=True
    ):
        assert_close(output, expected, str(param.ty.dtype))


def is_race(
    case: Case, func: tirx.PrimFunc, kernel: tirx.PrimFunc | Lowered, orders: int = 4
) -> bool:
    """Whether what `kernel` computes is wrong in some of several random orders of its warps."""
    try:
        for seed in range(orders):
            assert_right(case, func, kernel, seed=seed)
    except AssertionError:
        return True
    return False
