"""Convolutions of a symbolic number of images, told as those of some: what forms rank.

A kernel is written for any number, its tiles for a few: more of them are as many tiles more.
"""

from __future__ import annotations

from dataclasses import replace

import tvm
from tvm.ir import Expr, Var

from ..contraction.model import Axis
from ..contraction.windows import Window
from ..program.expr import constant, dtype_of, substitute, variables
from ..program.program import Extent
from .geometry import Convolution

IMAGES = 8
"""That tiles of a GPU are ranked for."""


def with_images(convolution: Convolution, images: int = IMAGES) -> Convolution:
    """The convolution with a number in the place of each symbolic size; itself where there is
    none.
    """
    if not convolution.is_symbolic:
        return convolution
    segment, contraction = convolution.segment, convolution.contraction
    axes = {a.var: _known_axis(a, images) for a in segment.space}

    def windows(some: tuple[Window, ...]) -> tuple[Window, ...]:
        return tuple(
            replace(w, axis=axes[w.axis.var], high=int(axes[w.axis.var].extent))
            if w.is_symbolic
            else w
            for w in some
        )

    groups = {n: tuple(axes[a.var] for a in group) for n, group in segment.groups.items()}
    params = tuple(
        p if p.shape is None else replace(p, shape=tuple(_known(n, images) for n in p.shape))
        for p in contraction.params
    )
    segment = replace(segment, **groups)
    return replace(
        convolution,
        contraction=replace(contraction, params=params, segments=(segment,)),
        windows=windows(convolution.windows),
        sources=tuple(replace(s, windows=windows(s.windows)) for s in convolution.sources),
    )


def _known_axis(axis: Axis, images: int) -> Axis:
    return axis if isinstance(axis.extent, int) else Axis(axis.var, _known(axis.extent, images))


def _known(extent: Extent, images: int) -> int:
    if isinstance(extent, int):
        return extent
    sizes: dict[Var, Expr] = {v: constant(images, dtype_of(v)) for v in variables(extent)}
    return max(1, int(tvm.sym.Analyzer().simplify(substitute(extent, sizes))))
