"""`relax.permute_dims` of constants, evaluated while it is legalized.

    permute_dims(const)  ->  const        weights that a model stores (out, in)

TVM's FoldConstant would build a function for it and run that on one thread, one element after the
other. What it makes of other constants stays its own.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import numpy as np
import tvm
from tvm import relax
from tvm.ir import Call

from ..rewrites.factors import is_constant

_DEFAULT = tvm.ir.Op.get("relax.permute_dims").get_attr("FLegalize")

# Elements along both axes that change places: the lines of memory that a block reads and writes
# stay in the cache (5504 x 2048 halves: 41 ms by blocks of 256, 63 ms by 64, 256 ms at once).
BLOCK = 256


def legalize_permute(builder: relax.BlockBuilder, call: Call) -> relax.Expr:
    """The legalization of one `relax.permute_dims`; of what is no constant, TVM's own."""
    legal = _DEFAULT(builder, call)  # its PrimFunc counts for the names of those after it
    tensor = call.args[0].value if is_constant(call.args[0]) else None
    if tensor is None or not str(tensor.dtype).startswith(("float16", "float32", "bfloat16")):
        return legal
    axes = call.attrs.axes
    order = range(len(tensor.shape))[::-1] if axes is None else [int(axis) for axis in axes]
    return relax.const(permuted(tensor.numpy(), tuple(order)), str(tensor.dtype))


def permuted(array: np.ndarray, axes: tuple[int, ...]) -> np.ndarray:
    """`array.transpose(axes)`, contiguous."""
    axes = tuple(axis % array.ndim for axis in axes)
    view = array.transpose(axes)
    out = np.empty(view.shape, view.dtype)
    if array.size <= BLOCK * BLOCK:
        out[...] = view
        return out
    rows = axes.index(array.ndim - 1)  # along which `array` is contiguous; `out` is along the last
    blocks = [
        _block(array.ndim, {rows: i, array.ndim - 1: j})
        for i in range(0, view.shape[rows], BLOCK)
        for j in range(0, view.shape[-1], BLOCK)
    ]

    def copy(block: tuple[slice, ...]) -> None:
        out[block] = view[block]

    with ThreadPoolExecutor() as pool:
        list(pool.map(copy, blocks))
    return out


def _block(rank: int, starts: dict[int, int]) -> tuple[slice, ...]:
    return tuple(
        slice(starts[axis], starts[axis] + BLOCK) if axis in starts else slice(None)
        for axis in range(rank)
    )
