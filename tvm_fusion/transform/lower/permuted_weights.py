"""`relax.permute_dims` of constants, evaluated while it is legalized.

    permute_dims(const)  ->  const        weights that a model stores (out, in)

TVM's FoldConstant would build a function for it and run that on one thread, one element after the
other. What it makes of other constants stays its own. A model is lowered several times while it is
planned: within `weights_kept` a weight is permuted once for all of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from contextvars import ContextVar

import numpy as np
import tvm
from tvm import relax
from tvm.ir import Call

from ..rewrites.constant_weights import identity
from ..rewrites.factors import is_constant

_PERMUTE = tvm.ir.Op.get("relax.permute_dims").get_attr("FLegalize")

# Elements along both axes that change places: the lines of memory that a block reads and writes
# stay in the cache (5504 x 2048 halves: 41 ms by blocks of 256, 63 ms by 64, 256 ms at once).
BLOCK = 256

# By what a weight is and the order of its axes: itself, so that its memory is nobody else's, and
# the permuted one.
_Known = dict[tuple, tuple[relax.Expr, relax.Expr]]
_kept: ContextVar[_Known | None] = ContextVar("kept_weights", default=None)


@contextmanager
def weights_kept() -> Iterator[None]:
    """What is permuted within is kept for all that is lowered within."""
    token = _kept.set({})
    try:
        yield
    finally:
        _kept.reset(token)


def legalize_permutes() -> Callable[[relax.BlockBuilder, Call], relax.Expr]:
    """The legalization of each `relax.permute_dims` of a module; of what is no constant, TVM's own.
    A weight that several operators read in one order stays one constant.
    """
    kept = _kept.get()
    known: _Known = {} if kept is None else kept

    def legalize(builder: relax.BlockBuilder, call: Call) -> relax.Expr:
        legal = _PERMUTE(builder, call)  # its PrimFunc counts for the names of those after it
        constant = call.args[0]
        tensor = constant.value if is_constant(constant) else None
        if tensor is None or not str(tensor.dtype).startswith(("float16", "float32", "bfloat16")):
            return legal
        axes = call.attrs.axes
        order = range(len(tensor.shape))[::-1] if axes is None else [int(axis) for axis in axes]
        key = (identity(constant), *order)
        if key not in known:
            known[key] = (constant, relax.const(permuted(tensor, tuple(order))))
        return known[key][1]

    return legalize


def permuted(tensor: tvm.runtime.Tensor, axes: tuple[int, ...]) -> tvm.runtime.Tensor:
    """A tensor on the CPU with its axes in another order, contiguous."""
    array = _words(tensor)
    axes = tuple(axis % array.ndim for axis in axes)
    view = array.transpose(axes)
    result = tvm.runtime.empty(view.shape, tensor.dtype)
    out = _words(result)
    if array.size <= BLOCK * BLOCK:
        out[...] = view
        return result
    rows = axes.index(array.ndim - 1)  # along which `array` is contiguous; `out` is along the last
    starts = range(0, view.shape[-1], BLOCK)

    def copy(row: int) -> None:
        for column in starts:
            block = _block(array.ndim, {rows: row, array.ndim - 1: column})
            out[block] = view[block]

    with ThreadPoolExecutor() as pool:
        list(pool.map(copy, range(0, view.shape[rows], BLOCK)))
    return result


def _words(tensor: tvm.runtime.Tensor) -> np.ndarray:
    """The memory of a tensor, as integers of its width."""
    width = 8 * np.dtype(str(tensor.dtype).removeprefix("b")).itemsize
    return np.from_dlpack(tensor._create_view(tensor.shape, f"uint{width}"))


def _block(rank: int, starts: dict[int, int]) -> tuple[slice, ...]:
    return tuple(
        slice(starts[axis], starts[axis] + BLOCK) if axis in starts else slice(None)
        for axis in range(rank)
    )
