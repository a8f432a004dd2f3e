"""What tuning chose, for each device that a pass writes for."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import tvm
from tvm.s_tir import meta_schedule as ms

from ..config import HardwareProfile

if TYPE_CHECKING:
    from ..tuning.session.lookup import TunedKernels
    from ..tuning.tuning_database import TuningDatabase

    DatabaseLike = str | Path | TuningDatabase | None


class TunedParts:
    """The kernels of a database by target; it is opened once for each.

    Parameters
    ----------
    database : str, Path, TuningDatabase or None
        None is the database that is current (`with database:`), if there is one.
    """

    def __init__(self, database: DatabaseLike) -> None:
        self.database = database
        self._opened: dict[str, TunedKernels | None] = {}

    def of(
        self, target: tvm.target.Target, hw: HardwareProfile, needed: bool = True
    ) -> TunedKernels | None:
        """Those of a device: see `tuning.session.lookup.tuned_kernels`."""
        if self.database is None and ms.Database.current() is None:
            return None
        from ..tuning.session.lookup import tuned_kernels  # half of what an import would take

        name = str(target)
        if name not in self._opened:
            self._opened[name] = tuned_kernels(self.database, hw, target, needed)
        return self._opened[name]
