"""Configurations of column kernels: threads along and across the rows, and how columns are held."""

from __future__ import annotations

import enum
from dataclasses import dataclass

from ..row.exchange import WARP


class Form(enum.StrEnum):
    """How a thread holds its columns while the reductions run."""

    REGISTERS = "reg"
    LOOP = "loop"


@dataclass(frozen=True, slots=True)
class ColumnConfig:
    """One way to compute the columns of a program.

    Attributes
    ----------
    form : REGISTERS reads every column once and holds it; LOOP reads it once a phase.
    lanes : threads side by side along the rows, each with `width` neighbours; 0: vectors lie along
        the columns, and all threads of a block walk over one row.
    walkers : threads of a block that share the columns of a row.
    width : elements of a vector.
    unroll : LOOP: vectors a step.
    min_blocks : blocks a multiprocessor that ptxas must leave registers for; 0: no demand.
    load, store : cache hints (memory.py).
    keep : REGISTERS: costly temporaries stay in registers too, instead of being computed again.
    online : LOOP: sums of exponentials run along with their maximum.
    cluster : blocks that share the columns of a row.
    """

    form: Form = Form.LOOP
    lanes: int = 8
    walkers: int = 32
    width: int = 8
    unroll: int = 4
    min_blocks: int = 0
    load: str = "nc"
    store: str = "wb"
    keep: bool = False
    online: bool = True
    cluster: int = 1

    @property
    def threads(self) -> int:
        """Threads a block."""
        return max(1, self.lanes) * self.walkers

    @property
    def by_shuffle(self) -> int:
        """Walkers that meet in shuffles: those of a warp, if all warps are whole and alike."""
        alike = self.threads % WARP == 0 and WARP % max(1, self.lanes) == 0
        return WARP // max(1, self.lanes) if alike else 1

    @property
    def partials(self) -> int:
        """Partial results of a lane that meet in shared memory."""
        return -(-self.walkers // self.by_shuffle)

    @property
    def tag(self) -> str:
        """Short name for reports."""
        parts = [f"{self.form}-{self.lanes or 'row'}x{self.walkers}-v{self.width}"]
        parts += [f"c{self.cluster}"] if self.cluster > 1 else []
        parts += [f"u{self.unroll}"] if self.form is Form.LOOP else []
        parts += ["keep"] if self.keep else []
        parts += [f"b{self.min_blocks}"] if self.min_blocks else []
        parts += [hint for hint, usual in ((self.load, "nc"), (self.store, "wb")) if hint != usual]
        return "-".join(parts + ([] if self.online else ["phases"]))
