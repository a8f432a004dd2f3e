"""Kernel class `attention`: softmax(scale * Q K^T + mask) V in one launch, no scores in memory.

Both products and everything pointwise or reduced along the keys between them; Q, K and V read, and
the result written, in whatever layout the neighbours use; masks computed in the kernel; the
logarithm of the sum of weights as another result. Softmax is computed online (Milakov and
Gimelshein, Online normalizer calculation for softmax, 2018; Dao et al., FlashAttention, 2022).
"""

from __future__ import annotations

from collections.abc import Iterator

from ...config import HardwareProfile, Policy
from ...cost.traffic import Resources, Traffic
from ...ir.access import Pipe
from ...ir.graph import FusionGraph
from ...plan.group_view import GroupView, dtype_bytes
from ...plan.refusal import Refusal, RefusalCode
from ..base import MULTIPLIES_TWICE, Family, Fit, Needs
from ..forms import Writer
from ..group.footprint import evaluations, footprint_bytes, points, refuse_recompute
from ..group.traffic import memory_traffic
from ..program.expr import HALF_DTYPES
from .roles import (
    AttentionRoles,
    Level,
    attention_cores,
    match_attention,
    stored_along,
    stored_tensor,
)
from .time import AttentionShape, AttentionTime, predict

TMA_UNIT = 8  # halves of 16 bytes, in which pitches count
CAUSAL_SHARE = 0.5
"""Of the scores, where whether a key is visible is computed of indices alone: what a triangle
leaves."""
SOFTMAX_ARITHMETIC, SOFTMAX_SPECIAL = 2, 2
"""Operations on each score of a plain one: scaling and shifting, an exponential and a division."""


class AttentionClass(Family):
    """See the module docstring."""

    name = "attention"
    needs = Needs(MULTIPLIES_TWICE)
    slow_to_compile = True

    def cores(self, graph: FusionGraph) -> Iterator[tuple[int, ...]]:
        """Sets of operators that only together are attention (see `plan.search.search`)."""
        return attention_cores(graph)

    def accepts(self, group: GroupView, hw: HardwareProfile, policy: Policy) -> Fit | Refusal:
        roles = match_attention(group)
        if isinstance(roles, Refusal):
            return roles
        if policy.rounding == "exact":
            return group.refuse(
                RefusalCode.EPILOGUE,
                "scores that stay in the kernel are not rounded as the unfused graph rounds them, "
                "which the policy asks for",
                'policy: rounding = "fast"',
            )
        if roles.keys == 1:
            return group.refuse(
                RefusalCode.REDUCTION, "a softmax of one key: its weights are 1, whatever the score"
            )
        if refusal := _check_operands(group, roles, hw):
            return refusal
        kept = (b for b in group.blocks if roles.levels[id(b)] is not Level.MASK)
        runs = evaluations(group, frozenset(w.tensor for b in kept for w in b.writes))
        if refusal := refuse_recompute(group, runs, policy):
            return refusal
        time = _time(group, roles, hw, policy)
        if time is None:
            return group.refuse(
                RefusalCode.WRITER,
                f"no attention kernel of {hw.name} has these sizes",
                f"size: use heads of fewer than {max(roles.score.k, roles.features)} elements",
            )
        sizes = tuple((p.batch, p.m, p.n, p.k) for p in (roles.score, roles.value))
        return Fit(
            self.name,
            roles.batch * roles.queries,
            roles.keys,
            runs.counts,
            sizes,
            seconds=time.seconds,
            terms=tuple(sorted(time.terms.items())),
        )

    def traffic(self, group: GroupView, fit: Fit, hw: HardwareProfile) -> Traffic:
        flops = sum(2.0 * b * m * n * k for b, m, n, k in fit.contractions)
        return memory_traffic(
            group,
            fit,
            hw,
            tensor_flops=flops,
            tensor_dtype=group.graph.tensors[group.inputs[0]].dtype,
            seconds=fit.seconds,
            terms=dict(fit.terms),
        )

    def resources(self, group: GroupView, fit: Fit, hw: HardwareProfile) -> Resources:
        time = _time(group, None, hw, None)
        if time is None or time.resources is None:
            return Resources(hw.max_registers_per_thread, hw.smem_per_block_bytes)
        return time.resources

    def writer(self, hw: HardwareProfile) -> Writer:
        if hw.kind == "llvm":
            from .cpu.forms import WRITER
        else:
            from .forms import WRITER
        return WRITER


def _time(
    group: GroupView, roles: AttentionRoles | None, hw: HardwareProfile, policy: Policy | None
) -> AttentionTime | None:
    """The predicted time of the form that will be written; no form depends on the policy."""

    def predicted() -> AttentionTime | None:
        found = roles or match_attention(group)
        return None if isinstance(found, Refusal) else predict(_shape(group, found), hw, policy)

    return group.once(("attention time", hw.name), predicted)


def _check_operands(group: GroupView, roles: AttentionRoles, hw: HardwareProfile) -> Refusal | None:
    """What the units that multiply can take; a CPU takes all."""
    if hw.kind == "llvm":
        return None
    return _check_dtypes(group, roles) or _check_layouts(group, roles, hw)


def _check_dtypes(group: GroupView, roles: AttentionRoles) -> Refusal | None:
    """Tensor cores multiply halves: what is stored as such, or rounded to it in the end; and
    float32 in parts.
    """
    tensors = group.graph.tensors
    operands = (roles.query, roles.key, roles.content)
    dtypes = {tensors[stored_tensor(group, t)].dtype for t in operands}
    if dtypes == {"float32"}:
        return None
    if len(dtypes) > 1 or not dtypes <= set(HALF_DTYPES):
        return group.refuse(
            RefusalCode.PROLOGUE,
            f"queries, keys and values are stored as {', '.join(sorted(dtypes))}: tensor cores "
            "take one half precision",
            "dtype: store queries, keys and values as float16 or bfloat16 (`model.half()`)",
        )
    weights = {tensors[a.tensor].dtype for a in (roles.value.left, roles.value.right)}
    results = {tensors[t].dtype for t in group.outputs}
    if not weights <= dtypes and not results <= dtypes:
        return group.refuse(
            RefusalCode.EPILOGUE,
            f"weights of {', '.join(sorted(weights - dtypes))} would be rounded for tensor cores, "
            f"for a result of {', '.join(sorted(results - dtypes))}",
            f"dtype: keep the weights in {', '.join(sorted(dtypes))}, as queries and keys are",
        )
    return None


def _check_layouts(group: GroupView, roles: AttentionRoles, hw: HardwareProfile) -> Refusal | None:
    """Kernels load runs of a head, of terms and of features; wgmma also takes operands whose runs
    are of queries or keys, where the TMA can address these.
    """
    for name, tensor in _transposed(group, roles):
        run = group.graph.tensors[tensor].shape[-1]
        if not hw.architecture.has_wgmma or not isinstance(run, int) or run % TMA_UNIT:
            return group.refuse(
                RefusalCode.PROLOGUE,
                f"{name} are stored turned, neighbours in memory are of different rows of a head: "
                f"that takes wgmma and runs of a known multiple of {TMA_UNIT}",
                f"layout: store {name} with the elements of a head side by side "
                "(`x.transpose(-1, -2).contiguous()`)",
            )
    return None


def _transposed(group: GroupView, roles: AttentionRoles) -> list[tuple[str, int]]:
    """Operands that lie along queries or keys: what they are, and where they are stored."""
    score, value = roles.score, roles.value
    content = value.left if value.left.tensor == roles.content else value.right
    features = content.axes - set(value.block.reduced)
    wanted = (
        ("queries", score.left, set(score.block.reduced), frozenset()),
        ("keys", score.right, set(score.block.reduced), score.columns),
        ("values", content, features, set(value.block.reduced)),
    )
    found = []
    for name, access, axes, rows in wanted:
        along = stored_along(group, access)
        tensor = stored_tensor(group, access.tensor)
        # Of runs of symbolic extent a reshape tells nothing: an index goes by all axes.
        unclear = not isinstance(group.graph.tensors[tensor].shape[-1], int) and along & rows
        if along and (unclear or not along & axes):
            found.append((name, tensor))
    return found


def _shape(group: GroupView, roles: AttentionRoles) -> AttentionShape:
    """The sizes that the time of a group depends on."""
    graph, scores = group.graph, points(roles.score.block) // roles.score.k
    work = {pipe: 0.0 for pipe in Pipe}
    masks, triangle = 0.0, False
    for block in group.blocks:
        level = roles.levels[id(block)]
        triangle |= block.compares or (level is Level.MASK and not block.reads)
        if level in (Level.MASK, Level.SCORE) and block is not roles.score.block:
            for pipe, number in block.counts:
                work[pipe] += number * points(block) / scores
    operands = {stored_tensor(group, t) for t in (roles.query, roles.key, roles.content)}
    for t in group.inputs:
        if t not in operands:
            masks += footprint_bytes(group, t)
    key = stored_tensor(group, roles.key)
    stored, dtype = footprint_bytes(group, key), graph.tensors[key].dtype
    spread = roles.batch * roles.keys * roles.score.k * dtype_bytes(dtype)
    return AttentionShape(
        batch=roles.batch,
        group=max(1, round(spread / stored)) if stored else 1,
        queries=roles.queries,
        keys=roles.keys,
        terms=roles.score.k,
        features=roles.features,
        dtype=dtype,
        visible=CAUSAL_SHARE if triangle and not masks else 1.0,
        mask_bytes=masks,
        arithmetic=max(0.0, work[Pipe.ARITHMETIC] - SOFTMAX_ARITHMETIC),
        special=max(0.0, work[Pipe.SPECIAL] + work[Pipe.DIVISION] - SOFTMAX_SPECIAL),
        transposed=bool(_transposed(group, roles)),
    )
