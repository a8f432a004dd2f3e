"""The CPU of this machine: the shipped profile with rates that are measured at first use.

    <cache folder>/hosts/<key>.json

The key holds the CPU's name and features, the threads that kernels run on, and the versions of TVM
and of this package: the loops that are measured are those that its kernels consist of. It takes
about a second, once. What other programs disturb is measured again while there is time (`BUDGET_S`
at most: what is not reached keeps its shipped value).
`TVM_FUSION_CALIBRATE=0` leaves the shipped profile as it is.
"""

from __future__ import annotations

import datetime
import json
import logging
import math
import os
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from ..._version import __version__
from ...config import HardwareProfile, load_profile
from ...config.digest import digest
from ...config.hardware import HOST_NUMBERS
from ...config.targets import cpu_target
from ...errors import InputError
from ...host import interrupts
from ...host.atomic_files import replace_file
from ...host.cache_folder import cache_dir, make_folder
from ...host.cores import available_cores
from ...host.threads import asked_threads, thread_count, use_calibrated_threads
from ..profile_file import cpu_name

# How long the threads of this process ran, and how long they were ready to and waited for a core:
# what other programs took of a measurement. What a signal stopped did neither.
#
#     /proc/self/task/*/schedstat         nanoseconds that ran, that waited, slices
#
# Where the system does not say it, a thread that had to leave its core counts as `SLICE_S`.

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
    try:
        import resource  # of Unix only, as what counts on threads is of Linux
    except ImportError:  # who waits for a core is not known
        return CoreTime(time.process_time(), 0.0)
    used = resource.getrusage(resource.RUSAGE_SELF)
    return CoreTime(used.ru_utime + used.ru_stime, SLICE_S * used.ru_nivcsw)


VARIABLE = "TVM_FUSION_CALIBRATE"
BUDGET_S = 3.0
LEAST_THREAD_GAIN = 1.05
"""How much faster hyper-threads have to be in the mean to be used."""
MOST_WAITING = 0.05
"""Share of a measurement for which its threads may wait for a core: below 0.015 at rest, once
0.049; beside one or two busy loops 0.06 to 0.4 (2 cores of a Zen 4)."""
HOPELESS = 5 * MOST_WAITING
"""Where the best trial of one of the five steps waited for more, all of them together do for too
much even if nothing disturbs the others: they are not run."""
FORMAT = 1
_log = logging.getLogger(__name__)


class DisturbedError(RuntimeError):
    """Other programs took the cores from a calibration: what it found are their rates, too."""


@dataclass(frozen=True, slots=True)
class Calibration:
    """What was measured on a CPU.

    Attributes
    ----------
    cpu : str
    threads : int
        On which kernels run.
    date : str
    values : Mapping[str, float]
        By field of the profile, in its unit.
    """

    cpu: str
    threads: int
    date: str
    values: Mapping[str, float] = field(hash=False)

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Calibration:
        """Raises ValueError, KeyError or TypeError where the data is no calibration."""
        found = cls(**{name: data[name] for name in ("cpu", "threads", "date", "values")})
        for name, value in found.values.items():
            if name not in HOST_NUMBERS:
                raise ValueError(f"{name} is not calibrated")
            if not 0 < value < math.inf:
                raise ValueError(f"{name} = {value!r}")
        if not 1 <= found.threads <= 1 << 16:
            raise ValueError(f"threads = {found.threads!r}")
        return found

    def profile(self, base: HardwareProfile) -> HardwareProfile:
        """The profile with what was measured in place of its own values."""
        return replace(
            base,
            **self.values,
            num_sms=self.threads,
            graph_launch_us=self.values.get("launch_us", base.graph_launch_us),
            queued_launch_us=self.values.get("launch_us", base.queued_launch_us),
            description=f"{self.cpu}, {self.threads} threads, calibrated {self.date}",
            host=self.cpu,
        )


def host_profile() -> HardwareProfile:
    """The profile of this machine's CPU: calibrated, now if it never was; the shipped one where
    calibrations are switched off, interrupted, disturbed by other programs, or damaged.
    """
    return load_profile("llvm_cpu") if is_switched_off() else _host_profile(asked_threads())


def is_switched_off() -> bool:
    """Whether nothing is measured at first use."""
    return os.environ.get(VARIABLE) == "0"


@cache
def _host_profile(asked: int | None) -> HardwareProfile:
    """`asked` are the threads of the user's variables."""
    base, path = load_profile("llvm_cpu"), calibration_file()
    try:
        found = kept(path)
        if found is None:
            found = calibrated(base)
            _keep(path, found)
    except (ValueError, KeyError, TypeError, AttributeError, OSError) as error:
        _log.warning(
            "the calibration %s is damaged (%s): plans are made with the shipped profile; "
            "remove the file to calibrate again",
            path,
            error,
        )
        return base
    except DisturbedError as error:
        _log.warning(
            "this CPU is not calibrated: %s; plans are made with the shipped profile, and the next "
            "run calibrates again",
            error,
        )
        return base
    except KeyboardInterrupt:
        interrupts.check()  # a command ends; a program of its own goes on
        _log.warning(
            "the calibration of this CPU was interrupted: plans are made with the shipped "
            "profile; the next run calibrates again"
        )
        return base
    if asked is None and found.threads <= available_cores():
        use_calibrated_threads(found.threads)
    return found.profile(base)


def calibration_file() -> Path:
    """Where the calibration of this machine lies."""
    import tvm

    parts = [FORMAT, __version__, tvm.__version__, cpu_name(), str(cpu_target())]
    return cache_dir() / "hosts" / f"{digest([*parts, available_cores()])}.json"


def kept(path: Path) -> Calibration | None:
    """The calibration that lies there, None where there is none."""
    try:
        text = path.read_text(encoding="utf-8")
    except (FileNotFoundError, NotADirectoryError):
        return None
    return Calibration.from_dict(json.loads(text))


def _keep(path: Path, found: Calibration) -> None:
    try:
        make_folder(path.parent)
        replace_file(path, json.dumps({**asdict(found), "values": dict(found.values)}, indent=1))
    except (OSError, InputError) as error:
        _log.warning("the calibration of this CPU cannot be kept: %s", error)


def calibrated(base: HardwareProfile, budget_s: float = BUDGET_S) -> Calibration:
    """Measures this machine.

    On physical cores first; where hyper-threads are there, and the user names no number, on all of
    them too, if time is left.

    Raises
    ------
    DisturbedError
        Other programs run on the cores.
    """
    deadline = time.perf_counter() + budget_s
    _log.info("calibrating this CPU, once (at most %.0f s)", budget_s)
    threads = thread_count()
    found = _measured(base, deadline)
    most = available_cores()
    spent = budget_s - (deadline - time.perf_counter())
    if asked_threads() is None and most > threads and 2 * spent < budget_s:
        use_calibrated_threads(most)
        try:
            more = _measured(base, deadline)
        except DisturbedError:  # on so many; the others were measured
            more = None
        if more is not None and _gain(found.values, more.values) > LEAST_THREAD_GAIN:
            found, threads = more, most
        else:
            use_calibrated_threads(None)
    if found.waiting > MOST_WAITING:
        raise _disturbed(found)
    return Calibration(cpu_name(), threads, datetime.date.today().isoformat(), found.values)


def _gain(before: Mapping[str, float], after: Mapping[str, float]) -> float:
    """How many times faster, in the geometric mean of the rates that both have."""
    rates = [name for name in before if name.endswith(("_per_s", "_per_s_f32")) and name in after]
    if not rates:
        return 0.0
    return math.exp(math.fsum(math.log(after[n] / before[n]) for n in rates) / len(rates))


def _disturbed(trial: _Trial) -> DisturbedError:
    return DisturbedError(f"other programs took its cores for {trial.waiting:.0%} of the time")


class _Trial(NamedTuple):
    """Rates by field of the profile, how long it took to measure them, and for which share of their
    time on cores the threads waited for them.
    """

    values: dict[str, float]
    seconds: float
    waiting: float


def _measured(base: HardwareProfile, deadline: float) -> _Trial:
    """All steps, the most important first; a benchmark that fails and one that is not reached leave
    the shipped value as it is. Raises DisturbedError as soon as nothing can come of them.
    """
    from . import quick as cpu_quick
    from .bench import CpuBench

    bench = CpuBench(base, 0.0)
    trials: list[_Trial] = []
    for done, measure in enumerate(cpu_quick.STEPS):
        left_s = deadline - time.perf_counter()
        if left_s < 0:
            _log.info("not calibrated for want of time: %s", measure.__name__)
            break
        try:
            trials.append(_least_waiting(measure, bench, left_s / (len(cpu_quick.STEPS) - done)))
        except Exception as error:  # a trial: recorded, and the next one is run
            _log.warning("%s is not calibrated: %s", measure.__name__, error)
            continue
        if trials[-1].waiting > HOPELESS:
            raise _disturbed(trials[-1])
    seconds = sum(t.seconds for t in trials)
    waited = sum(t.seconds * t.waiting for t in trials)
    values = {name: value for t in trials for name, value in t.values.items()}
    return _Trial(values, seconds, waited / max(seconds, 1e-9))


def _least_waiting(measure: Callable[..., dict[str, float]], bench: Any, budget_s: float) -> _Trial:
    """The first trial that others did not disturb; where the time ends before, the best."""
    end, best = time.perf_counter() + budget_s, None
    while best is None or best.waiting > MOST_WAITING:
        trial = _trial(measure, bench)
        best = trial if best is None or trial.waiting < best.waiting else best
        if time.perf_counter() + trial.seconds > end:
            break
    return best


def _trial(measure: Callable[..., dict[str, float]], bench: Any) -> _Trial:
    began, before = time.perf_counter(), core_time()
    values = measure(bench)
    return _Trial(values, time.perf_counter() - began, core_time().waiting_since(before))
