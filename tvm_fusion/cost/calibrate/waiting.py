"""How long the threads of this process were ready to run and waited for a core: what other programs
took of a measurement.

    /proc/self/task/*/schedstat         nanoseconds that ran, that waited, slices

Where the system does not say it, a thread that had to leave its core counts as `SLICE_S`.
"""

from __future__ import annotations

import resource
from pathlib import Path

TASKS = Path("/proc/self/task")
SLICE_S = 0.003
"""What Linux gives a thread before another one gets its turn, at least."""


def waited_s() -> float:
    """Seconds so far, of all threads together; what one of them takes is a difference."""
    total, known = 0, False
    for file in TASKS.glob("*/schedstat"):
        try:
            total += int(file.read_text().split()[1])
        except (OSError, ValueError, IndexError):  # the thread has ended
            continue
        known = True
    if known:
        return total / 1e9
    return SLICE_S * resource.getrusage(resource.RUSAGE_SELF).ru_nivcsw
