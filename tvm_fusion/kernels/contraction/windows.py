"""Operands that are read at windows: which element each row and term meets, and where zeros are.

    x[n, 2 p + r - 1, 2 q + s - 1, c]      rows (n, p, q), terms (r, s, c)
      windows    n;  2 p + r - 1;  2 q + s - 1          channels c

An operand of a convolution: its rows are positions, its terms the taps of a filter and channels.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from tvm import tirx
from tvm.ir import Expr, Var

from ..program.expr import conjunction, constant, dtype_of, substitute
from ..program.extents import equal_sizes, is_below, is_multiple, sized
from ..program.program import Extent
from .axis import INDEX, Axis


@dataclass(frozen=True, slots=True, eq=False)
class Window:
    """A dimension of the data that an axis of the results slides over.

    The element ``(stride * axis + dilation * tap - before) / expansion`` is read where that is
    whole and from `low` on and below `high`; elsewhere there is a zero. A negative `dilation` is a
    filter that is turned around.

    Attributes
    ----------
    dim : int
        The dimension of the data.
    axis : Axis or None
        Of the results; None where they have one position only.
    tap : Axis or None
        Of the filter; None where it has one tap only.
    phase, offset : Axis or None, int
        An axis of the batch whose extent is the number of phases of a transposed convolution:
        ``(phase + offset) // extent`` comes to the element.
    high : Extent
        Symbolic where the size of the data is.
    inner : Axis or None
        Positions are counted in windows that are pooled: ``axis * extent + inner``, with the extent
        of `inner`.
    repeats : int
        Neighbours of one value, the first ones at a multiple of `repeats`: elements are those of
        data that is enlarged, of which only every `repeats`-th is one in memory.
    """

    dim: int
    axis: Axis | None
    tap: Axis | None
    stride: int
    dilation: int
    before: int
    expansion: int
    low: int
    high: Extent
    phase: Axis | None = None
    offset: int = 0
    repeats: int = 1
    inner: Axis | None = None

    @property
    def size(self) -> Extent:
        """Positions of the results."""
        axes = [axis for axis in (self.axis, self.inner) if axis is not None]
        return math.prod(axis.extent for axis in axes)

    @property
    def is_symbolic(self) -> bool:
        """Whether the number of positions is not known."""
        return not isinstance(self.size, int)

    def blocks(self, positions: int) -> Extent:
        """Blocks of so many positions."""
        return (self.size + positions - 1) // positions

    def is_multiple_of(self, positions: int) -> bool:
        """Whether all blocks of so many positions are whole."""
        return is_multiple(self.size, positions)

    @property
    def phases(self) -> int:
        """Positions that differ in which taps meet an element."""
        return self.expansion if self.is_symbolic else min(self.expansion, self.size)

    @property
    def taps(self) -> int:
        """Taps of the filter."""
        return 1 if self.tap is None else int(self.tap.extent)

    @property
    def reads_all(self) -> bool:
        """Whether positions are elements: one for each, none of them padding."""
        steps = (self.taps, self.stride, self.expansion, self.before, self.low)
        return steps == (1, 1, 1, 0, 0) and equal_sizes(self.high, self.size)

    @property
    def has_zeros(self) -> bool:
        """Whether some position and tap meet no element."""
        if self.phase is None and self.reads_all:
            return False
        reach = self.dilation * (self.taps - 1)
        first = min(0, reach) - self.before
        last = self.stride * (self.size - 1) + max(0, reach) - self.before
        if self.phase is not None:
            first += self.offset // self.phase.extent
            last += (self.phase.extent - 1 + self.offset) // self.phase.extent
        return self.expansion > 1 or first < self.low or not is_below(last, self.high)

    def phase_taps(self, phase: int) -> list[tuple[int, int]]:
        """The taps that positions ``phase + expansion * i`` of the results meet an element at, and
        at which element, less ``stride * i``.
        """
        found = []
        for tap in range(self.taps):
            at = self.stride * phase + self.dilation * tap - self.before
            if at % self.expansion == 0:
                found.append((tap, at // self.expansion))
        return found

    def repeated_at(self, phase: int) -> tuple[int, int]:
        """Of positions ``phase + repeats * i``: tap t meets the element in memory
        ``stride * i + first + (offset + dilation * t) // repeats``, as (first, offset), 0 <= offset
        < repeats.
        """
        return divmod(self.stride * phase - self.before, self.repeats)

    @property
    def start(self) -> Expr:
        """The element that is read at the first tap, times the expansion."""
        found = constant(-self.before, INDEX)
        size = 1 if self.inner is None else int(self.inner.extent)
        for axis, step in ((self.axis, size), (self.inner, 1)):
            if axis is not None:
                found = found + axis.var * constant(self.stride * step, INDEX)
        if self.phase is not None:
            shifted = self.phase.var + constant(self.offset, INDEX)
            found = found + tirx.FloorDiv(shifted, constant(self.phase.extent, INDEX))
        return found

    @property
    def place(self) -> Expr:
        """The element that is read, times the expansion."""
        if self.tap is None:
            return self.start
        return self.start + self.tap.var * constant(self.dilation, INDEX)


@dataclass(frozen=True, slots=True, eq=False)
class Windows:
    """What an operand reads at windows, zeros around it.

    Attributes
    ----------
    dims : tuple of Window
        Of all dimensions of the data but that of the channels.
    channel_dim : int or None
    group, channels : Axis or None
        The dimension of the channels is read at ``group * (number of channels) + channel``.
    data : Expr
        An element of the data over `coordinates`.
    coordinates : tuple of Var
        Stand for the dimensions of the data.
    """

    dims: tuple[Window, ...]
    channel_dim: int | None
    group: Axis | None
    channels: Axis | None
    data: Expr
    coordinates: tuple[Var, ...]

    @property
    def channel(self) -> Expr | None:
        """Where the dimension of the channels is read."""
        if self.channel_dim is None:
            return None
        found = constant(0, INDEX)
        if self.channels is not None:
            found = found + self.channels.var
        if self.group is not None:
            size = 1 if self.channels is None else self.channels.extent
            found = found + self.group.var * constant(size, INDEX)
        return found

    def places(self) -> tuple[dict[Var, Expr], Expr | None]:
        """What the coordinates of the data are at the operand's axes, and the condition that there
        is an element; None where there is one everywhere.
        """
        places, conditions = {}, []
        for window in self.dims:
            at = window.place
            if window.expansion > 1:
                size = constant(window.expansion, INDEX)
                conditions.append(tirx.FloorMod(at, size).equal(0))
                at = tirx.FloorDiv(at, size)
            places[self.coordinates[window.dim]] = at
            if window.has_zeros:
                conditions += [at >= constant(window.low, INDEX), at < sized(window.high)]
        if self.channel_dim is not None:
            places[self.coordinates[self.channel_dim]] = self.channel
        return places, conjunction(*conditions)

    @property
    def value(self) -> Expr:
        """What the operand is at its axes."""
        places, condition = self.places()
        found = substitute(self.data, places)
        if condition is None:
            return found
        return tirx.if_then_else(condition, found, constant(0, dtype_of(found)))
