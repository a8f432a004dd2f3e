"""Contractions write to a buffer of their tile; what others need is copied from there."""

from __future__ import annotations

from dataclasses import replace

from tvm import tirx
from tvm.ir import Expr, TensorLoad, Var

from ...program.expr import convert, dtype_of, same
from ..groups import Group
from ..nests.nests import Nest
from ..nests.scope import new_buffer
from ..stages.rewrite import Rewriter, rebuild
from ..stages.stages import Stage
from .operands import split_product


def with_copies(group: Group, kept: set[Var]) -> Group:
    """Let contractions write to a buffer of the tile, and copy from there what others need.

    C = sum(A * B)                  acc = sum(A * B); C = acc
    D = f(C)                ->      D = f(acc)
    """
    stages: list[Stage] = []
    shared: list[list[int]] = [[] for _ in group.shared]
    moved: dict[Var, Var] = {}

    def add(stage: Stage, member: int) -> None:
        stages.append(stage)
        for positions, out in zip(group.shared, shared, strict=True):
            out.append(positions[member])

    for member, stage in enumerate(group.stages):
        stage = _reading(stage, moved)
        buffer = stage.buffer
        if split_product(stage) is None or buffer not in kept:
            add(stage, member)
            continue
        dtype = dtype_of(stage.values[0])
        alias = new_buffer(f"{buffer.name}_tile", list(buffer.ty.shape), dtype)
        moved[buffer] = alias
        add(replace(stage, buffers=(alias,)), member)
        axes = tuple(replace(a, var=Var(a.var.name, a.var.ty)) for a in stage.axes)
        value = tirx.BufferLoad(alias, [a.index for a in axes])
        add(Stage(f"{stage.name}_copy", (buffer,), axes, (), (value,)), member)
    return Group(tuple(stages), tuple(tuple(s) for s in shared))


def is_copy_of(stage: Stage, item: Nest) -> bool:
    """Whether a nest does nothing but copy the result of `stage` to a buffer of the same shape."""
    if len(item.members) != 1:
        return False
    copy = item.members[0].stage
    value = copy.values[0]
    if copy.kind is not None or copy.binds or not isinstance(value, TensorLoad):
        return False
    at = zip(value.indices, copy.axes, strict=True) if value.source.same_as(stage.buffer) else ()
    return value.source.same_as(stage.buffer) and all(same(i, a.index) for i, a in at)


def _reading(stage: Stage, moved: dict[Var, Var]) -> Stage:
    """`stage` with loads of the moved buffers redirected."""
    if not moved:
        return stage
    redirect = _Redirect(moved)
    return replace(
        stage,
        binds=tuple((v, redirect(e)) for v, e in stage.binds),
        values=tuple(redirect(v) for v in stage.values),
    )


class _Redirect(Rewriter):
    def __init__(self, moved: dict[Var, Var]) -> None:
        super().__init__()
        self.moved = moved

    def visit(self, expr: Expr) -> Expr:
        expr = rebuild(expr, self)
        if isinstance(expr, TensorLoad) and expr.source in self.moved:
            load = tirx.BufferLoad(self.moved[expr.source], list(expr.indices))
            return convert(load, dtype_of(expr))
        return expr
