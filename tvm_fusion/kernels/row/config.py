"""Configurations of row kernels: threads a row, and how a row is held."""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import TYPE_CHECKING

from .exchange import WARP

if TYPE_CHECKING:
    pass


class Form(enum.StrEnum):
    """How a row is held while its reductions run."""

    REGISTERS = "reg"
    LOOP = "loop"
    BULK = "bulk"


@dataclass(frozen=True, slots=True)
class RowConfig:
    """One way to compute the rows of a program.

    Attributes
    ----------
    form : REGISTERS keeps the row in registers; LOOP streams it once a phase; BULK is REGISTERS
        with resident blocks whose coming rows are copied into shared memory ahead.
    threads : threads a row within one block (a power of two below 32, else a multiple of 32).
    rows : rows a block; together whole warps.
    width : columns of one vector.
    cluster : blocks a row.
    unroll : LOOP: vectors a step.
    prefetch : LOOP: the next step's loads are issued before this step's arithmetic.
    stages : BULK: rows in flight a block.
    resident : blocks a multiprocessor that stay and walk over the rows; 0: one block for each
        `rows` rows.
    min_blocks : blocks a multiprocessor that ptxas must leave registers for; 0: no demand.
    load, store : cache hints (memory.py).
    online : run sums of exponentials along with their maximum.
    most : REGISTERS, rows of symbolic length: columns of the longest row that is held, which the
        host sees to; 0 where the length is known.
    least : columns of the shortest one: what all rows have is not asked for.
    """

    form: Form = Form.REGISTERS
    threads: int = 256
    rows: int = 1
    width: int = 8
    cluster: int = 1
    unroll: int = 4
    prefetch: bool = False
    stages: int = 2
    resident: int = 0
    min_blocks: int = 0
    load: str = "nc"
    store: str = "wb"
    online: bool = True
    most: int = 0
    least: int = 0

    @property
    def runs_online(self) -> bool:
        """Whether sums run along with their maxima; threads of one warp take two sweeps instead."""
        one_warp = self.form is not Form.LOOP and self.threads * self.cluster <= WARP
        return self.online and not one_warp

    @property
    def tag(self) -> str:
        """Short name for reports: the form and what differs from the defaults."""
        parts = [f"{self.form}-t{self.threads}x{self.rows}-v{self.width}"]
        letters = {"cluster": "c", "stages": "s", "resident": "p", "min_blocks": "b", "most": "m"}
        for name, letter in letters.items():
            value, default = getattr(self, name), type(self).__dataclass_fields__[name].default
            parts += [f"{letter}{value}"] if value != default else []
        if self.form is Form.LOOP:
            parts.append(f"u{self.unroll}{'p' if self.prefetch else ''}")
        return "-".join(parts + ([] if self.online else ["phases"]))
