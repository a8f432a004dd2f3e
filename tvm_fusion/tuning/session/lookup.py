"""Kernels in place of what a class writes by itself, as `write_kernels` asks for them: those that
tuning chose (`compile(..., database=D)`), and what else may compute an operator whose kernel gives
wrong numbers, before TVM's own code does:

    what tuning chose -> the class's best configuration -> other configurations, of other forms
    first -> what the class `fallback` writes, where that is another kernel

On a CPU one writer serves all classes of this package, without configurations: there is nothing
else there, but for the classes that users add.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import tvm
import tvm_ffi
from tvm import relax, tirx

from ...config import HardwareProfile, Policy
from ...errors import InputError, NothingTuned, PlanError, Unsupported
from ...ir.weights import content_hash
from ...kernels.cpu.contraction.panels import without_constants
from ...plan.plan import FALLBACK, FusionPlan
from ...runtime.build.lowering import SCHEDULED_ATTR
from ...transform.apply.write_kernels import Tuned, write_kernel
from ..database import Database, Folders
from ..database.trial import Trial
from ..measure.building import written
from ..tuning_database import current_database
from .choices import CLASS_CHOICE, DEFAULT, chosen, ranked_configs, text_of
from .settings import load_settings
from .tasks import key_of, key_of_group, workload_of

logger = logging.getLogger(__name__)

# Each costs a build and a check, and a bug of a class's frame is in all of its configurations.
MOST_CONFIGURATIONS = 2


class Source(Protocol):
    """Where trials are kept: `database.Database`."""

    def trials(self, workload: tirx.PrimFunc) -> Iterable[Trial]: ...

    def plan(self, key: str) -> dict[str, Any] | None: ...


class TunedKernels:
    """The kernels that tuning chose.

    Parameters
    ----------
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
    names = (var.name for var in relax.analysis.all_vars(mod["main"]))
    parts = (content_hash(mod), *names, policy.fingerprint(), hw.name)
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
            "; give one of these"
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


# ---- where a kernel was wrong


class OtherKernels:
    """Stands in for what tuning chose (`tuned`), with other configurations for the functions whose
    kernels were wrong.
    """

    def __init__(self, tuned: Tuned | None, hw: HardwareProfile, policy: Policy) -> None:
        self._tuned, self._hw, self._policy = tuned, hw, policy
        self._left: dict[str, list[str]] = {}
        self._now: dict[str, str] = {}

    def reject(self, func: tirx.PrimFunc, class_name: str) -> str | None:
        """Go on to the next configuration for a function; its text, or None where none is left."""
        key = key_of_group(func, class_name, self._policy)
        if key not in self._left:
            self._left[key] = self._offered(func, class_name)
        if not self._left[key]:
            return None
        self._now[key] = self._left[key].pop(0)
        return self._now[key]

    def falls_back(self, func: tirx.PrimFunc, class_name: str) -> bool:
        """Whether the class `fallback` writes another kernel than the class does; on a GPU it
        leaves all to TVM.
        """
        if class_name == FALLBACK:
            return False
        try:
            kernels = [
                write_kernel(func, name, self._hw, self._policy) for name in (class_name, FALLBACK)
            ]
        except Unsupported:
            return False
        return SCHEDULED_ATTR in kernels[1].attrs and not tvm_ffi.structural_equal(*kernels)

    def _offered(self, func: tirx.PrimFunc, class_name: str) -> list[str]:
        """Texts of what may be tried in turn, after what is written now."""
        chosen = self._tuned.choice(func, class_name, self._policy) if self._tuned else ""
        try:
            ranked = ranked_configs(without_constants(func), class_name, self._hw, self._policy)
        except Unsupported:
            return []
        best, *others = [config for _, config in ranked] or [None]
        texts = dict.fromkeys(map(text_of, _one_of_each_form_first(best, others)))
        tried = (text_of(best), chosen.removeprefix(f"{CLASS_CHOICE} "))
        others = [text for text in texts if text not in tried][:MOST_CONFIGURATIONS]
        return [DEFAULT, *others] if chosen else others

    # ---- as write_kernels asks for it

    def plan(self, mod: tvm.IRModule, hw: HardwareProfile, policy: Policy) -> FusionPlan | None:
        """As `TunedKernels.plan`."""
        return None if self._tuned is None else self._tuned.plan(mod, hw, policy)

    def choice(self, func: tirx.PrimFunc, class_name: str, policy: Policy) -> str:
        """As `TunedKernels.choice`."""
        text = self._now.get(key_of_group(func, class_name, self._policy))
        if text is None:
            return self._tuned.choice(func, class_name, policy) if self._tuned else ""
        return "" if text == DEFAULT else f"{CLASS_CHOICE} {text}"

    def kernel(
        self, func: tirx.PrimFunc, class_name: str, hw: HardwareProfile, policy: Policy
    ) -> tirx.PrimFunc | None:
        """As `TunedKernels.kernel`."""
        text = self._now.get(key_of_group(func, class_name, self._policy))
        if text is None:
            return self._tuned.kernel(func, class_name, hw, policy) if self._tuned else None
        return written(workload_of(func, class_name, policy), CLASS_CHOICE, text, hw, policy)

    def told(
        self, func: tirx.PrimFunc, class_name: str, policy: Policy
    ) -> Mapping[str, Any] | None:
        """As `TunedKernels.told`; of a kernel that was wrong, that it is not used."""
        said = self._tuned.told(func, class_name, policy) if self._tuned else None
        if said is None or key_of_group(func, class_name, self._policy) not in self._now:
            return said
        return {"workload": said["workload"], "choice": DEFAULT, "stale": "wrong numbers"}


def configuration(
    func: tirx.PrimFunc, class_name: str, hw: HardwareProfile, policy: Policy
) -> str | None:
    """The configuration that the untuned kernel of a function is written in, as text; None where
    its class has none.

    Raises
    ------
    Unsupported
        The class cannot write it.
    """
    ranked = ranked_configs(func, class_name, hw, policy)
    return text_of(ranked[0][1]) if ranked and ranked[0][1] is not None else None


def _one_of_each_form_first(best: Any, others: Sequence[Any]) -> list[Any]:
    """The configurations of a class beside its best: a bug is likely to be in all of a form."""
    seen, first, rest = {_form(best)}, [], []
    for config in others:
        (rest if _form(config) in seen else first).append(config)
        seen.add(_form(config))
    return first + rest


def _form(config: Any) -> tuple[str, Any]:
    return type(config).__name__, getattr(config, "form", None)
