"""The order of the configurations of the Hopper attention, by the model of `attention.time`."""

from __future__ import annotations

from ....config import HardwareProfile
from ....errors import Unsupported
from ..read.bounds import key_range
from ..tiled.loads import registers_of_score
from ..tiled.points import read_formulas
from ..tiled.shape import shape_of, sharing
from ..time import AttentionTile, hopper_time
from .config import AttentionConfig, candidates
from .match import split_match
from .problem import HopperAttention
from .state import make_plan


def rank_configs(
    problem: HopperAttention, hw: HardwareProfile
) -> list[tuple[float, AttentionConfig]]:
    """Seconds and configurations that can be planned, the fastest first."""
    attention = problem.attention
    match, keys = split_match(attention, key_range(attention))
    formulas = read_formulas(problem, keys.rest)
    shape = shape_of(problem, formulas, sharing(problem.k.access.digits))
    found = []
    for config in candidates(
        problem.dtype,
        problem.terms,
        problem.features,
        attention.M if isinstance(attention.M, int) else None,
        attention.N if isinstance(attention.N, int) else None,
        problem.result is not None,
        registers_of_score(formulas.loads),
        hw.smem_per_block_bytes,
        match is not None,
    ):
        try:
            plan = make_plan(problem, config, hw)
        except Unsupported:
            continue
        tile = AttentionTile(
            config.block_m,
            config.block_n,
            overlaps=config.consumers > 1,
            in_place=config.staged and not plan.own_output,
        )
        found.append((hopper_time(shape, tile, hw).seconds, config))
    return sorted(found, key=lambda entry: entry[0])
