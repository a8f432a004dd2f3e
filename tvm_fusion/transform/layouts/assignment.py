"""The orders of all tensors of a graph at once: a 0-1 program over the ways of its operators.

    minimise    sum of moved(w) z(w)  +  sum of (2 bytes(t) + launch) c(t, order)
    such that   sum of z(w) = 1                           over the ways w of each operator
                c(t, o) >= z(reader in o) - z(writer in o)     for each reader of tensor t

z are the ways that are taken, c the changes of order behind a tensor, which its readers share. Two
orders that differ in axes of one element alone are the same. Constants change at compile time, for
nothing.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass, field

import numpy as np
import tvm_ffi
from tvm import relax, tirx

from ...errors import PlanError
from .orders import Order, moved, plain
from .ways import Way

UNKNOWN_EXTENT = 64
"""Stands for a symbolic extent."""

LAUNCH_BYTES = 1 << 20
"""What is moved in the time that a launch takes beside its work, some 0.3 us at 3 to 4 TB/s: of
changes that move as much in all, the fewest are made."""

PREFERENCE = 1e-4
"""What any other order of results than channels last costs, as a share of changing it: between
orders for which as much is moved, changes stand at the borders. What is made of constants alone
stays as it is."""

Tensor = Hashable


@dataclass(slots=True, eq=False)
class Operator:
    """One operator.

    Attributes
    ----------
    reads : list of Tensor or None
        None for what changes its order for nothing.
    writes : list of Tensor
    ways : list of Way
    chosen : int
        The number of the way that is taken.
    """

    reads: list[Tensor | None]
    writes: list[Tensor]
    ways: list[Way]
    chosen: int = 0

    @property
    def way(self) -> Way:
        """The way that is taken."""
        return self.ways[self.chosen]


@dataclass(slots=True, eq=False)
class Assignment:
    """The operators of a function.

    Attributes
    ----------
    operators : list of Operator
    types : dict of Tensor to relax.TensorType
        Of each tensor in the order of the model.
    wanted : set of Tensor
        What something reads in the order of the model, beside the operators.
    """

    operators: list[Operator] = field(default_factory=list)
    types: dict[Tensor, relax.TensorType] = field(default_factory=dict)
    wanted: set[Tensor] = field(default_factory=set)

    def solve(self) -> None:
        """Chooses the cheapest ways."""
        _Program(self).solve()

    def order_of(self, tensor: Tensor, order: Order) -> Order:
        """What orders have in common that are the same in memory."""
        return moved(list(self.types[tensor].shape), order)

    def bytes_of(self, tensor: Tensor) -> float:
        """The size of a tensor; a guess for symbolic extents."""
        type_ = self.types[tensor]
        extents = [int(e) if isinstance(e, tirx.IntImm) else UNKNOWN_EXTENT for e in type_.shape]
        return math.prod(extents) * tvm_ffi.dtype(str(type_.dtype)).bits / 8

    def cost_of_change(self, tensor: Tensor) -> float:
        """What it takes to change the order of a tensor, in launches."""
        return 2 * self.bytes_of(tensor) / LAUNCH_BYTES + 1


class _Program:
    """Variables: the ways of operators that have several, and changes of order.

    `rows` are sums of variables and a constant that are at least 0.
    """

    def __init__(self, assignment: Assignment) -> None:
        self.assignment = assignment
        self.costs: list[float] = []
        self.whole: list[bool] = []
        self.rows: list[tuple[dict[int, float], float]] = []
        self.ways: dict[int, list[int]] = {}
        for number, operator in enumerate(assignment.operators):
            if len(operator.ways) > 1:
                costs = [self._cost(operator, way) for way in operator.ways]
                self.ways[number] = [self._variable(cost) for cost in costs]

    def solve(self) -> None:
        """Sets `chosen` of all operators."""
        if not self.ways:
            return
        self._changes()
        solution = self._solution()
        for number, variables in self.ways.items():
            shares = [solution[v] for v in variables]
            self.assignment.operators[number].chosen = int(np.argmax(shares))

    def _variable(self, cost: float, whole: bool = True) -> int:
        self.costs.append(cost)
        self.whole.append(whole)
        return len(self.costs) - 1

    def _cost(self, operator: Operator, way: Way) -> float:
        if any(tensor is not None for tensor in operator.reads):
            share = way.moved + (0.0 if way.is_last else PREFERENCE)
        else:
            share = 0.0 if way.is_plain else PREFERENCE
        return share * max(map(self.assignment.cost_of_change, operator.writes))

    def _changes(self) -> None:
        """A variable for each order in which a tensor is wanted, and what it is at least."""
        made = {
            tensor: (number, place)
            for number, operator in enumerate(self.assignment.operators)
            for place, tensor in enumerate(operator.writes)
        }
        changes: dict[tuple, int] = {}
        for tensor, order, terms, constant in self._demands():
            number, place = made.get(tensor, (None, 0))
            supply = self._of(number, tensor, lambda way, place=place: way.outputs[place])
            has = supply.get(order, ({}, 0.0))
            if has == (terms, constant) or has[1] == 1.0:
                continue
            if (tensor, order) not in changes:
                cost = self.assignment.cost_of_change(tensor)
                changes[tensor, order] = self._variable(cost, whole=False)
            row = dict.fromkeys([changes[tensor, order]], 1.0)
            for variable, factor in terms.items():
                row[variable] = row.get(variable, 0.0) - factor
            for variable, factor in has[0].items():
                row[variable] = row.get(variable, 0.0) + factor
            self.rows.append((row, has[1] - constant))

    def _demands(self) -> Iterator[tuple[Tensor, Order, dict[int, float], float]]:
        """Each tensor that is read in an order, in which of the ways, or always (1)."""
        for tensor in self.assignment.wanted:
            rank = len(self.assignment.types[tensor].shape)
            yield tensor, self.assignment.order_of(tensor, plain(rank)), {}, 1.0
        for number, operator in enumerate(self.assignment.operators):
            for place, tensor in enumerate(operator.reads):
                if tensor is None:
                    continue
                found = self._of(number, tensor, lambda way, place=place: way.inputs[place])
                for order, (terms, constant) in found.items():
                    yield tensor, order, terms, constant

    def _of(
        self, number: int | None, tensor: Tensor, order_in: Callable[[Way], Order]
    ) -> dict[Order, tuple[dict[int, float], float]]:
        """By order of a tensor, the variables of those ways of an operator that have it in it."""
        same = self.assignment.order_of
        if number is None:
            rank = len(self.assignment.types[tensor].shape)
            return {same(tensor, plain(rank)): ({}, 1.0)}
        ways = self.assignment.operators[number].ways
        if number not in self.ways:
            return {same(tensor, order_in(ways[0])): ({}, 1.0)}
        found: dict[Order, tuple[dict[int, float], float]] = {}
        for way, variable in zip(ways, self.ways[number], strict=True):
            found.setdefault(same(tensor, order_in(way)), ({}, 0.0))[0][variable] = 1.0
        if len(found) == 1:
            return dict.fromkeys(found, ({}, 1.0))
        return found

    def _solution(self) -> np.ndarray:
        from scipy import optimize
        from scipy.sparse import coo_array

        rows = [*self.rows]
        low = [-constant for _, constant in rows]
        high = [np.inf] * len(rows)
        for variables in self.ways.values():
            rows.append((dict.fromkeys(variables, 1.0), 0.0))
            low.append(1.0)
            high.append(1.0)
        entries = [(i, v, f) for i, (row, _) in enumerate(rows) for v, f in row.items()]
        where, which, factors = zip(*entries, strict=True)
        matrix = coo_array((factors, (where, which)), shape=(len(rows), len(self.costs))).tocsr()
        found = optimize.milp(
            self.costs,
            constraints=optimize.LinearConstraint(matrix, low, high),
            bounds=optimize.Bounds(0.0, 1.0),
            integrality=np.array(self.whole, int),
            options={"mip_rel_gap": 0.0},
        )
        if not found.success:
            raise PlanError(f"no assignment of layouts: {found.message}; leave the rewrite out")
        return found.x
