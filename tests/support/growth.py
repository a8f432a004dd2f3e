"""Memory of this process that belongs to nobody else."""

import ctypes
from pathlib import Path


def private_bytes() -> int:
    """Pages that were written to, after free ones of the C library went back to the system."""
    ctypes.CDLL("libc.so.6").malloc_trim(0)
    lines = Path("/proc/self/smaps_rollup").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith("Private_Dirty"))
