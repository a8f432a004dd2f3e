"""The ledger's bytes beside what a GPU's counters say, kernel by kernel.

    python tests/gpu/check_ledger.py [--only NAME ...] [--target NAME] [--json FILE]

Twelve models of one or two kernels each. Nsight Compute counts what each kernel moves, its caches
cleaned before; where it is missing, CUPTI's range profiler through torch does, without cleaning.
Where the driver closes counters to this user (ERR_NVGPUCTRPERM), the script says so and ends with
status 3. Needs torch with CUDA. Ends with status 1 if a kernel is further from the ledger than
`ALLOWED`.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch
from torch import nn
from torch.nn import functional

from tvm_fusion.errors import InputError
from tvm_fusion.profile.measured import call_once
from tvm_fusion.profile.ncu import CLOSED, METRICS, READ, Counted, counted, ncu_options

ALLOWED = 0.10
COUNTERS_CLOSED = 3
LIMIT_S = 240
HALF = torch.float16
Case = Callable[[], tuple[nn.Module, tuple[torch.Tensor, ...]]]


class Lambda(nn.Module):
    """A function as a module."""

    def __init__(self, function: Callable[..., Any], *parts: nn.Module) -> None:
        super().__init__()
        self.function, self.parts = function, nn.ModuleList(parts)

    def forward(self, *inputs: torch.Tensor) -> Any:
        return self.function(*self.parts, *inputs)


def case(function: Callable[..., Any], *shapes: Sequence[int], parts: Any = ()) -> Case:
    """A model of a function of modules and half-precision inputs."""

    def make() -> tuple[nn.Module, tuple[torch.Tensor, ...]]:
        torch.manual_seed(0)
        made = [part().to(HALF) for part in parts]
        return Lambda(function, *made).eval(), tuple(torch.randn(s).to(HALF) for s in shapes)

    return make


def attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    return functional.scaled_dot_product_attention(q, k, v)


def linear(rows: int, columns: int) -> Callable[[], nn.Module]:
    return lambda: nn.Linear(rows, columns, bias=True)


IMAGE = (32, 64, 56, 56)
CASES: dict[str, Case] = {
    "pointwise": case(lambda x, y: torch.sigmoid(x) * torch.tanh(y), (8192, 8192), (8192, 8192)),
    "softmax": case(lambda x: torch.softmax(x, -1), (8192, 4096)),
    "layer_norm": case(
        lambda norm, x, y: norm(x + y),
        (8192, 4096),
        (8192, 4096),
        parts=[lambda: nn.LayerNorm(4096)],
    ),
    "long_rows": case(lambda x: torch.log_softmax(x, -1), (2048, 32000)),
    "column_sums": case(lambda x: (x * x).sum(0), (16384, 4096)),
    "transpose": case(lambda x, y: x.t() + y, (8192, 8192), (8192, 8192)),
    "product": case(lambda a, x: a(x), (4096, 4096), parts=[linear(4096, 4096)]),
    "product_gelu": case(
        lambda a, x: functional.gelu(a(x)), (8192, 1024), parts=[linear(1024, 4096)]
    ),
    "one_row": case(lambda a, x: torch.relu(a(x)), (1, 8192), parts=[linear(8192, 8192)]),
    "attention": case(attention, *[(4, 16, 2048, 128)] * 3),
    "convolution": case(
        lambda conv, x: torch.relu(conv(x)), IMAGE, parts=[lambda: nn.Conv2d(64, 64, 3, padding=1)]
    ),
    "depthwise": case(
        lambda conv, x: torch.relu(conv(x)),
        (32, 256, 56, 56),
        parts=[lambda: nn.Conv2d(256, 256, 3, padding=1, groups=256)],
    ),
}


def run_once(name: str, target: str, out: Path) -> None:
    """In a process of its own, perhaps below a profiler: the call, and what the ledger says."""
    found = call_once(CASES[name](), target, policy={"verify": False})
    out.write_text(json.dumps([asdict(one) for one in found]))


def by_ncu(name: str, target: str) -> tuple[list[dict[str, Any]], list[Counted]]:
    """Ledger and counters of a case, by Nsight Compute."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder, "ledger.json")
        command = [*ncu_options(), sys.executable, __file__, "--once", name, "--out", str(out)]
        done = subprocess.run(
            [*command, "--target", target], capture_output=True, text=True, timeout=LIMIT_S
        )
        found = counted(done.stdout + done.stderr)
        return json.loads(out.read_text()), found


def by_cupti(name: str, target: str) -> tuple[list[dict[str, Any]], list[Counted]]:
    """The same by CUPTI's range profiler, which torch's profiler drives."""
    from torch._C._profiler import _ExperimentalConfig
    from torch.profiler import ProfilerActivity, profile

    config = _ExperimentalConfig(
        profiler_metrics=list(METRICS[:3]), profiler_measure_per_kernel=True
    )
    with tempfile.TemporaryDirectory() as folder:
        ledger, trace = Path(folder, "ledger.json"), Path(folder, "trace.json")
        with profile(activities=[ProfilerActivity.CUDA], experimental_config=config) as profiler:
            run_once(name, target, ledger)
            torch.cuda.synchronize()
        profiler.export_chrome_trace(str(trace))
        events = json.loads(trace.read_text())["traceEvents"]
        launches = json.loads(ledger.read_text())
    ranges = [event["args"] for event in events if "range" in str(event.get("cat", ""))]
    values = [[float(args.get(metric, 0.0)) for metric in METRICS[:3]] for args in ranges]
    if not any(READ in args for args in ranges):
        raise InputError(f"CUPTI's range profiler gave no counters: {CLOSED}, or torch lacks it")
    kernels = [kernel for one in launches for kernel in one["kernels"]]
    last = values[-len(kernels) :]  # calls before it loaded and checked the kernels
    return launches, [Counted(k, *v, 0.0) for k, v in zip(kernels, last, strict=True)]


def compared(launches: Sequence[dict[str, Any]], found: Sequence[Counted]) -> list[dict[str, Any]]:
    """A row for each launch."""
    own = {kernel for one in launches for kernel in one["kernels"]}
    left = [one for one in found if one.kernel in own]
    if len(left) != sum(len(one["kernels"]) for one in launches):
        raise InputError(f"{len(left)} kernels were counted, {len(own)} are known: {launches}")
    rows = []
    for one in launches:
        mine, left = left[: len(one["kernels"])], left[len(one["kernels"]) :]
        total = sum(kernel.bytes for kernel in mine)
        rows.append(
            {
                "computes": one["label"],
                "ledger": one["bytes"],
                "counted": round(total),
                "dram_read": round(sum(kernel.read for kernel in mine)),
                "dram_written": round(sum(kernel.written for kernel in mine)),
                "ratio": total / one["bytes"] if one["bytes"] else None,
            }
        )
    return rows


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", nargs="+", choices=CASES, default=list(CASES))
    parser.add_argument("--target", default="cuda")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--once", choices=CASES, help=argparse.SUPPRESS)
    parser.add_argument("--out", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.once:
        run_once(args.once, args.target, args.out)
        return 0
    how = by_ncu if shutil.which("ncu") else by_cupti
    print(f"counters by {'Nsight Compute' if how is by_ncu else 'CUPTI'}")
    print(f"{'kernel':44} {'ledger':>14} {'counted':>14} {'read':>14} {'written':>14} {'ratio':>7}")
    results, off = {}, 0
    for name in args.only:
        try:
            rows = compared(*how(name, args.target))
        except InputError as error:
            print(f"{name}: {error}")
            if CLOSED in str(error):
                print("counters are closed on this machine: nothing was compared")
                return COUNTERS_CLOSED
            off += 1
            continue
        results[name] = rows
        for row in rows:
            wrong = row["ratio"] is None or abs(row["ratio"] - 1) > ALLOWED
            off += wrong
            numbers = (row[key] for key in ("ledger", "counted", "dram_read", "dram_written"))
            words = " ".join(f"{number or 0:14,d}" for number in numbers)
            ratio = "-" if row["ratio"] is None else f"{row['ratio']:.3f}"
            title = f"{name}: {row['computes']}"[:44]
            print(f"{title:44} {words} {ratio:>7}{'  OFF' if wrong else ''}")
    if args.json:
        device = torch.cuda.get_device_name()
        args.json.write_text(json.dumps({"device": device, "kernels": results}, indent=1) + "\n")
    print(f"{off} kernels are more than {ALLOWED:.0%} off")
    return 1 if off else 0


if __name__ == "__main__":
    raise SystemExit(main())
