"""`scan` and `while_loop` on a GPU: error against float64, and time beside torch's loop.

    python tests/gpu/check_scan.py [--json F]

Cells of a product, tanh and, of some, a norm. Ours is one kernel of one block, through
`torch.compile(backend="tvm_fusion")` with everything compiled; torch's loop calls the step as often
as there are rows (backend "eager"; inductor of torch 2.11 refuses such a `scan`). Memory that
outputs may come to lie in holds NaN before; times are medians of events around calls back to back,
interleaved, in us.
"""

import argparse
import json
import statistics
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch
from torch import Tensor, nn
from torch._higher_order_ops import scan, while_loop
from torch.utils import _pytree as pytree

import tvm_fusion.torch_backend  # registers the backend

CASES = [  # units, batch, steps, with a norm
    (64, 1, 16, "float32", False),
    (64, 32, 256, "float32", False),
    (64, 32, 256, "float32", True),
    (256, 1, 256, "float32", False),
    (256, 32, 16, "float32", True),
    (256, 32, 256, "float16", False),
    (64, 4, 256, "float16", True),
]
TOLERANCE = {"float32": 1e-4, "float16": 4e-3}
TOLERANCES = (1e9, 1e-1, 1e-6)  # at which the loop of `Roots` ends: after one round or several


class Cell(nn.Module):
    """A recurrent layer written as a `scan`."""

    def __init__(self, units: int, is_normed: bool) -> None:
        super().__init__()
        self.into, self.across = nn.Linear(units, units), nn.Linear(units, units)
        self.norm = nn.LayerNorm(units) if is_normed else nn.Identity()

    def new(self, hidden: Tensor, x: Tensor) -> Tensor:
        """The state behind a step."""
        return self.norm(torch.tanh(self.into(x) + self.across(hidden)))

    def forward(self, hidden: Tensor, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Apply it to [batch, units] and [steps, batch, units]."""

        def step(hidden: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
            new = self.new(hidden, x)
            return new, new.clone()

        return scan(step, hidden, rows)


class Roots(nn.Module):
    """Square roots by Newton's method, until none changes by more than a tolerance."""

    def forward(self, x: Tensor, tolerance: Tensor) -> tuple[Tensor, Tensor]:
        """The roots and the last change."""

        def step(root: Tensor, _change: Tensor) -> tuple[Tensor, Tensor]:
            better = 0.5 * (root + x / root)
            return better, (better - root).abs().max()

        first = x.clone(), torch.full((), torch.inf, device=x.device)
        return while_loop(lambda _root, change: change > tolerance, step, first)


def measured(units: int, batch: int, steps: int, dtype: str, is_normed: bool) -> dict[str, Any]:
    """Compile a cell, and compare and time it."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    kind = {"device": "cuda", "dtype": getattr(torch, dtype)}
    cell = Cell(units, is_normed).to(**kind).eval()
    inputs = torch.randn(batch, units, **kind), torch.randn(steps, batch, units, **kind)
    options = {"strict": True, "verify": False}
    calls = {
        "tvm_fusion": torch.compile(cell, backend="tvm_fusion", options=options),
        "torch": torch.compile(cell, backend="eager"),
    }
    began = time.monotonic()
    calls["tvm_fusion"](*inputs)
    ready_s = time.monotonic() - began
    poison = torch.full((1 << 24,), torch.nan, device="cuda")
    del poison
    given, again = (pytree.tree_leaves(calls["tvm_fusion"](*inputs)) for _ in range(2))
    exact = Cell(units, is_normed).cuda().double().eval()
    exact.load_state_dict(cell.state_dict())
    hidden, kept = inputs[0].double(), []
    for row in inputs[1].double():
        hidden = exact.new(hidden, row)
        kept.append(hidden)
    pairs = zip(given, (hidden, torch.stack(kept)), strict=True)
    error = max(float((x.double() - y).abs().max() / y.abs().max()) for x, y in pairs)
    same = all(torch.equal(x, y) for x, y in zip(given, again, strict=True))
    calls["torch"](*inputs)
    times: dict[str, list[float]] = {label: [] for label in calls}
    for _ in range(3):
        for label, call in calls.items():
            times[label].append(_us(call, inputs, 5 if label == "tvm_fusion" else 2))
    return {
        "units": units,
        "batch": batch,
        "steps": steps,
        "dtype": dtype,
        "norm": is_normed,
        "ready_s": round(ready_s, 2),
        "error": error,
        "right": same and error <= TOLERANCE[dtype],
        "us": {label: round(statistics.median(found), 1) for label, found in times.items()},
    }


def _us(call: Any, inputs: tuple[Tensor, ...], count: int) -> float:
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    for _ in range(count):
        call(*inputs)
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) * 1e3 / count


def rounds() -> dict[str, Any]:
    """A loop that data end, in one CUDA graph, at several tolerances beside torch's loop."""
    x = torch.rand(1000, device="cuda") + 1
    inputs = x, torch.tensor(1e-4, device="cuda")
    module = tvm_fusion.compile(Roots(), "cuda", example_inputs=inputs, cuda_graph=True)
    off = {}
    for tolerance in TOLERANCES:
        at = torch.tensor(tolerance, device="cuda")
        (given, _), (wanted, _) = module(x, at), Roots()(x, at)
        off[str(tolerance)] = float((given - wanted).abs().max())
    return {"off": off, "right": all(one <= 1e-6 for one in off.values())}


@torch.no_grad()
def main() -> int:
    """Run the cases."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path, metavar="F", help="a file of all figures")
    args = parser.parse_args()
    found: dict[str, Any] = {
        "device": torch.cuda.get_device_name(),
        "date": time.strftime("%Y-%m-%d"),
        "versions": {"torch": torch.__version__, "cuda": torch.version.cuda},
        "command": "python tests/gpu/check_scan.py --json tests/results/scan_h200.json",
        "scan": [],
    }
    for case in CASES:
        found["scan"].append(measured(*case))
        print(found["scan"][-1], flush=True)
    found["while_loop"] = rounds()
    print(found["while_loop"])
    if args.json:
        args.json.write_text(json.dumps(found, indent=1) + "\n")
    return 0 if all(one["right"] for one in (*found["scan"], found["while_loop"])) else 1


if __name__ == "__main__":
    sys.exit(main())
