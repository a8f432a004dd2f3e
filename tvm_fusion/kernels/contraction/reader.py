"""Reads a fused PrimFunc as a contraction: matrix products with pointwise work before and after.

    T[i, j] = sum_k x[i, k] * w[j, k]          segment batch () M (i0) N (i1)
    y[i, j] = relu(T[i, j] + b[j])        ->     acc0 = sum over (k0) of x[i0, k0] * w[i1, k0]
                                                 y[i0, i1] = max(acc0 + b[i1], 0)

The parts live in `model` (the values), `segments` (which products and
outputs belong together) and `inline` (expressions).
"""

from __future__ import annotations

from tvm import tirx

from ..program.definitions import read_definitions, read_params
from ..program.program import Extent
from .model import (
    Axis,
    Contraction,
    Operand,
    Output,
    Partners,
    Product,
    Segment,
    equal_sizes,
    size_of,
)
from .segments import find_segments

__all__ = [
    "Axis",
    "Contraction",
    "Extent",
    "Operand",
    "Output",
    "Partners",
    "Product",
    "Segment",
    "analyze_contraction",
    "equal_sizes",
    "size_of",
]


def analyze_contraction(func: tirx.PrimFunc, exact: bool = False) -> Contraction:
    """Read a fused PrimFunc as matrix products with pointwise work before and after.

    Parameters
    ----------
    func : tirx.PrimFunc
        s_tir blocks over buffers that are parameters or local, as FuseTIR leaves them.
    exact : bool
        Keep every rounding of the unfused graph: what it stores as half is rounded and widened
        again.

    Returns
    -------
    contraction : Contraction
        Segments in the order of their products. An operand may be any expression: a convolution, a
        gather or a cast in front of a product are contractions too. The columns (N) of a segment
        are the axes along which its first output is contiguous, where the operands allow it.

    Raises
    ------
    Unsupported
        For another reduction than a sum of products or one of runs of a product's columns, a
        product of a product, an output without a product, and an epilogue that reads the
        accumulator at other points than it writes (a shift, a broadcast), but for pairs of columns
        at one distance within aligned runs (see `Partners`).
    """
    definitions = read_definitions(func)
    params = read_params(func)
    segments = find_segments(definitions, params, exact)
    name = func.attrs.get("global_symbol") if func.attrs is not None else None
    return Contraction(None if name is None else str(name), params, tuple(segments), exact)
