"""Nsight Compute: the command that measures what kernels move to and from DRAM, and what it prints.

`ncu` runs the process of the command once, waits for `cuProfilerStart`, and repeats each kernel of
that call, its caches cleaned before, as often as its counters need.
"""

from __future__ import annotations

import csv
import io
import shlex
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from ..errors import InputError

READ, WRITTEN, TIME = "dram__bytes_read.sum", "dram__bytes_write.sum", "gpu__time_duration.sum"
L2_WRITTEN = "lts__t_sectors_srcunit_tex_op_write.sum"
METRICS = (READ, WRITTEN, L2_WRITTEN, TIME)
SECTOR_BYTES = 32
# No counters for this user: the driver's setting NVreg_RestrictProfilingToAdminUsers.
CLOSED = "ERR_NVGPUCTRPERM"


@dataclass(frozen=True, slots=True)
class Counted:
    """What the counters say of a launch.

    Attributes
    ----------
    kernel : str
    read, written : float
        Bytes of DRAM while it ran.
    l2_sectors : float
        Sectors of 32 bytes that its multiprocessors wrote to the L2 (that of all writes counts what
        the two halves of an H100's L2 tell each other, half as much again).
    ns : float
    """

    kernel: str
    read: float
    written: float
    l2_sectors: float
    ns: float

    @property
    def bytes(self) -> float:
        """What the kernel moves: what it wrote leaves the L2 when others need the room, most of it
        after a small kernel has ended.
        """
        return self.read + max(self.written, self.l2_sectors * SECTOR_BYTES)


def ncu_options() -> list[str]:
    """Nsight Compute, for a command that follows."""
    options = ("--profile-from-start", "off", "--cache-control", "all", "--nvtx", "--csv")
    return ["ncu", *options, "--print-units", "base", "--metrics", ",".join(METRICS)]


def shown_command(*arguments: str) -> str:
    """The command for what `python -m tvm_fusion profile` would profile with these arguments, as a
    line for a shell.
    """
    own = (sys.executable, "-m", "tvm_fusion", "profile", *arguments, "--once")
    return shlex.join([*ncu_options(), *own])


def counted(output: str) -> list[Counted]:
    """Reads what `ncu --csv` prints: launches in their order.

    Raises
    ------
    InputError
        It has no counters: they are closed for this user, or something else went wrong.
    """
    if CLOSED in output:
        raise InputError(
            f"ncu: {CLOSED}: the driver lets administrators alone read counters; run it as root, "
            "or load the driver with NVreg_RestrictProfilingToAdminUsers=0"
        )
    start = output.find('"ID"')
    if start < 0:
        last = output.strip().splitlines()[-1:] or ["it printed nothing"]
        raise InputError(f"ncu: no table of kernels: {last[0]}; look at its whole output")
    return list(_launches(list(csv.DictReader(io.StringIO(output[start:])))))


def _launches(rows: Sequence[dict[str, str]]) -> Iterator[Counted]:
    values: dict[str, dict[str, float]] = {}
    names: dict[str, str] = {}
    for row in rows:
        if row.get("Metric Name") in METRICS:
            names[row["ID"]] = row["Kernel Name"].partition("(")[0]
            number = float(row["Metric Value"].replace(",", ""))
            values.setdefault(row["ID"], {})[row["Metric Name"]] = number
    for key, found in values.items():
        yield Counted(names[key], *(found.get(metric, 0.0) for metric in METRICS))
