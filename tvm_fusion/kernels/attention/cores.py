"""Operators that are worth a launch together though no two of them are: a product, the softmax of
what it gives, and the product behind that.

Joined one by one they would pass through groups that no kernel computes, so the search is told of
them as a whole.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from ...ir.access import Reduction
from ...ir.graph import FusionGraph, Op, OpKind, bits
from ..program.expr import HALF_DTYPES

EXPONENTIALS = frozenset({"exp", "exp2"})
HALVES = frozenset(HALF_DTYPES)
MAX_BETWEEN = 64  # operators between the two products


def attention_cores(graph: FusionGraph) -> Iterator[tuple[int, ...]]:
    """The operators of each possible attention, ascending: both products and all between them.

    No operator is in two of them.
    """
    taken: set[int] = set()
    for op in graph.ops:
        if not _is_product(op):
            continue
        between, products = _above(graph, op)
        for first in sorted(products, reverse=True):
            core = _core(graph, first, op.id, between)
            if core:
                core = tuple(sorted({*core, *_turns(graph, core), *_casts(graph, core)}))
            if core and taken.isdisjoint(core):
                taken.update(core)
                yield core
                break


def _is_product(op: Op) -> bool:
    return op.kind is OpKind.CALL_TIR and any(b.is_matrix_product for b in op.blocks)


def _above(graph: FusionGraph, op: Op) -> tuple[set[int], set[int]]:
    """Operators that lead to a product without passing another one, and the products behind."""
    between: set[int] = set()
    products: set[int] = set()
    waiting = list(graph.producers(op.id))
    while waiting and len(between) <= MAX_BETWEEN:
        number = waiting.pop()
        if number in between or number in products:
            continue
        above = graph.ops[number]
        if _is_product(above):
            products.add(number)
        elif above.kind is not OpKind.OPAQUE:
            between.add(number)
            waiting += graph.producers(number)
    return between, products


def _core(graph: FusionGraph, first: int, last: int, between: set[int]) -> tuple[int, ...]:
    """The products and what lies on paths between them, if that is a softmax by its blocks; with
    its normalisation where that follows the second product.
    """
    path = graph.descendants[first] & graph.ancestors[last]
    if path & ~bits(between) or not _has_exponential(graph, path):
        return ()
    if _sums(graph, path):
        return _ascending(path | bits((first, last)))
    whole = _normalised(graph, first, last)
    inside = whole & ~bits((first, last))
    if not whole or inside.bit_count() > MAX_BETWEEN or _holds_product(graph, inside):
        return ()
    return _ascending(whole)


def _turns(graph: FusionGraph, core: tuple[int, ...]) -> set[int]:
    """What moves an operand for its product only: a kernel reads it where it lay before."""
    found: set[int] = set()
    waiting = [op for op in core if _is_product(graph.ops[op])]
    while waiting:
        for above in graph.producers(waiting.pop()):
            op = graph.ops[above]
            alone = len(graph.consumers(above)) == 1 and above not in core
            if alone and _moves(op) and _dtypes(graph, op.inputs) == _dtypes(graph, op.outputs):
                found.add(above)
                waiting.append(above)
    return found


def _casts(graph: FusionGraph, core: tuple[int, ...]) -> set[int]:
    """Casts from halves in front of the products, and to halves behind: with these a kernel
    multiplies what is stored, and rounds no more than the graph does in the end.
    """
    found = set()
    for op in core:
        if _is_product(graph.ops[op]):
            for above in graph.producers(op):
                found |= _widened(graph, above) - set(core)
    for below in graph.consumers(core[-1]):
        if _moves(graph.ops[below]) and _dtypes(graph, graph.ops[below].outputs) <= HALVES:
            found.add(below)
    return found


def _widened(graph: FusionGraph, op: int) -> set[int]:
    """The cast from a half precision, and what moves its result, up to and with this operator."""
    chain: set[int] = set()
    while _moves(graph.ops[op]) and _dtypes(graph, graph.ops[op].outputs) == {"float32"}:
        chain.add(op)
        if _dtypes(graph, graph.ops[op].inputs) <= HALVES:
            return chain
        above = graph.producers(op)
        if len(above) != 1:
            break
        op = above[0]
    return set()


def _moves(op: Op) -> bool:
    """Whether an operator moves or casts one tensor and computes nothing."""
    still = all(not b.counts and b.reduction is None for b in op.blocks)
    alone = len(op.inputs) == 1 and len(op.outputs) == 1
    return op.kind is not OpKind.OPAQUE and still and alone


def _dtypes(graph: FusionGraph, tensors: Iterable[int]) -> set[str]:
    return {graph.tensors[t].dtype for t in tensors}


def _normalised(graph: FusionGraph, first: int, last: int) -> int:
    """The bitset up to the operator that divides what the second product gives by a sum."""
    beside = graph.descendants[first] & ~graph.descendants[last] & ~bits((last,))
    sums = [op for op in _ascending(beside) if _sums(graph, 1 << op)]
    for op in sums[:1]:
        below = graph.descendants[last] & graph.descendants[op]
        if below:
            meeting = (below & -below).bit_length() - 1
            on_the_way = graph.descendants[first] & graph.ancestors[meeting]
            return on_the_way | bits((first, last, meeting))
    return 0


def _ascending(ops: int) -> tuple[int, ...]:
    found = []
    while ops:
        found.append((ops & -ops).bit_length() - 1)
        ops &= ops - 1
    return tuple(found)


def _has_exponential(graph: FusionGraph, ops: int) -> bool:
    blocks = (b for op in _ascending(ops) for b in graph.ops[op].blocks)
    return any(name in EXPONENTIALS for b in blocks for name, _ in b.functions)


def _sums(graph: FusionGraph, ops: int) -> bool:
    blocks = (b for op in _ascending(ops) for b in graph.ops[op].blocks)
    return any(b.reduction is Reduction.SUM and not b.is_contraction for b in blocks)


def _holds_product(graph: FusionGraph, ops: int) -> bool:
    found = [graph.ops[op] for op in _ascending(ops)]
    return any(_is_product(op) or op.kind is OpKind.OPAQUE for op in found)
