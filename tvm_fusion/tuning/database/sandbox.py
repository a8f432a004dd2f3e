"""Lines of unknown origin, tried in a process of their own: TVM may end it, not this one."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .lines import WorkloadLine, canonical

_SCRIPT = Path(__file__).with_name("replay_process.py")
_MOST_CRASHES = 5  # each costs the start of another process
_START_S, _PART_S = 120, 5


class CannotJudge(RuntimeError):
    """There is no process to try lines in: nothing is known of them."""


@dataclass(frozen=True, slots=True)
class Suspect:
    """A workload, and records that are said to be of it."""

    workload: WorkloadLine
    payloads: tuple[list[Any], ...] = ()


@dataclass(frozen=True, slots=True)
class Verdict:
    """Why TVM does not take a workload or its records; None where it does."""

    workload: str | None
    payloads: tuple[str | None, ...]


def judge(suspects: Sequence[Suspect]) -> list[Verdict]:
    """Load each workload, compare its hash, and replay each record on it.

    A part at which the process ends or hangs is damaged, and the next process goes on behind it.
    After some of these the parts that are left count as damaged too.

    Raises
    ------
    CannotJudge
        No such process can be started here.
    """
    parts = sum(1 + len(suspect.payloads) for suspect in suspects)
    reasons: list[str | None] = []
    with tempfile.TemporaryDirectory(prefix="tvm_fusion_") as folder:
        file = Path(folder, "suspects")
        file.write_text("".join(_line(suspect) for suspect in suspects), encoding="utf-8")
        crashes = 0
        while len(reasons) < parts and crashes < _MOST_CRASHES:
            how = _run(file, Path(folder, f"verdicts{crashes}"), reasons, parts)
            if len(reasons) < parts:
                reasons.append(how)
                crashes += 1
    reasons += ["not tried, after other lines that crash TVM"] * (parts - len(reasons))
    return _verdicts(suspects, reasons)


def _line(suspect: Suspect) -> str:
    value = json.loads(suspect.workload.text)
    return canonical([value, list(suspect.payloads)]) + "\n"


def _run(file: Path, verdicts: Path, reasons: list[str | None], parts: int) -> str:
    """Extend `reasons` as far as one process gets; returns how it ended."""
    limit_s = _START_S + _PART_S * (parts - len(reasons))
    command = [sys.executable, "-P", str(_SCRIPT), str(file), str(verdicts), str(len(reasons))]
    try:
        run = subprocess.run(
            command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, timeout=limit_s
        )
        how = f"TVM crashes on it (status {run.returncode})"
    except subprocess.TimeoutExpired:
        how = f"TVM hangs on it (longer than {limit_s} s)"
    except OSError as error:
        raise CannotJudge(f"{sys.executable} cannot be started: {error}") from error
    text = verdicts.read_text(encoding="utf-8") if verdicts.exists() else ""
    ready, *done = text[: text.rfind("\n") + 1].splitlines() or [""]
    if not ready:
        raise CannotJudge(f"a process that tries lines ends before its first one: {how}")
    reasons += [json.loads(line)[0] for line in done]
    return how


def _verdicts(suspects: Sequence[Suspect], reasons: list[str | None]) -> list[Verdict]:
    found, left = [], iter(reasons)
    for suspect in suspects:
        workload = next(left)
        found.append(Verdict(workload, tuple(next(left) for _ in suspect.payloads)))
    return found
