"""A GPU's derived profile beside its measured one: which kernels differ, and their times.

    python tests/gpu/check_derived.py differ FILE [--device nvidia_h200] [--only PATTERN] [--jobs N]
    python tests/gpu/check_derived.py time FILE OUT.json [--workers N] [--repeats N]

`differ` needs no GPU: the cases of `tests.benchmarks.golden` are planned by the derived profile,
and their kernels and calls compared with the digests that are kept of the measured one; FILE says
of each case what differs, and is gone on with where it is there. `time` compiles the workloads of
suites that differ by both profiles on the GPU present, and times them in turns, each checked
against float64, its outputs NaN before. Where kernels and calls are the same, so are times.
"""

import argparse
import json
import os
import statistics
import sys
import tempfile
from collections.abc import Mapping
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch

from tests.benchmarks import golden
from tests.benchmarks.golden_cases import cases, kind_of
from tests.gpu.check_portable import prepared, setups_of, timed
from tvm_fusion.config import profile_text
from tvm_fusion.config.cards import Card
from tvm_fusion.config.files import profile_of_card

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
        differing(args.device, args.only, known.get("cases", {}), args.jobs, args.file)
        return 0
    found = time_differing(known["device"], known["cases"], args.workers, args.repeats)
    args.out.write_text(json.dumps(found, indent=1, default=str) + "\n")
    return int(not all(row["right"] for row in found["rows"]))


if __name__ == "__main__":
    sys.exit(main())
