"""GEMM kernels on a GPU: error against float64, and time beside torch.

    python tests/gpu/check_gemm.py [--only NAME ...] [--configs N] [--isolate SECONDS] [--json F]

Needs TVM and torch with CUDA. A failure is printed and the next case goes on; with --isolate each
case has a process and a time limit of its own, so that a hang costs that case only. Outputs hold
NaN before each checked run. Times are those of the kernels alone (CUPTI), the median of interleaved
rounds of ours and torch's.
"""

import argparse
import dataclasses
import json
import math
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
if shutil.which("nvcc"):
    os.environ.setdefault("TVM_CUDA_COMPILE_MODE", "nvcc")

import torch
import torch.nn.functional as F
import tvm
from torch import Tensor

from tests import gemm_cases as graphs
from tests.kernel_cases import fuse
from tvm_fusion.config import load_profile
from tvm_fusion.errors import Unsupported
from tvm_fusion.kernels.contraction import Contraction, analyze_contraction
from tvm_fusion.kernels.cuda.gemm_hopper import emit_gemm_hopper, hopper_configs
from tvm_fusion.kernels.cuda.gemm_simt import emit_gemm_simt, simt_configs

HALF, BRAIN, FLOAT = "float16", "bfloat16", "float32"
TORCH = {HALF: torch.float16, BRAIN: torch.bfloat16, FLOAT: torch.float32}

# Largest error relative to the largest reference value: about two roundings of the output.
TOLERANCE = {HALF: 2e-3, BRAIN: 1.6e-2, FLOAT: 1e-5}


@dataclasses.dataclass(frozen=True)
class Case:
    """A graph, the shapes of its inputs, and the same in torch (for float64 and as the peer)."""

    name: str
    emit: Callable
    shapes: tuple[tuple[int, ...], ...]
    same: Callable[..., Sequence[Tensor]]
    flop: float
    dtype: str = HALF
    compiled: bool = False


def heads(x: Tensor, count: int) -> Tensor:
    """[b, s, h * d] -> [b, h, s, d]."""
    b, s, w = x.shape
    return x.reshape(b, s, count, w // count).permute(0, 2, 1, 3)


def square(*widths: int) -> tuple[tuple[int, int], ...]:
    return ((4096, 4096), *((4096, n) for n in widths))


L = 4096
CASES = [
    Case("plain", graphs.matmul, square(L), lambda x, w: [x @ w], 2 * L**3),
    Case("linear", graphs.linear, square(L), lambda x, w: [x @ w.T], 2 * L**3),
    Case(
        "bias gelu",
        graphs.bias_gelu,
        (*square(L), (L,)),
        lambda x, w, b: [F.gelu(x @ w + b)],
        2 * L**3,
        compiled=True,
    ),
    Case("residual", graphs.residual, square(L, L), lambda x, w, r: [x @ w + r], 2 * L**3),
    Case(
        "bias gelu residual",
        graphs.bias_gelu_residual,
        (*square(L), (L,), (L, L)),
        lambda x, w, b, r: [F.gelu(x @ w + b) + r],
        2 * L**3,
        compiled=True,
    ),
    Case(
        "gate up",
        graphs.gate_up,
        ((L, L), (L, 11008), (L, 11008)),
        lambda x, g, u: [F.silu(x @ g) * (x @ u)],
        4 * L * L * 11008,
        compiled=True,
    ),
    Case(
        "qkv",
        graphs.qkv,
        square(L, 1024, 1024),
        lambda x, *ws: [x @ w for w in ws],
        2 * L * L * 6144,
    ),
    Case(
        "qkv bias",
        graphs.qkv_bias,
        (*square(L, 1024, 1024), (L,), (1024,), (1024,)),
        lambda x, q, k, v, a, b, c: [x @ q + a, x @ k + b, x @ v + c],
        2 * L * L * 6144,
        compiled=True,
    ),
    Case(
        "scores",
        graphs.scores(16),
        ((2, 2048, 2048), (2, 2048, 2048)),
        lambda q, k: [heads(q, 16) @ heads(k, 16).transpose(-1, -2) * 0.125],
        2 * 2 * 16 * 2048 * 2048 * 128,
        compiled=True,
    ),
    Case(
        "values",
        graphs.values(16),
        ((2, 16, 2048, 2048), (2, 2048, 2048)),
        lambda p, v: [(p @ heads(v, 16)).permute(0, 2, 1, 3).reshape(v.shape)],
        2 * 2 * 16 * 2048 * 2048 * 128,
    ),
    Case(
        "project heads",
        graphs.project_heads(16),
        ((2, 2048, 2048), (2048, 2048)),
        lambda x, w: [heads(x @ w, 16).contiguous()],
        2 * 4096 * 2048 * 2048,
    ),
    Case("odd 1000", graphs.linear, ((1000, 1000),) * 2, lambda x, w: [x @ w.T], 2e9),
    Case(
        "16 rows",
        graphs.linear,
        ((16, L), (11008, L)),
        lambda x, w: [x @ w.T],
        2 * 16 * L * 11008,
    ),
    Case("300 rows", graphs.linear, ((300, L), (L, L)), lambda x, w: [x @ w.T], 600 * L * L),
    Case("bfloat16", graphs.matmul, square(L), lambda x, w: [x @ w], 2 * L**3, BRAIN),
    Case(
        "bfloat16 bias gelu",
        graphs.bias_gelu,
        (*square(L), (L,)),
        lambda x, w, b: [F.gelu(x @ w + b)],
        2 * L**3,
        BRAIN,
        True,
    ),
    Case(
        "left transposed",
        graphs.left_transposed,
        square(L),
        lambda x, w: [x.T @ w],
        2 * L**3,
    ),
    Case(
        "two outputs",
        graphs.two_outputs,
        square(L),
        lambda x, w: [x @ w, F.relu(x @ w)],
        2 * L**3,
        compiled=True,
    ),
    Case("float32", graphs.matmul, square(L), lambda x, w: [x @ w], 2 * L**3, FLOAT),
    Case(
        "float32 linear",
        graphs.linear,
        ((1000, 1000),) * 2,
        lambda x, w: [x @ w.T],
        2e9,
        FLOAT,
    ),
    Case(
        "float16 odd pitch",
        graphs.linear,
        ((1000, 999), (1001, 999)),
        lambda x, w: [x @ w.T],
        2e9,
    ),
]


def inputs_of(case: Case) -> list[Tensor]:
    """Random inputs; weights scaled so that results are of the order of one."""
    torch.manual_seed(0)
    made = []
    for i, shape in enumerate(case.shapes):
        x = torch.randn(*shape, device="cuda", dtype=torch.float32)
        if i and len(shape) > 1:
            x *= case.shapes[0][-1] ** -0.5
        made.append(x.to(TORCH[case.dtype]))
    return made


def kernel_us(call: Callable[[], object], repeats: int = 10) -> float:
    """Time of all kernels that a call launches, by the profiler."""
    from torch.profiler import ProfilerActivity, profile

    call()
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as found:
        for _ in range(repeats):
            call()
        torch.cuda.synchronize()
    kernels = [e for e in found.events() if e.device_type.name == "CUDA" and "emset" not in e.name]
    return sum(e.device_time for e in kernels) / repeats


def build(kernel: tvm.tirx.PrimFunc, target: tvm.target.Target) -> Callable:
    """The compiled kernel as a function of TVM tensors."""
    mod = tvm.IRModule({"main": kernel.with_attr("global_symbol", "main")})
    with target:
        built = tvm.compile(mod, target=target, tir_pipeline="tirx")
    return (built.mod if hasattr(built, "mod") else built)["main"]


def written(contraction: Contraction, hw, simt: bool, count: int) -> list[tuple[str, object]]:
    """Kernels to run: the first `count` configurations of the form the package would choose."""
    if not simt:
        try:
            configs = hopper_configs(contraction, hw)[:count]
            return [(str(c), emit_gemm_hopper(contraction, hw, c)) for c in configs]
        except Unsupported as why:
            print(f"    on CUDA cores: {why}")
    configs = simt_configs(contraction, hw)[:count]
    return [(str(c), emit_gemm_simt(contraction, hw, c)) for c in configs]


def check(case: Case, args: argparse.Namespace, hw) -> list[dict]:
    """Runs one case; prints and returns its rows."""
    inputs = inputs_of(case)
    contraction = analyze_contraction(fuse(case.emit, *((s, case.dtype) for s in case.shapes)))
    expected = [r.double() for r in case.same(*(x.double() for x in inputs))]
    like = case.same(*inputs)
    outputs = [torch.full(r.shape, math.nan, device="cuda", dtype=r.dtype) for r in like]
    peer = torch.compile(case.same) if case.compiled and args.compile else case.same
    rows = []
    for config, kernel in written(contraction, hw, args.simt, args.configs):
        main = build(kernel, hw.to_target())
        tensors = [tvm.runtime.from_dlpack(t) for t in (*inputs, *outputs)]
        for output in outputs:
            output.fill_(math.nan)
        main(*tensors)
        torch.cuda.synchronize()
        error = max(
            float(((o.double() - e).abs().max() / e.abs().max()).nan_to_num(math.inf))
            for o, e in zip(outputs, expected, strict=True)
        )
        ours_call, peer_call = partial(main, *tensors), partial(peer, *inputs)
        pairs = [(kernel_us(ours_call), kernel_us(peer_call)) for _ in range(args.rounds)]
        ours, torchs = (statistics.median(column) for column in zip(*pairs, strict=True))
        passed = error <= TOLERANCE[case.dtype]
        print(
            f"{case.name:20s} {'ok' if passed else 'FAIL':4s} error {error:.1e}",
            f"ours {ours:8.1f} us  torch {torchs:8.1f} us  {torchs / ours:6.3f}x",
            f"{case.flop / ours / 1e6:6.1f} TFLOP/s  {config}",
            flush=True,
        )
        rows.append(
            {
                "name": case.name,
                "shape": [list(s) for s in case.shapes],
                "dtype": case.dtype,
                "ours_us": ours,
                "error": error,
                "passed": passed,
                "config": config,
                "peers_us": {"torch": torchs},
            }
        )
    return rows


def isolated(args: argparse.Namespace) -> int:
    """Each case in a process of its own."""
    options = [f"--configs={args.configs}", f"--rounds={args.rounds}", f"--device={args.device}"]
    options += ["--simt"] * args.simt + ["--no-compile"] * (not args.compile)
    rows = []
    for case in CASES:
        if args.only and case.name not in args.only:
            continue
        with tempfile.TemporaryDirectory() as folder:
            found = Path(folder, "rows.json")
            command = [sys.executable, __file__, *options, "--only", case.name]
            try:
                subprocess.run([*command, "--json", str(found)], timeout=args.isolate)
                rows += json.loads(found.read_text())["rows"]
            except (subprocess.TimeoutExpired, FileNotFoundError) as why:
                print(f"{case.name:20s} FAIL {type(why).__name__}", flush=True)
                rows.append({"name": case.name, "passed": False})
    failed = [row["name"] for row in rows if not row["passed"]]
    if args.json:
        args.json.write_text(json.dumps({"rows": rows}, indent=1))
    print("failed:", ", ".join(failed) or "none")
    return 1 if failed else 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", nargs="*", help="names of cases")
    parser.add_argument("--configs", type=int, default=1, help="configurations to try a case")
    parser.add_argument("--rounds", type=int, default=5, help="interleaved rounds of timing")
    parser.add_argument("--simt", action="store_true", help="CUDA cores even where wgmma works")
    parser.add_argument("--no-compile", dest="compile", action="store_false", help="eager torch")
    parser.add_argument("--device", default="nvidia_h200", help="hardware profile")
    parser.add_argument("--isolate", type=float, help="seconds for each case, in its own process")
    parser.add_argument("--json", type=Path, help="file for the results")
    args = parser.parse_args()
    if args.isolate:
        return isolated(args)
    hw = load_profile(args.device)
    torch.backends.cuda.matmul.allow_tf32 = False
    rows, failed = [], []
    for case in CASES:
        if args.only and case.name not in args.only:
            continue
        try:
            found = check(case, args, hw)
        except Exception:
            traceback.print_exc(limit=-3)
            print(f"{case.name:22s} FAIL", flush=True)
            found = [{"name": case.name, "passed": False}]
        rows += found
        failed += [row["name"] for row in found if not row["passed"]]
    if args.json:
        device = {"device": torch.cuda.get_device_name(), "torch": torch.__version__}
        args.json.write_text(json.dumps({**device, "rows": rows}, indent=1))
    if not args.only or len(args.only) > 1:
        print("failed:", ", ".join(failed) or "none")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
