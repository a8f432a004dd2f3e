"""A product of few terms as its kernel sees it: each row's terms are runs of the data.

    y[n, p, q, f] = sum over r, s, c of x[n, 2 p + r - 3, 2 q + s - 3, c] * w[f, r, s, c]

      windows    n;  2 p + r - 3;  2 q + s - 3          rows are their positions
      lines      rows of a filter: taps r of all windows but the inner one, and channels that are no
                 neighbours in memory
      run        the terms of a line, neighbours in memory: taps s and channels c, 21 for 7 and 3

A plain product has one window, whose positions are its rows, and one line, whose run is a row of A.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from tvm.ir import Var

from ....errors import Unsupported
from ...contraction.model import Axis, Contraction, Operand, Product, Segment
from ...gpu.access import affine_access
from ...program.expr import HALF_DTYPES, bytes_of, dtype_of
from ...program.extents import equal_sizes, is_multiple
from ...program.program import Extent
from ..epilogue import take_loads
from ..mma.problem import COPY_BYTES, MmaSegment

MOST_TERMS = 512
"""Of a row, with what fills up its lines: a thread's code has all of them."""

MOST_COLUMNS = 512
"""Of a plain product: all of its rows are read again for each tile of columns."""

MOST_CLOSE_COLUMNS = 2048
"""The same where rows are no whole pieces of 16 bytes: other forms shift these in registers."""

OCTET = 8
"""Terms of a line that lie side by side in the fragments of mma.sync."""


@dataclass(frozen=True, slots=True, eq=False)
class RunWindow:
    """A dimension of the data that rows slide over.

    Position `i` meets tap `t` at element ``stride * i + dilation * t - before``; outside of
    ``low ... high - 1`` there are zeros.

    Attributes
    ----------
    size : Extent
        Positions, over the axes of `positions`.
    pitch : Extent
        Distance of neighbouring elements in memory.
    tap : Axis or None
        None where there is one tap.
    """

    size: Extent
    positions: tuple[Axis, ...]
    pitch: Extent
    tap: Axis | None = None
    stride: int = 1
    dilation: int = 1
    before: int = 0
    low: int = 0
    high: Extent = 1

    @property
    def taps(self) -> int:
        """Number of taps."""
        return 1 if self.tap is None else int(self.tap.extent)

    @property
    def reach(self) -> int:
        """Elements between the nearest and the farthest tap."""
        return abs(self.dilation) * (self.taps - 1)

    @property
    def start(self) -> int:
        """The nearest element of position 0."""
        return min(0, self.dilation * (self.taps - 1)) - self.before


@dataclass(frozen=True, slots=True, eq=False)
class Runs:
    """A product whose rows are runs of the data.

    Attributes
    ----------
    segment : MmaSegment
        Rows are positions, columns filters; no loops.
    accumulator : Var
        Stands for the sums in the segment's expressions.
    data, weights : Operand
        Both plain loads of one half dtype.
    base : int
        Element of the data's parameter where all coordinates are 0.
    inner : int
        The number of the window along which taps are neighbours in memory.
    below : int or None
        That of the one along which a block's tile has several rows of positions.
    channels : tuple of Axis
        What is summed up beside taps.
    inside : bool
        Whether channels are neighbours, too, nearer than taps.
    plane : Extent
        Distance of channels in memory.
    weight_base, weight_step : int
        Where the weights of filter 0 start, and how far those of the next one are behind them, in
        elements, where a filter's are neighbours in memory and vectors of 16 bytes can be copied;
        a step of 0 where weights come in one by one.
    """

    contraction: Contraction
    segment: MmaSegment
    accumulator: Var
    data: Operand
    weights: Operand
    base: int
    windows: tuple[RunWindow, ...]
    inner: int
    below: int | None
    channels: tuple[Axis, ...]
    inside: bool
    plane: Extent
    weight_base: int = 0
    weight_step: int = 0

    @property
    def dtype(self) -> str:
        """Of data and weights."""
        return dtype_of(self.data.load)

    @property
    def others(self) -> tuple[int, ...]:
        """The numbers of the windows but the inner one."""
        return tuple(i for i in range(len(self.windows)) if i != self.inner)

    @property
    def unit(self) -> int:
        """Terms of a tap."""
        return self._channels if self.inside else 1

    @property
    def planes(self) -> int:
        """Channels that are lines of their own."""
        return 1 if self.inside else self._channels

    @property
    def _channels(self) -> int:
        return math.prod(int(axis.extent) for axis in self.channels)

    @property
    def step(self) -> int:
        """Elements between the runs of neighbouring positions."""
        window = self.windows[self.inner]
        return window.pitch * (1 if equal_sizes(window.size, 1) else window.stride)

    @property
    def run(self) -> int:
        """Terms of a line."""
        return self.unit * self.windows[self.inner].taps

    @property
    def lines(self) -> int:
        """Lines of a row."""
        return self.planes * math.prod(self.windows[i].taps for i in self.others)

    @property
    def first(self) -> int:
        """Where the run of position 0 starts, in elements behind the first one of a line."""
        return -self.windows[self.inner].before * self.windows[self.inner].pitch

    @property
    def ends(self) -> tuple[int, Extent]:
        """Where a line's data starts and ends, likewise."""
        window = self.windows[self.inner]
        last = (window.high - 1) * window.pitch + self.unit
        return window.low * window.pitch, last

    @property
    def piece(self) -> int:
        """Elements of a copy to shared memory; 1 where cp.async cannot take what there is."""
        if self.is_plain:
            return OCTET
        strides = [self.windows[i].pitch for i in self.others]
        strides += [self.plane] if self.planes > 1 else []
        for size in COPY_BYTES:
            elements = size // bytes_of(self.dtype)
            if all(is_multiple(n, elements) for n in (self.base, *strides, *self.ends)):
                return elements
        return 1

    @property
    def is_plain(self) -> bool:
        """Whether rows are those of a matrix: tiles of them, all behind each other in memory, start
        at 16 bytes, and there is but the last piece of which a part is data.
        """
        (window, *others), alone = self.windows, self.planes == 1
        starts = window.tap is None and window.low == window.before == self.base % OCTET == 0
        return not others and alone and starts and isinstance(self.ends[1], int)

    @property
    def weights_apart(self) -> bool:
        """Whether filters are made of whole copies of 16 bytes."""
        return self.weight_step > 0 and self.weight_step % OCTET == self.run % OCTET == 0

    @property
    def apart(self) -> bool:
        """Whether runs do not lie over each other and are made of whole copies of 16 bytes."""
        whole = all(n % OCTET == 0 for n in (self.run, self.step, self.first))
        return whole and self.step >= self.run and self.piece == OCTET

    def check(self) -> None:
        """Raises `Unsupported` where there are too many terms."""
        if self.lines * -(-self.run // OCTET) * OCTET > MOST_TERMS:
            raise Unsupported(f"{self.lines} lines of {self.run} terms")


def halves_of(data: Operand, weights: Operand, sums: str) -> None:
    """Raises `Unsupported` unless operands are plain ones of one half dtype."""
    loads = data.load, weights.load
    dtypes = {"computed" if load is None else dtype_of(load) for load in loads}
    if len(dtypes) != 1 or not dtypes <= set(HALF_DTYPES):
        raise Unsupported(f"operands of {', '.join(sorted(dtypes))}")
    if sums != "float32":
        raise Unsupported(f"sums of {sums}")


def read_product(contraction: Contraction) -> Runs:
    """A plain product as one of runs.

    Raises
    ------
    Unsupported
        Several products, batches, pairs of columns or partial results, symbolic sizes, many terms
        or columns, other dtypes than float16 and bfloat16, and rows that neither are whole pieces
        of 16 bytes nor lie close together.
    """
    c = contraction
    sizes = [n for p in c.params for n in p.shape or ()]
    is_static = c.is_static and all(isinstance(n, int) for n in sizes)
    if len(c.products) != 1 or c.has_partials or c.has_partners or not is_static:
        raise Unsupported("not one plain product of known sizes")
    (segment,), (product,) = c.segments, c.products
    if segment.B != 1 or product.a.windows or product.b.windows:
        raise Unsupported("a batch of products, or data at windows")
    halves_of(product.a, product.b, product.dtype)
    if product.K > MOST_TERMS or segment.N > MOST_CLOSE_COLUMNS:
        raise Unsupported(f"{product.K} terms of {segment.N} columns")
    load = product.a.load
    shape = next(p.shape for p in c.params if p.var.same_as(load.source))
    access = affine_access(load.indices, shape, {"m": segment.m, "k": product.k})
    if access is None or any(len(access.digits[g]) > 1 for g in "mk") or not access.contiguous("k"):
        raise Unsupported("rows that are no runs at one distance")
    pitch = access.inner("m").stride if segment.M > 1 else product.K
    window = RunWindow(segment.M, tuple(segment.m), pitch, high=segment.M)
    groups = {"batch": (), "m": segment.m, "n": segment.n}
    parts = take_loads(c, segment, groups)
    found = Runs(
        c,
        MmaSegment(segment, (), *parts),
        product.accumulator,
        product.a,
        product.b,
        access.base,
        (window,),
        0,
        None,
        tuple(product.k),
        True,
        1,
        *_weights(c, product, segment),
    )
    if found.apart and segment.N > MOST_COLUMNS:
        raise Unsupported(f"{product.K} terms of {segment.N} columns")
    is_close = found.is_plain and product.K <= pitch < 2 * product.K
    if not found.apart and not is_close:
        raise Unsupported("rows that neither are whole pieces of 16 bytes nor lie close together")
    return found


def _weights(contraction: Contraction, product: Product, segment: Segment) -> tuple[int, int]:
    """Where the weights of the first filter start, and of the next one; 0 and 0 where they are
    no runs at one distance that can be copied.
    """
    load = product.b.load
    shape = next(p.shape for p in contraction.params if p.var.same_as(load.source))
    access = affine_access(load.indices, shape, {"n": segment.n, "k": product.k})
    if access is None or any(len(access.digits[g]) > 1 for g in "nk") or not access.contiguous("k"):
        return 0, 0
    step = access.inner("n").stride if segment.N > 1 else product.K
    apart = step % OCTET == product.K % OCTET == 0
    close = step >= product.K and (apart or step < 2 * product.K)
    copied = access.base % OCTET == 0 and close
    return (access.base, step) if copied else (0, 0)
