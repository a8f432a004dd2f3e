"""`python -m tvm_fusion calibrate`: run the benchmarks, write the profile, say what changed."""

from __future__ import annotations

import argparse
import logging
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol

from ..config import (
    HardwareProfile,
    load_profile,
    profile_file,
    profile_text,
    resolve_target,
    targets,
)
from ..config.toml import nearest, number_fields
from ..errors import CHECK_FAILED, ConfigError, InputError, TargetError
from ..host.atomic_files import replace_file
from ..host.interrupts import INTERRUPTED
from ..host.terminal import is_plain
from .findings import Family, Finding, Measured, NotMeasured
from .profile_file import described, notes_of, spelled, with_notes, with_values

# Progress on standard error: a bar where `rich` is installed and someone looks, else lines.


class Progress(Protocol):
    """Shows what is being done."""

    def start(self, title: str) -> None:
        """The next step begins."""

    def done(self, result: str) -> None:
        """The step ended; one line about it."""


class Quiet:
    """Nothing."""

    def start(self, title: str) -> None: ...

    def done(self, result: str) -> None: ...


class Lines:
    """A line a step."""

    def __init__(self, steps: int) -> None:
        self.steps, self.step = steps, 0
        self.title, self.began = "", 0.0

    def start(self, title: str) -> None:
        self.step += 1
        self.title, self.began = title, time.perf_counter()

    def done(self, result: str) -> None:
        taken = time.perf_counter() - self.began
        line = f"[{self.step}/{self.steps}] {self.title} ({taken:.1f} s): {result}"
        print(line, file=sys.stderr, flush=True)


class Bar(Lines):
    """A bar of `rich`, with the lines above it."""

    def __init__(self, steps: int, progress: object) -> None:
        super().__init__(steps)
        self.progress = progress
        self.task = progress.add_task("", total=steps)

    def start(self, title: str) -> None:
        super().start(title)
        self.progress.update(self.task, description=title)

    def done(self, result: str) -> None:
        taken = time.perf_counter() - self.began
        self.progress.console.print(f"{self.title} ({taken:.1f} s): {result}", markup=False)
        self.progress.advance(self.task)


@contextmanager
def progress(steps: int, quiet: bool = False) -> Iterator[Progress]:
    """Progress over a number of steps."""
    if quiet:
        yield Quiet()
        return
    if is_plain(sys.stderr):
        yield Lines(steps)
        return
    try:
        from rich.console import Console
        from rich.progress import BarColumn, TextColumn, TimeElapsedColumn
        from rich.progress import Progress as RichProgress
    except ImportError:
        yield Lines(steps)
        return
    console = Console(file=sys.stderr)
    columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
    with RichProgress(*columns, console=console, transient=True) as bar:
        yield Bar(steps, bar)


_log = logging.getLogger(__name__)


@dataclass(slots=True)
class Outcome:
    """What a run found: values, notes and gaps by family, and the families that failed."""

    values: list[Measured] = field(default_factory=list)
    notes: dict[str, Sequence[str]] = field(default_factory=dict)
    missing: list[str] = field(default_factory=list)
    failures: dict[str, str] = field(default_factory=dict)


def main(args: argparse.Namespace) -> int:
    """Run the command; returns the exit status.

    Raises
    ------
    TargetError
        The device is not in this machine.
    InputError
        `--out` cannot be written, or holds something else.
    ConfigError
        `--only` names no family, `--budget` no time.
    """
    if args.refit:
        from ..cost.learned.refit import main as refit

        return refit(args)
    began = time.perf_counter()
    if not args.budget >= 0:
        raise ConfigError(f"--budget {args.budget:g}: expected seconds")
    hw = _device(args.target)
    families = _chosen(families_of(hw), args.only)
    out, text, known = _files(args, hw)
    variant = hw.kind == "cuda" and hw.num_sms != known.num_sms
    profile = replace(known, num_sms=hw.num_sms) if variant else known
    try:
        outcome = run(profile, families, began + args.budget, args.quiet)
        if not outcome.values and not outcome.notes:
            _report_gaps(outcome)
            print(f"calibrate: nothing was measured; {out} is as it was", file=sys.stderr)
            return CHECK_FAILED
        if variant:
            outcome.values.append(Measured("num_sms", hw.num_sms, "reported by the driver"))
        write(out, text, profile, outcome)
    except KeyboardInterrupt:
        print(f"calibrate: interrupted; {out} is as it was", file=sys.stderr)
        return INTERRUPTED
    _report(known, outcome, out, time.perf_counter() - began)
    return CHECK_FAILED if outcome.failures else 0


def families_of(hw: HardwareProfile) -> tuple[Family, ...]:
    """The families that measure a device."""
    if hw.kind == "llvm":
        from .cpu.families import FAMILIES
    else:
        from .cuda.families import FAMILIES

    return FAMILIES


def run(
    profile: HardwareProfile, families: Sequence[Family], deadline: float, quiet: bool = False
) -> Outcome:
    """Run families of benchmarks; the error of one leaves the others alone.

    `deadline` is a time of `time.perf_counter`; families are not started after it.
    """
    outcome = Outcome()
    with progress(len(families) + 1, quiet) as shown:
        shown.start("building")
        bench = _bench(profile, families, deadline)
        failures = getattr(bench, "failures", {})
        shown.done("built" + (f", but for {', '.join(failures)}" if failures else ""))
        for family in families:
            _run(family, bench, deadline, outcome, shown)
    return outcome


def _run(family: Family, bench: Any, deadline: float, outcome: Outcome, shown: Progress) -> None:
    shown.start(family.title)
    if time.perf_counter() > deadline:
        outcome.missing.append(f"{family.name}: the time is used up (--budget)")
        shown.done("left out")
        return
    try:
        found = family.measure(bench)
    except NotMeasured as why:
        found = Finding((), (), (f"{family.name}: {why}",))
    except Exception as error:  # a trial: recorded, and the next family is run
        _log.debug("%s failed", family.name, exc_info=True)
        outcome.failures[family.name] = f"{type(error).__name__}: {' '.join(str(error).split())}"
        shown.done("failed")
        return
    outcome.values += found.values
    outcome.missing += found.missing
    if found.notes:
        outcome.notes[family.name] = found.notes
    shown.done(", ".join(v.field for v in found.values) or "no values")


def write(out: Path, text: str, profile: HardwareProfile, outcome: Outcome) -> None:
    """Write the profile `text` with what was found, whole or not at all."""
    text = with_values(text, profile, outcome.values, described(profile))
    kept = [n for n in notes_of(text) if n.partition(":")[0] not in outcome.notes]
    new = [f"{family}: {note}" for family, notes in outcome.notes.items() for note in notes]
    replace_file(out, with_notes(text, kept + new), check=load_profile)


def _bench(profile: HardwareProfile, families: Sequence[Family], deadline: float) -> Any:
    if profile.kind == "llvm":
        from .cpu.bench import CpuBench

        left = max(0.0, deadline - time.perf_counter())
        return CpuBench(profile, left / (2 * len(families)))
    from .cuda.bench import CudaBench

    kernels = {name: f for family in families for name, f in family.kernels(profile).items()}
    return CudaBench(profile, kernels)


def _device(target: str | None) -> HardwareProfile:
    """The profile of a device of this machine."""
    if str(target).lower() in targets.THIS_CPU or (
        target is None and targets.present_gpu()[0] is None
    ):
        return load_profile("llvm_cpu")
    _, hw = resolve_target(target)
    if hw.kind == "llvm":
        return hw
    name, _ = targets.present_gpu()
    if name is None:
        raise TargetError(f"this machine has no {hw.name} to measure; run it where there is one")
    if not targets.names_gpu(hw, name) and not str(target).endswith(".toml"):
        raise TargetError(
            f"the GPU of this machine is {name}, not {hw.name}"
            "; name that one, or a profile of your own"
        )
    return hw


def _chosen(families: tuple[Family, ...], only: str | None) -> tuple[Family, ...]:
    if only is None:
        return families
    names = [name.strip() for name in only.split(",") if name.strip()]
    known = [family.name for family in families]
    if not names:
        raise ConfigError(f"--only names no family; known: {', '.join(known)}")
    for name in names:
        if name not in known:
            raise ConfigError(
                f"--only: unknown family {name!r}{nearest(name, known)}; known: {', '.join(known)}"
            )
    return tuple(family for family in families if family.name in names)


def _files(args: argparse.Namespace, hw: HardwareProfile) -> tuple[Path, str, HardwareProfile]:
    """The file to write, and the text and the profile that give what is not measured.

    They are those of the file itself where it exists (so that families can be measured one after
    the other), else of the profile that was named, else of the one that ships with the package or
    is derived.
    """
    out = Path(args.out or f"{hw.name}.toml")
    if not out.absolute().parent.is_dir():
        raise InputError(f"cannot write {out}: there is no such directory; make it first")
    if not out.exists() and hw.derived:
        return out, profile_text(hw), hw
    if not out.exists():
        base = profile_file(args.target if str(args.target).endswith(".toml") else hw.name)
        return out, base.read_text(encoding="utf-8"), load_profile(base)
    try:
        known = load_profile(out)
    except (ConfigError, OSError) as error:
        raise InputError(f"{out} is no profile; name another --out ({error})") from error
    if known.name != hw.name:
        raise InputError(f"{out} is the profile of {known.name}; name another --out")
    return out, out.read_text(encoding="utf-8"), known


def _report(profile: HardwareProfile, outcome: Outcome, out: Path, seconds: float) -> None:
    units = {f.name: f.metadata["unit"] for f in number_fields(HardwareProfile)}
    rows = [("number", "old", "new", "unit")]
    for value in outcome.values:
        for name, old, new in _changes(value, getattr(profile, value.field)):
            rows.append((name, old, new, units[value.field]))
    widths = [max(len(row[column]) for row in rows) for column in range(4)]
    for name, old, new, unit in rows:
        print(f"{name:<{widths[0]}}  {old:>{widths[1]}}  {new:>{widths[2]}}  {unit}")
    for notes in outcome.notes.values():
        for note in notes:
            print(f"  {note}")
    sys.stdout.flush()
    _report_gaps(outcome)
    print(f"wrote {out} in {seconds:.0f} s; use it as: --target ./{out.name}", file=sys.stderr)


def _report_gaps(outcome: Outcome) -> None:
    for gap in outcome.missing:
        print(f"not measured, the old value stays: {gap}", file=sys.stderr)
    for name, why in outcome.failures.items():
        print(f"failed, the old values stay: {name}: {why}", file=sys.stderr)


def _changes(value: Measured, old: Any) -> list[tuple[str, str, str]]:
    """Name, old and new of a number, or of each number of a table."""
    if not isinstance(value.value, Mapping):
        return [(value.field, spelled(old, type(old)), spelled(value.value, type(old)))]
    return [
        (f"{value.field}.{key}", spelled(old[key]) if key in old else "-", spelled(new))
        for key, new in value.value.items()
    ]
