"""Loops over a range by vectors, with shorter ones or single elements for the rest."""

from __future__ import annotations

from collections.abc import Callable

from tvm import tirx
from tvm.ir import Expr
from tvm.tirx import ForKind

from ...cpu.loops import Loop, Loops, nest, pieces, seq
from ...cpu.nests.point import has_vector_form
from ...program.expr import number


def by_vectors(
    loops: Loops,
    lanes: int,
    low: Expr,
    high: Expr,
    ops: Callable[[Expr, Loop | None], list],
    twice: bool = False,
) -> tirx.Stmt:
    """``ops(at, lane)`` at each point from `low` on and below `high`, by vectors where they have
    such a form and as far as these go; with `twice`, at some points twice if that takes fewer.
    """

    def vector(first: Expr, width: int) -> tirx.Stmt:
        kind = ForKind.VECTORIZED if width > 1 else ForKind.SERIAL
        lane = loops.new("v", width, kind)
        found = ops(loops.simplify(first + lane.value), lane if width > 1 else None)
        if width > 1 and not has_vector_form(found):
            lane = loops.new("v", width)
            found = ops(loops.simplify(first + lane.value), None)
        return nest([lane], found)

    return in_vectors(loops, lanes, low, high, vector, twice)


def in_vectors(
    loops: Loops,
    lanes: int,
    low: Expr,
    high: Expr,
    vector: Callable[[Expr, int], tirx.Stmt],
    twice: bool = False,
) -> tirx.Stmt:
    """``vector(first, width)`` for vectors that cover the points from `low` on and below `high`."""
    length = loops.simplify(high - low)
    size = number(length)
    if size is None:
        whole = loops.new("i", loops.simplify(tirx.FloorDiv(length, loops.imm(lanes))))
        done = loops.simplify(low + tirx.FloorDiv(length, loops.imm(lanes)) * loops.imm(lanes))
        rest = loops.new("i", loops.simplify(high - done))
        return seq(
            whole.around(vector(low + whole.value * loops.imm(lanes), lanes)),
            rest.around(vector(loops.simplify(done + rest.value), 1)),
        )
    count, rest = divmod(max(0, int(size)), lanes)
    whole = loops.new("i", count)
    first = loops.simplify(low + loops.imm(count * lanes))
    parts = pieces(rest, lanes)
    if twice and len(parts) > 2:
        width = parts[0][1]
        parts = [parts[0], (rest - width, width)]
    return seq(
        whole.around(vector(low + whole.value * loops.imm(lanes), lanes)) if count else None,
        *(vector(first + loops.imm(start), width) for start, width in parts),
    )
