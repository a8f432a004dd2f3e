"""Data that is put together of parts along its channels: each is read where it lies.

    concat(x, y)[n, u, v, c]      x[n, u // 2, v // 2, c] for c < 64, y[n, u, v, c - 64] for others

      sources    channels 0 to 63 of x, which is enlarged;  channels 64 to 127 of y

A part has windows and bounds of its own: it may be enlarged or padded where another one is not.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import reduce

import tvm_ffi
from tvm import tirx
from tvm.ir import Call, Expr, TensorLoad, Var

from ...errors import Unsupported
from ..contraction.model import INDEX, Axis
from ..contraction.windows import Window, Windows
from ..program.expr import (
    conjunction,
    constant,
    dtype_of,
    is_if_then_else,
    number,
    rebuild,
    substitute,
)
from ..program.extents import equal_sizes, larger, simplified, sized
from ..program.program import Extent
from .ranges import LinearOf, lower_bound


@dataclass(frozen=True, slots=True, eq=False)
class Source:
    """A part of a convolution's data: its channels from `first` on.

    Attributes
    ----------
    first : int
    channels : Axis
        Its own, from 0 on.
    windows : tuple of Window
        Of the positions and taps that all parts share.
    data : Expr
        An element of it, over `coordinates`, which stand for its own dimensions.
    coordinates : tuple of Var
    placed : Expr
        An element of it over the coordinates of the whole.
    """

    first: int
    channels: Axis
    windows: tuple[Window, ...]
    data: Expr
    coordinates: tuple[Var, ...]
    placed: Expr

    @property
    def end(self) -> int:
        """The first channel of the next part."""
        return self.first + int(self.channels.extent)


def cuts_of(
    value: Expr, linear: LinearOf, reduced: Mapping[Var, Axis]
) -> tuple[Axis, tuple[int, ...]] | None:
    """The axis of a sum along which data is put together, and where parts but the first begin; None
    where there is no such axis.
    """
    found: dict[Var, set[int]] = {}

    def look(expr: Call) -> None:
        if not is_if_then_else(expr):
            return
        test, *branches = expr.args
        bound = None if any(is_zero(b) for b in branches) else lower_bound(test, linear)
        if bound is None or len(bound[0]) != 1 or not isinstance(bound[1], int):
            return
        ((var, factor),), least = bound[0].items(), bound[1]
        if var in reduced and abs(factor) == 1:
            found.setdefault(var, set()).add(-least if factor == 1 else least + 1)

    tvm_ffi.structural_walk(value, [(Call, look)])
    if len(found) != 1:
        return None
    ((var, ends),) = found.items()
    inside = sorted(n for n in ends if 0 < n < int(reduced[var].extent))
    return (reduced[var], tuple(inside)) if inside else None


def is_zero(expr: Expr) -> bool:
    """Whether an expression is a zero, of whatever type it becomes."""
    while isinstance(expr, tirx.Cast):
        expr = expr.value
    return number(expr) == 0


def decided(expr: Expr) -> Expr:
    """An expression without conditionals whose condition is known."""
    if is_if_then_else(expr) and (known := number(expr.args[0])) is not None:
        return decided(expr.args[1 if known else 2])
    return rebuild(expr, decided) if not isinstance(expr, TensorLoad) else expr


def put_together(channels: Axis, parts: Sequence[Windows]) -> tuple[Windows, tuple[Source, ...]]:
    """The whole of parts, one behind the other along `channels`, and the parts within it.

    Raises
    ------
    Unsupported
        Parts that are not read by the same windows.
    """
    first = parts[0]
    if any(part.channels is None or part.group is not None for part in parts):
        raise Unsupported("parts of data along more than its channels")
    if any(_reads(part) != _reads(first) for part in parts):
        raise Unsupported("parts of data that are read at other windows")
    windows, sources, start = list(first.dims), [], 0
    for i, window in enumerate(windows):
        bounds = [_bounds(window, part.dims[i]) for part in parts]
        low, high = min(low for low, _ in bounds), reduce(larger, (high for _, high in bounds))
        windows[i] = replace(window, repeats=1, low=low, high=high)
    for part in parts:
        placed = _placed(windows, first, part, start)
        source = Source(start, part.channels, part.dims, part.data, part.coordinates, placed)
        sources.append(source)
        start = source.end
    at = first.coordinates[first.channel_dim]
    *others, (_, data) = [(source.end, source.placed) for source in sources]
    for end, placed in reversed(others):
        data = tirx.if_then_else(at < constant(end, INDEX), placed, data)
    whole = replace(first, dims=tuple(windows), channels=channels, data=data)
    return whole, tuple(sources)


def _reads(part: Windows) -> tuple:
    """What parts have in common; where zeros begin and what is repeated is their own."""
    steps = [
        # Where zeros lie between elements, zeros around them are told in other units.
        (w.dim, w.axis, w.tap, w.stride, w.dilation, w.expansion, w.expansion > 1 and w.before)
        for w in part.dims
    ]
    return part.channel_dim, len(part.coordinates), dtype_of(part.data), steps


def _bounds(window: Window, own: Window) -> tuple[int, Extent]:
    """Where a part has elements, in the coordinate of the whole."""
    shift = own.before - window.before
    return own.low + shift, simplified(own.high + shift)


def _placed(windows: Sequence[Window], whole: Windows, part: Windows, start: int) -> Expr:
    at = {whole.channel_dim: -start}
    inside = []
    for window, own in zip(windows, part.dims, strict=True):
        place = whole.coordinates[window.dim]
        at[window.dim] = window.before - own.before
        low, high = _bounds(window, own)
        inside += [place >= constant(low, INDEX)] if low > window.low else []
        inside += [place < sized(high)] if not equal_sizes(high, window.high) else []
    names = zip(part.coordinates, whole.coordinates, strict=True)
    env = {
        own: place + constant(at[d], INDEX) if at[d] else place
        for d, (own, place) in enumerate(names)
    }
    found, condition = substitute(part.data, env), conjunction(*inside)
    if condition is None:
        return found
    return tirx.if_then_else(condition, found, constant(0, dtype_of(found)))
