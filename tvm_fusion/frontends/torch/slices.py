"""Converters for slices that are written, for splits, and for values in the place of a row.

A slice that is written is `x[:, a:b:s] = y`, which torch.export makes `slice_scatter`.

    step 1:      concat(x[:, :a], y, x[:, b:])
    other steps: where(mask of the slice, take(y, its index there), x)

TVM 0.27 takes the values at indices that lie outside of `y` where the slice is not, and reads
memory that is no part of the tensor.
Does not handle: symbolic extents, which are left to TVM.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import fx
from tvm import relax, te, tirx
from tvm.ir import Expr

from .importer import Importer, bound_arguments, size_of
from .operators import Converter, span


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


_SLICES: dict[str, Converter] = {"slice_scatter.default": _slice_scatter}


# ---- Splits: equal ones of an exported program as one, and those into many pieces as slices.
#
# Where the tensor that is split was written into, `torch.export` splits it anew for each piece:
#
#     p = split(x, 2); a = p[0]; q = split(x, 2); b = q[1]   ->   p = split(x, 2); a = p[0]; b =
# p[1] # so that a tensor in n pieces has n splits of n results each. As an operator, a split into
# many pieces has a type of as many fields, which TVM walks through wherever a piece is read.

SPLITS = (
    torch.ops.aten.split.Tensor,
    torch.ops.aten.split_with_sizes.default,
    torch.ops.aten.unbind.int,
)
MANY = 32  # pieces; fewer are one operator, which other passes know


def merge_equal_splits(program: torch.export.ExportedProgram) -> None:
    """Merges equal splits in a program that is the caller's own, in which nothing writes into a
    tensor.
    """
    first: dict[str, torch.fx.Node] = {}
    for node in list(program.graph.nodes):
        if node.op != "call_function" or node.target not in SPLITS:
            continue
        kept = first.setdefault(str((node.target, node.args, node.kwargs)), node)
        if kept is not node:
            node.replace_all_uses_with(kept)
            program.graph.erase_node(node)


def _split(importer: Importer, node: fx.Node) -> relax.Expr:
    """The pieces, each a slice, where they are many."""
    pieces = node.meta["val"]
    if len(pieces) <= MANY:
        unbinds = node.target is torch.ops.aten.unbind.int
        return importer._unbind(node) if unbinds else importer._split(node)
    args = bound_arguments(node)
    x = importer.value_of(args["self"])
    axis, begin, slices = args["dim"] % x.ty.ndim, 0, []
    for piece in pieces:
        removed = piece.ndim < x.ty.ndim  # by unbind
        size = 1 if removed else size_of(piece.shape[axis], importer.symbols)
        part = span(importer, x, axis, begin, size)
        slices.append(importer.emit(relax.op.squeeze(part, [axis])) if removed else part)
        begin += size
    return relax.Tuple(slices)


_SPLITS: dict[str, Converter] = {
    "split.Tensor": _split,
    "split_with_sizes.default": _split,
    "unbind.int": _split,
}


# ---- Values in the place of a row or a diagonal: `select_scatter`, `diagonal_scatter`.
#
#     y = x.select_scatter(v, 1, 2)     y[i, j] = v[i] if j == 2 else x[i, j]
#
# `x[:, 2] *= 3` is exported as the first. A choice at every element, which fuses with what reads
# it. The values take the type of the tensor: torch's own decomposition of `select_scatter` gives
# the result the wider of both types, as eager execution does not.

# The place of an element and the arguments of a node -> whether it is replaced, and by which value.
Choice = Callable[[Sequence[Expr], Sequence[Expr], dict], tuple[Expr, list[Expr]]]


def _select(at: Sequence[Expr], shape: Sequence[Expr], args: dict) -> tuple[Expr, list[Expr]]:
    axis, index = args["dim"] % len(at), args["index"]
    chosen = index if index >= 0 else shape[axis] + index
    return at[axis] == chosen, [*at[:axis], *at[axis + 1 :]]


def _diagonal(at: Sequence[Expr], shape: Sequence[Expr], args: dict) -> tuple[Expr, list[Expr]]:
    first, second = args["dim1"] % len(at), args["dim2"] % len(at)
    rest = [i for axis, i in enumerate(at) if axis not in (first, second)]
    along = at[first if args["offset"] >= 0 else second]
    return at[second] - at[first] == args["offset"], [*rest, along]


def _scatter(choice: Choice) -> Converter:
    def convert(importer: Importer, node: fx.Node) -> relax.Expr:
        args = bound_arguments(node)
        x, values = (importer.value_of(args[name]) for name in ("self", "src"))

        def chosen(x: te.Tensor, values: te.Tensor) -> te.Tensor:
            def at(*index: tirx.Var) -> Expr:
                replaced, place = choice(index, x.shape, args)
                return tirx.if_then_else(replaced, values(*place), x(*index))

            return te.compute(x.shape, at, name="scatter")

        operands = x, importer.cast(values, str(x.ty.dtype))
        return importer.block_builder.emit_te(chosen, *operands, primfunc_name_hint="scatter")

    return convert


_SCATTERS: dict[str, Converter] = {
    "select_scatter.default": _scatter(_select),
    "diagonal_scatter.default": _scatter(_diagonal),
}


CONVERTERS = _SLICES | _SCATTERS | _SPLITS
