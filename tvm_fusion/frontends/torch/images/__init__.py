"""Operators of images [N, C, ..., H, W]: pooling, other sizes, places between elements."""

from . import interpolation, nearest, pooling, samples

CONVERTERS = {**pooling.CONVERTERS, **nearest.CONVERTERS, **interpolation.CONVERTERS}
DECOMPOSITIONS = {
    **nearest.DECOMPOSITIONS,
    **interpolation.DECOMPOSITIONS,
    **samples.DECOMPOSITIONS,
}
KEPT_WHOLE = (*nearest.REPEATED, *interpolation.DECOMPOSITIONS)
"""Which their decompositions leave whole where a converter reads them."""
