"""GEMM kernels on a GPU: error against float64, and time beside torch.

    python tests/gpu/check_gemm.py [--only NAME ...] [--form NAME] [--configs N]
                                   [--isolate SECONDS] [--json F]

Kernels are those the package would choose, or the best of one form (hopper, skinny, mma, simt); a
case that the form does not take is skipped with its reason.
Needs TVM and torch with CUDA. A failure is printed and the next case goes on; with --isolate each
case has a process and a time limit of its own, so that a hang costs that case only. Outputs hold
NaN before each checked run. Times are those of the kernels alone (CUPTI), the median of interleaved
rounds of ours and torch's.
"""

import argparse
import json
import math
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Callable
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
if shutil.which("nvcc"):
    os.environ.setdefault("TVM_CUDA_COMPILE_MODE", "nvcc")

import torch
import tvm
from torch import Tensor

from tests.gpu.device_cases import CASES, FP8, TOLERANCE, Case
from tests.support.kernel_cases import fuse
from tvm_fusion.config import load_policy, load_profile
from tvm_fusion.errors import Unsupported
from tvm_fusion.kernels.contraction.reader import Contraction, analyze_contraction
from tvm_fusion.kernels.gemm.forms import WRITER


def inputs_of(case: Case) -> list[Tensor]:
    """Random inputs; weights scaled so that results are of the order of one."""
    torch.manual_seed(0)
    made = []
    for i, (shape, dtype) in enumerate(case.inputs):
        kind = getattr(torch, dtype)
        if not kind.is_floating_point:
            made.append(torch.randint(-(2**31), 2**31, shape, device="cuda").to(kind))
            continue
        x = torch.randn(*shape, device="cuda", dtype=torch.float32)
        if i and len(shape) > 1:
            # Weights of 8 bits must not become subnormal
            x *= 0.25 if dtype == FP8 else case.shapes[0][-1] ** -0.5
        made.append(x.to(kind))
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


def written(contraction: Contraction, hw, form: str | None, count: int) -> list[tuple]:
    """Kernels to run: the first `count` configurations that can be written, of all forms or one.

    Gives the predicted microseconds, the configuration as text, and the kernel.
    """
    policy, found, reasons = load_policy(None), [], []
    rank = next((f.rank for f in WRITER.forms if f.name == form), WRITER.ranked)
    for seconds, config in rank(contraction, hw, policy):
        try:
            kernel = WRITER.form_of(config).emit(contraction, hw, config)
        except Unsupported as why:
            reasons.append(str(why))
            continue
        found.append((seconds * 1e6, f"{WRITER.form_of(config).name} {config}", kernel))
        if len(found) == count:
            break
    if not found:
        raise Unsupported("; ".join(dict.fromkeys(reasons)))
    return found


def tvm_tensor(x: Tensor) -> tvm.runtime.Tensor:
    """The same memory; torch gives no 8-bit floats by DLPack."""
    if x.itemsize > 1 or not x.is_floating_point():
        return tvm.runtime.from_dlpack(x)
    bits = tvm.runtime.from_dlpack(x.view(torch.uint8))
    return bits._create_view(bits.shape, str(x.dtype).removeprefix("torch."))


def exact(x: Tensor) -> Tensor:
    """In float64; whole numbers as they are."""
    return x.double() if x.is_floating_point() else x


def check(case: Case, args: argparse.Namespace, hw) -> list[dict]:
    """Runs one case; prints and returns its rows."""
    inputs = inputs_of(case)
    contraction = analyze_contraction(fuse(case.emit, *case.inputs))
    try:
        kernels = written(contraction, hw, args.form, args.configs)
    except Unsupported as why:
        if args.form is None:
            raise
        print(f"{case.name:20s} skipped: {why}", flush=True)
        return []
    expected = [r.double() for r in case.same(*(exact(x) for x in inputs))]
    like = case.same(*(x.half() if x.dtype.itemsize == 1 else x for x in inputs))
    outputs = [torch.full(r.shape, math.nan, device="cuda", dtype=r.dtype) for r in like]
    peer = case.peer or case.same
    if case.compiled and args.compile:
        peer = torch.compile(peer)
    rows = []
    for predicted, config, kernel in kernels:
        main = build(kernel, hw.to_target())
        tensors = [tvm_tensor(t) for t in (*inputs, *outputs)]
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
            f"{case.flop / ours / 1e6:6.1f} TFLOP/s  predicted {predicted:8.1f}  {config}",
            flush=True,
        )
        rows.append(
            {
                "name": case.name,
                "shape": [list(s) for s in case.shapes],
                "dtype": case.dtype,
                "ours_us": ours,
                "predicted_us": predicted,
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
    options += [f"--form={args.form}"] if args.form else []
    options += ["--no-compile"] * (not args.compile)
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
    parser.add_argument(
        "--form", choices=[f.name for f in WRITER.forms], help="kernels of this form only"
    )
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
