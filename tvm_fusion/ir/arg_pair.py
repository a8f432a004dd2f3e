"""Recognises argmax and argmin: two buffers, index and value, written together.

I[i], V[i] = Select(V[i] > x or (V[i] == x and I[i] < k), I[i], k), Select(V[i] > x, V[i], x)
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import tvm_ffi
from tvm import tirx
from tvm.ir import Expr, TensorLoad


@dataclass(frozen=True, slots=True, eq=False)
class ArgPair:
    """``index_store`` holds the smallest `index` at which `value` is largest (or smallest)."""

    index_store: tirx.BufferStore
    value_store: tirx.BufferStore
    largest: bool
    index: Expr
    value: Expr


def read_arg_pair(
    stores: Sequence[tirx.BufferStore], resolved: Callable[[Expr], Expr] = lambda e: e
) -> ArgPair | None:
    """What two stores of a reduction block compute, if that is an argmax or argmin.

    Parameters
    ----------
    stores : of one block.
    resolved : puts the values of let variables in.
    """
    if len(stores) != 2:
        return None
    for first, second in (tuple(stores), tuple(reversed(stores))):
        pair = _match(first, second, resolved(first.value), resolved(second.value))
        if pair is not None:
            return pair
    return None


def _match(
    index_store: tirx.BufferStore, value_store: tirx.BufferStore, index: Expr, value: Expr
) -> ArgPair | None:
    if not (isinstance(index, tirx.Select) and isinstance(value, tirx.Select)):
        return None
    keep, better = index.condition, value.condition
    if not isinstance(better, tirx.GT | tirx.LT) or not isinstance(keep, tirx.Or):
        return None
    x, k = value.false_value, index.false_value
    own_value, own_index = value.true_value, index.true_value
    tie = keep.b
    shape_fits = (
        _same(keep.a, better)
        and _same(better.a, own_value)
        and _same(better.b, x)
        and isinstance(tie, tirx.And)
        and isinstance(tie.a, tirx.EQ)
        and isinstance(tie.b, tirx.LT)
    )
    if not shape_fits:
        return None
    tie_fits = (
        _same(tie.a.a, own_value)
        and _same(tie.a.b, x)
        and _same(tie.b.a, own_index)
        and _same(tie.b.b, k)
    )
    if not tie_fits or not _loads(own_value, value_store) or not _loads(own_index, index_store):
        return None
    buffers = (index_store.buffer, value_store.buffer)
    if any(_reads(part, buffers) for part in (x, k)):
        return None
    return ArgPair(index_store, value_store, isinstance(better, tirx.GT), k, x)


def _same(a: Expr, b: Expr) -> bool:
    return a.same_as(b) or tvm_ffi.structural_equal(a, b)


def _loads(expr: Expr, store: tirx.BufferStore) -> bool:
    """Whether `expr` reads what `store` writes."""
    if not isinstance(expr, TensorLoad) or not expr.source.same_as(store.buffer):
        return False
    return all(map(_same, expr.indices, store.indices))


def _reads(expr: Expr, buffers: Sequence) -> bool:
    loads: list[TensorLoad] = []
    tvm_ffi.structural_walk(expr, [(TensorLoad, loads.append)])
    return any(load.source.same_as(buffer) for load in loads for buffer in buffers)
