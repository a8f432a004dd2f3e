"""Tuned kernels for `compile(..., database=D)`: what the database has for a fused PrimFunc."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Protocol

import tvm
import tvm_ffi
from tvm import relax, tirx

from ...config import HardwareProfile, Policy
from ...errors import InputError, NothingTuned, PlanError, Unsupported
from ...plan.plan import FusionPlan
from ..database import Database, Folders
from ..database.trial import Trial
from ..measure.building import written
from ..tuning_database import current_database
from .choices import CLASS_CHOICE, DEFAULT, chosen
from .settings import load_settings
from .tasks import key_of, workload_of

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
        See `choices.chosen`.

    Attributes
    ----------
    used : dict
        By key of the workload: the trial whose kernel is used, `default` for the untuned one.
    stale : dict
        By key: why what the database has could not be written.
    """

    def __init__(self, source: Source, certain_gain: float) -> None:
        self.source, self.certain_gain = source, certain_gain
        self.used: dict[str, Trial] = {}
        self.stale: dict[str, str] = {}

    def choice(self, func: tirx.PrimFunc, class_name: str, policy: Policy) -> str:
        """What decides the kernel of a fused PrimFunc beside the function and its class; empty
        where the untuned one is to be used.
        """
        workload = workload_of(func, class_name, policy)
        trial = self.trial(workload)
        if trial is None:
            return ""
        self.used[key_of(workload)] = trial
        untuned = trial.kind == CLASS_CHOICE and trial.text == DEFAULT
        return "" if untuned else f"{trial.kind} {trial.text}"

    def kernel(
        self, func: tirx.PrimFunc, class_name: str, hw: HardwareProfile, policy: Policy
    ) -> tirx.PrimFunc | None:
        """The kernel of a function with a `choice`; None where it cannot be written any more."""
        workload = workload_of(func, class_name, policy)
        trial = self.trial(workload)
        try:
            return written(workload, trial.kind, trial.text, hw, policy)
        except Unsupported as why:
            logger.warning("a tuned kernel is stale, the untuned one is used: %s", why)
            key = key_of(workload)
            self.used.pop(key, None)
            self.stale[key] = str(why)
            return None

    def told(self, func: tirx.PrimFunc, class_name: str, policy: Policy) -> dict[str, Any] | None:
        """What reports say of the kernel that is used for a function: the choice, its time and that
        of the untuned kernel, each measured by itself; None where it was not tuned.
        """
        workload = workload_of(func, class_name, policy)
        key = key_of(workload)
        if key in self.stale:
            return {"workload": key, "choice": DEFAULT, "stale": self.stale[key]}
        trial = self.used.get(key)
        if trial is None:
            return None
        untuned = next(t.us for t in self.source.trials(workload) if t.text == DEFAULT)
        choice = trial.text if trial.kind == CLASS_CHOICE else trial.kind
        return {"workload": key, "choice": choice, "us": trial.us, "untuned_us": untuned}

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
    """What a settled plan is kept under: the module with the names by which plans speak of it, the
    policy and the device.
    """
    module = str(tvm_ffi.structural_hash(mod, map_free_vars=True))
    names = (var.name for var in relax.analysis.all_vars(mod["main"]))
    parts = (module, *names, policy.fingerprint(), hw.name)
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:32]


def tuned_kernels(
    database: Any, hw: HardwareProfile, target: tvm.target.Target, needed: bool = True
) -> TunedKernels | None:
    """The tuned kernels of a database for a device.

    Parameters
    ----------
    database : str, Path, TuningDatabase or None
        None takes the one that is current (`with database:`), if there is one.
    hw, target
    needed : bool
        Whether a database that is given has to have something of the device.

    Returns
    -------
    TunedKernels or None
        None without a database, and where it has nothing of the device, which is logged.

    Raises
    ------
    InputError
        The database is none, or has nothing of the device and is `needed`.
    """
    stores = _current_stores() if database is None else _stores(database)
    if stores is None:
        return None
    try:
        return _of_store(stores.of(hw, target))
    except NothingTuned as why:
        if needed and database is not None:
            raise
        logger.warning("nothing tuned is used: %s", why)
        return None


def _current_stores() -> Folders | None:
    current = current_database()
    return None if current is None else current.stores


def _stores(database: Any) -> Folders:
    """Where a database keeps its trials."""
    if isinstance(database, str | Path):
        return Folders(database)
    stores = getattr(database, "stores", None)
    if stores is None:
        raise InputError(
            f"database: a folder or a tvm_fusion.TuningDatabase, not a {type(database).__name__}"
        )
    return stores


def _of_store(store: Database) -> TunedKernels:
    if count := sum(t.text == DEFAULT and not t.checked for _, t in store.counted()):
        logger.warning(
            "%s: the times of %d untuned kernels are unchecked, and what was tuned of these is not "
            "used until `tune` measures them again",
            store,
            count,
        )
    return TunedKernels(store, load_settings().certain_gain)
