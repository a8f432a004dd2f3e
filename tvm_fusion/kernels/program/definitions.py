"""Reads s_tir blocks as definitions: buffer[axes] = value, or = reduction of value.

for i, k in T.grid(M, N):
    with T.sblock("sum"):
        vi, vk = T.axis.remap("SR", [i, k])      ->  Definition(buffer=S, axes=(vi,),
        with T.init():                                   reduced=((vk, N),), kind=SUM,
            S[vi] = 0.0                                  value=A[vi, vk], initial=0.0)
        S[vi] = S[vi] + A[vi, vk]
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from tvm import tirx
from tvm.ir import Expr, Var

from ...errors import Unsupported
from ...ir.access import AxisKind
from ...ir.blocks import (
    ArgPair,
    BlockDef,
    Scan,
    Stray,
    along_scan,
    loads_of,
    read_arg_pair,
    read_blocks,
    read_scan,
    term_of,
)
from ...ir.extents import bounds_within, known_sizes
from .expr import extent_of, number, same
from .extents import equal_sizes
from .program import Extent, Param, ReduceKind

KINDS = {
    tirx.Add: ReduceKind.SUM,
    tirx.Mul: ReduceKind.PROD,
    tirx.Max: ReduceKind.MAX,
    tirx.Min: ReduceKind.MIN,
    tirx.And: ReduceKind.MIN,
    tirx.Or: ReduceKind.MAX,
}


@dataclass(frozen=True, slots=True, eq=False)
class Scanned:
    """How a scan combines what it meets along a block axis; `exclusive`: before its own place."""

    kind: ReduceKind
    axis: Var
    exclusive: bool


@dataclass(frozen=True, slots=True, eq=False)
class Definition:
    """``buffer[axes] = value``; with `kind`, the reduction of `value` over the `reduced` axes.

    ARGMAX and ARGMIN reduce `value` to the `index` of its extremum. An entry of `axes` is None
    where the block stores at index 0 only. `shape` has the extents that are written: those of the
    buffer, or less where that is a parameter, of which the rest is somebody else's. With `scan` it
    is what that combines of `value`.
    """

    buffer: Var
    axes: tuple[Var | None, ...]
    reduced: tuple[tuple[Var, Extent], ...]
    value: Expr
    kind: ReduceKind | None
    initial: Expr | None
    shape: tuple[Extent, ...]
    index: Expr | None = None
    scan: Scanned | None = None

    @property
    def is_part(self) -> bool:
        """Whether it is less than the buffer."""
        whole = shape_of(self.buffer)
        return not all(_equal(n, extent) for n, extent in zip(self.shape, whole, strict=True))

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
    params, known = [], known_sizes(func)
    for var in func.params:
        if not isinstance(var.ty, tirx.BufferType):
            params.append(Param(var.name, None, str(var.ty.dtype), var))
            continue
        if len(var.ty.strides or ()) or number(var.ty.elem_offset) not in (None, 0):
            raise Unsupported(f"parameter {var.name} is a strided view")
        shape = shape_of(var)
        most = bounds_within(math.prod(shape), known).most
        params.append(Param(var.name, shape, str(var.ty.dtype), var, most))
    return tuple(params)


def read_definitions(func: tirx.PrimFunc, scans: bool = False) -> list[Definition]:
    """The definitions of `func` in the order of its blocks, each buffer defined once; those of
    scans only for who asks for `scans`.

    Raises
    ------
    Unsupported
        For anything that is not a set of complete blocks with one store for each buffer.
    """
    found: dict[Var, Definition] = {}
    blocks, params = read_blocks(func, opens=_is_root), set(func.params)
    for block in blocks:
        for definition in _read_block(block, scans) if isinstance(block, BlockDef) else ():
            if definition.buffer in found:
                raise Unsupported(f"{definition.buffer.name} is written by several blocks")
            if definition.is_part and definition.buffer not in params:
                raise Unsupported(f"{definition.buffer.name} is written in part")
            found[definition.buffer] = definition
    for block in blocks:
        if isinstance(block, Stray) and block.kind != "AllocBuffer":
            raise Unsupported(f"a {block.kind} stands outside of blocks")
    return list(found.values())


def _is_root(block: BlockDef) -> bool:
    return not block.axes and any(isinstance(inner, BlockDef) for inner in block.inner)


def _read_block(block: BlockDef, scans: bool) -> list[Definition]:
    if number(block.predicate) != 1:
        raise Unsupported(f"block {block.name} has a predicate")
    if block.matches:
        raise Unsupported(f"block {block.name} matches buffer regions")
    if not all(isinstance(value, Var | tirx.IntImm) for value in block.bindings):
        raise Unsupported(f"block {block.name} is already scheduled")
    kinds = {axis.kind for axis in block.axes}
    if AxisKind.OPAQUE in kinds:
        raise Unsupported(f"block {block.name} has opaque axes")
    initial = block.initial
    others = (*block.body.others, *(initial.others if initial else ()))
    if others:
        raise Unsupported(f"block {block.name} holds a {others[0]}")
    scan = read_scan(block)
    if scan is not None:
        if not scans:
            raise Unsupported(f"block {block.name} is a scan")
        return [_define_scan(block, scan)]
    initials = {store.buffer: store.value for store in initial.stores} if initial else {}
    pair = read_arg_pair(block.body.stores)
    if pair is not None and AxisKind.REDUCE in kinds:
        return _define_pair(block, pair, initials)
    return [_define(block, store, initials) for store in block.body.stores]


def _define_scan(block: BlockDef, scan: Scan) -> Definition:
    axes, _, shape = _block_axes(along_scan(block, scan), scan.step)
    scanned = Scanned(ReduceKind(scan.kind), scan.axis, scan.exclusive)
    return Definition(scan.step.buffer, axes, (), scan.term, None, None, shape, scan=scanned)


def _define_pair(block: BlockDef, pair: ArgPair, initials: dict[Var, Expr]) -> list[Definition]:
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
        axes, reduced, shape = _block_axes(block, store)
        initial = initials[store.buffer]
        found.append(
            Definition(store.buffer, axes, reduced, pair.value, kind, initial, shape, index)
        )
    return found


def _define(block: BlockDef, store: tirx.BufferStore, initials: dict[Var, Expr]) -> Definition:
    name = store.buffer.name
    axes, reduced, shape = _block_axes(block, store)
    if not reduced:
        return Definition(store.buffer, axes, (), store.value, None, None, shape)
    if store.buffer not in initials:
        raise Unsupported(f"reduction {name} has no initial value")
    kind, value = _combiner(store)
    return Definition(store.buffer, axes, reduced, value, kind, initials[store.buffer], shape)


Written = tuple[tuple[Var | None, ...], tuple[tuple[Var, Extent], ...], tuple[Extent, ...]]
"""Which block axis each index of a store is, the reduced axes with their extents, and how far each
index goes."""


def _block_axes(block: BlockDef, store: tirx.BufferStore) -> Written:
    spatial, reduced = (
        {axis.var: extent_of(axis.domain.extent) for axis in block.axes if axis.kind is kind}
        for kind in (AxisKind.SPATIAL, AxisKind.REDUCE)
    )
    if any(number(axis.domain.min) != 0 for axis in block.axes):
        name = store.buffer.name
        raise Unsupported(f"{name} is computed over a range that does not start at 0")
    axes, shape = _axes(store, spatial)
    return axes, tuple(reduced.items()), shape


def _axes(
    store: tirx.BufferStore, spatial: dict[Var, Extent]
) -> tuple[tuple[Var | None, ...], tuple[Extent, ...]]:
    """Which block axis each index is, and its extent; the block must write each element once."""
    name = store.buffer.name
    missing = dict(spatial)
    axes: list[Var | None] = []
    shape: list[Extent] = []
    for index, whole in zip(store.indices, shape_of(store.buffer), strict=True):
        if number(index) == 0 and (spatial or whole == 1):
            axes.append(None)
            shape.append(1)
            continue
        if not isinstance(index, Var) or index not in missing:
            raise Unsupported(f"{name} is written at {index}")
        extent = missing.pop(index)
        known = isinstance(extent, int) and isinstance(whole, int)
        if not (extent <= whole if known else _equal(extent, whole)):
            raise Unsupported(f"{name} is written beyond its end")
        axes.append(index)
        shape.append(extent)
    if any(extent != 1 for extent in missing.values()):
        raise Unsupported(f"{name} is written several times")
    return tuple(axes), tuple(shape)


def _equal(a: Extent, b: Extent) -> bool:
    if isinstance(a, int) or isinstance(b, int):
        return isinstance(a, int) and isinstance(b, int) and a == b
    return same(a, b) or equal_sizes(a, b)


def _combiner(store: tirx.BufferStore) -> tuple[ReduceKind, Expr]:
    """``S[i] = S[i] + value`` -> (SUM, value)."""
    kind = KINDS.get(type(store.value))
    value = None if kind is None else term_of(store)
    if value is None:
        raise Unsupported(f"reduction {store.buffer.name} = {store.value}")
    if loads_of((store.buffer,), value):
        raise Unsupported(f"reduction {store.buffer.name} reads itself")
    return kind, value
