"""RowSlices: pieces of a tensor that matrix products read, each a slice of its own.

    p = split(x, axis=0)                       # rows of several experts
    y0 = matmul(p[0], a), y1 = matmul(p[1], b)
->  x0 = strided_slice(x, rows of p[0]), x1 = strided_slice(x, rows of p[1])
    y0 = matmul(x0, a),   y1 = matmul(x1, b)

A split is one operator with many results, which fuses with none of their readers; a slice of rows
is a view of x inside its product.

Does not handle (left alone): other axes, symbolic sizes, splits no product reads a result of.
"""

from __future__ import annotations

import tvm
from tvm import relax
from tvm.relax import Expr, Var, op
from tvm.relax.expr_functor import PyExprMutator, mutator

from ..decompose.opening import static_size
from ..functions.functions import rewrite_functions
from .factors import is_call
from .readers import Parts, Readers


@tvm.transform.module_pass(opt_level=0, name="tvm_fusion.RowSlices")
class RowSlices:
    """See the module docstring. Runs before LegalizeOps; a module without such splits is returned
    as it is.
    """

    def transform_module(self, mod: tvm.IRModule, _ctx: tvm.transform.PassContext) -> tvm.IRModule:
        slicer = _Slicer(mod)
        return rewrite_functions(mod, slicer.builder_, slicer.slice_function)


@mutator
class _Slicer(PyExprMutator):
    """Replaces the bindings of pieces."""

    def slice_function(self, func: relax.Function) -> relax.Function | None:
        """The function with slices, or None where there was nothing to slice."""
        if not isinstance(func.body, relax.SeqExpr):
            return None
        self._slices = _pieces(func)
        if not self._slices:
            return None
        self.parts = Parts(self.builder_, func)
        return relax.analysis.remove_all_unused(self.visit_expr(func))

    def visit_var_binding_(self, binding: relax.VarBinding) -> None:
        if binding.var not in self._slices:
            super().visit_var_binding_(binding)
            return
        source, first, last = self._slices[binding.var]
        piece = op.strided_slice(self.visit_expr(source), [0], [first], [last])
        self.parts.finish(self.visit_var_def(binding.var), piece)


def _pieces(func: relax.Function) -> dict[Var, tuple[Expr, int, int]]:
    """Pieces to replace: what they are of, the first of its rows and the row behind the last."""
    readers = Readers(func)
    found: dict[Var, tuple[Expr, int, int]] = {}
    for block in func.body.blocks:
        for binding in block.bindings:
            piece = binding.value
            if not isinstance(piece, relax.TupleGetItem) or not _feeds_product(binding, readers):
                continue
            split = readers.within(piece.tuple_value)
            rows = _rows(piece.tuple_value) if is_call(split, "split") else None
            if rows is not None and int(split.attrs.axis) == 0:
                first = sum(rows[: piece.index])
                found[binding.var] = (split.args[0], first, first + rows[piece.index])
    return found


def _feeds_product(binding: relax.Binding, readers: Readers) -> bool:
    """Whether a matrix product has the bound tensor as its left operand."""
    return any(
        reader.argument == 0 and is_call(readers.lookup(reader.var), "matmul")
        for reader in readers.of(binding.var)
    )


def _rows(pieces: Expr) -> list[int] | None:
    """The size of each tensor of a tuple along its first axis."""
    shapes = [field.shape for field in pieces.ty.fields]
    if not all(isinstance(shape, relax.ShapeExpr) for shape in shapes):
        return None
    sizes = [static_size(list(shape)[:1]) for shape in shapes]
    return None if None in sizes else sizes
