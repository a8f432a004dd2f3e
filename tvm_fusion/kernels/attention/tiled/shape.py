"""The numbers that the time of an attention depends on, from the attention itself."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping

from tvm.ir import Expr, TensorLoad

from ....ir.access import Pipe
from ....ir.reader import children, pipe_of
from ...gpu.access import Digit
from ...gpu.product_frame import assumed
from ...program.expr import bytes_of
from ..read.bounds import key_range, split_match
from ..read.model import Attention
from ..time import AttentionShape
from .points import Formulas
from .tiles import MAX_WALK, TiledAttention, static_tiles

# Tiles by which the share of visible scores is counted.
COUNTED = 16

MATCHING = 0.25
"""The share of the keys that have a query's value: what is read is not known, and stands for
sequences packed of a few documents each."""


def shape_of(problem: TiledAttention, formulas: Formulas, group: int) -> AttentionShape:
    """The numbers of an attention that its time depends on; symbolic sizes are assumed.

    `group` is the number of heads that share keys and values.
    """
    attention = problem.attention
    B, M, N = (assumed(size) for size in (attention.B, attention.M, attention.N))
    values = [b.value for b in formulas.bindings]
    values += [formulas.logit] if formulas.logit is not None else []
    match, keys = split_match(attention, key_range(attention))
    work = _operations([*values, *formulas.conditions])
    mask = 0.0
    for load in formulas.loads:
        size = bytes_of(load.dtype) * (N if load.per_column else 1) * (M if load.per_row else 1)
        mask += size * (B if "batch" in load.groups else 1)
    return AttentionShape(
        batch=B,
        group=group,
        queries=M,
        keys=N,
        terms=problem.terms,
        features=problem.features,
        dtype=problem.dtype,
        visible=visible_share(attention, M, N),
        mask_bytes=mask if any(load.per_column for load in formulas.loads) else 0.0,
        arithmetic=work[Pipe.ARITHMETIC],
        special=work[Pipe.SPECIAL] + work[Pipe.DIVISION],
        by_point=bool(formulas.conditions),
        edges=max(1, sum(bound.slope != 0 for bound in keys.bounds)),
        matching=1.0 if match is None else MATCHING,
    )


def visible_share(attention: Attention, M: int, N: int) -> float:
    """The share of the scores that lie within the bounds of keys; 1 where these are not known."""
    keys = key_range(attention)
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


def sharing(digits: Mapping[str, tuple[Digit, ...]]) -> int:
    """Heads that share keys: digits of the batch that do not move the access to them."""
    found = 1
    for name, own in digits.items():
        if name.startswith("batch"):
            for digit in own:
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
