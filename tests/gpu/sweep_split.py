"""Times of float32 products on tensor cores, tile by tile, for the model of `gemm.mma.rank`.

    python tests/gpu/sweep_split.py OUT.json [--only NAME ...] [--workers N] [--repeats N]
                    [--tiles M,N,WARP_M,WARP_N,STEP_BYTES,STAGES[,wgmma] ...]

SHAPES beside torch.matmul in float32 (not rounded to tfloat32) and the best tile on CUDA cores:
errors beside float64, medians of kernel times (CUPTI), interleaved, the L2 cleaned before each
launch. Outputs hold NaN before the checked run. A product with one-hot rows is compared for being
the numbers that these choose, one with infinities, NaN, tiny and large numbers row by row.
"""

import argparse
import json
import math
import multiprocessing
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import tvm

from tests.support import gemm_cases as graphs
from tests.support.kernel_cases import fuse
from tvm_fusion.config import load_profile
from tvm_fusion.errors import Unsupported
from tvm_fusion.kernels.contraction.reader import Contraction, analyze_contraction
from tvm_fusion.kernels.gemm.mma.kernel import emit_gemm_mma
from tvm_fusion.kernels.gemm.mma.plan import MmaConfig
from tvm_fusion.kernels.gemm.mma.problem import read_mma
from tvm_fusion.kernels.gemm.mma.rank import GROUP_TILES, check_config
from tvm_fusion.kernels.gemm.simt.kernel import emit_gemm_simt
from tvm_fusion.runtime.build.build import build_functions

FLOAT, ENTRY, TOLERANCE, CUDA_CORES = "float32", "product", 2e-5, "simt"
PROFILE = "nvidia_h200"

# Rows, columns, terms; whether operands lie along rows and columns: x[K, M], w[K, N] for x[M, K],
# w[N, K].
SHAPES = {
    "odd": (3752, 5993, 192, False),
    "2048": (2048, 2048, 2048, False),
    "long": (443, 109, 21120, True),
    "wide": (504, 2512, 2336, False),
    "k511": (2000, 3001, 511, False),
    "along rows": (1024, 2048, 4096, True),
    "4096": (4096, 4096, 4096, False),
    "odd sizes": (1537, 2051, 1999, False),
    "odd along rows": (1023, 1537, 3001, True),
    "few rows": (77, 4096, 4096, False),
}
TILES = (
    "128,128,64,32,64,4",
    "128,64,32,64,64,4",
    "64,128,32,64,64,4",
    "64,64,32,32,64,4",
    "64,64,32,32,128,3",
    "32,32,16,16,128,3",
    *(f"{m},{n},16,{n},128,3,wgmma" for m, n in GROUP_TILES),
)

Job = tuple[str, str, str]
"""A shape's name, a tile (or CUDA_CORES), the path of its library."""


def contraction_of(name: str) -> Contraction:
    """The product of a shape."""
    m, n, k, along_rows = SHAPES[name]
    graph = graphs.left_transposed if along_rows else graphs.linear
    shapes = ((k, m), (k, n)) if along_rows else ((m, k), (n, k))
    return analyze_contraction(fuse(graph, *((shape, FLOAT) for shape in shapes)))


def config_of(name: str, tile: str) -> MmaConfig:
    """The configuration of a tile."""
    group = 16 if SHAPES[name][0] >= 2048 else 8
    numbers = tile.removesuffix(",wgmma")
    return MmaConfig(
        *map(int, numbers.split(",")), group, split=True, wgmma=tile.endswith(",wgmma")
    )


def fits(name: str, tile: str) -> bool:
    """Whether a kernel of the tile can be written."""
    hw = load_profile(PROFILE)
    try:
        check_config(read_mma(contraction_of(name), hw, True), config_of(name, tile), hw)
    except Unsupported:
        return False
    return True


def written(job: Job) -> str:
    """Writes and compiles one kernel."""
    name, tile, path = job
    contraction, hw = contraction_of(name), load_profile(PROFILE)
    if tile == CUDA_CORES:
        kernel = emit_gemm_simt(contraction, hw)
    else:
        kernel = emit_gemm_mma(contraction, hw, config_of(name, tile))
    mod = tvm.IRModule({ENTRY: kernel.with_attr("global_symbol", ENTRY)})
    library, _ = build_functions(mod, hw.to_target())
    library.export_library(path)
    return path


def timed(name: str, kernels: dict[str, str], repeats: int) -> dict:
    """Times and errors of a shape's kernels; a kernel that is wrong has no time."""
    import torch

    from tvm_fusion.runtime.timing.timing import kernel_times

    m, n, k, along_rows = SHAPES[name]
    shapes = ((k, m), (k, n)) if along_rows else ((m, k), (n, k))
    x, w = (torch.randn(shape, device="cuda") for shape in shapes)
    chosen = torch.zeros(shapes[1], device="cuda")
    terms = torch.randint(0, k, (n,), device="cuda")
    columns = torch.arange(n, device="cuda")
    chosen[(terms, columns) if along_rows else (columns, terms)] = 1.0
    out = torch.empty(m, n, device="cuda")

    def product(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return x.T @ w if along_rows else x @ w.T

    wanted = product(x.double(), w.double())
    moved = x.T[:, terms] if along_rows else x[:, terms]

    def called(path: str) -> Callable[[torch.Tensor, torch.Tensor], None]:
        main = tvm.runtime.load_module(path)[ENTRY]
        taken = tvm.runtime.from_dlpack
        return lambda left, right: main(taken(left), taken(right), taken(out))

    def error(result: torch.Tensor) -> float:
        return ((result.double() - wanted).abs().max() / wanted.abs().max()).item()

    special = x.T.clone() if along_rows else x.clone()
    special[0, 0], special[1, 5], special[2, 7] = math.inf, -math.inf, math.nan
    special[3] *= 1e-38
    special[4] *= 1e34
    special = special.T.contiguous() if along_rows else special
    wanted_special = product(special.double(), w.double())

    def specials(result: torch.Tensor) -> list:
        """Whether what is not finite is right in the first rows; errors of the next two."""
        same = [
            bool(torch.equal(result[i].double().nan_to_num(0, 1, -1), signs))
            for i, signs in enumerate(wanted_special[:3].nan_to_num(0, 1, -1))
        ]
        rest = [
            (a.double() - b).abs().max() / b.abs().max()
            for a, b in zip(result[3:5], wanted_special[3:5], strict=True)
        ]
        return [*same, *(float(f"{value.item():.2g}") for value in rest)]

    found = {"shape": SHAPES[name][:3], "along_rows": along_rows, "us": {}, "error": {}}
    found["one_hot_is_exact"] = {"torch": bool((product(x, chosen) == moved).all())}
    found["error"]["torch"] = error(product(x, w))
    found["specials"] = {"torch": specials(product(special, w))}
    calls = {"torch": lambda: product(x, w)}
    for tile, path in kernels.items():
        call = called(path)
        out.fill_(math.nan)
        call(x, chosen)
        found["one_hot_is_exact"][tile] = bool((out == moved).all())
        out.fill_(math.nan)
        call(special, w)
        found["specials"][tile] = specials(out)
        out.fill_(math.nan)
        call(x, w)
        found["error"][tile] = error(out)
        if found["error"][tile] <= TOLERANCE:
            calls[tile] = lambda call=call: call(x, w)
        else:
            print(f"WRONG {name} {tile}: {found['error'][tile]}", flush=True)
    times = kernel_times(calls, repeats)
    found["us"] = {tile: round(times[tile].median_us, 2) for tile in calls}
    return found


def sweep(
    names: list[str],
    tiles: list[str],
    workers: int,
    repeats: int,
    write: Callable[[Job], str] = written,
) -> dict:
    """What stands in the file; `write` makes a job's library, in a process of its own."""
    import torch

    torch.backends.cuda.matmul.allow_tf32 = False
    spawn = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as folder:
        jobs = [
            (name, tile, f"{folder}/{len(tiles) * i + j}.so")
            for i, name in enumerate(names)
            for j, tile in enumerate(tiles)
            if tile == CUDA_CORES or fits(name, tile.split()[0])
        ]
        with ProcessPoolExecutor(workers, mp_context=spawn) as pool:
            paths = list(pool.map(write, jobs))
        rows = {
            name: timed(
                name, {j[1]: p for j, p in zip(jobs, paths, strict=True) if j[0] == name}, repeats
            )
            for name in names
        }
    return {
        "device": torch.cuda.get_device_name(),
        "date": time.strftime("%Y-%m-%d"),
        "versions": {
            "torch": torch.__version__,
            "tvm": tvm.__version__,
            "cuda": torch.version.cuda,
        },
        "shapes": rows,
    }


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("out", type=Path)
    parser.add_argument("--tiles", nargs="*", default=[*TILES, CUDA_CORES])
    parser.add_argument("--only", nargs="*", default=list(SHAPES))
    parser.add_argument("--repeats", type=int, default=12)
    parser.add_argument("--workers", type=int, default=14)
    args = parser.parse_args()
    found = sweep(args.only, args.tiles, args.workers, args.repeats)
    args.out.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
