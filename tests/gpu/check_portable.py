"""Portable forms beside Hopper's on one card: error against float64, and interleaved times.

    python tests/gpu/check_portable.py OUT.json [--only NAME,...] [--workers N] [--repeats N]
                                       [--sweep N [--shapes MxNxK,...]]

Each workload is compiled for the GPU present, of compute capability 9.0, and for `arch = "sm_90"`,
without what sm_90a alone has. `--sweep`: instead, or beside `--only`, products of few rows by the
first N tiles of the mma.sync form, with rings of all lengths, and the first N configurations of the
skinny form, beside the first choice for the GPU present. Times are those of the kernels (CUPTI),
the L2 cleaned before each call; outputs hold NaN before a checked call. 1 if one is wrong.
"""

import argparse
import json
import math
import multiprocessing
import statistics
import sys
import tempfile
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch
import tvm

from tests.benchmarks.peers.registry import outputs_of
from tests.benchmarks.rows.accuracy import CEILINGS, checked_error, reference
from tests.benchmarks.rows.prepare import Prepared, prepare
from tests.benchmarks.rows.setup import Setup
from tests.support import gemm_cases as graphs
from tests.support.kernel_cases import fuse
from tvm_fusion.config import load_policy, resolve_target
from tvm_fusion.kernels.contraction.reader import analyze_contraction
from tvm_fusion.kernels.gemm.forms import WRITER
from tvm_fusion.kernels.gemm.mma.rank import mma_ranked
from tvm_fusion.runtime.build.build import build_functions
from tvm_fusion.runtime.calls.compiled_module import CompiledModule
from tvm_fusion.runtime.timing.timing import kernel_times

TARGETS = {"hopper": "cuda", "portable": {"kind": "cuda", "arch": "sm_90"}}
WORKLOADS = (
    "gemv_fp16",
    "gemm_16x4096x4096",
    "gemm_16x14336x4096",
    "gemm_16x4096x14336",
    "gemm_256x1024x1024",
    "gemm_256x4096x4096",
    "gemm_256x14336x4096",
    "gemm_256x4096x14336",
    "gemm_2048x4096x4096",
    "gemm_4096x4096x4096",
    "gemm_fp8_4096x4096x4096",
    "attention_d128",
    "attention_document",
    "decode_16x2048",
    "llama_decode_1",
    "llama_decode_16",
)
SWEPT = (
    (16, 4096, 4096),
    (16, 14336, 4096),
    (16, 4096, 14336),
    (32, 4096, 4096),
    (64, 4096, 4096),
    (64, 14336, 4096),
    (64, 4096, 14336),
    (256, 4096, 4096),
    (256, 4096, 14336),
    (256, 14336, 4096),
)
HALF, ENTRY = "float16", "product"


def setups_of(targets: Mapping[str, Any], repeats: int) -> dict[str, Setup]:
    """The set-up of a run for each of the targets."""
    return {
        form: Setup(named, *resolve_target(named), (), None, 1.0, repeats, 5.0)
        for form, named in targets.items()
    }


def prepared(
    names: Sequence[str], setups: Mapping[str, Setup], workers: int, folder: str
) -> dict[str, Prepared]:
    """What is compiled of the workloads for each target, by `workers` processes each."""
    with ThreadPoolExecutor(len(setups)) as threads:
        begun = {}
        for form, setup in setups.items():
            own = Path(folder, form)
            own.mkdir()
            begun[form] = threads.submit(prepare, names, setup, workers, own)
        return {form: one.result() for form, one in begun.items()}


def timed(name: str, setups: Mapping[str, Setup], built: Mapping[str, Prepared]) -> dict[str, Any]:
    """The row of a workload; `ratio` is that of the last target's time to the first one's."""
    instance = next(iter(setups.values())).instance(name)
    wanted, _ = reference(instance)
    row: dict[str, Any] = {"name": name, "dtype": instance.dtype, "right": True}
    calls = {}
    for form, made in built.items():
        saved = made.saved.get(name)
        if saved is None:
            why = next((why for key, why in made.failures.items() if key[0] == name), "")
            row["right"], row[f"{form}_failure"] = False, why[:500]
            continue
        module = CompiledModule.load(next(iter(saved.paths.values())))
        given = tuple(x.clone() for x in instance.inputs)
        error = checked_error(lambda m=module, g=given: m(*g), given, wanted)
        row["right"] &= error <= CEILINGS[instance.dtype]
        row[form] = {"error": error, **saved.facts}
        calls[form] = lambda m=module, g=given: outputs_of(m(*g))
    if len(calls) == len(built):
        repeats = next(iter(setups.values())).repeats
        times = kernel_times(calls, repeats)
        for form, timing in times.items():
            row[form] |= {"us": timing.median_us, "low_us": timing.low_us}
        first, *_, last = times.values()
        row["ratio"] = last.median_us / first.median_us
    return row


def contraction_of(shape: tuple[int, int, int]) -> Any:
    """x[M, K] w[N, K]^T."""
    m, n, k = shape
    return analyze_contraction(fuse(graphs.linear, ((m, k), HALF), ((n, k), HALF)))


def offered(shape: tuple[int, int, int], count: int) -> list[tuple[str, float, Any]]:
    """Targets, predicted seconds and configurations: the first choice for both targets, the first
    `count` of the skinny form, and the first `count` tiles on mma.sync with all their rings.
    """
    contraction, policy = contraction_of(shape), load_policy(None)
    found = []
    for form, named in TARGETS.items():
        ranked = WRITER.ranked(contraction, resolve_target(named)[1], policy)
        found += [(form, *one) for one in ranked[:1]]
    skinny = [one for one in ranked if WRITER.form_of(one[1]).name == "skinny"]
    tiles: dict[tuple, list[tuple[float, Any]]] = {}
    for seconds, config in mma_ranked(contraction, resolve_target(named)[1], policy):
        tile = config.block_m, config.block_n, config.warp_m, config.warp_n, config.step_bytes
        tiles.setdefault(tile, []).append((seconds, config))
    others = [*skinny[:count], *(one for rings in list(tiles.values())[:count] for one in rings)]
    first = found[-1][2]
    return [*found, *(("portable", *one) for one in others if one[1] != first)]


def written(job: tuple[tuple[int, int, int], str, Any, str]) -> bool:
    """Writes the library of a configuration; tells whether there is one."""
    shape, form, config, path = job
    target, hw = resolve_target(TARGETS[form])
    try:
        kernel = WRITER.form_of(config).emit(contraction_of(shape), hw, config)
        mod = tvm.IRModule({ENTRY: kernel.with_attr("global_symbol", ENTRY)})
        build_functions(mod, target)[0].export_library(path)
    except Exception as why:  # of a candidate: the others are still tried
        print(f"{shape} {config}: {why}"[:300], file=sys.stderr)
        return False
    return True


def swept(shape: tuple[int, int, int], kernels: list[tuple[str, float, Any, str]]) -> dict:
    """Times of all configurations of a shape."""
    m, n, k = shape
    x = torch.randn(m, k, device="cuda").half()
    w = (torch.randn(n, k, device="cuda") * k**-0.5).half()
    wanted = x.double() @ w.double().T
    out = torch.empty(m, n, device="cuda", dtype=torch.float16)
    arguments = [tvm.runtime.from_dlpack(t) for t in (x, w, out)]
    calls, rows = {"cublas": lambda: x @ w.T}, {}
    for i, (target, seconds, config, path) in enumerate(kernels):
        main = tvm.runtime.load_module(path)[ENTRY]
        out.fill_(math.nan)
        main(*arguments)
        torch.cuda.synchronize()
        error = ((out.double() - wanted).abs().max() / wanted.abs().max()).item()
        calls[str(i)] = lambda main=main: main(*arguments)
        rows[str(i)] = {
            "target": target,
            "form": WRITER.form_of(config).name,
            "config": asdict(config),
            "predicted_us": seconds * 1e6,
            "error": math.inf if math.isnan(error) else error,
        }
    times = kernel_times(calls, 8)
    for i, row in rows.items():
        row["us"] = times[i].median_us
    best = min(rows.values(), key=lambda row: row["us"], default=None)
    print(shape, "cublas", times["cublas"].median_us, "best", best, flush=True)
    return {"shape": shape, "cublas_us": times["cublas"].median_us, "kernels": [*rows.values()]}


def sweep(shapes: Sequence[tuple[int, int, int]], count: int, workers: int) -> list[dict]:
    """All shapes."""
    spawn = multiprocessing.get_context("spawn")
    with (
        tempfile.TemporaryDirectory() as folder,
        ProcessPoolExecutor(workers, mp_context=spawn) as pool,
    ):
        jobs = [(s, *one) for s in shapes for one in offered(s, count)]
        paths = [str(Path(folder, f"{i}.so")) for i in range(len(jobs))]
        work = [(s, form, c, p) for (s, form, _, c), p in zip(jobs, paths, strict=True)]
        there = list(pool.map(written, work))
        found = []
        for shape in shapes:
            kernels = [
                (form, seconds, config, path)
                for (s, form, seconds, config), path, ok in zip(jobs, paths, there, strict=True)
                if s == shape and ok
            ]
            found.append(swept(shape, kernels))
        return found


def main() -> int:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("out", type=Path)
    parser.add_argument("--only", help="workloads, with commas between them")
    parser.add_argument("--workers", type=int, default=8, help="processes that compile, a target")
    parser.add_argument("--repeats", type=int, default=12)
    parser.add_argument("--sweep", type=int, default=0, metavar="N")
    parser.add_argument("--shapes", help="products of the sweep, as 16x4096x14336,64x4096x4096")
    args = parser.parse_args()
    names = args.only.split(",") if args.only else [] if args.sweep else WORKLOADS
    found: dict[str, Any] = {"device": torch.cuda.get_device_name(), "rows": []}
    with tempfile.TemporaryDirectory() as folder, torch.no_grad():
        setups = setups_of(TARGETS, args.repeats) if names else {}
        built = prepared(names, setups, args.workers, folder) if names else {}
        for name in names:
            row = timed(name, setups, built)
            found["rows"].append(row)
            args.out.write_text(json.dumps(found, indent=1, default=str) + "\n")
            us = {form: row.get(form, {}).get("us") for form in TARGETS}
            print(name, us, row.get("ratio"), "right" if row["right"] else "WRONG", flush=True)
        ratios = [row["ratio"] for row in found["rows"] if "ratio" in row]
        if ratios:
            found["mean_ratio"] = statistics.geometric_mean(ratios)
    if args.sweep:
        texts = args.shapes.split(",") if args.shapes else []
        shapes = [tuple(map(int, text.split("x"))) for text in texts] or SWEPT
        found["sweep"] = sweep(shapes, args.sweep, 2 * args.workers)
    args.out.write_text(json.dumps(found, indent=1, default=str) + "\n")
    return int(not all(row["right"] for row in found["rows"]))


if __name__ == "__main__":
    sys.exit(main())
