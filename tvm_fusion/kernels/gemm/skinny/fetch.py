"""Loads shared by a block of points, and the copies into registers that they become."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from tvm import tirx
from tvm.ir import Expr, Var
from tvm.script import tirx as T

from ...contraction.model import INDEX, fresh_var
from ...contraction.reader import Axis
from ...gpu.memory import WIDEST, copy_in
from ...gpu.product_frame import Frame
from ...program.expr import bytes_of, constant

Env = Mapping[Var, Expr]

STREAMED = 8
"""Fetches by narrower accesses (scales) are read again by neighbours and stay in the L1."""


@dataclass(frozen=True, slots=True, eq=False)
class Copy:
    """`elements` from parameter[indices] on, into a register array at `slot`."""

    indices: tuple[Expr, ...]
    slot: int
    elements: int
    piece: int


@dataclass(frozen=True, slots=True, eq=False)
class Fetch:
    """What one load of an operand reads for all points of a block.

    Attributes
    ----------
    slots : where each point's element lies in the register array.
    holders : the placeholder that stands for the element of a slot.
    """

    source: Var
    dtype: str
    copies: tuple[Copy, ...]
    slots: tuple[int, ...]
    holders: dict[int, Var]
    elements: int

    @property
    def nbytes(self) -> int:
        """Bytes read for a block."""
        return sum(copy.elements for copy in self.copies) * bytes_of(self.dtype)

    @property
    def piece(self) -> int:
        """Bytes of the narrowest copy."""
        return min(copy.piece for copy in self.copies)


@dataclass(frozen=True, slots=True, eq=False)
class Blocks:
    """A group of axes in runs of `size` points: ``last = (unit * lanes + lane) * size + i``.

    `axes` are the group's with the unit in place of the last one.
    """

    axes: tuple[Axis, ...]
    last: Var | None
    unit: Var | None
    lane: Var | None
    lanes: int
    size: int

    @classmethod
    def of(cls, axes: Sequence[Axis], size: int, lanes: int = 1) -> Blocks:
        """The last extent has to be a multiple of ``size * lanes``."""
        if not axes or size * lanes == 1:
            return cls(tuple(axes), None, None, None, 1, 1)
        *outer, last = axes
        unit = fresh_var("unit", INDEX)
        lane = fresh_var("lane", INDEX) if lanes > 1 else None
        units = Axis(unit, last.extent // (size * lanes))
        return cls((*outer, units), last.var, unit, lane, lanes, size)

    def at(self, i: int) -> dict[Var, Expr]:
        """The replaced axis at point `i` of a run."""
        if self.last is None:
            return {}
        start = self.unit if self.lane is None else self.unit * self.lanes + self.lane
        return {self.last: start * self.size + constant(i, INDEX)}

    def ranges(self) -> list[Axis]:
        """Everything that varies, with its extent."""
        lane = [] if self.lane is None else [Axis(self.lane, self.lanes)]
        return [*self.axes, *lane]


def runs_of(deltas: Sequence[int]) -> list[tuple[int, int]]:
    """Starts and lengths of runs of consecutive numbers."""
    runs: list[tuple[int, int]] = []
    for delta in deltas:
        if runs and delta == sum(runs[-1]):
            runs[-1] = (runs[-1][0], runs[-1][1] + 1)
        else:
            runs.append((delta, 1))
    return runs


def widest_piece(factor: int, length: int, dtype: str) -> int:
    """Bytes of the widest access that the start and length of a run allow."""
    size = bytes_of(dtype)
    piece = WIDEST
    while piece > size and (factor * size % piece or length * size % piece):
        piece //= 2
    return piece if dtype != "bool" else size


def emit_fetch(fetch: Fetch, frame: Frame, env: Env, hint: str) -> Expr:
    """Emits the copies of a fetch; the register array."""
    buffer, size = frame.buffers[fetch.source], bytes_of(fetch.dtype)
    array = T.alloc_local((fetch.elements,), fetch.dtype)
    hint = hint if fetch.piece >= STREAMED else "nc"
    for copy in fetch.copies:
        place = frame.place(copy.indices, env)
        if copy.piece == size:
            for i in range(copy.elements):
                at = [*place[:-1], place[-1] + i] if i else place
                T.buffer_store(array, tirx.BufferLoad(buffer, at), [copy.slot + i])
            continue

        def source(offset: int, start: Sequence[Expr] = place) -> Expr:
            return buffer.ptr_to([*start[:-1], start[-1] + offset // size])

        def target(offset: int, slot: int = copy.slot) -> Expr:
            return array.ptr_to([slot + offset // size])

        copy_in(target, source, copy.elements * size, copy.piece, hint)
    return array
