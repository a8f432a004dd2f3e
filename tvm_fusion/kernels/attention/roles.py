"""Which block of a group is what in attention: two products with a softmax between them.

    S = Q K^T                    the score product                       score points
    a = scale * S + mask         pointwise on scores                     score points
    m = max a, l = sum exp(..)   reductions over the keys                rows
    P = exp(a - m) / l           pointwise on scores and rows            score points
    O = P V                      the value product, one operand scores   result points
    y = O, lse = m + log(l)      pointwise behind                        result points, rows

Blocks are told apart by what they read and over which space they run, never by name. Whether the
expressions are a softmax indeed is found when the kernel is written (`attention.read.program`).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from enum import Enum

from ...ir.access import Access, Block, Reduction
from ...ir.extents import assumed_product, product_key
from ...ir.graph import FusionGraph, Op, OpKind, bits
from ...plan.group_view import GroupView
from ...plan.refusal import Refusal, RefusalCode
from ..gemm.product import Product, match_product
from ..program.expr import HALF_DTYPES

# Operators that are worth a launch together though no two of them are: a product, the softmax of
# what it gives, and the product behind that.
#
# Joined one by one they would pass through groups that no kernel computes, so the search is told of
# them as a whole.

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


class Level(Enum):
    """The points a tensor of the group has an element for."""

    OPERAND = "operand"  # of Q, K or V, or what these are moved from
    MASK = "mask"  # computed of neither product
    SCORE = "score"
    ROW = "row"
    RESULT = "result"


@dataclass(frozen=True, slots=True)
class AttentionRoles:
    """The two products of a group, and what each block is.

    Attributes
    ----------
    score, value : the products
    query, key : tensors of the operands of the score product
    content : tensor of the other operand of the value product
    levels : of the tensor each block writes, by `id` of the block
    """

    score: Product
    value: Product
    query: int
    key: int
    content: int
    levels: dict[int, Level]

    @property
    def batch(self) -> int:
        return self.score.batch

    @property
    def features(self) -> int:
        """Columns of V and of the result."""
        return self.value.n if self.value.left.tensor != self.content else self.value.m

    @property
    def keys(self) -> int:
        return self.value.k

    @property
    def queries(self) -> int:
        return self.score.m * self.score.n // self.keys


def match_attention(group: GroupView) -> AttentionRoles | Refusal:
    """The roles of a group's blocks, or why it is no attention."""
    products = [p for block in group.blocks if (p := match_product(block)) is not None]
    contractions = sum(block.is_contraction for block in group.blocks)
    if len(products) != 2 or contractions != 2:
        return group.refuse(RefusalCode.REDUCTION, "no two matrix products, one behind the other")
    return _Matching(group, *products).roles()


@dataclass(slots=True)
class _Matching:
    group: GroupView
    score: Product
    value: Product

    def roles(self) -> AttentionRoles | Refusal:
        group, score, value = self.group, self.score, self.value
        tensors: dict[int, Level] = {score.block.writes[0].tensor: Level.SCORE}
        levels: dict[int, Level] = {id(score.block): Level.SCORE}
        operands = _upstream(group, {score.left.tensor, score.right.tensor})
        for block in group.blocks:
            if block is score.block:
                continue
            if block is value.block:
                found: Level | Refusal = self._value_level(tensors)
            elif block.writes[0].tensor in operands:
                found = self._moved(block)
            else:
                found = self._level(block, tensors)
            if isinstance(found, Refusal):
                return found
            levels[id(block)] = found
            tensors |= {w.tensor: found for w in block.writes}
        sides = (value.left.tensor, value.right.tensor)
        content = next(t for t in sides if tensors.get(t) is not Level.SCORE)
        for t in _upstream(group, {content}):
            block = group.writer_of.get(t)
            if block is None:
                continue
            if isinstance(refusal := self._moved(block), Refusal):
                return refusal
            levels[id(block)] = Level.OPERAND
        if refusal := self._check(levels, tensors):
            return refusal
        return AttentionRoles(score, value, score.left.tensor, score.right.tensor, content, levels)

    def _moved(self, block: Block) -> Level | Refusal:
        """A block in front of Q, K or V may move data or multiply it by a number, no more."""
        works = bool(block.operations()) and not block.scales
        computes = works or block.reduction is not None or len(block.reads) != 1
        if computes or any(a.guarded or a.data_dependent for a in block.reads):
            return self.group.refuse(
                RefusalCode.PROLOGUE,
                f"{block.name} computes on an operand of attention, once per tile of the other",
            )
        return Level.OPERAND

    def _value_level(self, tensors: dict[int, Level]) -> Level | Refusal:
        scores = [
            a.tensor
            for a in (self.value.left, self.value.right)
            if tensors.get(a.tensor) is Level.SCORE
        ]
        if len(scores) != 1 or scores[0] == self.score.block.writes[0].tensor:
            return self.group.refuse(
                RefusalCode.REDUCTION, "no matrix product of what is computed from another one"
            )
        if self.value.batch != self.score.batch or self.value.k not in (
            self.score.m,
            self.score.n,
        ):
            return self.group.refuse(
                RefusalCode.SPACE_MISMATCH,
                f"{self.value.block.name} does not sum over the keys of {self.score.block.name}",
            )
        return Level.RESULT

    def _level(self, block: Block, tensors: dict[int, Level]) -> Level | Refusal:
        """The level of any other block, by what it reads."""
        read = {tensors[a.tensor] for a in block.reads if a.tensor in tensors}
        space = product_key(a.extent for a in block.axes)
        scores = product_key(self.score.block.extents(self.score.block.spatial))
        if block.reduction is not None:
            known = block.reduction in (Reduction.MAX, Reduction.MIN, Reduction.SUM)
            keys = assumed_product(block.extents(block.reduced)) == self.value.k
            if read == {Level.SCORE} and space == scores and known and keys:
                return Level.ROW
            return self.group.refuse(
                RefusalCode.REDUCTION, f"{block.name} reduces something else than rows of scores"
            )
        if Level.RESULT in read:
            result = product_key(self.value.block.extents(self.value.block.spatial))
            if Level.SCORE not in read and space == result:
                return Level.RESULT
            return self._other_space(block)
        if Level.SCORE in read:
            return Level.SCORE if space == scores else self._other_space(block)
        if Level.ROW in read:
            rows = assumed_product(block.extents(block.spatial)) * self.value.k
            if rows == assumed_product(self.score.block.extents(self.score.block.spatial)):
                return Level.ROW
            return Level.SCORE if space == scores else self._other_space(block)
        return Level.MASK

    def _other_space(self, block: Block) -> Refusal:
        return self.group.refuse(
            RefusalCode.SPACE_MISMATCH,
            f"{block.name} runs neither over scores, nor over rows, nor over results",
        )

    def _check(self, levels: dict[int, Level], tensors: dict[int, Level]) -> Refusal | None:
        """A softmax needs an exponential and a sum; scores themselves stay in the kernel."""
        group = self.group
        between = [b for b in group.blocks if levels[id(b)] in (Level.SCORE, Level.ROW)]
        exponentials = sum(n for b in between for name, n in b.functions if name in EXPONENTIALS)
        if not exponentials or not any(
            b.reduction is Reduction.SUM and not b.is_contraction for b in between
        ):
            return group.refuse(RefusalCode.REDUCTION, "no softmax between the two matrix products")
        for t in group.outputs:
            if tensors.get(t) not in (Level.RESULT, Level.ROW):
                name = group.graph.tensors[t].name
                return group.refuse(
                    RefusalCode.SPACE_MISMATCH,
                    f"{name} is read by others as well, and an attention kernel keeps it to itself",
                    f"model: drop what else reads {name} (`need_weights=False`)",
                )
        return None


def _upstream(group: GroupView, tensors: Iterable[int]) -> set[int]:
    """These tensors and what they are computed from within the group."""
    found = set(tensors)
    for block in reversed(group.blocks):
        if any(w.tensor in found for w in block.writes):
            found |= {a.tensor for a in block.reads}
    return found


def stored_tensor(group: GroupView, tensor: int) -> int:
    """The input that an operand is moved from."""
    while (block := group.writer_of.get(tensor)) is not None:
        tensor = block.reads[0].tensor
    return tensor


def stored_along(group: GroupView, access: Access) -> frozenset[int]:
    """The axes of a product's block along which neighbours of an operand lie in memory."""
    tensor, axes = access.tensor, [index.axes for index in access.index]
    while (block := group.writer_of.get(tensor)) is not None:
        (write,), (read,) = block.writes, block.reads
        own = {i: axes[d] for d, index in enumerate(write.index) for i in index.axes}
        axes = [
            frozenset().union(*(own.get(i, frozenset()) for i in index.axes))
            for index in read.index
        ]
        tensor = read.tensor
    return axes[-1] if axes else frozenset()
