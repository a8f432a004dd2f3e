"""Which configurations of the Hopper GEMM the kernel has a form for."""

from __future__ import annotations

from ....errors import Unsupported
from ...program.expr import dtype_of
from .config import CHUNK, MULTICASTS, SPLITS, HopperConfig
from .model import BOX, HopperProblem

# Columns of the accumulators that 4 threads hold side by side.
GROUP = 8

# Steps that an epilogue can be spread over; fewer leave no room for it.
DEFERRED_STEPS = 3


def check_config(problem: HopperProblem, config: HopperConfig, out_n: int, steps: int) -> None:
    """Refuses what cannot be planned.

    Parameters
    ----------
    problem, config : the product and the choice for it.
    out_n : columns of a tile's outputs.
    steps : steps of the tiles that have the fewest.

    Raises
    ------
    Unsupported
        With what is in the way.
    """
    _check_cluster(config)
    if not problem.shared and config.split > 1:
        raise Unsupported("segments of their own with split terms")
    if problem.rounds_operands and not config.tf32:
        raise Unsupported("float32 operands, which may not be rounded to tfloat32")
    if steps < config.split:
        raise Unsupported(f"{steps} steps for {config.split} blocks")
    _check_columns(problem, config, out_n)
    _check_runs(problem, out_n // config.split)
    _check_pairs(problem, out_n // config.split)
    if config.staged:
        _check_boxes(problem, config, out_n // config.split)
    if config.deferred and not (config.staged and problem.kept_dtype):
        raise Unsupported("accumulators that the unfused graph does not round")
    if config.deferred and steps < DEFERRED_STEPS:
        raise Unsupported("too few steps to hide an epilogue between")


def _check_cluster(config: HopperConfig) -> None:
    """Raises for clusters that the kernel has no form for."""
    if config.split not in SPLITS:
        raise Unsupported(f"terms split between {config.split} blocks")
    if config.multicast not in MULTICASTS:
        raise Unsupported(f"tiles of B shared by {config.multicast} blocks")
    if config.split > 1 and config.multicast > 1:
        raise Unsupported("clusters that split the terms and share tiles")
    if config.deferred and (config.split > 1 or config.promote):
        raise Unsupported("a deferred epilogue of split terms, or of sums kept twice")


def _check_columns(problem: HopperProblem, config: HopperConfig, out_n: int) -> None:
    """Raises where blocks of a cluster cannot divide the columns of a tile, or those of B."""
    if out_n % (8 * config.split):
        raise Unsupported(f"{out_n} columns shared by {config.split} blocks")
    if problem.segments[0].b[0].k_major:
        whole = out_n % (8 * config.multicast) == 0
    elif out_n % BOX:
        raise Unsupported("columns of B in boxes of 64")
    else:
        whole = config.block_n // BOX % config.multicast == 0
    if not whole:
        raise Unsupported(f"{out_n} columns of B loaded by {config.multicast} blocks")


def _check_boxes(problem: HopperProblem, config: HopperConfig, columns: int) -> None:
    """Raises where the outputs of so many columns cannot leave through the boxes.

    Boxes are taken in turn: a tile fills the ring a whole number of times, or a box would be
    written again while the TMA still reads it.
    """
    if not problem.staged or columns % BOX:
        raise Unsupported("an output that the TMA cannot store")
    boxes, needed = config.boxes, columns // BOX
    if problem.residual is not None and not config.deferred:
        if boxes == needed or (boxes == 2 * needed and config.split == 1):
            return
        raise Unsupported(f"{boxes} boxes for the {needed} of a residual")
    if boxes < 1 or needed % boxes:
        raise Unsupported(f"{boxes} boxes for {needed} in a tile")
    if problem.residual is not None and boxes < 2:
        raise Unsupported(f"{boxes} boxes for a residual")


def _check_runs(problem: HopperProblem, columns: int) -> None:
    """Raises Unsupported where so many columns, a block's share of a tile, are no whole runs."""
    outputs = [o for segment in problem.segments for o in segment.outputs if o.partial is not None]
    for output in outputs:
        width = output.partial.width
        if columns % width or width % CHUNK:
            raise Unsupported(f"runs of {width} columns in a tile of {columns}")
        if dtype_of(output.value) != "float32":
            raise Unsupported(f"a run of {dtype_of(output.value)}")


def _check_pairs(problem: HopperProblem, columns: int) -> None:
    """Raises Unsupported where a thread does not hold both columns of a pair: those of groups of 8
    lie in threads side by side, two neighbours in one.
    """
    for segment in problem.segments:
        if segment.partners is None:
            continue
        width, distance = segment.partners.width, segment.partners.distance
        if width != 2 and (width % GROUP or distance % GROUP):
            raise Unsupported(f"columns {distance} apart in runs of {width}")
        if columns % width:
            raise Unsupported(f"runs of {width} columns in a tile of {columns}")
