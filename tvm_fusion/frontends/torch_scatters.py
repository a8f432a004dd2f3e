"""Values in the place of a row or a diagonal: `select_scatter`, `diagonal_scatter`.

    y = x.select_scatter(v, 1, 2)     y[i, j] = v[i] if j == 2 else x[i, j]

`x[:, 2] *= 3` is exported as the first. A choice at every element, which fuses with what reads it.
The values take the type of the tensor: torch's own decomposition of `select_scatter` gives the
result the wider of both types, as eager execution does not.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from torch import fx
from tvm import relax, te, tirx
from tvm.ir import Expr

from tvm_fusion.frontends.torch_operators import Converter, bound_arguments

if TYPE_CHECKING:
    from tvm_fusion.frontends.torch_importer import Importer

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


CONVERTERS: dict[str, Converter] = {
    "select_scatter.default": _scatter(_select),
    "diagonal_scatter.default": _scatter(_diagonal),
}
