"""Sets of pointwise operators that need fewer permutations in another order of axes."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass, field

import tvm
import tvm_ffi
from tvm import relax
from tvm.ir import Call
from tvm.relax import Expr, Var

from ..decompose.opening import dtype_of, normalize_axes, shape_of
from .factors import is_call, is_constant, is_one, padded_shape
from .readers import Readers
from .relabeling import Relabeling
from .row_origins import POINTWISE

# Chains of layout operators in a function, and those of them that have a shorter form.

RESHAPES = ("reshape", "expand_dims", "squeeze", "flatten", "nn.batch_flatten")
IN_PLACE = ("call_tir_inplace", "call_inplace_packed")

Cost = tuple[int, int]  # permutations, and layout operators


@dataclass(frozen=True, slots=True, eq=False)
class Source:
    """A tensor that another one is a relabeling of; `turned` if in the new order of its set."""

    base: Expr
    relabeling: Relabeling
    turned: bool = False


@dataclass(frozen=True, slots=True, eq=False)
class Chain:
    """Layout operators from a tensor up; by the first i of `steps` it is made of `sources[i]`."""

    sources: tuple[Source, ...]
    steps: tuple[
        tuple[Var, bool, bool], ...
    ]  # variable, whether it permutes, and is read here only

    def left(self, depth: int) -> Cost:
        """What stays if the tensor is made of `sources[depth]`."""
        stay = [p for i, (_, p, own) in enumerate(self.steps) if i >= depth or not own]
        return sum(stay), len(stay)


class Survey:
    """The layout operators of one function.

    Attributes
    ----------
    readers : Readers
    block : dict of Var to int
        The number of the block that binds a variable.
    written : set of Var
        What a call may write to in place: nothing is made of it at another time, nor by a view.
    """

    def __init__(self, func: relax.Function) -> None:
        self.readers = Readers(func)
        self.block: dict[Var, int] = {}
        self.written: set[Var] = set()
        self._known: dict[Var, Relabeling | None] = {}
        for number, block in enumerate(func.body.blocks):
            for binding in block.bindings:
                self.block[binding.var] = number
                if is_call(getattr(binding, "value", None), *IN_PLACE):
                    self._write(binding.value)

    def _write(self, call: Expr) -> None:
        """Notes what a call may write to: its operands, and what they may be views of."""
        waiting = list(relax.analysis.free_vars(call))
        while waiting:
            var = waiting.pop()
            self.written.add(var)
            if self.relabeling(var) is not None:
                source = self.readers.lookup(var).args[0]
                waiting += [source] if isinstance(source, Var) else []

    def shorter(self) -> dict[Var, Source]:
        """Layout operators, and what to make them of in their place."""
        found = {}
        for var, _ in self.readers.calls():
            if var not in self.written and self.relabeling(var) is not None:
                source = self._shorter(var)
                if source is not None:
                    found[var] = source
        return found

    def _shorter(self, var: Var) -> Source | None:
        chain = self.chain(var, self.block[var])
        best, rank, replaced = None, None, (0, 0)
        for depth, (_, permutes, own) in enumerate(chain.steps, 1):
            if own:
                replaced = total_cost(replaced, (int(permutes), 1))
            source = chain.sources[depth]
            cost = cost_of(source.relabeling)
            gains = cost < replaced or (cost == replaced and cost[1] < depth)
            if gains and cost[1] <= replaced[1] and (rank is None or (cost, -depth) < rank):
                best, rank = source, (cost, -depth)
        return best

    def chain(self, expr: Expr, block: int, readers: Collection[Var] | None = None) -> Chain:
        """The layout operators of a block that make a tensor, upwards. `readers` ask for it; None
        if the tensor itself is to be made in another way.
        """
        shape = shape_of(expr)
        sources = [Source(expr, Relabeling.reshape(shape, shape))] if shape is not None else []
        steps: list[tuple[Var, bool, bool]] = []
        own = True
        while sources and isinstance(var := sources[-1].base, Var):
            step = self.relabeling(var) if self.block.get(var) == block else None
            below, call = sources[-1].relabeling, self.readers.lookup(var)
            total = step and below and (step.then(below) if steps else step)
            source = call.args[0] if total is not None else None
            if source is None or source in self.written or (readers and source in readers):
                break
            if steps or readers is not None:
                alone = {r.var for r in self.readers.of(var)} <= set(readers or ())
                alone |= bool(steps) and len(self.readers.of(var)) == 1
                own = own and alone and self.readers.within(var) is not None
            steps.append((var, is_call(call, "permute_dims"), own))
            sources.append(Source(source, total))
        return Chain(tuple(sources), tuple(steps))

    def relabeling(self, var: Var) -> Relabeling | None:
        """What the layout operator does that a variable is bound to; None for other variables."""
        if var not in self._known:
            self._known[var] = relabeling_of(self.readers.lookup(var))
        return self._known[var]


def relabeling_of(call: Expr | None) -> Relabeling | None:
    """What a layout operator does to the axes of its operand; None for other operators."""
    if not is_call(call, "permute_dims", "astype", "broadcast_to", *RESHAPES):
        return None
    source = call.args[0]
    if not all(isinstance(e.ty, relax.TensorType) for e in (source, call)):
        return None
    old, new = shape_of(source), shape_of(call)
    if old is None or new is None:
        return None
    if is_call(call, "permute_dims"):
        axes = call.attrs.axes
        axes = range(len(old))[::-1] if axes is None else normalize_axes(axes, len(old))
        return Relabeling.permutation(old, axes)
    if is_call(call, *RESHAPES):
        return Relabeling.reshape(old, new)
    copies = is_call(call, "astype") and dtype_of(source) == dtype_of(call)
    if copies or (is_call(call, "broadcast_to") and tvm_ffi.structural_equal(old, new)):
        return Relabeling.reshape(old, new)
    return None


def cost_of(relabeling: Relabeling) -> Cost:
    """Of what makes it."""
    steps = relabeling.steps()
    return sum(name == "permute_dims" for name, _ in steps), len(steps)


def total_cost(*costs: Cost) -> Cost:
    """The sum of costs."""
    return sum(p for p, _ in costs), sum(n for _, n in costs)


def alike(a: Expr, b: Expr) -> bool:
    """Whether two tensors have one shape."""
    return tvm_ffi.structural_equal(shape_of(a), shape_of(b))


ELEMENTWISE = POINTWISE | frozenset(
    f"relax.{name}"
    for names in (
        ("acos", "acosh", "asin", "asinh", "atan", "atan2", "atanh", "cosh", "sinh", "tan"),
        ("bitwise_and", "bitwise_not", "bitwise_or", "bitwise_xor", "left_shift", "right_shift"),
        ("logical_and", "logical_or", "logical_xor"),
        ("equal", "not_equal", "greater", "greater_equal", "less", "less_equal"),
        ("floor_divide", "floor_mod", "mod", "log_add_exp", "trunc", "nn.selu"),
    )
    for name in names
)
MOST_ORDERS = 8  # that are tried for one set

Sink = tuple[Var, list[Var], Relabeling]
"""A member of a set, a chain of layout operators that begins with it, and what they do."""


@dataclass(eq=False)
class Turn:
    """Pointwise operators to be computed in another order of axes.

    Attributes
    ----------
    order : from the old axes to the new ones
    members : the variables they are bound to
    operands : of each variable or constant (by `operand_key`) that they read from outside, where it
        comes from
    sinks : layout operators on results, as made of the turned ones
    kept : members that others read in the old order
    """

    order: Relabeling
    members: tuple[Var, ...]
    operands: dict = field(default_factory=dict)
    sinks: dict[Var, Source] = field(default_factory=dict)
    kept: set[Var] = field(default_factory=set)


def operand_key(expr: Expr) -> object:
    """What tells operands apart: a variable, or a constant by its object."""
    return expr if isinstance(expr, Var) else hash(expr)


class Turns(Survey):
    """A survey that finds sets to turn as well."""

    def turns(self) -> list[Turn]:
        """Sets of pointwise operators to turn, which share no layout operator."""
        found, touched = [], set()
        for members in self._sets():
            turn, around = self._turn(members)
            if turn is not None and touched.isdisjoint(around):
                touched |= around
                found.append(turn)
        return found

    def _sets(self) -> Iterator[tuple[Var, ...]]:
        """Connected pointwise operators of one shape and one block."""
        root: dict[Var, Var] = {}

        def find(var: Var) -> Var:
            while root[var] is not var:
                root[var] = var = root[root[var]]
            return var

        for var, call in self.readers.calls():
            if not is_elementwise(call) or var not in self.block:
                continue
            root[var] = var
            for arg in call.args:
                if arg in root and self.block[arg] == self.block[var] and alike(arg, var):
                    root[find(arg)] = find(var)
        sets: dict[Var, list[Var]] = {}
        for var in root:
            sets.setdefault(find(var), []).append(var)
        return (tuple(members) for members in sets.values())

    def _turn(self, members: tuple[Var, ...]) -> tuple[Turn | None, set[Var]]:
        """The set in the order that leaves least around it, and the layout operators around it."""
        inside, shape = frozenset(members), shape_of(members[0])
        whole: dict[object, Chain] = {}
        narrow: dict[object, Expr] = {}
        for var in members:
            for arg in self.readers.lookup(var).args:
                if not isinstance(getattr(arg, "ty", None), relax.TensorType) or arg in inside:
                    continue
                if not alike(arg, var) or is_constant(arg):
                    narrow[operand_key(arg)] = arg
                elif arg not in whole:
                    whole[arg] = self.chain(arg, self.block[var], inside)
        sinks, kept = self._sinks(members, inside)
        paths = [var for _, path, _ in sinks for var in path]
        around = {*paths, *(step[0] for chain in whole.values() for step in chain.steps)}
        now = total_cost(*(chain.left(0) for chain in whole.values()), *map(self._cost, paths))
        if not now[0] or self.written & {*inside, *whole, *narrow}:
            return None, around
        best, least = None, now
        for order in _orders(whole.values(), sinks):
            turn = Turn(order, members, kept=set(kept))
            cost = _operands(turn, whole, narrow, shape)
            if cost is None:
                continue
            for member, path, relabeling in sinks:
                total = order.inverse().then(relabeling)
                if total is None:
                    turn.kept.add(member)
                    cost = total_cost(cost, *map(self._cost, path))
                    continue
                turn.sinks[path[-1]] = Source(member, total, turned=True)
                cost = total_cost(cost, cost_of(total))
            cost = total_cost(cost, *[cost_of(order.inverse())] * len(turn.kept))
            if cost < least and cost[0] < now[0] and cost[1] <= now[1]:
                best, least = turn, cost
        return best, around

    def _cost(self, var: Var) -> Cost:
        return int(is_call(self.readers.lookup(var), "permute_dims")), 1

    def _sinks(
        self, members: tuple[Var, ...], inside: frozenset[Var]
    ) -> tuple[list[Sink], set[Var]]:
        """Chains of layout operators on members, and the members that something else reads."""
        sinks, kept = [], set()
        for member in members:
            if self.readers.within(member) is None:  # the block's result
                kept.add(member)
            for reader in dict.fromkeys(r.var for r in self.readers.of(member)):
                if reader in inside:
                    continue
                path, total = [], None
                var = reader
                while var is not None and self.block.get(var) == self.block[member]:
                    step = self.relabeling(var)
                    longer = step if total is None else step and total.then(step)
                    if longer is None:
                        break
                    path.append(var)
                    total, readers = longer, self.readers.of(var)
                    single = len(readers) == 1 and self.readers.within(var) is not None
                    var = readers[0].var if single else None
                if path:
                    sinks.append((member, path, total))
                else:
                    kept.add(member)
        return sinks, kept


def is_elementwise(call: Expr) -> bool:
    """Whether a call computes each element of elements at its place; shapes are known."""
    if not isinstance(call, Call) or not isinstance(call.op, tvm.ir.Op):
        return False
    if call.op.name not in ELEMENTWISE or not isinstance(call.ty, relax.TensorType):
        return False
    tensors = [a for a in call.args if isinstance(getattr(a, "ty", None), relax.TensorType)]
    return bool(shape_of(call)) and all(shape_of(t) is not None for t in tensors)


def _orders(chains: Iterable[Chain], sinks: list[Sink]) -> list[Relabeling]:
    """Orders of axes in which some permutation around would vanish."""
    found: dict[tuple, Relabeling] = {}
    before = (s.relabeling.inverse() for c in chains for s in c.sources if s.relabeling)
    for order in (*before, *(relabeling for _, _, relabeling in sinks)):
        if not order.is_view and len(found) < MOST_ORDERS:
            found.setdefault(order.key(), order)
    return list(found.values())


def _operands(turn: Turn, whole: dict, narrow: dict, shape: list) -> Cost | None:
    """Fills in what the operators read in the new order; what that costs, or None where an
    operand cannot be broadcast in it.
    """
    costs = []
    for key, chain in whole.items():
        ways = []
        for depth, source in enumerate(chain.sources):
            total = source.relabeling and source.relabeling.then(turn.order)
            if total is not None:
                cost = total_cost(chain.left(depth), cost_of(total))
                ways.append((cost, -depth, source.base, total))
        if not ways:
            return None
        more, _, base, total = min(ways, key=lambda way: way[:2])
        costs.append(more)
        turn.operands[key] = Source(base, total)
    for key, operand in narrow.items():
        relabeling = _broadcast(turn.order, operand, shape)
        if relabeling is None:
            return None
        turn.operands[key] = Source(operand, relabeling)
        if not is_constant(operand):  # these are relabeled now
            costs.append(cost_of(relabeling))
    return total_cost(*costs)


def _broadcast(order: Relabeling, operand: Expr, shape: list) -> Relabeling | None:
    """What turns an operand that is broadcast; None where an axis of the new order would hold some
    of its atoms and others.
    """
    own = shape_of(operand)
    padded = padded_shape(own, len(shape))
    moving = [axis for axis, e in enumerate(padded) if not is_one(e) and order.source[axis]]
    kept = {atom for axis in moving for atom in order.source[axis]}
    if any(kept & set(group) and set(group) - kept for group in order.target):
        return None
    found = order.only(kept, range(len(shape) - len(own), len(shape)))
    target = list(found.target)
    while target and not target[0] and len(target) > len(own):
        del target[0]  # broadcasting adds it
    return Relabeling(found.atoms, found.source, tuple(target))
