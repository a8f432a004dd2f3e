"""The cores of this process, whatever TVM pinned its threads to.

A thread that first runs a parallel kernel, or asks for the number of threads, gets a pool from TVM
and is pinned to one core; what it starts afterwards (threads, compilers, processes that measure)
would share that core with it.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable, Iterator
from pathlib import Path

HAS_AFFINITY = hasattr(os, "sched_getaffinity")
_AT_IMPORT = frozenset(os.sched_getaffinity(0)) if HAS_AFFINITY else frozenset()
_TASKS = Path("/proc/self/task")
_ROOT = Path("/")


def usable_cores() -> frozenset[int]:
    """The cores that this process may use: those that any of its threads may."""
    if not HAS_AFFINITY:
        return frozenset(range(os.cpu_count() or 1))
    found = set(os.sched_getaffinity(0)) | _AT_IMPORT
    with contextlib.suppress(OSError):  # no such folder
        for task in _TASKS.iterdir():
            with contextlib.suppress(OSError):  # it ended
                found |= os.sched_getaffinity(int(task.name))
    return frozenset(found)


def available_cores() -> int:
    """How many of them the process can keep busy: a container may be granted the time of fewer."""
    return _within_quota(len(usable_cores()))


def available_physical_cores() -> int:
    """The same, where the hyper-threads of a core count once."""
    return _within_quota(len(physical_cores(usable_cores())))


def physical_cores(cores: Iterable[int], root: Path = _ROOT) -> frozenset[frozenset[int]]:
    """Group cores that are hyper-threads of one physical core; where the system does not say, each
    is taken to be one.
    """
    shared: dict[str, set[int]] = {}
    for core in cores:
        topology = root / f"sys/devices/system/cpu/cpu{core}/topology/thread_siblings_list"
        try:
            siblings = topology.read_text().strip()
        except OSError:
            siblings = str(core)
        shared.setdefault(siblings, set()).add(core)
    return frozenset(map(frozenset, shared.values()))


def granted_cores(root: Path = _ROOT) -> float | None:
    """How many cores' time the control groups of this process (version 1 or 2) grant it; None if
    they do not say.
    """
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return None
    found = []
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if not controllers:
            found += _grants(root / "sys/fs/cgroup", path, _grant_of_version_2)
        elif "cpu" in controllers.split(","):
            for mount in dict.fromkeys(("cpu", controllers)):
                found += _grants(root / "sys/fs/cgroup" / mount, path, _grant_of_version_1)
    return min(found, default=None)


def _grants(mount: Path, path: str, read) -> Iterator[float]:
    """What a group and those around it grant; a container sees its own group as the topmost."""
    group = mount / path.strip("/")
    for folder in (group, *group.parents):
        with contextlib.suppress(OSError, ValueError, ZeroDivisionError):  # no group, or no limit
            yield read(folder)
        if folder == mount:
            return


def _grant_of_version_2(folder: Path) -> float:
    quota, period = (folder / "cpu.max").read_text().split()
    return int(quota) / int(period)  # "max" is no number


def _grant_of_version_1(folder: Path) -> float:
    quota = int((folder / "cpu.cfs_quota_us").read_text())
    if quota <= 0:
        raise ValueError("no limit")
    return quota / int((folder / "cpu.cfs_period_us").read_text())


def _within_quota(count: int) -> int:
    """Threads that wait for each other stand still together once the time granted is used up: a
    part of a core carries none.
    """
    granted = granted_cores()
    return count if granted is None else max(1, min(count, int(granted)))


def use_all_cores() -> None:
    """Lets the calling thread, and what it starts from now on, run on all of them."""
    if HAS_AFFINITY:
        with contextlib.suppress(OSError):  # a core was taken from the process
            os.sched_setaffinity(0, usable_cores())


@contextlib.contextmanager
def on_all_cores() -> Iterator[None]:
    """As `use_all_cores` within the block; the thread is then as it was before."""
    before = os.sched_getaffinity(0) if HAS_AFFINITY else None
    use_all_cores()
    try:
        yield
    finally:
        if before is not None:
            os.sched_setaffinity(0, before)
