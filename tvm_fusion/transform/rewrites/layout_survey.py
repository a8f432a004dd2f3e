"""Chains of layout operators in a function, and those of them that have a shorter form."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

import tvm_ffi
from tvm import relax
from tvm.relax import Expr, Var

from ..decompose.opening import dtype_of, normalize_axes, shape_of
from .factors import is_call
from .readers import Readers
from .relabeling import Relabeling

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
