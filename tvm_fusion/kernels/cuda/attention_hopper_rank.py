"""The order of the configurations of the Hopper attention, by the model of `attention_time`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from tvm.ir import Expr, TensorLoad

from ...config import HardwareProfile
from ...errors import Unsupported
from ...ir.access import Pipe
from ...ir.reader import children, pipe_of
from ..attention_time import AttentionShape, AttentionTile, hopper_time
from ..expr import bytes_of
from .attention_hopper_config import AttentionConfig, candidates
from .attention_hopper_loads import registers_of_score
from .attention_hopper_points import Formulas, read_formulas
from .attention_hopper_problem import HopperAttention
from .attention_hopper_range import key_range, static_tiles
from .attention_hopper_state import MAX_WALK, make_plan
from .gemm_frame import assumed

# Tiles by which the share of visible scores is counted.
COUNTED = 16


def rank_configs(
    problem: HopperAttention, hw: HardwareProfile
) -> list[tuple[float, AttentionConfig]]:
    """Seconds and configurations that can be planned, the fastest first."""
    attention = problem.attention
    keys = key_range(attention)
    formulas = read_formulas(problem, keys.rest)
    shape = shape_of(problem, formulas)
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
    ):
        try:
            make_plan(problem, config, hw)
        except Unsupported:
            continue
        tile = AttentionTile(
            config.block_m, config.block_n, config.polynomial, config.consumers > 1
        )
        found.append((hopper_time(shape, tile, hw).seconds, config))
    return sorted(found, key=lambda entry: entry[0])


def shape_of(problem: HopperAttention, formulas: Formulas) -> AttentionShape:
    """The numbers of an attention that its time depends on; symbolic sizes are assumed."""
    attention = problem.attention
    B, M, N = (assumed(size) for size in (attention.B, attention.M, attention.N))
    values = [b.value for b in formulas.bindings]
    values += [formulas.logit] if formulas.logit is not None else []
    work = _operations([*values, *formulas.conditions])
    mask = 0.0
    for load in formulas.loads:
        size = bytes_of(load.dtype) * (N if load.per_column else 1) * (M if load.per_row else 1)
        mask += size * (B if "batch" in load.groups else 1)
    return AttentionShape(
        batch=B,
        group=_sharing(problem),
        queries=M,
        keys=N,
        terms=problem.terms,
        features=problem.features,
        dtype=problem.dtype,
        visible=visible_share(problem, M, N),
        mask_bytes=mask if any(load.per_column for load in formulas.loads) else 0.0,
        arithmetic=work[Pipe.ARITHMETIC],
        special=work[Pipe.SPECIAL] + work[Pipe.DIVISION],
        by_point=bool(formulas.conditions),
    )


def visible_share(problem: HopperAttention, M: int, N: int) -> float:
    """The share of the scores that lie within the bounds of keys; 1 where these are not known."""
    keys = key_range(problem.attention)
    if not keys.bounds or M > MAX_WALK * COUNTED:
        return 1.0
    steps = 0
    tops = range(0, M, COUNTED)
    for top in tops:
        middle = min(top + COUNTED // 2, M - 1)
        tiles = static_tiles(keys, (middle, middle), N, 1)
        if tiles is None:
            return 1.0
        steps += tiles[3] - tiles[0]
    return steps / (N * len(tops))


def _sharing(problem: HopperAttention) -> int:
    """Heads that share keys and values: digits of the batch that do not move the keys."""
    found = 1
    for name, digits in problem.k.access.digits.items():
        if name.startswith("batch"):
            for digit in digits:
                if isinstance(digit.stride, int) and digit.stride == 0:
                    found *= assumed(digit.extent)
    return found


def _operations(values: Iterable[Expr]) -> Counter[Pipe]:
    """Operations by the unit that computes them; loads are counted elsewhere."""
    counts: Counter[Pipe] = Counter()
    waiting = list(values)
    while waiting:
        value = waiting.pop()
        if (pipe := pipe_of(value)) is not None:
            counts[pipe] += 1
        if not isinstance(value, TensorLoad):
            waiting.extend(children(value))
    return counts
