"""Products of few terms on a GPU: error against float64, and time beside a copy of as many bytes.

    python tests/gpu/check_thin.py [--configs N] [--workers N] [--profile NAME] [--json F]

Kernels are the package's first choice, and the first `--configs` of each form. Times are those of
the kernels alone (CUPTI), medians of interleaved rounds, each launch behind a read that cleans the
L2. Outputs hold NaN before the checked run.
"""

import argparse
import json
import math
import multiprocessing
import os
import sys
import tempfile
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch
import tvm

from tests.support.thin_products import THIN, Thin
from tvm_fusion.config import load_policy, load_profile
from tvm_fusion.errors import Unsupported
from tvm_fusion.kernels.contraction.reader import analyze_contraction
from tvm_fusion.kernels.gemm.forms import WRITER
from tvm_fusion.runtime.build.build import build_functions
from tvm_fusion.runtime.timing.timing import kernel_times

TOLERANCE = 2e-3
ENTRY = "product"


def written(case: Thin, count: int, folder: str, profile: str) -> list[dict[str, Any]]:
    """Libraries of the first choice, then of the first `count` configurations of each form."""
    hw, policy = load_profile(profile), load_policy(None)
    problem = analyze_contraction(case.func())
    chosen = WRITER.ranked(problem, hw, policy)[:1]
    for form in WRITER.forms if count else ():
        try:
            chosen += form.rank(problem, hw, policy)[:count]
        except Unsupported:
            continue
    found = []
    for seconds, config in chosen:
        form = WRITER.form_of(config)
        kernel = form.emit(problem, hw, config).with_attr("global_symbol", ENTRY)
        library, resources = build_functions(tvm.IRModule({ENTRY: kernel}), hw.to_target())
        path = Path(folder, f"{os.getpid()}_{len(found)}_{case.name.replace(' ', '_')}.so")
        library.export_library(str(path))
        spilled = sum(r.spill_bytes for r in resources)
        row = {"form": form.name, "config": str(config), "predicted_us": seconds * 1e6}
        found.append({**row, "spill_bytes": spilled, "path": str(path)})
    return found


def check(case: Thin, kernels: list[dict[str, Any]], repeats: int) -> dict[str, Any]:
    """Runs one case; gives its row."""
    tensors = [torch.from_numpy(a).cuda() for a in case.arrays()]
    wanted = case.expected([t.double() for t in tensors])
    out = torch.empty(case.output_shape, device="cuda", dtype=tensors[0].dtype)
    arguments = [tvm.runtime.from_dlpack(t) for t in (*tensors, out)]
    calls = {}
    for number, kernel in enumerate(kernels):
        main = tvm.runtime.load_module(kernel.pop("path"))[ENTRY]
        out.fill_(math.nan)
        main(*arguments)
        torch.cuda.synchronize()
        error = ((out.double() - wanted).abs().max() / wanted.abs().max()).item()
        kernel["error"] = math.inf if math.isnan(error) else error
        calls[str(number)] = lambda main=main: main(*arguments)
    moved = sum(t.nbytes for t in (*tensors, out))
    source = torch.empty(moved // 2, device="cuda", dtype=torch.uint8)
    target = torch.empty_like(source)
    calls["copy"] = lambda: target.copy_(source)
    times = kernel_times(calls, repeats)
    for number, kernel in enumerate(kernels):
        kernel["us"] = times[str(number)].median_us
    copy = times["copy"].median_us
    first, best = kernels[0], min(kernels, key=lambda k: k["us"])
    print(
        f"{case.name:20s} copy {copy:6.1f} first {first['us']:6.1f} ({copy / first['us']:.2f} of"
        f" the copy rate, predicted {first['predicted_us']:.1f}, {first['form']}) best"
        f" {best['us']:6.1f} {best['form']} error {max(k['error'] for k in kernels):.1e}",
        flush=True,
    )
    return {"name": case.name, "bytes": moved, "copy_us": copy, "kernels": kernels}


def main() -> int:
    """The command; 1 where a kernel is wrong."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--configs", type=int, default=0)
    parser.add_argument("--repeats", type=int, default=12)
    parser.add_argument("--workers", type=int, default=14)
    parser.add_argument("--profile", default="nvidia_h200")
    parser.add_argument("--json")
    args = parser.parse_args()
    spawn = multiprocessing.get_context("spawn")
    with (
        tempfile.TemporaryDirectory() as folder,
        ProcessPoolExecutor(args.workers, mp_context=spawn) as pool,
    ):
        begun = [pool.submit(written, case, args.configs, folder, args.profile) for case in THIN]
        rows = [check(c, b.result(), args.repeats) for c, b in zip(THIN, begun, strict=True)]
    if args.json:
        found = {"device": torch.cuda.get_device_name(), "rows": rows}
        Path(args.json).write_text(json.dumps(found, indent=1))
    wrong = [r["name"] for r in rows if any(k["error"] > TOLERANCE for k in r["kernels"])]
    print(f"{len(rows)} cases, wrong: {wrong or 'none'}")
    return bool(wrong)


if __name__ == "__main__":
    sys.exit(main())
