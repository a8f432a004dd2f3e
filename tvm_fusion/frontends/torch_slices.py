"""Slices that are written: `x[:, a:b:s] = y`, which torch.export makes `slice_scatter`.

    step 1:      concat(x[:, :a], y, x[:, b:])
    other steps: where(mask of the slice, take(y, its index there), x)

TVM 0.27 takes the values at indices that lie outside of `y` where the slice is not, and reads
memory that is no part of the tensor.
Does not handle: symbolic extents, which are left to TVM.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from torch import fx
from tvm import relax

from tvm_fusion.frontends.torch_operators import Converter, bound_arguments

if TYPE_CHECKING:
    from tvm_fusion.frontends.torch_importer import Importer


def _slice_scatter(importer: Importer, node: fx.Node) -> relax.Expr:
    args = bound_arguments(node)
    shapes = [args[name].meta["val"].shape for name in ("self", "src")]
    if not all(isinstance(extent, int) for shape in shapes for extent in shape):
        return importer._slice_scatter(node)
    x = importer.value_of(args["self"])
    y = importer.cast(importer.value_of(args["src"]), str(x.ty.dtype))
    axis = args["dim"] % len(shapes[0])
    extent, count = shapes[0][axis], shapes[1][axis]
    begin = slice(args["start"], args["end"]).indices(extent)[0]
    if count == 0:
        return x
    if args["step"] == 1:
        return _joined(importer, x, y, axis, begin)
    shape = [1] * len(shapes[0])
    shape[axis] = extent
    beyond = np.arange(extent) - begin
    index = np.clip(beyond // args["step"], 0, count - 1)
    chosen = (beyond >= 0) & (beyond == index * args["step"])
    values = importer.emit(relax.op.take(y, relax.const(index.astype("int64")), axis))
    return importer.emit(relax.op.where(relax.const(chosen.reshape(shape)), values, x))


def _joined(importer: Importer, x: relax.Expr, y: relax.Expr, axis: int, begin: int) -> relax.Expr:
    """What lies before the slice, the slice, what lies behind it."""
    extent, end = int(x.ty.shape[axis]), begin + int(y.ty.shape[axis])
    parts = [
        importer.emit(relax.op.strided_slice(x, [axis], [a], [b], assume_inbound=True))
        for a, b in ((0, begin), (end, extent))
        if a < b
    ]
    parts.insert(1 if begin else 0, y)
    return y if len(parts) == 1 else importer.emit(relax.op.concat(parts, axis))


CONVERTERS: dict[str, Converter] = {"slice_scatter.default": _slice_scatter}
