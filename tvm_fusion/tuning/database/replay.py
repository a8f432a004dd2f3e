"""Lines of MetaSchedule's files, tried in a process of their own: TVM may end it, not this one.

    python -m tvm_fusion.tuning.database.replay <suspects> <verdicts> <done>

Each line of the file of suspects is ``[<workload>, [<record>, ...]]``. The file of verdicts begins
with a line ``["ready"]``; then one line ``[<reason or null>]`` goes to it for each part, the
workload before its records. The first `done` parts are passed over: a process before judged them.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tvm import tirx
from tvm.s_tir.meta_schedule.database import Workload

from ...errors import InputError
from ..measure.processes import module_command
from .lines import canonical
from .metaschedule import ENTRY, arguments_of, hash_of, load, load_record

_MOST_CRASHES = 5  # each costs the start of another process
_START_S, _PART_S = 120, 5


class CannotJudge(InputError):
    """There is no process to try lines in: nothing is known of them."""


@dataclass(frozen=True, slots=True)
class Suspect:
    """A workload, and records that are said to be of it."""

    key: str
    module: str
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
        lines = (canonical([[s.key, s.module], list(s.payloads)]) + "\n" for s in suspects)
        file.write_text("".join(lines), encoding="utf-8")
        crashes = 0
        while len(reasons) < parts and crashes < _MOST_CRASHES:
            how = _run(file, Path(folder, f"verdicts{crashes}"), reasons, parts)
            if len(reasons) < parts:
                reasons.append(how)
                crashes += 1
    reasons += ["not tried, after other lines that crash TVM"] * (parts - len(reasons))
    left = iter(reasons)
    return [Verdict(next(left), tuple(next(left) for _ in s.payloads)) for s in suspects]


def command() -> list[str]:
    """What `judge` starts."""
    return module_command(__name__, torch=False)


def _run(file: Path, verdicts: Path, reasons: list[str | None], parts: int) -> str:
    """Extend `reasons` as far as one process gets; returns how it ended."""
    limit_s = _START_S + _PART_S * (parts - len(reasons))
    words = [*command(), str(file), str(verdicts), str(len(reasons))]
    try:
        run = subprocess.run(
            words, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, timeout=limit_s
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


def check_workload(key: str, module: str) -> Workload:
    """The workload, if its module is one PrimFunc with the hash that the line names."""
    workload = load(key, module)
    names = [var.name_hint for var in workload.mod.functions]
    if names != [ENTRY] or not isinstance(workload.mod[ENTRY], tirx.PrimFunc):
        raise ValueError(f"the module holds {names}, not one PrimFunc called {ENTRY}")
    if (found := hash_of(workload.mod)) != key:
        raise ValueError(f"the module's structural hash is {found}, not {key}")
    return workload


def check_record(payload: list[Any], workload: Workload) -> None:
    """Replays the record's trace on its workload."""
    load_record(payload, workload)
    if payload[3] is not None and payload[3] != arguments_of(workload.mod):
        raise ValueError("the arguments are not those of the workload")


def attempt(check: Callable[..., Any], *args: Any) -> tuple[Any, str | None]:
    """What a check returns, and why it fails or None."""
    try:
        return check(*args), None
    except Exception as error:  # whatever TVM says of a line is the verdict on it
        return None, (str(error).strip().splitlines() or [type(error).__name__])[-1][:300]


def verdicts_on(lines: Iterable[str], done: int) -> Iterable[str | None]:
    """Of each part of the lines of suspects behind the first `done`."""
    for line in lines:
        (key, module), payloads = json.loads(line)
        if done > len(payloads):
            done -= 1 + len(payloads)
            continue
        workload, why = attempt(check_workload, key, module)
        if done == 0:
            yield why
        for payload in payloads[max(done - 1, 0) :]:
            yield "its workload is damaged" if why else attempt(check_record, payload, workload)[1]
        done = 0


def main(suspects: str, verdicts: str, done: str) -> None:
    """See the module docstring."""
    with open(suspects, encoding="utf-8") as lines, open(verdicts, "a", encoding="utf-8") as out:
        print('["ready"]', file=out, flush=True)
        for why in verdicts_on(lines, int(done)):
            print(json.dumps([why]), file=out, flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
