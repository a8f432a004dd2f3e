"""Reductions of what a product computes, over runs of columns: they stand in its epilogue.

T[i, j] = sum_k x[i, k] * w[k, j]     h[i, j] = T[i, j] + r[i, j]
p[i, t] = sum over c < 128 of h[i, 128 t + c]^2     ->  an output with RowPartial("sum", 128)
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import tvm_ffi
from tvm import tirx
from tvm.ir import Expr, TensorLoad, Var

from ...errors import Unsupported
from ..program.definitions import Definition
from ..program.expr import constant, number, same, substitute, variables
from ..program.program import ReduceKind
from .model import INDEX, Axis, RowPartial, Simplifier, fresh_var
from .sums import is_sum_of_products

_KINDS = (ReduceKind.SUM, ReduceKind.MAX)


def sums_and_partials(
    definitions: Sequence[Definition],
) -> tuple[list[Definition], list[Definition]]:
    """The products, and the reductions of what comes of a product; any other is refused."""
    sums: list[Definition] = []
    partials: list[Definition] = []
    after: set[Var] = set()  # products, and what is pointwise in them
    for definition in definitions:
        loads = _loads(definition.value)
        for partial in partials:
            if any(load.source.same_as(partial.buffer) for load in loads):
                raise Unsupported(
                    f"{partial.buffer.name} is no sum of products, and {definition.buffer.name} "
                    "reads it"
                )
        if definition.kind is None:
            if any(load.source in after for load in loads):
                after.add(definition.buffer)
        elif _reduces_product(definition, loads, after):
            partials.append(definition)
        elif is_sum_of_products(definition):
            sums.append(definition)
            after.add(definition.buffer)
    return sums, partials


def _loads(expr: Expr) -> list[TensorLoad]:
    found: list[TensorLoad] = []
    tvm_ffi.structural_walk(expr, [(TensorLoad, found.append)])
    return found


def _reduces_product(definition: Definition, loads: list[TensorLoad], after: set[Var]) -> bool:
    """Whether each term is another element of a product, or of what is pointwise in it."""
    axes = {axis for axis, n in zip(definition.axes, definition.shape, strict=True) if n != 1}
    axes |= {var for var, extent in definition.reduced if extent != 1}
    return any(load.source in after and axes <= set(variables(*load.indices)) for load in loads)


def run_axis(definition: Definition) -> Axis:
    """The one axis that a partial reduces, as a new coordinate.

    Raises
    ------
    Unsupported
        For several axes or a symbolic one, other reductions than sum and max, and initial values
        that change the result.
    """
    name = definition.buffer.name
    real = [(var, extent) for var, extent in definition.reduced if extent != 1]
    if len(real) != 1 or not isinstance(real[0][1], int):
        raise Unsupported(f"{name} is no sum of products, nor one of a run of columns")
    if definition.kind not in _KINDS or not _is_neutral(definition):
        raise Unsupported(f"{name} is no sum of products, and reduces columns in another way")
    return Axis(fresh_var("run", INDEX), real[0][1])


def _is_neutral(definition: Definition) -> bool:
    initial = number(definition.initial)
    if definition.kind is ReduceKind.SUM:
        return initial == 0
    return initial is not None and initial <= number(tirx.min_value(definition.dtype))


def run_point(definition: Definition, indices: tuple[Expr, ...], run: Expr) -> dict[Var, Expr]:
    """The block's axes for the element at `indices` and one term of its reduction."""
    env = definition.at(indices)
    for var, extent in definition.reduced:
        env[var] = constant(0, INDEX) if extent == 1 else run
    return env


def partial_of(definition: Definition, run: Axis) -> RowPartial:
    """The model's word for the definition of a partial."""
    return RowPartial(definition.kind.value, run.extent)


def follows_columns(
    indices: Iterable[Expr], run: Expr, width: int, n: Sequence[Axis], axes: Sequence[Axis]
) -> bool:
    """Whether `run` counts the columns of aligned runs of `width`, all with the same `indices`.

    `indices` and `run` are functions of `axes`; `n` are those of the columns.
    """
    if not n or not isinstance(n[-1].extent, int) or n[-1].extent % width:
        return False
    last = n[-1]
    first, place = fresh_var("first", INDEX), fresh_var("place", INDEX)
    count = Axis(first, last.extent // width)
    others = [axis for axis in axes if not axis.var.same_as(last.var)]
    simplify = Simplifier([*others, count, Axis(place, width)])
    start = first * constant(width, INDEX)
    inside, before = {last.var: start + place}, {last.var: start}
    return same(simplify(substitute(run, inside)), place) and all(
        same(simplify(substitute(i, inside)), simplify(substitute(i, before))) for i in indices
    )
