"""Writes a convolution as scheduled loops for LLVM, in the form that suits its filters."""

from __future__ import annotations

from tvm import tirx

from ....errors import Unsupported
from ...cpu.machine import Machine
from ...cpu.write import finished
from ..geometry import Convolution
from .direct import write_direct
from .tiles import direct_tiles

SUMS = ("float32", "float64")

# Terms and positions below which transposing results and packing weights take longer than sums.
LEAST_TERMS, LEAST_POSITIONS = 64, 32


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
        For sums of integers, few filters a group, and so few terms that other loops are faster.
    """
    if convolution.product.dtype not in SUMS:
        raise Unsupported(f"sums of {convolution.product.dtype}")
    if convolution.channels_of_group * convolution.taps < LEAST_TERMS:
        raise Unsupported("few terms")
    if convolution.positions < LEAST_POSITIONS:
        raise Unsupported("few positions")
    tiles = direct_tiles(convolution, machine)
    body, weights = write_direct(func, convolution, tiles, machine)
    panels = {weights.source: (weights.buffer, weights.how)} if weights.is_constant else {}
    return finished(func.with_body(body), panels)
