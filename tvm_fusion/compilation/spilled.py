"""Kernels that spill registers, which is known once ptxas has compiled them, beside what else their
class can write.

A configuration that spills takes longer than was predicted, by what its threads store to and load
from local memory:

    predicted + bytes that a thread spills x threads / rate

Where others of another number of threads, which is what limits registers, are predicted to take
less than that, at most two of them are compiled, side by side with those of other kernels, and the
one that takes least with its own spills is built instead, if that is worth it; the functions of a
module are built together once more. What does not spill stays as it was built. Instructions within
loops are counted once.

Does not handle (left alone): symbolic launches, kernels with versions by range, classes that rank
no configurations, kernels that tuning chose, other plans.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, replace
from itertools import chain, islice, takewhile
from typing import Any

from tvm import tirx

from ..config import HardwareProfile, Policy
from ..errors import BuildError, Unsupported
from ..flow.planned import BuiltPlan, Planned
from ..kernels.cpu.contraction.panels import without_constants
from ..plan.plan import UNWRITTEN, FusionPlan
from ..runtime.build.cubin_cache import Compiling
from ..runtime.build.cuda_compiler import DeviceCode, cuda_arch
from ..runtime.build.kernel_code import KernelSource, kernel_sources
from ..runtime.build.resources import resources_of
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
    spilling = list(_spilling(made))
    if not spilling:
        return planned
    with Compiling(cuda_arch(planned.target)) as compiling:
        offers = [_offered(*one, planned, compiling) for one in spilling]  # of all, nvcc begins
        for (func, class_name), offered in zip(spilling, offers, strict=True):
            first, *others = _judged(offered, planned.hw) or [None]
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


@dataclass(frozen=True, slots=True)
class _Offer:
    """A configuration, its predicted time, and the sources of its kernels, which nvcc compiles; no
    sources where it cannot be written, or it depends on a symbolic size how many threads there are.
    """

    config: Any
    us: float
    sources: tuple[KernelSource, ...]
    codes: tuple[Future[DeviceCode | BuildError], ...]

    def judged(self, hw: HardwareProfile) -> Judged | None:
        """As ptxas makes it; None where it does not compile."""
        codes = [code.result() for code in self.codes]
        if not codes or any(isinstance(code, BuildError) for code in codes):
            return None
        told = [(s, k) for s, c in zip(self.sources, codes, strict=True) for k in resources_of(c)]
        spilled = sum(k.spill_bytes * s.threads * s.blocks for s, k in told)
        worst = max(k.spill_bytes for _, k in told)
        return Judged(self.config, self.us + spilled / hw.spill_bytes_per_s * 1e6, worst)


def _offered(
    func: tirx.PrimFunc, class_name: str, planned: Planned, compiling: Compiling
) -> Iterator[_Offer]:
    """The configurations of a class, in its order; nvcc begins with those that are judged in any
    case at once, with each other when it is asked for.
    """
    try:
        ranked = ranked_configs(without_constants(func), class_name, planned.hw, planned.policy)
    except Unsupported:
        return iter(())
    known = takewhile(lambda one: one[0] is not None and one[1] is not None, ranked)
    offers = (_begun(func, class_name, planned, us, config, compiling) for us, config in known)
    return chain(list(islice(offers, 1 + MOST_OTHERS)), offers)


def _begun(
    func: tirx.PrimFunc,
    class_name: str,
    planned: Planned,
    us: float,
    config: Any,
    compiling: Compiling,
) -> _Offer:
    try:
        kernel = write_kernel(
            without_constants(func), class_name, planned.hw, planned.policy, config
        )
        sources = kernel_sources(kernel, planned.target)
    except (Unsupported, BuildError):
        sources = ()
    if not all(s.threads and s.blocks for s in sources):
        sources = ()
    return _Offer(config, us, sources, tuple(compiling.begin(s.source) for s in sources))


def _judged(offered: Iterator[_Offer], hw: HardwareProfile) -> list[Judged]:
    """The first configuration of a class, and those that may take less; empty where spills of the
    first cannot be told.
    """
    found: list[Judged] = []
    for offer in offered:
        if found and offer.us >= found[0].us:
            break
        one = offer.judged(hw)
        if one is None and not found:
            return []
        found += [] if one is None else [one]
        if len(found) > MOST_OTHERS:
            break
    return found


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
