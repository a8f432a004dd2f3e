"""What the direct kernel knows of a convolution: which window is which, in plain numbers.

A thread's positions are a strip of neighbours along one window (the columns), and walk down another
one (the rows). All other windows are outer ones: a thread has one position of them, and sums over
their taps.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import tvm_ffi
from tvm.ir import Expr, TensorLoad, Var
from tvm.sym import Analyzer

from ....errors import Unsupported
from ...contraction.model import Axis
from ...contraction.reader import Operand
from ...program.expr import HALF_DTYPES, bytes_of, dtype_of, known_factor, number, same, variables
from ...program.extents import equal_sizes, simplified
from ...program.program import Extent
from ..geometry import Convolution, Window
from ..typical import IMAGES, with_sizes

DTYPES = (*HALF_DTYPES, "float32")


@dataclass(frozen=True, slots=True)
class Slide:
    """A window as plain numbers, its taps in the order of the elements that they meet.

    Position ``phases * p + phase`` meets tap `t` at element
    ``step * phase - before + unit * (stride * p + pitch * t)``. With phases, dilated taps are
    neighbours: `pitch` is 1.

    Attributes
    ----------
    size : int
        Positions.
    step : int
        Elements between positions.
    low, high : int
        Elements outside of ``low ... high - 1`` are zeros.
    turned : bool
        Whether the filter's last tap is the first one here.
    is_symbolic : bool
        Whether there is any number of positions, each of which reads the element of its number;
        `size` is what tiles are ranked for.
    is_open : bool
        Whether `size` and `high` are not known where positions slide; they are what tiles are
        ranked for, see `Direct.size` and `Direct.high`.
    """

    size: int
    taps: int
    step: int
    before: int
    low: int
    high: int
    phases: int
    unit: int
    stride: int
    pitch: int
    turned: bool = False
    is_symbolic: bool = False
    is_open: bool = False

    @classmethod
    def of(cls, window: Window, typical: Window, in_phases: bool) -> Slide:
        """The numbers of a window, those of a `typical` one in the place of what is not known.

        Raises
        ------
        Unsupported
            A window that steps over parts of elements.
        """
        if window.expansion != 1:
            raise Unsupported("a transposed convolution with a stride")
        if window.is_symbolic and window.reads_all:
            return cls(IMAGES, 1, 1, 0, 0, IMAGES, 1, 1, 1, 1, is_symbolic=True)
        dilation = abs(window.dilation) if window.taps > 1 else 1
        turned = window.taps > 1 and window.dilation < 0
        before = window.before + (dilation * (window.taps - 1) if turned else 0)
        common = math.gcd(window.stride, dilation)
        phases, unit, stride, pitch = 1, 1, window.stride, dilation
        if in_phases:
            phases, unit, stride, pitch = dilation // common, dilation, window.stride // common, 1
        bounds = typical.low, typical.high
        return cls(
            typical.size,
            window.taps,
            window.stride,
            before,
            *bounds,
            phases,
            unit,
            stride,
            pitch,
            turned,
            is_open=window.is_symbolic,
        )

    @property
    def positions(self) -> int:
        """Positions of a phase, of the first one, which has the most."""
        return -(-self.size // self.phases)

    @property
    def alive(self) -> int:
        """Positions whose sums an element goes to, if taps are neighbours."""
        return -(-self.taps // self.stride)

    @property
    def dilation(self) -> int:
        """Elements between taps."""
        return self.unit * self.pitch


POINT = Slide(1, 1, 1, 0, 0, 1, 1, 1, 1, 1)
"""A window of one position and one tap, where there is no other one."""


@dataclass(frozen=True, slots=True)
class Numbers:
    """A convolution of few channels a group as plain numbers.

    Attributes
    ----------
    groups, channels, filters : int
        Groups, and channels and filters of each.
    windows : tuple of Slide
        In the order of the data's dimensions.
    width : int
        Elements that data may be read at once: its channels lie side by side, or its innermost
        window's elements, and this is what rows of them are a multiple of.
    along_channels : bool
        Whether neighbouring channels are neighbours in memory.
    bytes : int
        Of an element of the data.
    beside : int
        Bytes that are read for each result behind its sum.
    is_turned : bool
        Whether neighbouring channels are neighbours in the data and not in the results.
    """

    groups: int
    channels: int
    filters: int
    windows: tuple[Slide, ...]
    width: int
    along_channels: bool
    bytes: int
    beside: int = 0
    is_turned: bool = False

    @property
    def is_depthwise(self) -> bool:
        """Whether a filter has one channel."""
        return self.channels == 1

    def window(self, number: int | None) -> Slide:
        """The window of a number; None is for none."""
        return POINT if number is None else self.windows[number]

    @property
    def columns(self) -> int | None:
        """The window of neighbouring positions: the innermost one that has several, else the
        innermost one. Where it has many taps, whose code would be long, it is an outer one.
        """
        found = [i for i, w in enumerate(self.windows) if w.size > 1]
        last = found[-1] if found and self.along_channels else len(self.windows) - 1
        window = self.windows[last]
        return last if window.taps <= MOST_TAPS and not window.is_symbolic else None

    def rows(self, rolls: bool) -> int | None:
        """The window that threads walk down: if rows roll, the next one with taps; else the longest
        one without, so that weights serve many positions.
        """
        others = [i for i in range(len(self.windows)) if i != self.columns]
        tapped = [i for i in others if self.windows[i].taps > 1]
        if rolls and tapped:
            return tapped[-1]
        plain = [i for i in others if self.windows[i].taps == 1 and self.windows[i].size > 1]
        plain = [i for i in plain if not self.windows[i].is_symbolic]
        return max(plain, key=lambda i: self.windows[i].size, default=None)


@dataclass(frozen=True, slots=True, eq=False)
class Direct:
    """A convolution, and its numbers.

    Attributes
    ----------
    load : TensorLoad or None
        The data where it is nothing but a tensor.
    """

    convolution: Convolution
    numbers: Numbers
    load: TensorLoad | None

    @property
    def filter_axes(self) -> tuple[Axis, ...]:
        """The axes of all filters, the outer one first."""
        return tuple(a for a in (self.convolution.group, self.convolution.filters) if a is not None)

    def filter(self, number: Expr) -> dict[Var, Expr]:
        """Group and filter, of a filter of all groups."""
        c, size = self.convolution, self.numbers.filters
        found = {}
        if c.filters is not None:
            found[c.filters.var] = number % size
        if c.group is not None:
            found[c.group.var] = number // size
        return found

    def size(self, window: int | None) -> Extent:
        """Positions along a window."""
        return POINT.size if window is None else self.convolution.windows[window].size

    def high(self, window: int | None) -> Extent:
        """The first element behind the data along a window."""
        return POINT.high if window is None else self.convolution.windows[window].high

    def axis(self, window: int | None) -> Axis | None:
        """The axis of the results that slides along a window."""
        return None if window is None else self.convolution.windows[window].axis

    def window_axes(self, windows: Sequence[int | None]) -> tuple[Axis, ...]:
        """The axes of some windows."""
        return tuple(a for a in map(self.axis, windows) if a is not None)


MOST_TAPS = 64
"""Of a row of a filter, that a thread's code has side by side."""

MOST_CHANNELS = 32
"""Channels of a group that a thread sums over; more of them are matrix products."""


def direct_problem(convolution: Convolution, typical: Convolution | None = None) -> Direct:
    """What the direct kernel takes; its numbers are those of a `typical` one where sizes are
    symbolic.

    Raises
    ------
    Unsupported
        Many channels a group, other dtypes than float16, bfloat16 and float32, strides of a
        transposed convolution, and data that is put together of parts.
    """
    c = convolution
    if c.channels_of_group > MOST_CHANNELS:
        raise Unsupported(f"sums over {c.channels_of_group} channels are matrix products")
    if c.sources:
        raise Unsupported("data that is put together of parts")
    load = Operand(c.data).load
    whole = next((x for x in _loads(c.data) if _is_whole(x, c)), None)
    if whole is None:
        raise Unsupported("data that is no tensor")
    plain = load is not None and _is_whole(load, c)
    read = dtype_of(load) if plain else dtype_of(c.data)
    weights = c.weights.load
    for dtype in (read, dtype_of(weights)):
        if dtype not in DTYPES:
            raise Unsupported(f"data or weights of {dtype}")
    if c.product.dtype != "float32":
        raise Unsupported(f"sums of {c.product.dtype}")
    shape = [simplified(n) for n in whole.source.ty.shape]
    inner = shape[c.channel_dim + 1 :] if c.channel_dim is not None else [2]
    along_channels = all(equal_sizes(n, 1) for n in inner)
    known = (typical or with_sizes(c)).windows
    windows = tuple(Slide.of(*pair, True) for pair in zip(c.windows, known, strict=True))
    last = c.windows[-1]
    if not along_channels:
        windows = (*windows[:-1], Slide.of(last, known[-1], False))
    if not plain:
        width = 1
    elif along_channels:
        width = shape[c.channel_dim]
    else:
        width = 1
        if last.dim == len(shape) - 1 and not windows[-1].is_symbolic:
            width = _common_factor(shape[-1], last.low, last.high)
    numbers = Numbers(
        c.groups,
        c.channels_of_group,
        c.filters_of_group,
        windows,
        width,
        along_channels,
        bytes_of(read),
        _beside(c),
        along_channels and _has_positions_inside(c),
    )
    return Direct(c, numbers, load if plain else None)


def _common_factor(*sizes: Extent) -> int:
    """What is known to divide all sizes."""
    factors = (abs(n) if isinstance(n, int) else known_factor(n, Analyzer()) for n in sizes)
    return math.gcd(*factors)


def _loads(*values: Expr) -> list[TensorLoad]:
    found: list[TensorLoad] = []
    for value in values:
        tvm_ffi.structural_walk(value, [(TensorLoad, found.append)])
    return found


def _beside(convolution: Convolution) -> int:
    """Bytes of the tensors that an element of the results is computed with, as they lie."""
    segment = convolution.segment
    places = {w.axis.var for w in convolution.windows if w.axis is not None}
    values = [item.value for item in (*segment.bindings, *segment.outputs)]
    read = {x.source: dtype_of(x) for x in _loads(*values) if places & set(variables(*x.indices))}
    return sum(map(bytes_of, read.values()))


def _has_positions_inside(convolution: Convolution) -> bool:
    """Whether neighbours along a window are neighbours in a result."""
    places = {w.axis.var for w in convolution.windows if w.axis is not None}
    return any(
        places & set(variables(*output.indices[-1:])) for output in convolution.segment.outputs
    )


def _is_whole(load: TensorLoad, convolution: Convolution) -> bool:
    """Whether a load is of the element at the data's coordinates, of which some are one number."""
    if len(load.indices) != len(convolution.coordinates):
        return False
    fixed = {w.dim: -w.before for w in convolution.windows if w.axis is None and w.tap is None}
    places = enumerate(zip(load.indices, convolution.coordinates, strict=True))
    return all(
        same(i, at) or (number(i) is not None and number(i) == fixed.get(dim))
        for dim, (i, at) in places
    )
