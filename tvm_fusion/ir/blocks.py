"""Reads the s_tir blocks of a PrimFunc as values, whatever its readers take or refuse of them.

for i, k in T.grid(M, N):                    BlockDef("sum", loops=(for i, for k),
    with T.sblock("sum"):                        axes=(vi < M spatial, vk < N reduce),
        vi, vk = T.axis.remap("SR", [i, k])      body=(S[vi] = S[vi] + A[vi, vk] * 2.0,),
        with T.init():                   ->      initial=(S[vi] = 0.0,))
            S[vi] = 0.0
        v = A[vi, vk] * 2.0
        S[vi] = S[vi] + v

Nothing is refused here: what cannot be read is a `Stray`, or among the `others` of a block.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import tvm
import tvm_ffi
from tvm import s_tir, tirx
from tvm.ir import Call, Expr, TensorLoad, Var

from .access import AxisKind

_KINDS = {0: AxisKind.SPATIAL, 2: AxisKind.REDUCE}


@dataclass(frozen=True, slots=True, eq=False)
class BlockAxis:
    """An axis of a block."""

    var: Var
    domain: tvm.ir.Range
    kind: AxisKind


@dataclass(frozen=True, slots=True, eq=False)
class Contents:
    """What a statement stores: lets are put into values, not into the indices stored at.

    `late_lets` tells of a let behind a store; `others` are the types of all other statements.
    """

    stores: tuple[tirx.BufferStore, ...]
    lets: Mapping[Var, Expr]
    late_lets: bool
    others: tuple[str, ...]


@dataclass(frozen=True, slots=True, eq=False)
class Stray:
    """A statement outside of blocks that is no loop: the name of its type."""

    kind: str
    loops: tuple[tirx.For, ...]


@dataclass(frozen=True, slots=True, eq=False)
class BlockDef:
    """A block that stores values, or holds other blocks.

    Attributes
    ----------
    bindings : sequence of Expr
        What each axis is, of the variables of `loops`; these are those around it, outermost first.
    matches : bool
        Whether parts of buffers have names of their own in it.
    initial : Contents or None
        What a reduction starts from.
    inner : tuple of BlockDef and Stray
        What its body would be outside of blocks; empty where it has axes, stores and lets only.
    """

    name: str
    axes: tuple[BlockAxis, ...]
    bindings: Sequence[Expr]
    predicate: Expr
    matches: bool
    initial: Contents | None
    body: Contents
    loops: tuple[tirx.For, ...]
    inner: tuple[BlockDef | Stray, ...]


def read_blocks(
    func: tirx.PrimFunc, opens: Callable[[BlockDef], bool]
) -> tuple[BlockDef | Stray, ...]:
    """The blocks of a function, in its order; in the place of one that `opens`, those in it."""
    return tuple(_walk(func.body, (), opens))


def _walk(stmt: tirx.Stmt, loops: tuple[tirx.For, ...], opens) -> Iterator[BlockDef | Stray]:
    if isinstance(stmt, tirx.SeqStmt):
        for part in stmt.seq:
            yield from _walk(part, loops, opens)
    elif isinstance(stmt, tirx.For):
        yield from _walk(stmt.body, (*loops, stmt), opens)
    elif isinstance(stmt, s_tir.SBlockRealize):
        block = _read(stmt, loops, opens)
        yield from block.inner if opens(block) else (block,)
    else:
        yield Stray(type(stmt).__name__, loops)


def _read(realize: s_tir.SBlockRealize, loops: tuple[tirx.For, ...], opens) -> BlockDef:
    block = realize.block
    axes = tuple(
        BlockAxis(v.var, v.dom, _KINDS.get(int(v.iter_type), AxisKind.OPAQUE))
        for v in block.iter_vars
    )
    body = _contents(block.body)
    return BlockDef(
        block.name_hint,
        axes,
        realize.iter_values,
        realize.predicate,
        len(block.match_buffers) > 0,
        None if block.init is None else _contents(block.init),
        body,
        loops,
        tuple(_walk(block.body, loops, opens)) if body.others or not axes else (),
    )


def _contents(body: tirx.Stmt) -> Contents:
    stores: list[tirx.BufferStore] = []
    lets: dict[Var, Expr] = {}
    others: list[str] = []
    late = False
    for stmt in body.seq if isinstance(body, tirx.SeqStmt) else (body,):
        if isinstance(stmt, tirx.BufferStore):
            value = substitute(stmt.value, lets)
            stores.append(tirx.BufferStore(stmt.buffer, value, stmt.indices) if lets else stmt)
        elif isinstance(stmt, tirx.Bind):
            lets[stmt.var] = substitute(stmt.value, lets)
            late = late or bool(stores)
        else:
            others.append(type(stmt).__name__)
    return Contents(tuple(stores), lets, late, tuple(others))


def substitute(expr: Expr, lets: Mapping[Var, Expr]) -> Expr:
    """`expr` with the values of variables in their places."""
    return tvm_ffi.structural_map(expr, (Var, lambda v: lets.get(v, v))) if lets else expr


# ---- what reductions compute


def term_of(store: tirx.BufferStore) -> Expr | None:
    """``S[i] = S[i] + term`` -> term, with any operation on two values in the place of the sum."""
    a, b = store.value.a, store.value.b
    return b if loads_what(store, a) else a if loads_what(store, b) else None


def loads_what(store: tirx.BufferStore, expr: Expr) -> bool:
    """Whether `expr` loads what `store` writes."""
    if not isinstance(expr, TensorLoad) or not expr.source.same_as(store.buffer):
        return False
    return all(map(same, expr.indices, store.indices))


def loads_of(buffers: Sequence[Var], *exprs: Expr) -> bool:
    """Whether one of `exprs` loads from one of `buffers`."""
    found: list[TensorLoad] = []
    for expr in exprs:
        tvm_ffi.structural_walk(expr, [(TensorLoad, found.append)])
    return any(load.source.same_as(buffer) for load in found for buffer in buffers)


@dataclass(frozen=True, slots=True, eq=False)
class ArgPair:
    """``index_store`` holds the smallest `index` at which `value` is largest (or smallest)."""

    index_store: tirx.BufferStore
    value_store: tirx.BufferStore
    largest: bool
    index: Expr
    value: Expr


def read_arg_pair(stores: Sequence[tirx.BufferStore]) -> ArgPair | None:
    """What the stores of a reduction block compute, if that is an argmax or argmin.

    I[i], V[i] = Select(V[i] > x or (V[i] == x and I[i] < k), I[i], k), Select(V[i] > x, V[i], x)
    """
    if len(stores) != 2:
        return None
    return _match(stores[0], stores[1]) or _match(stores[1], stores[0])


def _match(index_store: tirx.BufferStore, value_store: tirx.BufferStore) -> ArgPair | None:
    index, value = index_store.value, value_store.value
    if not (isinstance(index, tirx.Select) and isinstance(value, tirx.Select)):
        return None
    better, own_index, own_value = value.condition, index.true_value, value.true_value
    k, x = index.false_value, value.false_value
    if not isinstance(better, tirx.GT | tirx.LT):
        return None
    if not loads_what(index_store, own_index) or not loads_what(value_store, own_value):
        return None
    tie = tirx.And(tirx.EQ(own_value, x), tirx.LT(own_index, k))
    fits = same(better, type(better)(own_value, x)) and same(index.condition, tirx.Or(better, tie))
    if not fits or loads_of((index_store.buffer, value_store.buffer), x, k):
        return None
    return ArgPair(index_store, value_store, isinstance(better, tirx.GT), k, x)


# ---- scans
#
#     S[i, j] = sum over k < N of (k <= j ? x[i, k] : 0)        j < N
#
# is written as the reduction that it is, which any tool reads; as N sums it is not meant.


@dataclass(frozen=True, slots=True, eq=False)
class Scan:
    """A block that combines, along `axis`, `term` of all places up to its own.

    Attributes
    ----------
    axis : Var
        The block axis; `term` is over it, too.
    term : Expr
    step : BufferStore
        What a sequential loop along the axis does: ``S[i, j] = S[i, j] + term``.
    kind : str
        What combines two: "sum", "prod", "max", "min", or "log_sum" of ``log(exp(a) + exp(b))``.
    exclusive : bool
        The own place is left out.
    """

    axis: Var
    term: Expr
    step: tirx.BufferStore
    kind: str
    exclusive: bool


_COMBINED = {tirx.Add: "sum", tirx.Mul: "prod", tirx.Max: "max", tirx.Min: "min"}


def log_add(a: Expr, b: Expr) -> Expr:
    """``log(exp(a) + exp(b))``, as a scan of kind "log_sum" is written; no float is compared for
    equality, for which no error is bounded.
    """
    one, endless = (tirx.const(value, str(a.ty.dtype)) for value in (1, math.inf))
    high, low = tirx.Max(a, b), tirx.Min(a, b)
    both = tirx.Add(high, tirx.log(tirx.Add(one, tirx.exp(tirx.Sub(low, high)))))
    return tirx.Select(tirx.LT(tirx.abs(high), endless), both, high)


def log_terms(store: tirx.BufferStore) -> tuple[Expr, Expr] | None:
    """What a store combines by `log_add`, what stands there first; None where it does not."""
    value = store.value
    high = value.false_value if isinstance(value, tirx.Select) else None
    if not isinstance(high, tirx.Max) or not loads_what(store, high.a):
        return None
    return (high.a, high.b) if same(value, log_add(high.a, high.b)) else None


def read_scan(block: BlockDef) -> Scan | None:
    """What a block scans; None where it does not."""
    reduced = [axis for axis in block.axes if axis.kind is AxisKind.REDUCE]
    initial = block.initial.stores if block.initial is not None else ()
    if len(reduced) != 1 or len(block.body.stores) != 1 or len(initial) != 1:
        return None
    ((k,), (store,)) = reduced, block.body.stores
    kind, pair = _COMBINED.get(type(store.value), "log_sum"), None
    if kind == "log_sum":
        pair = log_terms(store)
        if pair is None:
            return None
    masked = term_of(store) if pair is None else pair[1]
    name = getattr(masked.op, "name", "") if isinstance(masked, Call) else ""
    if name.rpartition(".")[2] != "if_then_else":
        return None
    condition, term, other = masked.args
    if not isinstance(condition, tirx.LE | tirx.LT) or not condition.a.same_as(k.var):
        return None
    axis = next((a for a in block.axes if a.var.same_as(condition.b)), None)
    if axis is None or not same(axis.domain.extent, k.domain.extent):
        return None
    along = any(index.same_as(axis.var) for index in store.indices)
    if not along or _uses(term, axis.var) or not same(other, initial[0].value):
        return None
    term = substitute(term, {k.var: axis.var})
    if pair is None:
        own = next(side for side in (store.value.a, store.value.b) if loads_what(store, side))
        combined = type(store.value)(own, term)
    else:
        combined = log_add(pair[0], term)
    step = tirx.BufferStore(store.buffer, combined, store.indices)
    return Scan(axis.var, term, step, kind, isinstance(condition, tirx.LT))


def along_scan(block: BlockDef, scan: Scan) -> BlockDef:
    """The block as a sequential loop computes it: without the axis that it reduces."""
    kept = [n for n, axis in enumerate(block.axes) if axis.kind is not AxisKind.REDUCE]
    return replace(
        block,
        axes=tuple(block.axes[n] for n in kept),
        bindings=[block.bindings[n] for n in kept],
        initial=None,
        body=replace(block.body, stores=(scan.step,)),
    )


def _uses(expr: Expr, var: Var) -> bool:
    found: list[Var] = []
    tvm_ffi.structural_walk(expr, [(Var, found.append)])
    return any(v.same_as(var) for v in found)


def same(a: Expr, b: Expr) -> bool:
    """Structural equality; variables are compared by identity (they may print alike)."""
    return a.same_as(b) or tvm_ffi.structural_equal(a, b)


def has_threads(nest: tirx.Stmt) -> bool:
    """Whether a statement is for the threads of a GPU."""

    def loop(node: tirx.For) -> tvm_ffi.VisitInterrupt | None:
        return tvm_ffi.VisitInterrupt() if node.kind == tirx.ForKind.THREAD_BINDING else None

    def attr(node: tirx.AttrStmt) -> tvm_ffi.VisitInterrupt | None:
        return tvm_ffi.VisitInterrupt() if node.attr_key == "thread_extent" else None

    return tvm_ffi.structural_walk(nest, [(tirx.For, loop), (tirx.AttrStmt, attr)]) is not None


# Calls that leave a kernel for the host.
_HOST_CALLS = ("tvm_call_packed", "tvm_call_cpacked", "tvm_stack_make")


def called(call: Call) -> str:
    """The name of the operator of TIR that is called; empty where it has none."""
    return getattr(call.op, "name", "").removeprefix("tirx.")


def calls_host(nest: tirx.Stmt) -> bool:
    """Whether a statement calls a function of the host."""

    def visit(call: Call) -> tvm_ffi.VisitInterrupt | None:
        return tvm_ffi.VisitInterrupt() if called(call).startswith(_HOST_CALLS) else None

    return tvm_ffi.structural_walk(nest, [(Call, visit)]) is not None
