"""TellRepeats: elements that are repeated by shapes alone, before a convolution, by an operator.

    Before                                          After
    a = expand_dims(x, 3)       [N, C, H, 1, W]
    b = broadcast_to(a)         [N, C, H, 2, W]
    c = reshape(b)              [N, C, 2 H, W]      c = repeat(x, 2, axis=2)
    y = conv2d(c, w)                                y = conv2d(c, w)

So PyTorch opens `repeat_interleave`. The index of `repeat` is ``i // 2``, which a convolution reads
where the data lies; that of the shapes is said in terms of all dimensions.

Does not handle (left alone): shapes with symbolic sizes.
"""

from __future__ import annotations

from collections.abc import Sequence

import tvm
from tvm import relax, tirx
from tvm.ir import Call
from tvm.relax import Expr, Var, op
from tvm.relax.expr_functor import PyExprMutator, mutator

from ..functions.functions import rewrite_functions, where_changed
from .factors import is_call

CONVOLUTIONS = ("nn.conv1d", "nn.conv2d", "nn.conv3d")
MOVES = ("nn.pad", "repeat", "image.resize2d", "image.resize3d")


@tvm.transform.module_pass(opt_level=0, name="tvm_fusion.TellRepeats")
class TellRepeats:
    """See the module docstring. A module without such shapes is returned as it is."""

    def transform_module(self, mod: tvm.IRModule, _ctx: tvm.transform.PassContext) -> tvm.IRModule:
        """Return `mod` with `repeat` where its convolutions read what shapes repeat."""
        teller = _Teller(mod)
        return rewrite_functions(mod, teller.builder_, where_changed(teller))


@mutator
class _Teller(PyExprMutator):
    """What shapes made stays bound for its other readers; without any it is dead."""

    def __init__(self, mod: tvm.IRModule) -> None:
        super().__init__(mod)
        self.changed = False

    def visit_var_binding_(self, binding: relax.VarBinding) -> None:
        """Rewrite the data of a convolution."""
        value = binding.value
        if is_call(value, *CONVOLUTIONS):
            data = self.visit_expr(value.args[0])
            told = self._told(data)
            if not told.same_as(data):
                self.changed = True
                call = Call(value.op, [told, *value.args[1:]], value.attrs, value.ty_args)
                binding = relax.VarBinding(binding.var, call)
        super().visit_var_binding_(binding)

    def _told(self, expr: Expr) -> Expr:
        """A tensor, told by operators that repeat; itself where shapes repeat nothing."""
        value = self.lookup_binding(expr) if isinstance(expr, Var) else None
        if value is None:
            return expr
        if is_call(value, *MOVES):
            moved = self._told(value.args[0])
            if moved.same_as(value.args[0]):
                return expr
            call = Call(value.op, [moved, *value.args[1:]], value.attrs, value.ty_args)
            return self.builder_.emit(call)
        found = self._repeated(value)
        if found is None:
            return expr
        source, repeats = found
        source = self._told(source)
        for axis, count in enumerate(repeats):
            if count > 1:
                source = self.builder_.emit(op.repeat(source, count, axis))
        return source

    def _repeated(self, value: Expr) -> tuple[Expr, list[int]] | None:
        """What a reshape repeats the elements of, and how often along each dimension."""
        if not is_call(value, "reshape") or not isinstance(value.args[0], Var):
            return None
        wide = self.lookup_binding(value.args[0])
        if not is_call(wide, "broadcast_to") or not isinstance(wide.args[0], Var):
            return None
        narrow = self.lookup_binding(wide.args[0])
        if not is_call(narrow, "expand_dims", "reshape"):
            return None
        source = narrow.args[0]
        shapes = [_shape(e) for e in (source, narrow, wide, value)]
        repeats = None if None in shapes else _repeats(*shapes)
        return None if repeats is None else (source, repeats)


def _shape(expr: Expr) -> list[int] | None:
    shape = getattr(expr.ty, "shape", None)
    fixed = isinstance(shape, relax.ShapeExpr) and all(isinstance(n, tirx.IntImm) for n in shape)
    return [int(n) for n in shape] if fixed else None


def _repeats(
    source: Sequence[int], narrow: Sequence[int], wide: Sequence[int], result: Sequence[int]
) -> list[int] | None:
    """How often each element is repeated along each dimension of `source`, where each dimension is
    followed by one for its repetitions, or by none.
    """
    if len(narrow) != len(wide) or len(source) != len(result):
        return None
    found, at = [], 0
    for size, new in zip(source, result, strict=True):
        if narrow[at : at + 1] != [size] or wide[at] != size:
            return None
        count = wide[at + 1] if narrow[at + 1 : at + 2] == [1] and new != size else 1
        if new != size * count:
            return None
        at += 1 if new == size else 2
        found.append(count)
    return found if at == len(narrow) and max(found, default=1) > 1 else None
