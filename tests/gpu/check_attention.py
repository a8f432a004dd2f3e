"""Attention of 40 random configurations on a GPU, at full size, against float64.

    python tests/gpu/check_attention.py [--seeds N ...] [--json F] [--jobs N] [--seconds S]

Each configuration of `tests.support.attention_random` is compiled as a whole module by
`tvm_fusion.compile`
and run; float64 results are computed by torch on the device. Outputs lie in memory that holds NaN.
Every configuration has a process and a time limit of its own: one that fails or hangs costs itself
only. Processes compile side by side and take the GPU in turn. Needs TVM, and torch with CUDA.
"""

import argparse
import datetime
import fcntl
import json
import math
import os
import shutil
import subprocess
import sys
import tempfile
import time
import traceback
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
if shutil.which("nvcc"):
    os.environ.setdefault("TVM_CUDA_COMPILE_MODE", "nvcc")

from tests.support.attention_random import SEEDS, configuration

CALLS = 4  # after the first, outputs take memory of earlier ones, which holds NaN by then


def check(seed: int, target: str, lock: Path) -> dict:
    """Compiles and runs one configuration; what was found."""
    import torch

    import tvm_fusion
    from tests.support.attention_random_graphs import module_of
    from tests.support.attention_random_numbers import ceilings, error, expected, numbers

    c = configuration(seed)
    compiled = tvm_fusion.compile(module_of(c), target, verify=False)
    with lock.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        inputs = numbers(c, "cuda")
        wanted = expected(c, inputs)
        torch.cuda.synchronize()
        poisoned: set[int] = set()
        for call in range(CALLS):
            results = compiled(*inputs.values())
            got = [results] if isinstance(results, torch.Tensor) else list(results)
            torch.cuda.synchronize()
            places = {x.data_ptr() for x in got}
            if call < CALLS - 1:
                poisoned |= places
                for x in got:
                    x.fill_(math.nan)
                torch.cuda.synchronize()
                del results, got, x
        errors = error(c, got, wanted)
    limits = ceilings(c)
    groups = [g.kernel_class for g in compiled.plan.groups if g.kernel_class != "view"]
    return {
        "errors": errors,
        "ceilings": limits,
        "passed": all(errors[name] <= limits[name] for name in limits),
        "poisoned": places <= poisoned,
        "launches": compiled.launches,
        "kernels": groups,
    }


def isolated(seed: int, args: argparse.Namespace, until: float, folder: Path) -> dict:
    """One configuration in a process of its own; prints a line and returns its row."""
    c = configuration(seed)
    row = {"configuration": str(c), **asdict(c), "passed": False}
    found = folder / f"{seed}.json"
    left = until - time.monotonic()
    command = [sys.executable, __file__, "--one", str(seed), "--target", args.target]
    command += ["--lock", str(folder / "lock"), "--json", str(found)]
    if left < 1:
        row["failure"] = "no time was left"
    else:
        try:
            ran = subprocess.run(command, timeout=left, capture_output=True, text=True)
            row |= json.loads(found.read_text()) if found.exists() else {}
            if not found.exists():
                row["failure"] = f"exit status {ran.returncode}: {ran.stderr[-300:]}"
        except subprocess.TimeoutExpired:
            row["failure"] = f"more than {left:.0f} s"
    text = row.get("failure", "")
    if not text:
        parts = [f"{n} {row['errors'][n]:.1e} of {row['ceilings'][n]:.0e}" for n in row["errors"]]
        text = f"{', '.join(parts)}  {' '.join(row['kernels'])}"
        text += "" if row["poisoned"] else "  (outputs not poisoned)"
    print(f"{'ok  ' if row['passed'] else 'FAIL'} {c}: {text}", flush=True)
    return row


def versions() -> dict[str, str]:
    """The device and what it runs with."""
    import torch
    import tvm

    import tvm_fusion

    query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    driver = subprocess.run(query, capture_output=True, text=True).stdout.strip()
    return {
        "device": torch.cuda.get_device_name(),
        "driver": driver.splitlines()[0] if driver else "unknown",
        "cuda": str(torch.version.cuda),
        "torch": torch.__version__,
        "tvm": tvm.__version__,
        "tvm_fusion": tvm_fusion.__version__,
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", nargs="*", type=int, default=list(SEEDS), help="which ones")
    parser.add_argument("--jobs", type=int, default=14, help="processes that compile side by side")
    parser.add_argument("--seconds", type=float, default=85, help="time for all")
    parser.add_argument("--target", default="nvidia_h200", help="hardware profile")
    parser.add_argument("--json", type=Path, help="file for the results")
    parser.add_argument("--one", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--lock", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.one is not None:
        try:
            row = check(args.one, args.target, args.lock)
        except Exception as why:
            row = {"failure": f"{type(why).__name__}: {str(why)[:300]}"}
            row["where"] = traceback.format_exc(limit=-4)
        args.json.write_text(json.dumps(row))
        return 0
    begun = time.monotonic()
    with tempfile.TemporaryDirectory() as name, ThreadPoolExecutor(args.jobs) as pool:
        run = partial(isolated, args=args, until=begun + args.seconds, folder=Path(name))
        rows = list(pool.map(run, args.seeds))
    failed = [row["seed"] for row in rows if not row["passed"]]
    if args.json:
        about = versions() | {"date": datetime.date.today().isoformat()}
        about["command"] = "python tests/gpu/check_attention.py --json FILE"
        about["seconds"] = round(time.monotonic() - begun, 1)
        args.json.write_text(json.dumps({**about, "rows": rows}, indent=1) + "\n")
    print(f"failed: {', '.join(map(str, failed)) or 'none'} of {len(rows)}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
