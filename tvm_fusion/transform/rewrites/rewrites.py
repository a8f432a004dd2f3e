"""Rewrites of the opened graph that pay in some models and not in others.

Each changes what can be fused, and the search cannot undo it: a module is planned with and without
each in turn, and those are kept by which the predicted time falls. A pass that finds nothing to do
returns the very module it was given.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass

import tvm

from ...config import HardwareProfile, Policy
from ...errors import PlanError
from .fold_factors import FoldFactors
from .lean_weights import LeanWeights, PackedWeights
from .pad_depth import PadDepth
from .partial_columns import PartialColumns
from .partial_rows import PartialRows
from .row_slices import RowSlices
from .split_products import SplitProducts


@dataclass(frozen=True, slots=True)
class Rewrite:
    """A rewrite of the opened graph.

    Attributes
    ----------
    make : the pass for a device.
    allowed : the policies under which it may be tried.
    kinds : of devices that it is tried for.
    ours : whether it is this package's own.
    local : whether nothing gets faster but the launches of what it changes.
    least_us : what it has to save for each launch that it changes: predictions of less are as often
        wrong as right.
    """

    make: Callable[[HardwareProfile], tvm.transform.Pass]
    allowed: Callable[[Policy], bool] = lambda _policy: True
    kinds: tuple[str, ...] = ("cuda",)
    ours: bool = True
    local: bool = False
    least_us: float = 0.0


def may_round(policy: Policy) -> bool:
    """Whether roundings may move."""
    return policy.rounding != "exact"


# By name, in the order in which they are applied. The kernels of CPUs gain by the first only.
REWRITES: dict[str, Rewrite] = {
    "fold_factors": Rewrite(lambda _hw: FoldFactors(), may_round, ("cuda", "llvm")),
    "partial_rows": Rewrite(PartialRows, may_round),
    # Kernels on an H200 (tests/results/column_sums_h200.json): where gains of 0.3 to 1.0 us were
    # predicted, they took 0.3 to 3.4 us longer; of four greater ones three were there.
    "partial_columns": Rewrite(PartialColumns, may_round, least_us=1.5),
    "row_slices": Rewrite(lambda _hw: RowSlices()),
    "pad_depth": Rewrite(PadDepth),
    "split_products": Rewrite(SplitProducts, local=True),
    # After those that look at constants: these hide them.
    "lean_weights": Rewrite(LeanWeights, lambda policy: not policy.allow_tf32, local=True),
    "lean_weights_tf32": Rewrite(
        lambda hw: LeanWeights(hw, allow_tf32=True), lambda policy: policy.allow_tf32, local=True
    ),
    "packed_weights": Rewrite(PackedWeights, may_round),
}


def candidates(hw: HardwareProfile, policy: Policy) -> tuple[str, ...]:
    """Names of the rewrites to try."""
    found = REWRITES.items()
    return tuple(name for name, r in found if hw.kind in r.kinds and r.allowed(policy))


def all_ours(hw: HardwareProfile) -> bool:
    """Whether all that are tried are this package's: the code of others is in no key."""
    return all(r.ours for r in REWRITES.values() if hw.kind in r.kinds)


def known_rewrites(names: Collection[str], policy: Policy) -> Collection[str]:
    """`names`, if all of them exist and none moves a rounding that the policy keeps.

    Raises
    ------
    PlanError
        A plan names a rewrite that this version does not have, or rounds where it may not.
    """
    unknown = sorted(set(names) - set(REWRITES))
    if unknown:
        raise PlanError(
            f"the plan needs the rewrites {', '.join(unknown)}, which do not exist here "
            f"(known: {', '.join(REWRITES) or 'none'}); plan again with `explain`"
        )
    rounding = sorted(n for n in set(names) if REWRITES[n].allowed is may_round)
    if rounding and not may_round(policy):
        raise PlanError(
            f"the plan was made with the rewrites {', '.join(rounding)}, which round in other "
            "places than the model; exact rounding needs a plan of its own, made by `explain`"
        )
    return names
