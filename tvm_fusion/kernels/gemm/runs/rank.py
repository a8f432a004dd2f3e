"""Configurations of the kernel for runs, the fastest by its model first."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

from tvm import tirx

from ....config import HardwareProfile, Policy
from ....errors import Unsupported
from ...contraction.model import Contraction
from ...forms import Ranked
from .kernel import emit_runs
from .problem import Runs, read_product
from .shape import RunsConfig, Shape
from .time import runs_seconds

BLOCKS = (64, 128, 256)
WARP_ROWS, WARP_COLUMNS = (16, 32, 64), (16, 32, 64)
MOST_FILTERS = 128
"""Of a block."""
COLUMNS = (8, 16, 32, 64, 128, 256)
MOST_WARPS = 8
KEPT = 48


def product_ranked(
    contraction: Contraction, hw: HardwareProfile, policy: Policy | None = None
) -> Ranked:
    """As `rank_runs`, of a plain product.

    Raises
    ------
    Unsupported
        As `read_product`; a device without cp.async, or no tile fits.
    """
    return rank_runs(read_product(contraction), hw)


def emit_product(
    contraction: Contraction, hw: HardwareProfile, config: RunsConfig
) -> tirx.PrimFunc:
    """Write a plain product of few terms as one TIRx kernel on mma.sync; see `emit_runs`."""
    return emit_runs(read_product(contraction), hw, config)


def rank_runs(problem: Runs, hw: HardwareProfile) -> Ranked:
    """Predicted seconds and configurations that can be written, best first.

    Raises
    ------
    Unsupported
        A device without cp.async, or no tile fits.
    """
    if not (hw.architecture.has_cp_async and hw.architecture.has_mma):
        raise Unsupported(f"{hw.arch} has no cp.async")
    found = []
    for config in _candidates(problem):
        shape = Shape(problem, config)
        try:
            shape.check(hw)
        except Unsupported:
            continue
        found.append((runs_seconds(shape, hw), config))
    if not found:
        raise Unsupported("no tile fits")
    return sorted(found, key=lambda entry: entry[0])[:KEPT]


def _candidates(problem: Runs) -> Iterator[RunsConfig]:
    filters = int(problem.segment.N)
    widest = min(MOST_FILTERS, max(16, 1 << (filters - 1).bit_length()))
    sizes = [n for n in (16, 32, 64, 128) if n <= widest]
    positions = problem.windows[problem.inner].size
    for block_m, block_n, warp_m, warp_n, columns in itertools.product(
        BLOCKS, sizes, WARP_ROWS, WARP_COLUMNS, COLUMNS
    ):
        warps = block_m // warp_m * (block_n // warp_n)
        if warp_n > block_n or warp_m > block_m or not 2 <= warps <= MOST_WARPS:
            continue
        if columns > block_m or (columns < block_m and problem.below is None):
            continue
        if problem.below is not None and columns > 8 and columns >= 2 * positions:
            continue
        yield RunsConfig(block_m, block_n, warp_m, warp_n, columns)
