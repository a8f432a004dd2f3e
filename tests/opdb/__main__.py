"""Compile what PyTorch's operator database has, and compare with eager execution.

    python -m tests.opdb                                     all of it; 1 if it is not as listed
    python -m tests.opdb --dtypes float32,int64 --only 'nn.functional.*' --part 1/5 --out F.json
    python -m tests.opdb --dtypes float32 --beside inductor  and torch.compile on the same samples
    python -m tests.opdb --dtypes float32 --inductor-of F.json   as that earlier run has inductor
    python -m tests.opdb --through torch.compile             and not tvm_fusion.compile

`tests/opdb/exceptions.toml` lists what is not right. What is worse or other than it says ends the
run with status 1; what has become right is told, so that it can be struck off the list.
"""

from __future__ import annotations

import argparse
import datetime
import json
import shlex
import sys
import time
from collections import Counter
from collections.abc import Sequence
from fnmatch import fnmatch
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

from tvm_fusion.errors import CHECK_FAILED
from tvm_fusion.tuning.measure.processes import Answer

from ..benchmarks.record import cpu_name
from ..support.answers import ONE_THREAD, answers
from . import DTYPES, OUTCOMES, exceptions, judge
from .earlier import Earlier
from .exceptions import Entry
from .samples import entries

LIMIT_S = 300.0  # beside others on all cores; a few seconds alone
INDUCTOR_LIMIT_S = 60.0
DYNAMO = "torch.compile"
INSIDE = ", no operator of a graph outside our parts"
WHOLE = f"{INSIDE}, no graph break"
KEPT_S = 10.0  # results are written so often
VERSIONS = {name: metadata.version(name) for name in ("torch", "apache-tvm")}
ENVIRONMENT = {**ONE_THREAD, "TORCHINDUCTOR_COMPILE_THREADS": "1"}


def main(argv: Sequence[str] | None = None) -> int:
    """Judge the chosen entries and print what was found; returns the exit status."""
    args = _parser().parse_args(argv)
    chosen = [
        entry
        for entry in entries(args.dtypes)
        if any(fnmatch(entry[0], p) for p in args.only or ["*"])
    ]
    part, parts = args.part
    chosen = chosen[part - 1 :: parts]
    found = _Found(args, chosen)
    try:
        _ask(args, chosen, found)
    finally:  # also of a run that is interrupted
        found.keep()
    listed = exceptions.read()
    if args.through == DYNAMO:
        listed = exceptions.not_refused(listed)
    return _tell(found.result(), listed)


def _ask(args: argparse.Namespace, chosen: Sequence[Entry], found: _Found) -> None:
    """Have all entries judged."""
    ask = partial(answers, jobs=args.jobs, environment=ENVIRONMENT)
    calls = [(*entry, args.target) for entry in chosen]
    way = judge.judge_backend if args.through == DYNAMO else judge.judge
    for (*entry, _), answer in ask(way, calls, limit_s=LIMIT_S, setup=judge.prepare):
        found.add(tuple(entry), answer)
    if args.beside == "inductor":
        judged = [entry for entry in chosen if found.asks_inductor(entry)]
        limit = {"limit_s": INDUCTOR_LIMIT_S, "setup": judge.prepare_inductor}
        for entry, answer in ask(judge.judge_inductor, judged, **limit):
            found.add_inductor(entry, answer)


class _Found:
    """What is found, told and kept while it comes: a run may be ended before its end."""

    def __init__(self, args: argparse.Namespace, chosen: Sequence[Entry]) -> None:
        self.args, self.chosen = args, chosen
        self.rows: dict[Entry, dict[str, Any]] = {}
        self._earlier = Earlier(args.inductor_of, args.onto)
        if self._earlier.versions not in (None, VERSIONS):
            raise SystemExit(f"--onto {args.onto}: made with {self._earlier.versions}")
        self._begun = self._kept = time.monotonic()

    def add(self, entry: Entry, answer: Answer) -> None:
        self.rows[entry] = row = _row(*entry, answer)
        if entry in self._earlier.by_inductor and row["outcome"] != "not judged":
            row["inductor"] = self._earlier.by_inductor[entry]
        self._told(row)

    def asks_inductor(self, entry: Entry) -> bool:
        """Whether an entry is judged, and no earlier run has an answer."""
        known = entry in self._earlier.by_inductor
        return self.rows[entry]["outcome"] != "not judged" and not known

    def add_inductor(self, entry: Entry, answer: Answer) -> None:
        row = _row(*entry, answer)
        self.rows[entry]["inductor"] = {key: row[key] for key in ("outcome", "why", "seconds")}
        self._told(row, "by inductor")

    def _told(self, row: dict[str, Any], whose: str = "") -> None:
        words = [row["operator"], row["dtype"], whose, row["outcome"], row["seconds"], row["why"]]
        if row["outcome"] != "right" or "outside" in row:
            words.append(row.get("outside", ""))
            print(*(word for word in words if word != ""), file=sys.stderr, flush=True)
        if time.monotonic() - self._kept > KEPT_S:
            self.keep()

    def result(self) -> dict[str, Any]:
        """All rows so far, in the order of the database, and what they come to."""
        own = {entry: self.rows[entry] for entry in self.chosen if entry in self.rows}
        rows = self._earlier.with_new(own)
        return {
            "device": _device(self.args.target),
            "date": datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d"),
            "command": shlex.join(["python", *sys.orig_argv[1:]]),
            "versions": VERSIONS,
            "target": self.args.target,
            "through": self.args.through,
            **self._earlier.facts(own),
            "seconds": round(time.monotonic() - self._begun, 1),
            "counts": _counts(rows, self.args.dtypes, self.args.through == DYNAMO),
            "rows": rows,
        }

    def keep(self) -> None:
        """Writes the result where it is wanted."""
        self._kept = time.monotonic()
        if self.args.out is not None:
            self.args.out.write_text(json.dumps(self.result(), indent=1) + "\n", encoding="utf-8")


def _device(target: str) -> str:
    return cpu_name() if target == "llvm" else torch.cuda.get_device_name()


def _row(name: str, dtype: str, answer: Answer) -> dict[str, Any]:
    """An answer as a row of the result."""
    outcome, why = ("internal error", answer.why)
    if answer.status == "ok":
        outcome, why = answer.value["outcome"], answer.value["why"]
    elif answer.status in ("crash", "timeout", "memory"):
        outcome = "timeout" if answer.status == "timeout" else "crash"
    seconds = round(answer.seconds, 2)
    row = {"operator": name, "dtype": dtype, "outcome": outcome, "why": why, "seconds": seconds}
    if answer.status == "ok" and answer.value["outside"]:
        row["outside"] = answer.value["outside"]
    return row


def _counts(
    rows: Sequence[dict[str, Any]], dtypes: Sequence[str], through_dynamo: bool
) -> dict[str, dict[str, int]]:
    """How many rows of a type have which outcome, ours and inductor's."""
    counts = {}
    for dtype in dtypes:
        own = [row for row in rows if row["dtype"] == dtype]
        found = Counter(row["outcome"] for row in own)
        counts[dtype] = {outcome: found[outcome] for outcome in OUTCOMES}
        if any("inductor" in row for row in own):
            counts[dtype] |= _beside_inductor([row for row in own if _right_by_inductor(row)])
        if through_dynamo:
            counts[dtype] |= _inside(own)
    return counts


def _beside_inductor(rows: Sequence[dict[str, Any]]) -> dict[str, int]:
    """How many of the rows that inductor has right are right here: of all, and of those that it
    compiles as one graph, where Dynamo leaves nothing to eager execution.
    """
    whole = [row for row in rows if not row["inductor"]["why"]]
    return {
        "right by inductor": len(rows),
        "right by inductor and here": _right(rows),
        "right by inductor as one graph": len(whole),
        "right by inductor as one graph and here": _right(whole),
    }


def _inside(rows: Sequence[dict[str, Any]]) -> dict[str, int]:
    """Through `torch.compile`: how many rows are right with no operator of a graph outside our
    parts, how many of those have no graph break either, and the same of what inductor has right.
    """
    own = [row for row in rows if row["outcome"] == "right" and "outside" not in row]
    found = {}
    for kind, some in ((INSIDE, own), (WHOLE, [row for row in own if not row["why"]])):
        theirs = [row for row in some if _right_by_inductor(row)]
        whole = [row for row in theirs if not row["inductor"]["why"]]
        found |= {
            f"right{kind}": len(some),
            f"right by inductor and here{kind}": len(theirs),
            f"right by inductor as one graph and here{kind}": len(whole),
        }
    return found


def _right(rows: Sequence[dict[str, Any]]) -> int:
    return sum(row["outcome"] == "right" for row in rows)


def _right_by_inductor(row: dict[str, Any]) -> bool:
    return row.get("inductor", {}).get("outcome") == "right"


def _tell(found: dict[str, Any], listed: dict[Entry, tuple[str, str]]) -> int:
    for dtype, counts in found["counts"].items():
        said = {what: n for what, n in counts.items() if n and INSIDE not in what}
        print(f"{dtype}: " + ", ".join(f"{n} {what}" for what, n in said.items()))
        for kind in (INSIDE, WHOLE):
            if f"right{kind}" in counts:
                print(f"{dtype}: {counts[f'right{kind}']} right{kind}")
        for theirs in ("right by inductor", "right by inductor as one graph"):
            for kind in ("", INSIDE, WHOLE):
                if counts.get(theirs) and f"{theirs} and here{kind}" in counts:
                    share = counts[f"{theirs} and here{kind}"] / counts[theirs]
                    print(f"{dtype}: {share:.1%} of {theirs} are right here{kind}")
    outcomes = {(row["operator"], row["dtype"]): row["outcome"] for row in found["rows"]}
    worse, better = exceptions.deviations(outcomes, listed)
    for line in better:
        print(f"better than listed: {line}")
    for line in worse:
        print(f"NOT AS LISTED: {line}")
    return CHECK_FAILED if worse else 0


def _part(text: str) -> tuple[int, int]:
    part, _, parts = text.partition("/")
    if not (part.isdigit() and parts.isdigit() and 1 <= int(part) <= int(parts)):
        raise argparse.ArgumentTypeError(f"expected K/N with 1 <= K <= N, got {text!r}")
    return int(part), int(parts)


def _dtypes(text: str) -> list[str]:
    names = text.split(",")
    if not set(names) <= set(DTYPES):
        raise argparse.ArgumentTypeError(f"expected some of {','.join(DTYPES)}, got {text!r}")
    return names


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m tests.opdb", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    add = parser.add_argument
    add("--dtypes", type=_dtypes, default=list(DTYPES), help="some of " + ",".join(DTYPES))
    add("--only", action="append", help="operators by name, with * and ?; may be repeated")
    add("--part", type=_part, default=(1, 1), help="K/N: every Nth entry from the Kth on")
    add("--jobs", type=int, default=2, help="processes (2)")
    add(
        "--through",
        choices=["tvm_fusion.compile", DYNAMO],
        default="tvm_fusion.compile",
        help="what compiles: tvm_fusion.compile, or torch.compile with our backend",
    )
    add("--target", default="llvm", help="as tvm_fusion.compile takes it (llvm)")
    add(
        "--beside",
        choices=["inductor"],
        help="torch.compile on the same samples, on this CPU; slow",
    )
    add(
        "--inductor-of",
        type=Path,
        action="append",
        default=[],
        metavar="FILE",
        help="an earlier result: entries that inductor answered in time are not asked for again",
    )
    add("--onto", type=Path, help="an earlier result, whose other entries stay in this one")
    add("--out", type=Path, help="a file for all rows, as JSON")
    return parser


if __name__ == "__main__":
    sys.exit(main())
