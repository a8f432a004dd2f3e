"""Reads s_tir blocks as definitions: buffer[axes] = value, or = reduction of value.

for i, k in T.grid(M, N):
    with T.sblock("sum"):
        vi, vk = T.axis.remap("SR", [i, k])      ->  Definition(buffer=S, axes=(vi,),
        with T.init():                                   reduced=((vk, N),), kind=SUM,
            S[vi] = 0.0                                  value=A[vi, vk], initial=0.0)
        S[vi] = S[vi] + A[vi, vk]
"""

from __future__ import annotations

from dataclasses import dataclass

import tvm_ffi
from tvm import s_tir, tirx
from tvm.ir import Expr, TensorLoad, Var

from ...errors import Unsupported
from ...ir.arg_pair import ArgPair, read_arg_pair
from .expr import extent_of, number, same, substitute
from .program import Extent, Param, ReduceKind

SPATIAL, REDUCTION = 0, 2

KINDS = {
    tirx.Add: ReduceKind.SUM,
    tirx.Mul: ReduceKind.PROD,
    tirx.Max: ReduceKind.MAX,
    tirx.Min: ReduceKind.MIN,
    tirx.And: ReduceKind.MIN,
    tirx.Or: ReduceKind.MAX,
}


@dataclass(frozen=True, slots=True, eq=False)
class Definition:
    """``buffer[axes] = value``; with `kind`, the reduction of `value` over the `reduced` axes.

    ARGMAX and ARGMIN reduce `value` to the `index` of its extremum. An entry of `axes` is None
    where the buffer's extent is 1 and the block stores at index 0.
    """

    buffer: Var
    axes: tuple[Var | None, ...]
    reduced: tuple[tuple[Var, Extent], ...]
    value: Expr
    kind: ReduceKind | None
    initial: Expr | None
    index: Expr | None = None

    @property
    def shape(self) -> tuple[Extent, ...]:
        """Extents of the buffer."""
        return shape_of(self.buffer)

    @property
    def dtype(self) -> str:
        """Element dtype of the buffer."""
        return str(self.buffer.ty.dtype)

    def at(self, indices: tuple[Expr, ...]) -> dict[Var, Expr]:
        """What the block's axes are when the element at `indices` is read."""
        return {axis: i for axis, i in zip(self.axes, indices, strict=True) if axis is not None}


def shape_of(buffer: Var) -> tuple[Extent, ...]:
    """Extents of a buffer."""
    return tuple(extent_of(extent) for extent in buffer.ty.shape)


def read_params(func: tirx.PrimFunc) -> tuple[Param, ...]:
    """The parameters of `func`; strided or offset buffers are refused."""
    params = []
    for var in func.params:
        if not isinstance(var.ty, tirx.BufferType):
            params.append(Param(var.name, None, str(var.ty.dtype), var))
            continue
        if len(var.ty.strides or ()) or number(var.ty.elem_offset) not in (None, 0):
            raise Unsupported(f"parameter {var.name} is a strided view")
        params.append(Param(var.name, shape_of(var), str(var.ty.dtype), var))
    return tuple(params)


def read_definitions(func: tirx.PrimFunc) -> list[Definition]:
    """The definitions of `func` in the order of its blocks, each buffer defined once.

    Raises
    ------
    Unsupported
        For anything that is not a set of complete blocks with one store for each buffer.
    """
    realizes: list[s_tir.SBlockRealize] = []
    tvm_ffi.structural_walk(func.body, [(s_tir.SBlockRealize, realizes.append)], order="pre")
    found: dict[Var, Definition] = {}
    for realize in realizes:
        if _is_root(realize.block):
            continue
        for definition in _read_block(realize):
            if definition.buffer in found:
                raise Unsupported(f"{definition.buffer.name} is written by several blocks")
            found[definition.buffer] = definition
    return list(found.values())


def _is_root(block: s_tir.SBlock) -> bool:
    inner: list[s_tir.SBlock] = []
    tvm_ffi.structural_walk(block.body, [(s_tir.SBlockRealize, inner.append)])
    return bool(inner) and not len(block.iter_vars)


def _read_block(realize: s_tir.SBlockRealize) -> list[Definition]:
    block = realize.block
    name = block.name_hint
    if number(realize.predicate) != 1:
        raise Unsupported(f"block {name} has a predicate")
    if len(block.match_buffers):
        raise Unsupported(f"block {name} matches buffer regions")
    for value in realize.iter_values:
        if not isinstance(value, Var | tirx.IntImm):
            raise Unsupported(f"block {name} is already scheduled")
    kinds = {int(iter_var.iter_type) for iter_var in block.iter_vars}
    if not kinds <= {SPATIAL, REDUCTION}:
        raise Unsupported(f"block {name} has opaque axes")
    stores = _stores(block.body, name)
    initials = {store.buffer: store.value for store in _stores(block.init, name)}
    pair = read_arg_pair(stores)
    if pair is not None and REDUCTION in kinds:
        return _define_pair(block, pair, initials)
    return [_define(block, store, initials) for store in stores]


def _stores(body: tirx.Stmt | None, name: str) -> list[tirx.BufferStore]:
    """The stores of a block body, its let-bound values substituted."""
    binds: dict[Var, Expr] = {}
    stores = []
    for stmt in _sequence(body):
        if isinstance(stmt, tirx.Bind):
            binds[stmt.var] = substitute(stmt.value, binds)
        elif isinstance(stmt, tirx.BufferStore):
            value = substitute(stmt.value, binds)
            stores.append(tirx.BufferStore(stmt.buffer, value, stmt.indices))
        else:
            raise Unsupported(f"block {name} holds a {type(stmt).__name__}")
    return stores


def _sequence(body: tirx.Stmt | None) -> list[tirx.Stmt]:
    if body is None:
        return []
    return list(body.seq) if isinstance(body, tirx.SeqStmt) else [body]


def _define_pair(block: s_tir.SBlock, pair: ArgPair, initials: dict[Var, Expr]) -> list[Definition]:
    """The index and the value of an argmax or argmin, each a reduction of its own."""
    arg, extreme = (
        (ReduceKind.ARGMAX, ReduceKind.MAX) if pair.largest else (ReduceKind.ARGMIN, ReduceKind.MIN)
    )
    found = []
    for store, kind, index in (
        (pair.index_store, arg, pair.index),
        (pair.value_store, extreme, None),
    ):
        if store.buffer not in initials:
            raise Unsupported(f"reduction {store.buffer.name} has no initial value")
        axes, reduced = _block_axes(block, store)
        initial = initials[store.buffer]
        found.append(Definition(store.buffer, axes, reduced, pair.value, kind, initial, index))
    return found


def _define(block: s_tir.SBlock, store: tirx.BufferStore, initials: dict[Var, Expr]) -> Definition:
    name = store.buffer.name
    axes, reduced = _block_axes(block, store)
    if not reduced:
        return Definition(store.buffer, axes, (), store.value, None, None)
    if store.buffer not in initials:
        raise Unsupported(f"reduction {name} has no initial value")
    kind, value = _combiner(store)
    return Definition(store.buffer, axes, reduced, value, kind, initials[store.buffer])


def _block_axes(
    block: s_tir.SBlock, store: tirx.BufferStore
) -> tuple[tuple[Var | None, ...], tuple[tuple[Var, Extent], ...]]:
    """Which block axis each index of a store is, and the reduced axes with their extents."""
    spatial = {v.var: extent_of(v.dom.extent) for v in block.iter_vars if v.iter_type == SPATIAL}
    reduced = tuple(
        (v.var, extent_of(v.dom.extent)) for v in block.iter_vars if v.iter_type == REDUCTION
    )
    if any(number(v.dom.min) != 0 for v in block.iter_vars):
        name = store.buffer.name
        raise Unsupported(f"{name} is computed over a range that does not start at 0")
    return _axes(store, spatial), reduced


def _axes(store: tirx.BufferStore, spatial: dict[Var, Extent]) -> tuple[Var | None, ...]:
    """Which block axis each index is; the block must write every element of the buffer once."""
    name = store.buffer.name
    missing = dict(spatial)
    axes: list[Var | None] = []
    for index, extent in zip(store.indices, shape_of(store.buffer), strict=True):
        if number(index) == 0 and extent == 1:
            axes.append(None)
            continue
        if not isinstance(index, Var) or index not in missing:
            raise Unsupported(f"{name} is written at {index}")
        if not _equal(missing.pop(index), extent):
            raise Unsupported(f"{name} is written in part")
        axes.append(index)
    if any(extent != 1 for extent in missing.values()):
        raise Unsupported(f"{name} is written several times")
    return tuple(axes)


def _equal(a: Extent, b: Extent) -> bool:
    if isinstance(a, int) or isinstance(b, int):
        return isinstance(a, int) and isinstance(b, int) and a == b
    return same(a, b)


def _combiner(store: tirx.BufferStore) -> tuple[ReduceKind, Expr]:
    """``S[i] = S[i] + value`` -> (SUM, value)."""

    def is_self(expr: Expr) -> bool:
        return (
            isinstance(expr, TensorLoad)
            and expr.source.same_as(store.buffer)
            and all(same(a, b) for a, b in zip(expr.indices, store.indices, strict=True))
        )

    update = store.value
    kind = KINDS.get(type(update))
    if kind is None or not (is_self(update.a) or is_self(update.b)):
        raise Unsupported(f"reduction {store.buffer.name} = {update}")
    value = update.b if is_self(update.a) else update.a
    loads: list[TensorLoad] = []
    tvm_ffi.structural_walk(value, [(TensorLoad, loads.append)])
    if any(load.source.same_as(store.buffer) for load in loads):
        raise Unsupported(f"reduction {store.buffer.name} reads itself")
    return kind, value
