"""What pipelines ask of a database, whatever keeps its trials."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Protocol

import tvm
from tvm import tirx

from ...config import HardwareProfile
from ..measure.trial_record import Trial


class Store(Protocol):
    """The trials of one device: `store.Database`.

    Attributes
    ----------
    changes : int
        Grows whenever there are other trials than before.
    """

    @property
    def changes(self) -> int: ...

    def workloads(self) -> Sequence[tirx.PrimFunc]: ...

    def trials(self, workload: tirx.PrimFunc) -> Iterable[Trial]: ...

    def unchecked(self) -> Sequence[tuple[str, Trial]]: ...

    def plan(self, key: str) -> dict[str, Any] | None: ...

    def metaschedule(self) -> Any:
        """The trials with a time as a database of MetaSchedule."""


class Stores(Protocol):
    """A store for each device: `folders.Folders`."""

    def of(self, hw: HardwareProfile, target: tvm.target.Target) -> Store:
        """That of a device; `NothingTuned` where there is none."""

    def all(self) -> Sequence[Store]:
        """Those that this TVM can read."""
