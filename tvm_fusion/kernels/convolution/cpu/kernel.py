"""Writes a convolution as scheduled loops for LLVM, in the form that suits its filters."""

from __future__ import annotations

from tvm import tirx

from ....errors import Unsupported
from ...cpu.machine import Machine
from ...cpu.write import finished
from ..geometry import Convolution, by_channels, merged
from .filter_lanes import FilterLanes
from .position_lanes import PositionLanes
from .tiles import Tiles, fastest_tiles

SUMS = ("float32", "float64")

# Terms of a sum, those of one channel, and multiply-adds in all, below which what stands around the
# sums decides, and the loops of any reduction have less of that.
LEAST_TERMS, LEAST_TAPS, LEAST_WORK = 16, 9, 30_000


def write_convolution(
    func: tirx.PrimFunc, convolution: Convolution, machine: Machine
) -> tirx.PrimFunc:
    """Write a convolution as scheduled loops for LLVM.

    Parameters
    ----------
    func : tirx.PrimFunc
        What the convolution was read from: gives the parameters.
    convolution : Convolution
    machine : Machine

    Returns
    -------
    tirx.PrimFunc
        Same parameters, but for weights that it takes as panels; for the `s_tir` pipeline.

    Raises
    ------
    Unsupported
        For sums of integers, for little work, and where neither filters nor positions fill
        vectors.
    """
    if convolution.product.dtype not in SUMS:
        raise Unsupported(f"sums of {convolution.product.dtype}")
    terms = convolution.channels_of_group * convolution.taps
    least = LEAST_TAPS if convolution.channels is None and convolution.group else LEAST_TERMS
    if terms < least or convolution.multiply_adds < LEAST_WORK:
        raise Unsupported(f"{convolution.multiply_adds} multiply-adds, {terms} a result")
    chosen, tiles = choose(convolution, machine)
    form = FilterLanes if tiles.along_filters else PositionLanes
    writer = form(func, chosen, tiles, machine)
    body, weights = writer.run(), writer.weights
    panels = {weights.source: (weights.buffer, weights.how)} if weights.is_constant else {}
    return finished(func.with_body(body), panels)


def choose(convolution: Convolution, machine: Machine) -> tuple[Convolution, Tiles]:
    """The way to see a convolution that is predicted to be the fastest, and its tiles."""
    convolution = merged(convolution)
    ways = [way for way in (convolution, by_channels(convolution)) if way is not None]
    found, reasons = [], []
    for way in ways:
        try:
            found.append((*fastest_tiles(way, machine), way))
        except Unsupported as why:
            reasons.append(str(why))
    if not found:
        raise Unsupported("; ".join(reasons))
    _, tiles, way = min(found, key=lambda entry: entry[0])
    return way, tiles
