"""torch's operators and our calls in turns in one process, as programs around compiled parts do.

    python -m tests.benchmarks.neighbours --json neighbours.json

Each program is called four ways: alone; in turns with a copy of itself, whose weights and tensors
take the caches in the same way as a neighbour's; and torch's operators in turns with our module.
Who shares threads with a neighbour loses what a copy takes, the caches; two pools of threads lose
slices of the scheduler, which show in the mean first. The ways are timed one after the other in
several rounds and compared within each, since machines have slow moments.
"""

from __future__ import annotations

import argparse
import copy
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

import tvm_fusion
from tvm_fusion.host.threads import thread_count

from .record import header, write

ROUNDS, CALLS, WARM_CALLS, PAUSE_S = 7, 200, 20, 0.1
WAYS = ("alone", "beside a copy", "in turns")

Call = Callable[[], Any]


class Chain(torch.nn.Module):
    """Arithmetic of a point."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """`relu((x + 1) * 2)`."""
        return torch.relu((x + 1) * 2)


def programs() -> Iterator[tuple[str, torch.nn.Module, torch.Tensor]]:
    """Programs of 5 us to some milliseconds on few cores."""
    yield "chain 256x256", Chain(), torch.randn(256, 256)
    yield "chain 1024x2048", Chain(), torch.randn(1024, 2048)
    yield "layernorm 512x768", torch.nn.LayerNorm(768), torch.randn(512, 768)
    linear = torch.nn.Sequential(torch.nn.Linear(256, 688), torch.nn.ReLU())
    yield "linear 128x256x688", linear, torch.randn(128, 256)
    encoder = torch.nn.TransformerEncoderLayer(256, 4, 1024, batch_first=True)
    yield "encoder layer 128x256", encoder, torch.randn(1, 128, 256)


def measure(model: torch.nn.Module, x: torch.Tensor, rounds: int, calls: int) -> dict[str, Any]:
    """Microseconds of torch's calls of a program and of ours in each way, and how many times as
    long those in turns take.
    """
    model = model.eval()
    copied, y = copy.deepcopy(model), x.clone()
    taken: list[dict[tuple[str, str], list[float]]] = []
    with torch.no_grad():
        ours, other = (tvm_fusion.compile((m, (v,)), "llvm") for m, v in ((model, x), (copied, y)))
        both = {"torch": lambda: model(x), "ours": lambda: ours(x)}
        copies = {"torch": lambda: copied(y), "ours": lambda: other(y)}
        for _ in range(rounds):
            taken.append(samples := {})
            for who, call in both.items():
                sample(samples, {(who, "alone"): call}, calls)
                sample(samples, {(who, "beside a copy"): call, ("copy", who): copies[who]}, calls)
            sample(samples, {(who, "in turns"): call for who, call in both.items()}, calls)
    row: dict[str, Any] = {}
    for who in both:
        by_round = [{way: summary(samples[who, way]) for way in WAYS} for samples in taken]
        row[who] = {way: summary([us for s in taken for us in s[who, way]]) for way in WAYS}
        row[who]["loss"] = [loss(by_round, way) for way in WAYS[:-1]]
    return row


def sample(samples: dict[tuple, list[float]], calls: dict[tuple, Call], number: int) -> None:
    """Add the microseconds of `number` calls of each, in turns, after a pause and warm calls."""
    time.sleep(PAUSE_S)
    for turn in range(WARM_CALLS + number):
        for name, call in calls.items():
            start = time.perf_counter()
            call()
            taken = time.perf_counter() - start
            if turn >= WARM_CALLS:
                samples.setdefault(name, []).append(taken * 1e6)


def summary(values: Sequence[float]) -> dict[str, float]:
    """Median, quartiles and mean."""
    low, median, high = statistics.quantiles(values, n=4, method="inclusive")
    found = {"us": median, "low_us": low, "high_us": high, "mean_us": statistics.fmean(values)}
    return {name: round(value, 2) for name, value in found.items()}


def loss(rounds: Sequence[dict[str, dict[str, float]]], way: str) -> dict[str, float]:
    """How many times as long calls take in turns as in another way, by the medians and by the means
    of a round; the median over the rounds.
    """
    found = {}
    for name in ("us", "mean_us"):
        ratios = [ways[WAYS[-1]][name] / ways[way][name] for ways in rounds]
        found[name] = round(statistics.median(ratios), 3)
    return found


def parser() -> argparse.ArgumentParser:
    """The options."""
    options = argparse.ArgumentParser(prog="python -m tests.benchmarks.neighbours")
    options.add_argument("--json", type=Path, help="file for the result")
    options.add_argument("--rounds", type=int, default=ROUNDS, help=f"by default {ROUNDS}")
    options.add_argument("--calls", type=int, default=CALLS, help=f"a round, by default {CALLS}")
    options.add_argument("--only", default="", help="programs whose name begins so")
    return options


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, print a table and write the result."""
    args = parser().parse_args(argv)
    torch.backends.mha.set_fastpath_enabled(False)  # one operator for the whole layer
    result = header("llvm_cpu", False, 1, args.rounds)
    result |= {"threads": thread_count(), "torch_threads": torch.get_num_threads()}
    result["calls"] = args.calls
    torch.manual_seed(0)
    print("medians in us, of torch and of ours, and how many times as long in turns (means)")
    for name, model, x in programs():
        if not name.startswith(args.only):
            continue
        row = measure(model, x, args.rounds, args.calls)
        result["rows"].append({"name": name, **row})
        print(line(name, row))
    if args.json:
        write(result, args.json)
    return 0


def line(name: str, row: dict[str, Any]) -> str:
    """A row as text."""
    parts = []
    for who in ("torch", "ours"):
        us = ", ".join(f"{way} {row[who][way]['us']:,.1f}" for way in WAYS)
        lost = " and ".join(f"{x['us']:.2f} ({x['mean_us']:.2f})" for x in row[who]["loss"])
        parts.append(f"    {who:6} {us}: {lost}")
    return "\n".join([name, *parts])


if __name__ == "__main__":
    raise SystemExit(main())
