"""What a comparison with stock MetaSchedule says (`stock_tuning`): who is ahead, and from when."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tvm_fusion.errors import InputError

from ..record import OURS

UNTUNED, STOCK, DEFAULT = "untuned", "stock", "tvm"
FORMAT = "stock_tuning 1"
_SAME = ("format", "device", "profile", "versions", "method", "scale", "trials")


def compare(row: dict[str, Any]) -> None:
    """Fills in stock's time over ours, and the trials after which ours is ahead."""
    ours, stock = row["us"].get(OURS), row["us"].get(STOCK)
    if ours is None or stock is None:
        return
    row["ratio"] = stock / ours
    if OURS not in row["clock_ratio"]:
        return
    mine = _scaled(row, OURS)
    if row["trials"].get(STOCK):
        row["equal_trials_ratio"] = stock / _at(mine, row["trials"][STOCK])
    row["ahead_after"] = next((k for k, us in mine if us < stock), None)
    if STOCK in row["clock_ratio"]:
        row["ahead_from"] = _ahead_from(mine, _scaled(row, STOCK))


def _scaled(row: dict[str, Any], label: str) -> list[tuple[int, float]]:
    """A history by the clock of the final run, infinite while nothing is known."""
    ratio = row["clock_ratio"][label]
    return [(k, math.inf if us is None else us * ratio) for k, us in row["history"][label]]


def _ahead_from(
    mine: Sequence[tuple[int, float]], theirs: Sequence[tuple[int, float]]
) -> int | None:
    """The first trial from which on `mine` is below `theirs` after as many trials; where one is
    shorter, its last time counts on.
    """
    last = max(mine[-1][0], theirs[-1][0])
    found = None
    for k in range(last, 0, -1):
        if not _at(mine, k) < _at(theirs, k):
            break
        found = k
    return found


def _at(points: Sequence[tuple[int, float]], k: int) -> float:
    return min((us for n, us in points if n <= k), default=math.inf)


def table(rows: Sequence[dict[str, Any]]) -> str:
    """The rows as lines of text."""
    labels = (OURS, UNTUNED, STOCK, DEFAULT)
    head = f"{'row':<16}" + "".join(f"{x:>11}" for x in labels)
    lines = [head + f"{'ratio':>7}{'trials':>9}{'ahead':>7}{'from':>6}{'s':>7}"]
    for row in rows:
        us = "".join(f"{_text(row['us'].get(x), '.1f'):>11}" for x in labels)
        trials = "/".join(str(row["trials"].get(x, "-")) for x in (OURS, STOCK))
        lines.append(
            f"{row['name']:<16}{us}{_text(row['ratio'], '.2f'):>7}{trials:>9}"
            f"{_text(row['ahead_after'], 'd'):>7}{_text(row['ahead_from'], 'd'):>6}"
            f"{row['spent_s']:>7.0f}"
        )
        lines += [f"  {label}: {why}" for label, why in row["failures"].items()]
    return "\n".join(lines)


def _text(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)


def merge(paths: Sequence[Path]) -> dict[str, Any]:
    """Joins results of one kind of machine and number of trials; of a row that two have, the later
    file's counts. Each row keeps its date: what it compares was timed in one run.
    """
    results = [json.loads(path.read_text()) for path in paths]
    for path, result in zip(paths, results, strict=True):
        for key in _SAME:
            if result.get(key) != results[0].get(key):
                raise InputError(f"{path} does not go with {paths[0]}: {key} differs")
    rows = {r["name"]: {"date": result["date"], **r} for result in results for r in result["rows"]}
    commands = "; ".join(dict.fromkeys(result["command"] for result in results))
    date = max(result["date"] for result in results)
    return results[0] | {"date": date, "command": commands, "rows": list(rows.values())}
