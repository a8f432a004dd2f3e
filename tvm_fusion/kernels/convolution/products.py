"""A convolution as the matrix product that the forms of a GEMM write.

    T[n, p, q, f] = sum_{r, s, c} pad(x)[n, 2 p + r, 2 q + s, c] * w[f, r, s, c]

      rows (n, p, q)   columns f   terms (r, s, c)   batch: the group

Rows and columns change places where positions lie side by side in the results. A transposed
convolution is a product for each phase of its steps, of the taps that meet an element there:

    T[2 i + phase, f] = sum_{j, c} x[i + j + shift of the phase, c] * w[first tap + 2 j, c, f]

Phases of one size and number of taps are an axis of the batch, others segments of one launch.
Positions that are pooled are taken window by window, so that those of one are rows side by side:

    T[n, p, q, i, j, f]    of the position (2 p + i, 2 q + j)

Data that is put together of parts along its channels is as many products with one sum:

    T[n, p, q, f] = sum_{r, s, c} pad(x)[..., c] * w[f, r, s, c]
                  + sum_{r, s, c} pad(y)[..., c] * w[f, r, s, 64 + c]
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache

from tvm import tirx
from tvm.ir import Expr, Var

from ...errors import Unsupported
from ..contraction.model import (
    INDEX,
    Axis,
    ColumnPartial,
    Contraction,
    Operand,
    Segment,
    Simplifier,
    fresh_var,
)
from ..contraction.windows import Window, Windows
from ..gpu.access import window_access
from ..program.expr import constant, number, variables
from ..program.extents import divided_up, is_multiple, simplified
from ..program.program import Extent
from .boxes import run_of
from .geometry import Convolution, Put
from .patches import in_patches
from .sources import Source

# Segments of one launch, each with code of its own; steps beyond meet zeros between elements.
MAX_PHASES = 8


@lru_cache(maxsize=16)  # for several forms
def as_products(convolution: Convolution) -> Contraction:
    """The convolution as a contraction: a segment, or several for one that is transposed.

    The operand that reads the data is told as `Windows`, unless it is read at the positions
    themselves, without padding.
    """
    convolution = in_patches(convolution)
    windows, env, apart, count = list(convolution.windows), {}, [], 1
    if (run := _pooled(convolution)) is not None:
        pooled = [_by_window(*each, env) for each in zip(windows, run, strict=True)]
        sources = tuple(_counted_as(source, pooled) for source in convolution.sources)
        convolution = replace(convolution, sources=sources)
        return replace(convolution.contraction, segments=(_segment(convolution, pooled, env),))
    for i, window in enumerate(windows):
        phases = window.phases
        if _is_even(window):
            windows[i] = _phases(window, env)
        elif phases > 1 and count * phases <= MAX_PHASES:
            apart.append((i, phases))
            count *= phases
    segments = []
    for starts in itertools.product(*(range(phases) for _, phases in apart)):
        own, own_env = list(windows), dict(env)
        for (i, _), start in zip(apart, starts, strict=True):
            own[i] = _phase(windows[i], start, own_env)
        segments.append(_segment(convolution, own, own_env))
    return replace(convolution.contraction, segments=tuple(segments))


def _pooled(convolution: Convolution) -> tuple[int, ...] | None:
    """How many positions along each window are pooled together; None where none are, or some of
    them are stored.

    Raises
    ------
    Unsupported
        Results of phases, positions that are stored and lie behind the last whole window.
    """
    outputs = convolution.segment.outputs
    pooled = [o for o in outputs if isinstance(o.partial, ColumnPartial) and o.partial.whole]
    if not pooled:
        return None
    run = run_of(convolution, pooled)
    if any(window.expansion > 1 for window in convolution.windows):
        raise Unsupported("reductions of results that are computed in phases")
    pairs = zip(convolution.windows, run, strict=True)
    if len(pooled) < len(outputs) and not all(w.is_multiple_of(n) for w, n in pairs):
        raise Unsupported("results that are stored and lie in no window that is pooled")
    return run


def _by_window(window: Window, height: int, env: dict[Var, Expr]) -> Window:
    """The window whose positions are counted by those that are pooled together; what its axis is
    then is added to `env`.
    """
    if height == 1:
        return window
    axis = _axis("pooled", simplified(window.size // height))
    inner = Axis(fresh_var("inner", INDEX), height)
    first = axis.var * constant(height, INDEX) if axis else constant(0, INDEX)
    env[window.axis.var] = first + inner.var
    return replace(window, axis=axis, inner=inner)


def _counted_as(source: Source, windows: Sequence[Window]) -> Source:
    """A part of the data whose positions are counted as those of the whole."""
    pairs = zip(source.windows, windows, strict=True)
    found = (replace(own, axis=whole.axis, inner=whole.inner) for own, whole in pairs)
    return replace(source, windows=tuple(found))


def _is_even(window: Window) -> bool:
    """Whether all phases have the same number of positions and of taps."""
    steps = window.expansion
    neighbours = window.stride == 1 and abs(window.dilation) == 1
    return steps > 1 and neighbours and is_multiple(window.size, steps) and window.taps % steps == 0


def _phases(window: Window, env: dict[Var, Expr]) -> Window:
    """The window with its phases as an axis of the batch; what its axes are then is added to
    `env`.
    """
    steps = window.expansion
    phase = Axis(fresh_var("phase", INDEX), steps)
    axis, tap = _every(window.axis, "step", steps), _every(window.tap, "tap", steps)
    size = constant(steps, INDEX)
    env[window.axis.var] = phase.var + (axis.var * size if axis else constant(0, INDEX))
    # The first tap of a phase: phase + dilation * tap - before is a multiple of the steps.
    before = constant(window.before, INDEX)
    apart = before - phase.var if window.dilation == 1 else phase.var - before
    first = tirx.FloorMod(apart, size)
    env[window.tap.var] = first + (tap.var * size if tap else constant(0, INDEX))
    offset = (steps - 1 if window.dilation == 1 else 0) - window.before
    low, high = window.low, window.high
    return Window(window.dim, axis, tap, 1, window.dilation, 0, 1, low, high, phase, offset)


def _every(axis: Axis, name: str, steps: int) -> Axis | None:
    return _axis(name, simplified(axis.extent // steps))


def _axis(name: str, size: Extent) -> Axis | None:
    """A new axis; None where it has one point."""
    return None if isinstance(size, int) and size <= 1 else Axis(fresh_var(name, INDEX), size)


def _phase(window: Window, start: int, env: dict[Var, Expr]) -> Window:
    """The window of the positions from `start` on, as far apart as it is expanded; what its axes
    are there is added to `env`.
    """
    axis = _axis("step", divided_up(window.size - start, window.expansion))
    env[window.axis.var] = constant(start, INDEX) + (
        axis.var * constant(window.expansion, INDEX) if axis else constant(0, INDEX)
    )
    found = window.phase_taps(start)
    first, at = found[0] if found else (0, 0)
    step, dilation = (found[1][0] - first, found[1][1] - at) if len(found) > 1 else (1, 1)
    tap = Axis(fresh_var("tap", INDEX), len(found)) if len(found) > 1 else None
    if window.tap is not None:
        env[window.tap.var] = constant(first, INDEX) + (
            tap.var * constant(step, INDEX) if tap else constant(0, INDEX)
        )
    # Where no tap meets an element there are zeros only.
    high = window.high if found else window.low
    return Window(window.dim, axis, tap, window.stride, dilation, -at, 1, window.low, high)


def _segment(convolution: Convolution, windows: list[Window], env: dict[Var, Expr]) -> Segment:
    group, filters, channels = convolution.group, convolution.filters, convolution.channels
    positions = tuple(w.axis for w in windows if w.axis is not None)
    positions += tuple(w.inner for w in windows if w.inner is not None)
    taps = tuple(w.tap for w in windows if w.tap is not None)
    phases = tuple(w.phase for w in windows if w.phase is not None)
    own = [a for a in (group, *phases, filters, channels, *positions, *taps) if a is not None]
    moved = Put(env, Simplifier(own)).segment(convolution.segment)
    columns = (filters,) if filters is not None else ()
    inner = next((i for i in reversed(moved.outputs[0].indices) if number(i) is None), None)
    by_filter = filters is not None and inner is not None and filters.var in variables(inner)
    by_filter |= any(isinstance(o.partial, ColumnPartial) for o in moved.outputs)
    products = []
    for read, first in _reads(convolution, windows):
        axes = own if read.channels in (None, channels) else [*own, read.channels]
        if read.channels is not channels:
            env = env | {channels.var: read.channels.var + constant(first, INDEX)}
        weights = Put(env, Simplifier(axes)).operand(convolution.weights)
        simplify = Put({a.var: a.var for a in axes}, Simplifier(axes))
        plain = all(w.taps == 1 and not w.has_zeros for w in read.dims)
        data = Operand(simplify(read.value), (), None if plain else read)
        a, b = (data, weights) if by_filter else (weights, data)
        k = _terms(read, weights, taps)
        products.append(replace(convolution.product, a=a, b=b, k=k))
    m, n = (positions, columns) if by_filter else (columns, positions)
    batch = (group, *phases) if group is not None else phases
    return replace(moved, batch=batch, m=m, n=n, products=tuple(products))


def _reads(convolution: Convolution, windows: Sequence[Window]) -> list[tuple[Windows, int]]:
    """How the data is read: as one tensor, or each part of it with the first of its channels."""
    channel_dim = convolution.channel_dim
    if convolution.sources and all(w.expansion == 1 for w in convolution.windows):
        return [
            (Windows(s.windows, channel_dim, None, s.channels, s.data, s.coordinates), s.first)
            for s in convolution.sources
        ]
    whole = Windows(
        tuple(windows),
        channel_dim,
        convolution.group,
        convolution.channels,
        convolution.data,
        convolution.coordinates,
    )
    return [(whole, 0)]


def _terms(read: Windows, weights: Operand, taps: tuple[Axis, ...]) -> tuple[Axis, ...]:
    """The axes of the sum: channels last where they are neighbours in the data, which then comes
    in by vectors; else as the weights have them.
    """
    if read.channels is None:
        return taps
    access = window_access(read)
    if access is not None and access.aligned(2, read):
        return (*taps, read.channels)
    owner = {a.var: a for a in (*taps, read.channels)}
    found = [owner[v] for i in weights.load.indices for v in variables(i) if v in owner]
    return tuple(dict.fromkeys(found))
