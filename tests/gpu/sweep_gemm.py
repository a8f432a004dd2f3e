"""Times of configurations of the Hopper form of matrix products, for tests.fit_gemm_cost.

    python tests/gpu/sweep_gemm.py OUT.jsonl [--shapes M,N,K ...] [--configs N] [--workers N]

Without shapes, those of data/gemm_sweep_h200.json, and of each the tiles that are held there as
they are offered now. Float16, x[M, K] w[N, K]^T beside torch.matmul; outputs hold NaN before a
checked run, times are medians of kernel times (CUPTI), interleaved, the L2 cleaned before each
launch.
"""

import argparse
import json
import math
import multiprocessing
import sys
import tempfile
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import tvm

from tests.fit_gemm_cost import DATA
from tests.support import gemm_cases as graphs
from tests.support.kernel_cases import fuse
from tvm_fusion.config import load_policy, load_profile
from tvm_fusion.kernels.contraction.reader import analyze_contraction
from tvm_fusion.kernels.gemm.forms import WRITER
from tvm_fusion.kernels.gemm.hopper.config import HopperConfig
from tvm_fusion.runtime.build.build import build_functions

HALF, ENTRY, TOLERANCE = "float16", "product", 2e-3
TILE = ("block_m", "block_n", "staged", "deferred", "split", "multicast")


def contraction_of(shape):
    m, n, k = shape
    return analyze_contraction(fuse(graphs.linear, ((m, k), HALF), ((n, k), HALF)))


def held(shapes: list[tuple], count: int) -> dict[tuple, list[HopperConfig]]:
    """The configurations of each shape: those held, or the first ones of other shapes."""
    data = json.loads(DATA.read_text())
    fields = data["columns"][1:]
    tiles = {
        tuple(s["shape"]): [dict(zip(fields, k[1:], strict=True)) for k in s["kernels"]]
        for s in data["shapes"]
    }
    found = {}
    for shape in shapes or tiles:
        ranked = WRITER.ranked(contraction_of(shape), load_profile("nvidia_h200"), load_policy())
        offered = [c for _, c in ranked if isinstance(c, HopperConfig)]
        if shape in tiles:
            wanted = {tuple(tile[f] for f in TILE) for tile in tiles[shape]}
            offered = [c for c in offered if tuple(getattr(c, f) for f in TILE) in wanted]
        found[shape] = offered if shape in tiles else offered[:count]
    return found


def written(job: tuple[tuple, HopperConfig, str]) -> str | None:
    """The path of the library of one kernel; None where it cannot be written."""
    shape, config, path = job
    hw = load_profile("nvidia_h200")
    try:
        kernel = WRITER.form_of(config).emit(contraction_of(shape), hw, config)
        mod = tvm.IRModule({ENTRY: kernel.with_attr("global_symbol", ENTRY)})
        library, _ = build_functions(mod, hw.to_target())
    except Exception as why:  # the boundary of a candidate: the others are still tried
        print(f"{shape} {config}: {type(why).__name__}: {why}"[:300], file=sys.stderr)
        return None
    library.export_library(path)
    return path


def timed(shape: tuple, kernels: list[tuple[HopperConfig, str]], repeats: int) -> list[dict]:
    """The lines of a shape; a kernel that is wrong is told, and has none."""
    import torch

    from tvm_fusion.runtime.timing.timing import kernel_times

    m, n, k = shape
    x = torch.randn(m, k, device="cuda").half()
    w = (torch.randn(n, k, device="cuda") * k**-0.5).half()
    wanted = x.double() @ w.double().T
    out = torch.empty(m, n, device="cuda", dtype=torch.float16)
    arguments = [tvm.runtime.from_dlpack(t) for t in (x, w, out)]
    calls, configs = {"cublas": lambda: x @ w.T}, {}
    for i, (config, path) in enumerate(kernels):
        main = tvm.runtime.load_module(path)[ENTRY]
        out.fill_(math.nan)
        main(*arguments)
        torch.cuda.synchronize()
        error = ((out.double() - wanted).abs().max() / wanted.abs().max()).item()
        if not error <= TOLERANCE:
            print(f"WRONG {shape} {config}: {error}", flush=True)
            continue
        calls[str(i)], configs[str(i)] = lambda main=main: main(*arguments), config
    times = kernel_times(calls, repeats)
    lines = [{"shape": shape, "us": times["cublas"].median_us, "config": "cublas"}]
    for i, config in configs.items():
        lines.append({"shape": shape, "us": times[i].median_us, "config": asdict(config)})
    return lines


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("out", type=Path)
    parser.add_argument("--shapes", nargs="*", default=[])
    parser.add_argument("--configs", type=int, default=12)
    parser.add_argument("--repeats", type=int, default=12)
    parser.add_argument("--workers", type=int, default=14)
    args = parser.parse_args()
    shapes = [tuple(map(int, text.split(","))) for text in args.shapes]
    spawn = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as folder, args.out.open("w") as out:
        found = held(shapes, args.configs)
        jobs = [
            (shape, config, f"{folder}/{i}_{j}.so")
            for i, (shape, configs) in enumerate(found.items())
            for j, config in enumerate(configs)
        ]
        with ProcessPoolExecutor(args.workers, mp_context=spawn) as pool:
            paths = list(pool.map(written, jobs, chunksize=4))
        for shape in found:
            made = [(j[1], p) for j, p in zip(jobs, paths, strict=True) if j[0] == shape and p]
            for line in timed(shape, made, args.repeats):
                out.write(json.dumps(line) + "\n")
            out.flush()


if __name__ == "__main__":
    main()
