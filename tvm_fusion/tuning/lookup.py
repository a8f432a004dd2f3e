"""Tuned kernels for `compile(..., database=D)`: what the database has for a fused PrimFunc."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Protocol

import tvm
import tvm_ffi
from tvm import tirx

from ..config import HardwareProfile, Policy
from ..errors import InputError, PlanError, Unsupported
from ..plan.plan import FusionPlan
from .building import written
from .choices import CLASS_CHOICE, DEFAULT
from .select import chosen
from .tasks import key_of, workload_of
from .trial_record import Trial

logger = logging.getLogger(__name__)


class Source(Protocol):
    """Where trials are kept: `database.Database`."""

    def trials(self, workload: tirx.PrimFunc) -> Iterable[Trial]: ...

    def plan(self, key: str) -> dict[str, Any] | None: ...


class TunedKernels:
    """The kernels that tuning chose.

    Parameters
    ----------
    source : Source
    certain_gain : float
        See `select.chosen`.

    Attributes
    ----------
    used : dict
        By key of the workload: the trial whose kernel was written.
    stale : dict
        By key: why what the database has could not be written.
    """

    def __init__(self, source: Source, certain_gain: float) -> None:
        self.source, self.certain_gain = source, certain_gain
        self.used: dict[str, Trial] = {}
        self.stale: dict[str, str] = {}

    def kernel(
        self, func: tirx.PrimFunc, class_name: str, hw: HardwareProfile, policy: Policy
    ) -> tirx.PrimFunc | None:
        """The tuned kernel of a fused PrimFunc; None where the untuned one is to be used."""
        workload = workload_of(func, class_name, policy)
        trial = self.trial(workload)
        if trial is None:
            return None
        key = key_of(workload)
        if trial.kind == CLASS_CHOICE and trial.text == DEFAULT:
            self.used[key] = trial
            return None
        try:
            kernel = written(workload, trial.kind, trial.text, hw, policy)
        except Unsupported as why:
            logger.warning("a tuned kernel is stale, the untuned one is used: %s", why)
            self.stale[key] = str(why)
            return None
        self.used[key] = trial
        return kernel

    def trial(self, workload: tirx.PrimFunc) -> Trial | None:
        """The trial that is chosen for a workload."""
        return chosen(self.source.trials(workload), self.certain_gain)

    def plan(self, mod: tvm.IRModule, hw: HardwareProfile, policy: Policy) -> FusionPlan | None:
        """The plan that was settled for a module; None where it was not tuned."""
        data = self.source.plan(plan_key(mod, hw, policy))
        if data is None:
            return None
        try:
            return FusionPlan.from_dict(data)
        except PlanError as why:
            logger.warning("the settled plan cannot be read, another is searched: %s", why)
            return None


def plan_key(mod: tvm.IRModule, hw: HardwareProfile, policy: Policy) -> str:
    """What a settled plan is kept under: the module, the policy and the device."""
    module = str(tvm_ffi.structural_hash(mod, map_free_vars=True))
    return hashlib.sha256("\n".join((module, policy.fingerprint(), hw.name)).encode()).hexdigest()[
        :32
    ]


def tuned_kernels(
    database: str | Path, hw: HardwareProfile, target: tvm.target.Target
) -> TunedKernels:
    """The tuned kernels of a database for a device.

    Raises
    ------
    InputError
        There is no such folder.
    """
    from .database import find_database
    from .settings import load_settings

    if not Path(database).is_dir():
        raise InputError(f"no such database: {database}; `tune` makes one")
    source = find_database(database, hw, target, read_only=True)
    return TunedKernels(source, load_settings().certain_gain)
