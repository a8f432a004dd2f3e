"""Windows that are written out: padding that nobody reads, and NaN among what they hold."""

import numpy as np
import pytest
from tvm import te, tirx

from tvm_fusion.kernels.cpu.write import write_cpu

from ....support.helpers_tir import call, compile_cpu, poisoned

CHANNELS, SIZE = 3, 39

WINDOWS = {
    "max": (lambda a, b: tirx.Max(a, b), -np.inf, np.max),
    "min": (lambda a, b: tirx.Min(a, b), np.inf, np.min),
    "sum": (lambda a, b: a + b, 0.0, np.sum),
}
"""How two elements are combined, what they start from, and what NumPy calls it."""


def _pool(pick, start: float, padded: int, positions: int) -> tirx.PrimFunc:
    """Windows of 3 x 3, two apart, of data that is padded behind to `padded` rows and columns."""
    x = te.placeholder((CHANNELS, SIZE, SIZE), "float32", name="x")

    def element(c, i, j):
        inside = tirx.all(i < SIZE, j < SIZE)
        return tirx.if_then_else(inside, x[c, i, j], tirx.const(start, "float32"))

    pad = te.compute((CHANNELS, padded, padded), element, name="pad")
    r, s = (te.reduce_axis((0, 3)) for _ in range(2))
    reducer = te.comm_reducer(pick, lambda dtype: tirx.const(start, dtype))
    y = te.compute(
        (CHANNELS, positions, positions),
        lambda c, i, j: reducer(pad[c, 2 * i + r, 2 * j + s], [r, s]),
    )
    return te.create_prim_func([x, y])


def _expected(x: np.ndarray, reduce, start: float, positions: int) -> np.ndarray:
    end = 2 * positions + 1
    padded = np.full((CHANNELS, max(end, SIZE), max(end, SIZE)), start, x.dtype)
    padded[:, :SIZE, :SIZE] = x
    windows = np.lib.stride_tricks.sliding_window_view(padded[:, :end, :end], (3, 3), (1, 2))
    return reduce(windows[:, ::2, ::2], axis=(-2, -1))


@pytest.mark.one_in(2)
@pytest.mark.parametrize("name", ["max", "min", "sum"])
@pytest.mark.parametrize(("padded", "positions", "copies"), [(40, 19, False), (41, 20, True)])
def test_padding_that_no_window_reads_is_not_copied(name, padded, positions, copies):
    pick, start, reduce = WINDOWS[name]
    kernel = write_cpu(_pool(pick, start, padded, positions))
    assert ("pad = T.alloc_buffer" in kernel.script()) == copies
    x = np.random.default_rng(0).standard_normal((CHANNELS, SIZE, SIZE)).astype("float32")
    shape = (CHANNELS, positions, positions)
    (got,) = call(compile_cpu(kernel), [x], [poisoned(shape, "float32")])
    np.testing.assert_allclose(got, _expected(x, reduce, start, positions), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", ["max", "min"])
def test_an_extremum_of_a_window_with_nan_is_nan(name):
    pick, start, reduce = WINDOWS[name]
    rng = np.random.default_rng(1)
    x = rng.standard_normal((CHANNELS, SIZE, SIZE)).astype("float32")
    x[rng.random(x.shape) < 0.05] = np.nan
    x[0] = start
    (got,) = call(
        compile_cpu(write_cpu(_pool(pick, start, 40, 19))), [x], [np.zeros((3, 19, 19), "float32")]
    )
    np.testing.assert_array_equal(got, _expected(x, reduce, start, 19))
