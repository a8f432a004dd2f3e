"""TuningDatabase: what `tvm_fusion.tune` found, as a database of MetaSchedule.

with tvm_fusion.TuningDatabase("tuned"):
    executable = tvm.compile(mod, target, relax_pipeline="tvm_fusion")
"""

from __future__ import annotations

import logging
import statistics
import weakref
from pathlib import Path
from typing import Any, NamedTuple

import tvm
import tvm_ffi
from tvm import tirx
from tvm.ir.utils import derived_object
from tvm.s_tir.meta_schedule.database import Database, PyDatabase, TuningRecord, Workload
from tvm.s_tir.meta_schedule.database.database import _PyDatabase

from ..config import resolve_target
from ..errors import InputError, NothingTuned, TargetError
from .database import Database as Store
from .database import Folders
from .database.metaschedule import hash_of, load_record, payload_of, root_of, target_json
from .database.trial import Trial
from .session.choices import TRACE_CHOICE, chosen
from .session.settings import load_settings

logger = logging.getLogger(__name__)

_OPEN: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()
"""By hash of the object of TVM, what stands behind it: TVM hands out databases as its own class."""


class _Content(NamedTuple):
    """What a store holds after so many changes: records by `workload_key`, and workloads by
    `_function_key`.
    """

    changes: int
    records: dict[str, list[TuningRecord]]
    workloads: dict[int, list[tirx.PrimFunc]]

    @classmethod
    def of(cls, store: Store) -> _Content:
        workloads: dict[int, list[tirx.PrimFunc]] = {}
        for workload in store.workloads():
            workloads.setdefault(_function_key(workload), []).append(workload)
        return cls(store.changes, store.tuning_records(), workloads)


@derived_object
class TuningDatabase(PyDatabase):
    """What `tvm_fusion.tune` found, for pipelines.

    Around a pipeline (`with database:`) `tvm_fusion.transform.Fuse`, the pipeline "tvm_fusion" and
    `tvm_fusion.compile` use its kernels as if it were their argument `database`, also where it is a
    member of TVM's `UnionDatabase` or `OrderedUnionDatabase`.

    To MetaSchedule it has a record for each choice that ran; those of configurations of kernel
    classes are no schedules, but annotations. Queries, and so `MetaScheduleApplyDatabase`, get what
    tuning chose for a function where that is a schedule that TVM can replay, and None for all
    others: `Fuse` writes these kernels. It is only read: a tuner of TVM needs a database of its
    own, beside which an `OrderedUnionDatabase` puts this one.

    Parameters
    ----------
    path : str, Path or Folders
        The folder that `tvm_fusion.tune` was given, or what answers like `Folders`.

    Raises
    ------
    InputError
        The path is no database.

    Examples
    --------
    >>> with tvm_fusion.TuningDatabase("tuned"):                                # doctest: +SKIP
    ...     executable = tvm.compile(mod, target, relax_pipeline="tvm_fusion")
    """

    def __init__(self, path: str | Path | Folders) -> None:
        super().__init__()
        self.stores = Folders(path) if isinstance(path, str | Path) else path
        if not callable(getattr(self.stores, "of", None)):
            raise InputError(
                f"TuningDatabase: give a folder that `tvm_fusion.tune` made, not a "
                f"{type(path).__name__}"
            )
        self._content: weakref.WeakKeyDictionary[Store, _Content] = weakref.WeakKeyDictionary()

    @property
    def _outer(self) -> Any:
        """The object of TVM: `derived_object` sets it."""
        return self._outer_reference

    @_outer.setter
    def _outer(self, reference: Any) -> None:
        self._outer_reference = reference
        _OPEN[hash(reference())] = self

    def _of(self, store: Store) -> _Content:
        found = self._content.get(store)
        if found is None or found.changes != store.changes:
            found = self._content[store] = _Content.of(store)
        return found

    def _all(self) -> list[_Content]:
        return [self._of(store) for store in self.stores.all()]

    def has_workload(self, mod: tvm.IRModule) -> bool:
        """Whether there are trials of a module's function, tuned as a kernel of any class."""
        func = _function_of(mod)
        return func is not None and any(_function_key(func) in c.workloads for c in self._all())

    def commit_workload(self, mod: tvm.IRModule) -> Workload:
        """Raises `InputError`: see the class."""
        raise _read_only()

    def commit_tuning_record(self, record: TuningRecord) -> None:
        """Raises `InputError`: see the class."""
        raise _read_only()

    def get_all_tuning_records(self) -> list[TuningRecord]:
        """One record for each choice that ran, of all devices."""
        return [r for content in self._all() for found in content.records.values() for r in found]

    def get_top_k(self, workload: Workload, top_k: int) -> list[TuningRecord]:
        """The fastest records of a workload, which is one of a record here."""
        key = hash_of(workload.mod)
        found = [record for content in self._all() for record in content.records.get(key, ())]
        return sorted(found, key=lambda r: statistics.mean(map(float, r.run_secs)))[:top_k]

    def query_tuning_record(
        self, mod: tvm.IRModule, target: tvm.target.Target, workload_name: str | None = None
    ) -> TuningRecord | None:
        """What tuning chose for a module's function, if that is a schedule that TVM can replay."""
        func = _function_of(mod)
        if func is None:
            return None
        try:
            store = self.stores.of(resolve_target(target)[1], target)
        except (NothingTuned, TargetError):
            return None
        gain = load_settings().certain_gain
        workloads = self._of(store).workloads.get(_function_key(func), ())
        trials = [trial for w in workloads if (trial := chosen(store.trials(w), gain)) is not None]
        best = min(trials, key=lambda trial: (trial.us, trial.text), default=None)
        return None if best is None else _record(best, mod, target)

    def __len__(self) -> int:
        """How many records there are, of all devices."""
        return len(self.get_all_tuning_records())


def current_database() -> TuningDatabase | None:
    """The one that `with database:` made TVM's current one, or that is a member of that."""
    return _ours_in(Database.current())


def _ours_in(database: Database | None) -> Any:
    if database is None:
        return None
    if isinstance(database, _PyDatabase):
        return _OPEN.get(hash(database))
    members = map(_ours_in, getattr(database, "databases", ()))  # of a union
    return next((found for found in members if found is not None), None)


def _record(trial: Trial, mod: tvm.IRModule, target: tvm.target.Target) -> TuningRecord | None:
    """A chosen trial as a record of a module; None where no schedule of TVM is it.

    Schedules for tensor cores are none: TVM's default lowering may fail on them (`APART_ATTR`).
    """
    if trial.kind != TRACE_CHOICE or '["Tensorize"' in trial.text:
        return None
    payload = payload_of(trial, mod, target_json(target))
    try:
        return load_record(payload, Workload(mod))
    except (RuntimeError, ValueError, TypeError) as error:  # of TVM, where the trace does not fit
        logger.warning("a schedule of the database is stale: %s", str(error).strip()[-300:])
        return None


def _function_of(mod: tvm.IRModule) -> tirx.PrimFunc | None:
    """The unscheduled PrimFunc of a module of one function, as MetaSchedule gives it."""
    func = mod["main"] if [g.name_hint for g in mod.get_global_vars()] == ["main"] else None
    return func if isinstance(func, tirx.PrimFunc) and root_of(func) is not None else None


def _function_key(func: tirx.PrimFunc) -> int:
    """What tells functions apart whatever their names, marks and stamps are."""
    for name in dict(func.attrs or {}):
        func = func.without_attr(name)
    return tvm_ffi.structural_hash(func)


def _read_only() -> InputError:
    return InputError(
        "what tvm_fusion.tune found is only read: give TVM's tuner a database of its own, such as "
        "ms.database.JSONDatabase(work_dir=...); OrderedUnionDatabase reads both"
    )
