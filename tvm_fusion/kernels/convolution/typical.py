"""Convolutions of symbolic sizes, told as those of typical ones: what forms rank.

    images        8, whose elements are read at their own position alone
    positions     33 x 33, 91 x 91 and 257 x 257, or 1,025, 8,193 and 65,537 of a line, along which
                  windows slide

A kernel is written for any sizes, its tiles for a few: larger ones are as many tiles more. Sizes
are odd, since nothing that depends on what divides them may be told by those that are ranked.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from tvm.ir import Var

from ..contraction.model import Axis
from ..contraction.windows import Window
from ..program.expr import variables
from ..program.extents import with_values
from ..program.program import Extent
from .geometry import Convolution

IMAGES = 8
"""That tiles of a GPU are ranked for."""
POSITIONS = (1 << 10, 1 << 13, 1 << 16)
"""Elements of an image, or of a line, that they are ranked for. Deep in a model convolutions
know theirs as a part of those of its input."""
MIDDLE = 1 << 14
"""The same where one size has to do."""


def sliding_sizes(convolution: Convolution) -> tuple[Var, ...]:
    """The variables of the sizes of data that windows slide over, not only step along."""
    found = [w for w in _all_windows(convolution) if not w.reads_all]
    ends = (e for w in found for e in (w.size, w.high) if not isinstance(e, int))
    return tuple(variables(*ends))


def values_of(
    convolution: Convolution, images: int = IMAGES, positions: int = MIDDLE
) -> dict[Var, int]:
    """A number for each variable of a convolution's sizes."""
    sliding = sliding_sizes(convolution)
    each = round(positions ** (1 / max(1, len(sliding)))) | 1
    shapes = (p.shape or () for p in convolution.contraction.params)
    ends = (w.high for w in _all_windows(convolution))
    sizes = [e for e in (*ends, *(n for shape in shapes for n in shape)) if not isinstance(e, int)]
    return {v: each if v in sliding else images for v in variables(*sizes)}


def with_sizes(
    convolution: Convolution, images: int = IMAGES, positions: int = MIDDLE
) -> Convolution:
    """The convolution with numbers in the place of symbolic sizes; itself where there are none."""
    if not convolution.is_symbolic:
        return convolution
    values = values_of(convolution, images, positions)
    segment, contraction = convolution.segment, convolution.contraction
    axes = {a.var: _known_axis(a, values) for a in segment.space}

    def windows(some: tuple[Window, ...]) -> tuple[Window, ...]:
        return tuple(
            replace(
                w,
                axis=None if w.axis is None else axes[w.axis.var],
                high=with_values(w.high, values),
            )
            for w in some
        )

    groups = {n: tuple(axes[a.var] for a in group) for n, group in segment.groups.items()}
    params = tuple(
        p if p.shape is None else replace(p, shape=tuple(with_values(n, values) for n in p.shape))
        for p in contraction.params
    )
    segment = replace(segment, **groups)
    return replace(
        convolution,
        contraction=replace(contraction, params=params, segments=(segment,)),
        windows=windows(convolution.windows),
        sources=tuple(replace(s, windows=windows(s.windows)) for s in convolution.sources),
    )


def several(convolution: Convolution) -> list[Convolution]:
    """The convolution with each of the sizes that its tiles are ranked for."""
    if not convolution.is_symbolic:
        return [convolution]
    sizes = POSITIONS if sliding_sizes(convolution) else (MIDDLE,)
    return [with_sizes(convolution, positions=n) for n in sizes]


def numbers_of(
    convolution: Convolution, extents: Sequence[Extent], images: Sequence[int]
) -> list[list[int]]:
    """Symbolic sizes as numbers, for so many images and each of the sizes of these."""
    if all(isinstance(e, int) for e in extents):
        return [list(extents)]
    positions = POSITIONS if sliding_sizes(convolution) else (MIDDLE,)
    every = [values_of(convolution, n, size) for size in positions for n in images]
    return [[with_values(e, values) for e in extents] for values in every]


def _all_windows(convolution: Convolution) -> list[Window]:
    return [*convolution.windows, *(w for s in convolution.sources for w in s.windows)]


def _known_axis(axis: Axis, values: dict[Var, int]) -> Axis:
    return (
        axis if isinstance(axis.extent, int) else Axis(axis.var, with_values(axis.extent, values))
    )
