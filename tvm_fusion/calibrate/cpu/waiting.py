"""How long the threads of this process ran, and how long they were ready to and waited for a core:
what other programs took of a measurement. What a signal stopped did neither.

    /proc/self/task/*/schedstat         nanoseconds that ran, that waited, slices

Where the system does not say it, a thread that had to leave its core counts as `SLICE_S`.
"""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

TASKS = Path("/proc/self/task")
SLICE_S = 0.003
"""What Linux gives a thread before another one gets its turn, at least."""


class CoreTime(NamedTuple):
    """Seconds of all threads together."""

    ran: float
    waited: float

    def waiting_since(self, before: CoreTime) -> float:
        """The share of the time on cores that was spent on waiting for them."""
        ran = max(0.0, self.ran - before.ran)  # threads that ended have taken theirs with them
        waited = max(0.0, self.waited - before.waited)
        return waited / max(ran + waited, 1e-9)


def core_time() -> CoreTime:
    """The time so far; what something takes is a difference."""
    ran = waited = 0
    for file in TASKS.glob("*/schedstat"):
        try:
            own = [int(number) for number in file.read_text().split()]
            ran, waited = ran + own[0], waited + own[1]
        except (OSError, ValueError, IndexError):  # the thread has ended
            continue
    if ran:
        return CoreTime(ran / 1e9, waited / 1e9)
    import resource  # of Unix only, as what counts on threads is of Linux

    used = resource.getrusage(resource.RUSAGE_SELF)
    return CoreTime(used.ru_utime + used.ru_stime, SLICE_S * used.ru_nivcsw)
