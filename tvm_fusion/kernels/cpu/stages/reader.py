"""Reads the blocks of a fused s_tir PrimFunc as stages."""

from __future__ import annotations

from dataclasses import replace

import tvm
from tvm import tirx
from tvm.ir import Expr, TensorLoad, Var

from ....errors import Unsupported
from ....ir.access import AxisKind
from ....ir.blocks import BlockDef, Contents, Stray, read_blocks
from ...program.expr import HALF_DTYPES, constant, dtype_of, number, same, widened
from ..contraction.panels import constants_of, read_once
from .resolve import Widen, round_constant
from .rewrite import Rewriter, Substitute, free_variables, loads, rebuild
from .stages import Axis, Graph, Kind, Stage, simplified

COMBINES = {
    tirx.Add: Kind.SUM,
    tirx.Mul: Kind.PROD,
    tirx.Max: Kind.MAX,
    tirx.Min: Kind.MIN,
    tirx.And: Kind.ALL,
    tirx.Or: Kind.ANY,
}


def read_graph(func: tirx.PrimFunc, exact: bool) -> Graph:
    """Read `func`.

    Raises
    ------
    Unsupported
        Where a statement is no block of a tensor expression: loops inside of blocks, external
        calls, scatters, in-place updates, strided views.
    """
    params = tuple(func.params)
    for p in params:
        if isinstance(p.ty, tirx.BufferType):
            _check_compact(p)
    raw = [_stage(block) for block in read_blocks(func, opens=_holds_blocks)]
    written = [b for s in raw for b in s.buffers]
    if len({b for b in written}) != len(written):
        raise Unsupported("a buffer is written twice")
    is_param = set(params)
    stored = {
        b: tirx.decl_buffer(list(b.ty.shape), widened(dtype_of(b)), b.name, layout=b.ty.layout)
        for b in written
        if b not in is_param and dtype_of(b) in HALF_DTYPES
    }
    stages = []
    for s in raw:
        stages.extend(_split(simplified(_lowered(s, exact, stored))))
    _check_order(params, stages)
    graph = Graph(params, tuple(stages))
    constants = read_once(constants_of(func), graph)
    return replace(graph, stages=tuple(replace(s, constants=constants) for s in stages))


def _check_compact(buffer: Var) -> None:
    if len(buffer.ty.strides or ()) or number(buffer.ty.elem_offset) not in (None, 0):
        raise Unsupported(f"{buffer.name} is a strided view")


def _holds_blocks(block: BlockDef) -> bool:
    return "For" in block.body.others or "SBlockRealize" in block.body.others


def _stage(block: BlockDef | Stray) -> Stage:
    for loop in block.loops:
        if number(loop.min) != 0 or loop.thread_binding is not None:
            raise Unsupported(f"loop {loop.loop_var} is scheduled already")
    if isinstance(block, Stray):
        raise Unsupported(f"a statement of type {block.kind} outside of a block")
    if number(block.predicate) != 1 or block.matches:
        raise Unsupported(f"block {block.name} has a predicate or matched buffers")
    _check_bindings(block)
    ones = {}
    reduced: list[Axis] = []
    spatial: dict[Var, Axis] = {}
    for found in block.axes:
        if found.kind is AxisKind.OPAQUE or number(found.domain.min) != 0:
            raise Unsupported(f"axis {found.var} of block {block.name}")
        axis = Axis(found.var, found.domain.extent)
        if axis.size == 1:
            ones[axis.var] = constant(0, dtype_of(axis.var))
        if found.kind is AxisKind.REDUCE:
            reduced.append(axis)
        else:
            spatial[axis.var] = axis
    stores = _stores(block.body, block.name)
    axes = _axes_of(stores[0], spatial, block.name)
    for s in stores:
        if not all(same(a, b) for a, b in zip(s.indices, stores[0].indices, strict=True)):
            raise Unsupported(f"block {block.name} stores at several places")
    buffers = tuple(s.buffer for s in stores)
    units = Substitute(ones)
    values = tuple(units(s.value) for s in stores)
    stage = Stage(block.name, buffers, axes, tuple(a for a in reduced if a.size != 1), values)
    if reduced:
        return _reduction(stage, block.initial)
    if block.initial is not None:
        raise Unsupported(f"block {block.name} has an initial value and no reduction")
    return _own_reads_refused(stage)


def _stores(contents: Contents, name: str) -> tuple[tirx.BufferStore, ...]:
    others = contents.others or ("Bind",) * contents.late_lets
    if others:
        raise Unsupported(f"a statement of type {others[0]} in block {name}")
    return contents.stores


def _check_bindings(block: BlockDef) -> None:
    """Each axis runs over a loop of its own, from end to end."""
    free = {loop.loop_var: loop.extent for loop in block.loops}
    for axis, value in zip(block.axes, block.bindings, strict=True):
        size = axis.domain.extent
        if number(value) == 0 and number(size) == 1:
            continue
        extent = free.pop(value, None) if isinstance(value, Var) else None
        if extent is None or not same(extent, size):
            raise Unsupported(f"axis {axis.var} is bound to {value}")
    if any(number(e) != 1 for e in free.values()):
        raise Unsupported(f"block {block.name} is repeated by a loop")


def _axes_of(store: tirx.BufferStore, spatial: dict[Var, Axis], name: str) -> tuple[Axis, ...]:
    """The axis of each dimension of a store; every spatial axis has to be among them."""
    left = {k: a for k, a in spatial.items() if a.size != 1}
    axes = []
    for index, extent in zip(store.indices, store.buffer.ty.shape, strict=True):
        if isinstance(index, Var) and index in left:
            axis = left.pop(index)
            if not same(axis.extent, extent):
                raise Unsupported(f"block {name} writes a part of {store.buffer.name}")
            axes.append(axis)
        elif number(extent) == 1:
            axes.append(Axis(Var("one", index.ty), constant(1, dtype_of(index))))
        else:
            raise Unsupported(f"block {name} stores at [{index}]")
    if left:
        raise Unsupported(f"block {name} has an axis that its output lacks")
    return tuple(axes)


def _own_reads_refused(stage: Stage) -> Stage:
    for load in stage.reads():
        if any(load.source.same_as(b) for b in stage.buffers):
            raise Unsupported(f"block {stage.name} updates {load.source.name} in place")
    return stage


def _reduction(stage: Stage, start: Contents | None) -> Stage:
    """Fill in the kind of a reduction, with the loads of its own state taken out."""
    if start is None:
        raise Unsupported(f"block {stage.name} reduces without an initial value")
    starts = {s.buffer: s.value for s in _stores(start, stage.name)}
    if set(starts) != {b for b in stage.buffers}:
        raise Unsupported(f"block {stage.name} initialises other buffers than it reduces")
    initial = tuple(starts[b] for b in stage.buffers)
    if any(loads(v) for v in initial):
        raise Unsupported(f"block {stage.name} starts from a loaded value")
    carries = tuple(Var(f"{b.name}_state", tvm.ir.PrimType(dtype_of(b))) for b in stage.buffers)
    state = _ReadState(stage.buffers, carries)
    values = tuple(state(v) for v in stage.values)
    stage = replace(stage, values=values, initial=initial, carries=carries, kind=Kind.UPDATE)
    return _own_reads_refused(stage)


class _ReadState(Rewriter):
    """Replaces loads of the reduced buffers by variables."""

    def __init__(self, buffers: tuple[Var, ...], carries: tuple[Var, ...]) -> None:
        super().__init__()
        self.carry_of = {b: c for b, c in zip(buffers, carries, strict=True)}

    def visit(self, expr: Expr) -> Expr:
        if isinstance(expr, TensorLoad) and expr.source in self.carry_of:
            return self.carry_of[expr.source]
        return rebuild(expr, self)


def _lowered(stage: Stage, exact: bool, stored: dict[Var, Var]) -> Stage:
    """`stage` with 16-bit arithmetic widened; a reduction runs in float32 in either mode."""
    wide_carries = tuple(Var(c.name, tvm.ir.PrimType(widened(dtype_of(c)))) for c in stage.carries)
    state = {c: w for c, w in zip(stage.carries, wide_carries, strict=True)}
    widen = _WidenState(exact and stage.kind is None, stored, state)
    initial = []
    for value in stage.initial:
        if isinstance(value, tirx.FloatImm) and dtype_of(value) in HALF_DTYPES:
            value = constant(round_constant(float(value.value), dtype_of(value)), "float32")
        initial.append(widen(value))
    narrow = dtype_of(stage.buffer)
    rounds = exact and stage.kind is not None and stage.buffer in stored
    return replace(
        stage,
        rounding=narrow if rounds else None,
        factors=_factors(stage),
        buffers=tuple(stored.get(b, b) for b in stage.buffers),
        values=tuple(widen(v) for v in stage.values),
        initial=tuple(initial),
        carries=wide_carries,
    )


def _factors(stage: Stage) -> str | None:
    """The type of both factors of a sum of products, before they were widened; None of others."""
    if len(stage.values) != 1 or stage.kind is None:
        return None
    found = _term(stage.values[0], stage.carries[0], stage.carries)
    if found is None or found[0] is not Kind.SUM or not isinstance(found[1], tirx.Mul):
        return None
    factors = (found[1].a, found[1].b)
    types = {dtype_of(x.value if isinstance(x, tirx.Cast) else x) for x in factors}
    return types.pop() if len(types) == 1 else None


class _WidenState(Widen):
    """Widen, with the variables of a recurrence's state replaced by wide ones."""

    def __init__(self, exact: bool, stored: dict[Var, Var], state: dict[Var, Var]) -> None:
        super().__init__(exact, stored)
        self.state = state

    def visit(self, expr: Expr) -> Expr:
        if expr in self.state:
            return self.state[expr]
        return super().visit(expr)


def _split(stage: Stage) -> list[Stage]:
    """Recognise the simple reductions; independent ones of one block become stages of their own."""
    if stage.kind is None:
        return [stage]
    terms = [_term(v, c, stage.carries) for v, c in zip(stage.values, stage.carries, strict=True)]
    if any(t is None for t in terms):
        return [_with_merge(stage)]
    return [
        replace(
            stage,
            buffers=(buffer,),
            values=(term,),
            kind=kind,
            initial=(initial,),
            carries=(),
        )
        for buffer, (kind, term), initial in zip(stage.buffers, terms, stage.initial, strict=True)
    ]


def _term(value: Expr, carry: Var, carries: tuple[Var, ...]) -> tuple[Kind, Expr] | None:
    """The kind and the term of ``carry = combine(carry, term)``."""
    kind = COMBINES.get(type(value))
    if kind is None:
        return None
    left, right = value.a.same_as(carry), value.b.same_as(carry)
    term = value.b if left else value.a
    if left == right or any(c in free_variables(term) for c in carries):
        return None
    return kind, term


def _with_merge(stage: Stage) -> Stage:
    """Find out how to merge two states of a recurrence that keeps or replaces its state.

    state = Select(better(state, term), state, term)  ->  merge = Select(better(a, b), a, b)
    """
    terms = []
    for value, carry in zip(stage.values, stage.carries, strict=True):
        if not isinstance(value, tirx.Select):
            return stage
        sides = [x for x in (value.true_value, value.false_value) if not x.same_as(carry)]
        if len(sides) != 1:
            return stage
        terms.append(sides[0])
    elements = tuple(Var(f"{c.name}_other", c.ty) for c in stage.carries)
    swap = _SwapTerms(terms, elements)
    merge = tuple(swap(v) for v in stage.values)
    known = {v for v in (*stage.carries, *elements)}
    if loads(*merge) or any(k not in known for k in free_variables(*merge)):
        return stage
    return replace(stage, elements=elements, merge=merge)


class _SwapTerms(Rewriter):
    """Replaces the terms of a recurrence by variables."""

    def __init__(self, terms: list[Expr], elements: tuple[Var, ...]) -> None:
        super().__init__()
        self.pairs = list(zip(terms, elements, strict=True))

    def visit(self, expr: Expr) -> Expr:
        for term, element in self.pairs:
            if same(expr, term):
                return element
        return rebuild(expr, self)


def _check_order(params: tuple[Var, ...], stages: list[Stage]) -> None:
    """Every buffer is a parameter or written before it is read."""
    written = {b for s in stages for b in s.buffers}
    known = {p for p in params} - written
    for s in stages:
        for load in s.reads():
            if load.source not in known:
                raise Unsupported(f"{load.source.name} is read before it is written")
        known.update(b for b in s.buffers)
