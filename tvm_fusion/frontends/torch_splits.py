"""Splits: equal ones of an exported program as one, and those into many pieces as slices.

Where the tensor that is split was written into, `torch.export` splits it anew for each piece:

    p = split(x, 2); a = p[0]; q = split(x, 2); b = q[1]   ->   p = split(x, 2); a = p[0]; b = p[1]

so that a tensor in n pieces has n splits of n results each. As an operator, a split into many
pieces has a type of as many fields, which TVM walks through wherever a piece is read.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import fx
from tvm import relax

from tvm_fusion.frontends.torch_operators import Converter, bound_arguments, span
from tvm_fusion.frontends.torch_symbols import size_of

if TYPE_CHECKING:
    from tvm_fusion.frontends.torch_importer import Importer

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


CONVERTERS: dict[str, Converter] = {
    "split.Tensor": _split,
    "split_with_sizes.default": _split,
    "unbind.int": _split,
}
