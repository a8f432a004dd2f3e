"""Kernels that spill registers, which is known once ptxas has compiled them, beside what else their
class can write.

A configuration that spills takes longer than was predicted, by what its threads store to and load
from local memory:

    predicted + bytes that a thread spills x threads / rate

Where others of another number of threads, which is what limits registers, are predicted to take
less than that, at most two of them are compiled, and the one that takes least with its own spills
is built instead, if that is worth it; the functions of a module are built together once more. What
does not spill stays as it was built. Instructions within loops are counted once.

Does not handle (left alone): symbolic launches, kernels with versions by range, classes that rank
no configurations, kernels that tuning chose, other plans.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from tvm import tirx

from ..config import HardwareProfile, Policy
from ..errors import BuildError, Unsupported
from ..flow.planned import BuiltPlan, Planned
from ..kernels.cpu.contraction.panels import without_constants
from ..plan.plan import UNWRITTEN, FusionPlan
from ..runtime.build.cuda_compiler import cuda_arch
from ..runtime.build.kernel_code import kernel_sources
from ..runtime.build.resources import ptxas_resources
from ..runtime.build.version_names import versions_among
from ..transform.apply.write_kernels import Tuned, write_kernel
from ..tuning.session.choices import ranked_configs, text_of
from ..tuning.session.tasks import key_of_group

logger = logging.getLogger(__name__)

MOST_OTHERS = 2
"""Configurations that are compiled beside one that spills."""

WORTH = 0.98
"""Share of the time up to which another configuration is built."""


@dataclass(frozen=True, slots=True)
class Judged:
    """A configuration, its predicted time with its spills, and the bytes that a thread spills."""

    config: Any
    us: float
    spill_bytes: int


def with_less_spilled(made: BuiltPlan) -> BuiltPlan:
    """The build with other configurations where one that spills is predicted to take longer."""
    planned = planned_with_less_spilled(made)
    return made if planned is made.planned else planned.build()


def planned_with_less_spilled(made: BuiltPlan) -> Planned:
    """The plan with these configurations; itself where there are none."""
    planned, chosen = made.planned, Instead(made.planned.tuned)
    for func, class_name in _spilling(made):
        first, *others = _judged(func, class_name, planned) or [None]
        best = min(others, key=lambda one: one.us, default=first)
        if best is not None and best.us < WORTH * first.us:
            chosen.take(func, class_name, planned.policy, first, best)
    if not chosen.taken:
        return planned
    logger.info("%d kernels spill and are built in other configurations", len(chosen.taken))
    return replace(planned, tuned=chosen)


def _spilling(made: BuiltPlan) -> Iterator[tuple[tirx.PrimFunc, str]]:
    """The PrimFuncs whose kernels spill, and their classes."""
    planned, built = made.planned, made.built
    for name, group in made.materialized.groups.items():
        kernels = [built.resources.get(kernel) for kernel in built.kernels.get(name, ())]
        if group.kernel_class in UNWRITTEN or not any(k and k.spill_bytes for k in kernels):
            continue
        if versions_among(built.kernels[name]):
            continue  # of one configuration for all sizes nothing is told
        func = made.materialized.mod[name]
        tuned = planned.tuned
        if not (tuned and tuned.choice(func, group.kernel_class, planned.policy)):
            yield func, group.kernel_class


def _judged(func: tirx.PrimFunc, class_name: str, planned: Planned) -> list[Judged]:
    """The first configuration of a class, and those that may take less; empty where spills of the
    first cannot be told.
    """
    try:
        ranked = ranked_configs(without_constants(func), class_name, planned.hw, planned.policy)
    except Unsupported:
        return []
    found: list[Judged] = []
    for us, config in ranked:
        if (
            us is None
            or config is None
            or len(found) > MOST_OTHERS
            or (found and us >= found[0].us)
        ):
            break
        one = _compiled(func, class_name, planned, us, config)
        if one is None and not found:
            return []
        found += [] if one is None else [one]
    return found


def _compiled(
    func: tirx.PrimFunc, class_name: str, planned: Planned, us: float, config: Any
) -> Judged | None:
    """A configuration as ptxas makes it; None where it cannot be written or compiled, or it depends
    on a symbolic size how many threads there are.
    """
    hw, target = planned.hw, planned.target
    try:
        kernel = write_kernel(without_constants(func), class_name, hw, planned.policy, config)
        sources = kernel_sources(kernel, target)
        told = [(s, k) for s in sources for k in ptxas_resources(s.source, cuda_arch(target))]
    except (Unsupported, BuildError):
        return None
    if not all(s.threads and s.blocks for s in sources):
        return None
    spilled = sum(k.spill_bytes * s.threads * s.blocks for s, k in told)
    worst = max(k.spill_bytes for _, k in told)
    return Judged(config, us + spilled / hw.spill_bytes_per_s * 1e6, worst)


class Instead:
    """Stands in for what tuning chose (`tuned`), with other configurations for the functions whose
    kernels spill.
    """

    def __init__(self, tuned: Tuned | None) -> None:
        self._tuned = tuned
        self.taken: dict[str, tuple[Judged, Judged]] = {}

    def take(
        self, func: tirx.PrimFunc, class_name: str, policy: Policy, first: Judged, best: Judged
    ) -> None:
        """Have `best` in place of `first`."""
        self.taken[key_of_group(func, class_name, policy)] = first, best

    # ---- as write_kernels and reports ask for it

    def plan(self, mod: Any, hw: HardwareProfile, policy: Policy) -> FusionPlan | None:
        """As `TunedKernels.plan`."""
        return None if self._tuned is None else self._tuned.plan(mod, hw, policy)

    def choice(self, func: tirx.PrimFunc, class_name: str, policy: Policy) -> str:
        """As `TunedKernels.choice`."""
        pair = self.taken.get(key_of_group(func, class_name, policy))
        if pair is not None:
            return f"spilled {text_of(pair[1].config)}"
        return self._tuned.choice(func, class_name, policy) if self._tuned else ""

    def kernel(
        self, func: tirx.PrimFunc, class_name: str, hw: HardwareProfile, policy: Policy
    ) -> tirx.PrimFunc | None:
        """As `TunedKernels.kernel`."""
        pair = self.taken.get(key_of_group(func, class_name, policy))
        if pair is None:
            return self._tuned.kernel(func, class_name, hw, policy) if self._tuned else None
        return write_kernel(without_constants(func), class_name, hw, policy, pair[1].config)

    def told(
        self, func: tirx.PrimFunc, class_name: str, policy: Policy
    ) -> Mapping[str, Any] | None:
        """As `TunedKernels.told`; of a kernel that spilled, what it took by prediction."""
        key = key_of_group(func, class_name, policy)
        if key not in self.taken:
            return self._tuned.told(func, class_name, policy) if self._tuned else None
        first, best = self.taken[key]
        return {
            "workload": key,
            "choice": text_of(best.config),
            "predicted_us": best.us,
            "spill_bytes": best.spill_bytes,
            "instead_of": text_of(first.config),
            "instead_of_us": first.us,
            "instead_of_spill_bytes": first.spill_bytes,
        }
