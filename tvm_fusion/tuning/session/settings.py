"""Settings of a tuning session, read from ``configs/tune_*.toml``, and its time."""

import math
import time
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from ...config import shipped_file
from ...config.toml import nearest, number, number_fields, parse, read_toml
from ...errors import ConfigError
from ..search.surrogate import Spread

SPACES = ("class", "stock")


@dataclass(frozen=True, slots=True)
class Settings:
    """How a session tunes.

    Attributes
    ----------
    name : str
        For reports.
    spaces : tuple of str
        "class": the configurations of the kernel classes. "stock": MetaSchedule evolves schedules
        in its own design space, for operators that no class of this package writes (and for every
        kernel on a CPU).
    trials : int
        Most trials of the session.
    trials_per_task : int
    minutes : float
        Most time of all; 0 is no limit. The trials end when what is left is needed for the finals
        and the joint runs.
    builders : int
        Processes that write and compile kernels; 0 is one per core but one.
    repeats : int
        Samples of a trial.
    final_repeats : int
        Samples of each finalist.
    finalists : int
        Choices of a task that are timed once more, side by side with the untuned one.
    build_timeout_s, run_timeout_s : float
        After which a trial is given up. Inputs and float64 reference, made before the first trial
        of a task in a process, have a time of their own (`processes.PREPARING_S`; at TVM's own RPC
        servers both count together), and final measurements one for all their samples.
    evolve_timeout_s : float
        Of a batch of schedules: a search that took longer is left.
    joint_s : float
        Most time after the trials, for all contested cuts together, in which these are run both
        ways with their tuned kernels (a quarter of the minutes at most); those it does not reach
        are decided by sums.
    build_memory_bytes : int
        That writing and compiling one kernel may take.
    least_gain : float
        Share of the tuned time of all tasks that one more trial must be expected to save; the
        session ends where none is.
    certain_gain : float
        Share by which a choice must be faster than the untuned one to be taken.
    rank_spread, task_spread : float
        Standard deviation of the logarithm of measured over predicted: among the choices of one
        task, and of all choices of a task together.
    noise : float
        Standard deviation of the logarithm of one measured time.
    likeness : float
        Differing settings after which one choice says 1/e about another.
    evolved_gain : float
        Share of a kernel's time that a first batch of evolved schedules is expected to save; halved
        with every batch that is not 1 % faster than what was best before.
    seed : int
        Of what is drawn.
    """

    name: str
    spaces: tuple[str, ...]
    trials: int = number("count", least=1)
    trials_per_task: int = number("count", least=1)
    minutes: float = number("min", least=0)
    builders: int = number("count", least=0)
    repeats: int = number("count", least=3)
    final_repeats: int = number("count", least=3)
    finalists: int = number("count", least=1)
    build_timeout_s: float = number("s", least=1)
    run_timeout_s: float = number("s", least=1)
    evolve_timeout_s: float = number("s", least=1)
    joint_s: float = number("s", least=0)
    build_memory_bytes: int = number("byte", least=1 << 28)
    least_gain: float = number("1", least=0)
    certain_gain: float = number("1", least=0)
    rank_spread: float = number("1", least=0.001)
    task_spread: float = number("1", least=0.001)
    noise: float = number("1", least=0.0001)
    likeness: float = number("1", least=0.1)
    evolved_gain: float = number("1", least=0)
    seed: int = number("1", least=1)

    def __post_init__(self) -> None:
        values = {f.name: getattr(self, f.name) for f in fields(self)}
        _check(values, f"tuning settings {self.name}")

    @property
    def spread(self) -> Spread:
        """What the surrogate starts with."""
        return Spread(self.rank_spread, self.task_spread, self.noise, self.likeness)


def load_settings(settings: Any = None, **arguments: Any) -> Settings:
    """Read settings.

    Parameters
    ----------
    settings : str, Path, Mapping, Settings or None
        A path to a TOML file or a mapping, which change the keys they name of the default settings
        (None).
    arguments
        In place of what the settings have; None leaves it.

    Raises
    ------
    ConfigError
        No such file, an unknown key or a wrong value.

    Examples
    --------
    >>> load_settings({"trials": 16}).trials
    16
    """
    given = {key: value for key, value in arguments.items() if value is not None}
    return replace(_read(settings), **_changes(given, "tune", strict=False))


def _read(settings: Any) -> Settings:
    if isinstance(settings, Settings):
        return settings
    file = shipped_file("tune_default.toml")
    base = parse(Settings, read_toml(file), file.name, strict=True, partial=False)
    if settings is None:
        return Settings(**base)
    if isinstance(settings, Mapping):
        changes = _changes(settings, "tuning settings", strict=False)
        return Settings(**base | {"name": "custom"} | changes)
    if not isinstance(settings, str | Path):
        raise ConfigError(f"tuning settings: expected a file or a mapping, got {settings!r}")
    path = Path(settings)
    if not path.is_file():
        raise ConfigError(f"no such file: {path}; check the path")
    changes = _changes(read_toml(path), str(path), strict=True)
    return Settings(**base | {"name": path.stem} | changes)


def _changes(given: Mapping[str, Any], where: str, strict: bool) -> dict[str, Any]:
    """Some settings, checked."""
    changes = parse(Settings, dict(given), where, strict, partial=True)
    _check(changes, where)
    return changes


def _check(values: Mapping[str, Any], where: str) -> None:
    """Raises ConfigError for a value that is too small or a space that there is not."""
    for space in values.get("spaces", ()):
        if space not in SPACES:
            known = ", ".join(SPACES)
            near = nearest(space, SPACES)
            raise ConfigError(f"{where}: spaces names {space!r}{near}; there is {known}")
    for spec in number_fields(Settings):
        value, least = values.get(spec.name, math.inf), spec.metadata["least"]
        if not value >= least:
            raise ConfigError(f"{where}: {spec.name} must be at least {least}, not {value}")


@dataclass
class TimeLimit:
    """The time of a call of `tune`, from its beginning.

    Attributes
    ----------
    minutes : float
        0 is no limit.
    kept_s : float
        What is to be left when the trials end.
    """

    minutes: float
    kept_s: float = 0.0
    began: float = field(default_factory=time.monotonic)

    @property
    def seconds(self) -> float:
        """Since the beginning."""
        return time.monotonic() - self.began

    @property
    def left_s(self) -> float:
        """Of all, 0 at least; infinite without a limit."""
        return max(0.0, self.minutes * 60 - self.seconds) if self.minutes else math.inf

    @property
    def is_near(self) -> bool:
        """Whether the trials have to end."""
        return self.left_s <= self.kept_s

    def share(self, part: float, most_s: float) -> float:
        """A part of the minutes, in seconds; `most_s` at most, and without a limit."""
        return min(most_s, part * self.minutes * 60) if self.minutes else most_s
