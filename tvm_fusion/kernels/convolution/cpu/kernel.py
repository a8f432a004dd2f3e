"""Writes a convolution as scheduled loops for LLVM, in the form that suits its filters."""

from __future__ import annotations

from tvm import tirx

from ....errors import Unsupported
from ...cpu.machine import Machine
from ...cpu.write import finished
from ..geometry import Convolution, by_channels, merged
from ..typical import sliding_sizes, with_sizes
from .filter_lanes import FilterLanes
from .position_lanes import PositionLanes
from .tiles import Tiles, fastest_tiles
from .winograd import Winograd, winograd_tiles
from .writer import Writer

SUMS = ("float32", "float64")

IMAGES = 2
"""That tiles are chosen for where their number is symbolic: the tasks of few images are to be
enough for all cores, and more of them are as many tasks more."""

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
    work = with_sizes(convolution, IMAGES).multiply_adds
    if terms < least or work < LEAST_WORK:
        raise Unsupported(f"{work} multiply-adds, {terms} a result")
    for form, chosen, tiles in ways(convolution, machine):
        try:
            writer = form(func, chosen, tiles, machine)
            body, weights = writer.run(), writer.weights
        except Unsupported as why:
            refusal = why
            continue
        panels = {weights.source: (weights.buffer, weights.how)} if weights.is_constant else {}
        return finished(func.with_body(body), panels)
    raise refusal


def ways(
    convolution: Convolution, machine: Machine
) -> list[tuple[type[Writer], Convolution, Tiles]]:
    """The ways to write a convolution: a form, how it sees the convolution, and its tiles; the one
    that is predicted to be the fastest first.

    Raises
    ------
    Unsupported
        No form takes it.
    """
    convolution = merged(convolution)
    if sliding_sizes(convolution):
        raise Unsupported("windows that slide over data of symbolic size")
    if convolution.windows[-1].is_symbolic:
        raise Unsupported("a symbolic number of neighbouring positions")
    found, reasons = [], []
    for way, search in (
        (convolution, fastest_tiles),
        (by_channels(convolution), fastest_tiles),
        (convolution, winograd_tiles),
    ):
        try:
            if way is not None:
                cycles, tiles = search(with_sizes(way, IMAGES), machine)
                form = FilterLanes if tiles.along_filters else PositionLanes
                form = Winograd if search is winograd_tiles else form
                found.append((cycles, form, way, tiles))
        except Unsupported as why:
            reasons.append(str(why))
    if not found:
        raise Unsupported("; ".join(reasons))
    return [entry[1:] for entry in sorted(found, key=lambda entry: entry[0])]
