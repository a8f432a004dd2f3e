"""Architectures of transformers and timm on a CPU, beside torch.

    python -m tests.zoo --out tests/results/zoo.json         all 120, and decoding with a cache
    python -m tests.zoo --only 't5*' --source transformers   some of them
    python -m tests.zoo --through torch.compile              our backend, what stays in torch

Each is compiled in another process, which is ended after `--limit` seconds. A result is right
if it errs by at most 1e-4 of its largest number, or by four times the error of torch in float32
(both beside float64): where a model chooses, as experts do, rounding may choose otherwise.
"""

from __future__ import annotations

import argparse
import datetime
import fnmatch
import importlib.metadata
import json
import shlex
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from tvm_fusion.errors import CHECK_FAILED

from ..benchmarks.record import cpu_name
from ..support.answers import ONE_THREAD, answers
from .judge import (
    ERROR,
    OUTCOMES,
    RIGHT,
    SLOW,
    SOURCES,
    Dynamo,
    Verdict,
    judged,
    judged_through_dynamo,
    module_of,
    prepare,
)

PACKAGES = ("apache-tvm", "torch", "transformers", "timm", "numpy")
LIMIT_S = 120.0
DYNAMO = "torch.compile"
CACHES = ("TVM_FUSION_PLAN_CACHE", "TVM_FUSION_KERNEL_CACHE", "TVM_FUSION_CALIBRATE")
ENVIRONMENT = {**ONE_THREAD, **dict.fromkeys(CACHES, "0")}


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tests.zoo",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--source", choices=SOURCES, help="of one package only")
    parser.add_argument("--only", default="*", metavar="PATTERN", help="names, as in 'gpt*'")
    parser.add_argument("--jobs", type=int, default=1, help="processes at once")
    parser.add_argument(
        "--through",
        choices=["tvm_fusion.compile", DYNAMO],
        default="tvm_fusion.compile",
        help="what compiles: tvm_fusion.compile, or torch.compile with our backend",
    )
    parser.add_argument("--limit", type=float, default=LIMIT_S, help="seconds for one")
    parser.add_argument("--out", type=Path, help="a file for the result, JSON")
    parser.add_argument(
        "--again",
        type=Path,
        nargs="+",
        default=[],
        metavar="F.json",
        help="what was right in earlier results counts, and is not done again",
    )
    args = parser.parse_args(argv)
    names = [
        (source, name)
        for source in SOURCES
        if args.source in (None, source)
        for name in (*module_of(source).TABLE, *module_of(source).WAYS)
        if fnmatch.fnmatch(name, args.only)
    ]
    before = {name: verdict for path in args.again for name, verdict in right_in(path).items()}
    verdicts = [before[name] for name in names if name in before]
    left = [name for name in names if name not in before]
    write(args.out, verdicts, names, args.limit)
    judge = judged_through_dynamo if args.through == DYNAMO else judged
    for verdict in verdicts_of(left, args.jobs, args.limit, judge):
        print(line(verdict), flush=True)
        verdicts.append(verdict)
        write(args.out, verdicts, names, args.limit)
    print(", ".join(f"{n} {outcome}" for outcome, n in counts(verdicts).items()))
    if any(verdict.dynamo for verdict in verdicts):
        print(*(f"{n} {what}" for what, n in _through_dynamo(verdicts).items()), sep="\n")
    return 0 if all(verdict.outcome == RIGHT for verdict in verdicts) else CHECK_FAILED


def write(
    path: Path | None, verdicts: Sequence[Verdict], names: Sequence[tuple], limit: float
) -> None:
    """Keeps what is there, in the order of the tables."""
    if path is not None:
        places = {name: place for place, name in enumerate(names)}
        ordered = sorted(verdicts, key=lambda v: places[v.source, v.name])
        path.write_text(json.dumps(result(ordered, limit), indent=1) + "\n")


def right_in(path: Path) -> dict[tuple[str, str], Verdict]:
    """The models that are right in a result."""
    models = json.loads(path.read_text())["models"]
    named = {tuple(name.split("/", 1)): facts for name, facts in models.items()}
    right = {name: facts for name, facts in named.items() if facts["outcome"] == RIGHT}
    return {name: _read(*name, **facts) for name, facts in right.items()}


def _read(source: str, name: str, dynamo: dict | None = None, **facts: Any) -> Verdict:
    return Verdict(source, name, **facts, dynamo=Dynamo(**dynamo) if dynamo else None)


def verdicts_of(
    names: Sequence[tuple[str, str]],
    jobs: int = 1,
    limit_s: float = LIMIT_S,
    judge: Callable[[str, str], Verdict] = judged,
) -> Iterator[Verdict]:
    """Models of sources judged by other processes, as they are done."""
    for name, answer in answers(judge, names, jobs, limit_s, prepare, ENVIRONMENT):
        if answer.status == "ok":
            yield answer.value
        else:
            outcome = SLOW if answer.status == "timeout" else ERROR
            yield Verdict(*name, outcome, answer.why)


def line(verdict: Verdict) -> str:
    """A verdict for the terminal."""
    phases = ", ".join(f"{name} {s}" for name, s in verdict.phases.items())
    dynamo = verdict.dynamo
    beside = (
        ""
        if dynamo is None
        else (
            f"; {dynamo.graphs} graphs, {dynamo.parts} parts, "
            f"{dynamo.breaks} breaks (Dynamo's: {dynamo.breaks_of_dynamo}), "
            f"{dynamo.flop_inside:.1%} of FLOP in them; {' '.join(dynamo.outside)}"
        )
    )
    return (
        f"{verdict.source}/{verdict.name}: {verdict.outcome} {verdict.why} "
        f"(error {verdict.error:.0e}, {verdict.seconds} s; {phases}){beside}"
    )


def counts(verdicts: Sequence[Verdict]) -> dict[str, int]:
    """How many there are of each outcome."""
    found = Counter(verdict.outcome for verdict in verdicts)
    return {outcome: found[outcome] for outcome in OUTCOMES if found[outcome]}


def result(verdicts: Sequence[Verdict], limit: float) -> dict:
    """What is kept of a run. Ways of decoding are counted apart from architectures."""
    groups = {
        **{
            source: [v for v in verdicts if v.source == source and "/" not in v.name]
            for source in SOURCES
        },
        "decoding": [v for v in verdicts if "/" in v.name],
    }
    facts = {
        "device": cpu_name(),
        "target": "llvm",
        "date": datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d"),
        "versions": {name: importlib.metadata.version(name) for name in PACKAGES},
        "command": shlex.join(["python", *sys.orig_argv[1:]]),
        "limit_s": limit,
        "counts": {name: counts(group) for name, group in groups.items()},
        "models": {f"{v.source}/{v.name}": _kept(v) for v in verdicts},
    }
    if any(v.dynamo for v in verdicts):
        facts["through torch.compile"] = _through_dynamo(verdicts)
    return facts


def _through_dynamo(verdicts: Sequence[Verdict]) -> dict:
    """What stays in torch, of all models that ran through `torch.compile`."""
    ran = {f"{v.source}/{v.name}": v.dynamo for v in verdicts if v.dynamo}
    return {
        "models": len(ran),
        "nothing outside our parts": sum(not d.outside and not d.breaks for d in ran.values()),
        "as a whole in eager mode": [name for name, d in ran.items() if not d.parts],
        "less than 95 % of FLOP in our parts": [n for n, d in ran.items() if d.flop_inside < 0.95],
        "more graph breaks than Dynamo's own": [
            name for name, d in ran.items() if d.breaks > d.breaks_of_dynamo
        ],
    }


def _kept(verdict: Verdict) -> dict:
    """What a verdict says, without what is empty."""
    facts = asdict(verdict)
    del facts["source"], facts["name"]
    return {name: fact for name, fact in facts.items() if fact not in ("", {}, 0, None)}


if __name__ == "__main__":
    sys.exit(main())
