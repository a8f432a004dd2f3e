"""A GPU's derived profile beside its measured one: which kernels differ, and their times.

    python tests/gpu/check_derived.py differ FILE [--device nvidia_h200] [--only PATTERN] [--jobs N]
    python tests/gpu/check_derived.py time FILE OUT.json [--workers N] [--repeats N]

`differ` needs no GPU: the cases of `tests.benchmarks.golden` are planned by the derived profile,
and their kernels and calls compared with the digests that are kept of the measured one, and the
plans of the random graphs of `results/plan_quality.json` by both; FILE says of each what differs,
and is gone on with where it is there. `time` compiles the workloads of suites and the graphs that
differ by both profiles on the GPU present, and times them in turns, each checked against float64,
outputs of workloads NaN before. Where kernels and calls are the same, so are times.
"""

import argparse
import json
import multiprocessing
import os
import statistics
import sys
import tempfile
from collections.abc import Mapping
from concurrent.futures import ProcessPoolExecutor
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch

from tests.benchmarks import golden
from tests.benchmarks.golden_cases import cases, kind_of
from tests.benchmarks.plans.collect import _enter, _prepare
from tests.benchmarks.plans.graph_launches import Choice, opened, queued_policy
from tests.benchmarks.plans.launch_check import check_launches
from tests.benchmarks.plans.measured_graph import open_runner
from tests.benchmarks.plans.quality import NEAR
from tests.gpu.check_portable import prepared, setups_of, timed
from tvm_fusion.config import profile_text
from tvm_fusion.config.cards import Card
from tvm_fusion.config.files import profile_of_card
from tvm_fusion.plan.decide.decide import decide

RESULTS = Path(__file__).resolve().parents[1] / "results"
ROUNDS, SAMPLES = 4, 10  # of each plan of a graph, in turns

# As the data sheets say.
CARDS = {
    "nvidia_h200": Card(
        "derived_h200",
        "H200 by its data sheet",
        "sm_90a",
        num_sms=132,
        clock_ghz=1.98,
        memory_gb=141,
        bandwidth_gb_per_s=4800,
        l2_mib=50,
        source="the data sheet",
    ),
}


def written_profile(device: str, folder: Path) -> str:
    """The file of a device's derived profile."""
    card = CARDS[device]
    path = folder / f"{card.name}.toml"
    path.write_text(profile_text(profile_of_card(card)))
    return str(path)


def differing(device: str, only: str, kept: dict[str, str], jobs: int, file: Path) -> None:
    """Adds what differs of each case to `kept` and to a file; "" where nothing does."""
    stored = golden.stored(device)
    names = [n for n, case in sorted(cases().items()) if case.is_for(device) and fnmatch(n, only)]
    with tempfile.TemporaryDirectory() as folder:
        path = written_profile(device, Path(folder))
        pairs = [(name, path) for name in names if name not in kept]
        for name, found in golden._all_found(pairs, jobs):
            kept[name] = golden.change(compared(stored[name]), compared(found[path]))
            print(f"{name}: {kept[name] or 'the same'}", flush=True)
            file.write_text(json.dumps({"device": device, "cases": kept}, indent=1) + "\n")


def differing_graphs(device: str, only: str, kept: dict[str, str], file: Path) -> None:
    """The same of the plans of random graphs, for launches that queue up, as they are measured."""
    keys = [row["graph"] for row in quality_rows() if fnmatch(row["graph"], only)]
    with tempfile.TemporaryDirectory() as folder:
        for key in keys:
            if key not in kept:
                plans = [plan_of(key, t) for t in (device, written_profile(device, Path(folder)))]
                kept[key] = "plan" if plans[0] != plans[1] else ""
                print(f"{key}: {kept[key] or 'the same'}", flush=True)
    file.write_text(json.dumps({"device": device, "cases": kept}, indent=1) + "\n")


def quality_rows() -> list[dict[str, Any]]:
    """The graphs whose plans were all measured, and how near to the best the chosen ones are."""
    return json.loads((RESULTS / "plan_quality.json").read_text())["rows"]


def plan_of(key: str, target: str) -> list[tuple]:
    """The groups of a graph's plan."""
    _, graph, hw, _ = opened(key, target)
    return [(g.kernel_class, tuple(g.ops)) for g in decide(graph, hw, queued_policy()).groups]


def compared(found: Mapping[str, Any]) -> dict[str, Any]:
    """What is compared: a plan has predicted times, too."""
    return {part: digests for part, digests in found.items() if part != "plan"}


def time_differing(device: str, kept: Mapping[str, str], workers: int, repeats: int) -> dict:
    """Times of the workloads of suites that differ; those of all others are the same."""
    suites = [name for name in kept if kind_of(name) == "suites" and not name.startswith("cpu")]
    names = [name.partition("/")[2] for name in suites if kept[name]]
    found: dict[str, Any] = {"gpu": torch.cuda.get_device_name(), "same": len(suites) - len(names)}
    with tempfile.TemporaryDirectory() as folder, torch.no_grad():
        targets = {"measured": device, "derived": written_profile(device, Path(folder))}
        setups = setups_of(targets, repeats)
        built = prepared(names, setups, workers, folder)
        rows = [timed(name, setups, built) for name in names]
    ratios = {row["name"]: row["ratio"] for row in rows if "ratio" in row}
    for name, ratio in sorted(ratios.items(), key=lambda item: item[1]):
        print(f"{name:40} derived / measured {ratio:.3f}", flush=True)
    every = [*ratios.values(), *[1.0] * found["same"]]
    found |= {"mean_ratio": statistics.geometric_mean(every), "largest": max(every), "rows": rows}
    print(
        f"{len(every)} workloads: geometric mean {found['mean_ratio']:.4f}, {found['largest']:.3f}"
    )
    return found


def time_graphs(device: str, kept: Mapping[str, str], workers: int) -> dict[str, Any]:
    """Spans of the plans of graphs that differ, and how many of all are near the best plan."""
    rows = {
        row["graph"]: row["careful_over_best"] for row in quality_rows() if row["graph"] in kept
    }
    found: dict[str, Any] = {"graphs": len(rows), "spans_us": {}, "wrong": {}}
    spawn = multiprocessing.get_context("spawn")
    with (
        tempfile.TemporaryDirectory() as folder,
        ProcessPoolExecutor(workers, spawn, _enter) as pool,
    ):
        targets = {"measured": device, "derived": written_profile(device, Path(folder))}
        jobs = {}
        for key in (key for key in rows if kept[key]):
            for form, target in targets.items():
                own = Path(folder, f"{key.replace(':', '_')}_{form}")
                own.mkdir()
                jobs[key, form] = pool.submit(_prepare, key, Choice(target, 0, 0), own)
        for key in dict.fromkeys(key for key, _ in jobs):
            runners, spans = {}, {form: [] for form in targets}
            for form, target in targets.items():
                made = jobs[key, form].result()
                if made.error:
                    raise RuntimeError(f"{key} {form}: {made.error}")
                runner = open_runner(made, target)
                if wrong := check_launches(runner, made, lambda text: None):
                    found["wrong"][f"{key} {form}"] = [*map(str, wrong.values())]
                runners[form] = runner, made.plans[made.careful].specs
            for _ in range(ROUNDS):
                for form, (runner, specs) in runners.items():
                    spans[form] += runner.time([specs], SAMPLES)[0].spans_us
            own = {form: statistics.median(each) for form, each in spans.items()}
            found["spans_us"][key] = own
            rows[key] *= own["derived"] / own["measured"]
            print(key, own, flush=True)
    found["over_best"] = rows
    found["within_3_percent"] = sum(ratio <= NEAR for ratio in rows.values())
    print(f"{found['within_3_percent']} of {len(rows)} graphs within 3 % of the best plan")
    return found


def main() -> int:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    ways = parser.add_subparsers(dest="way", required=True)
    differ = ways.add_parser("differ")
    differ.add_argument("file", type=Path)
    differ.add_argument("--device", choices=CARDS, default="nvidia_h200")
    differ.add_argument("--only", default="*", help="cases by name")
    differ.add_argument("--jobs", type=int, default=1, help="processes")
    time = ways.add_parser("time")
    time.add_argument("file", type=Path)
    time.add_argument("out", type=Path)
    time.add_argument("--workers", type=int, default=8, help="processes that compile, a profile")
    time.add_argument("--repeats", type=int, default=20)
    args = parser.parse_args()
    known = json.loads(args.file.read_text()) if args.file.exists() else {}
    if args.way == "differ":
        os.environ.update(golden.SETTINGS)
        kept = known.get("cases", {})
        differing_graphs(args.device, args.only, kept, args.file)
        differing(args.device, args.only, kept, args.jobs, args.file)
        return 0
    found = time_differing(known["device"], known["cases"], args.workers, args.repeats)
    args.out.write_text(json.dumps(found, indent=1, default=str) + "\n")
    found["random"] = time_graphs(known["device"], known["cases"], args.workers)
    args.out.write_text(json.dumps(found, indent=1, default=str) + "\n")
    return int(not all(row["right"] for row in found["rows"]) or bool(found["random"]["wrong"]))


if __name__ == "__main__":
    sys.exit(main())
