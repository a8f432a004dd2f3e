"""What a kernel may do beside its own, compiled into it and apart from it, on a GPU: error against
float32, and times of the kernels.

A command gives modules, shapes of their inputs, and how each way is compiled. Results hold NaN
before the checked run; times are medians of the sum of a call's kernels (CUPTI), interleaved, the
L2 cleaned before each call.
"""

import argparse
import copy
import datetime
import json
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from tvm_fusion.frontends.memory_formats import FORMATS
from tvm_fusion.runtime.timing.timing import time_modules

TOLERANCE = {torch.float16: 4e-3, torch.bfloat16: 2e-2}
Compiled = Callable[[nn.Module, list[Tensor], str], Any]
"""A module, its inputs and the name of a way in, the compiled module out."""


def several(found: Tensor | tuple) -> list[Tensor]:
    """The results of a call."""
    return [found] if isinstance(found, Tensor) else list(found)


def check(
    name: str,
    module: nn.Module,
    shapes: tuple,
    ways: Sequence[str],
    compiled: Compiled,
    repeats: int,
) -> list[dict[str, Any]]:
    """Runs one case each way; gives its rows. Vectors are float32, as statistics are."""
    dtype = torch.bfloat16 if "bfloat16" in name else torch.float16
    like = {"memory_format": FORMATS[len(shapes[0])]} if len(shapes[0]) in FORMATS else {}
    module = module.cuda().to(dtype).eval().to(**like)
    inputs = [
        torch.randn(s, device="cuda").to(dtype).contiguous(**like)
        if len(s) > 2
        else torch.randn(s, device="cuda")
        for s in shapes
    ]
    wanted = several(copy.deepcopy(module).float()(*(x.float() for x in inputs)))
    built = {way: compiled(module, inputs, way) for way in ways}
    times = time_modules(built, tuple(inputs), repeats=repeats)
    rows = []
    for way, made in built.items():
        for result in several(made(*inputs)):
            result.fill_(math.nan)
        errors = [
            ((a.float() - b).abs().max() / b.abs().max()).item()
            for a, b in zip(several(made(*inputs)), wanted, strict=True)
        ]
        error = max(math.inf if math.isnan(e) else e for e in errors)
        row = {"name": name, "variant": way, "kernels_us": times[way].median_us, "error": error}
        row["predicted_us"] = sum(g.predicted_us for g in made.plan.groups)
        row["right"] = error < TOLERANCE[dtype]
        row["classes"] = [g.kernel_class for g in made.plan.groups if g.kernel_class != "view"]
        print(json.dumps(row), flush=True)
        rows.append(row)
    return rows


@torch.no_grad()
def command(told: str, cases: Mapping[str, tuple], ways: Sequence[str], compiled: Compiled) -> int:
    """A command that says what it is for; 1 where a result is wrong."""
    parser = argparse.ArgumentParser(description=told)
    parser.add_argument("--only", default="")
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    rows, failed = [], []
    for name, (module, *shapes) in cases.items():
        if args.only not in name:
            continue
        try:
            rows += check(name, module, tuple(shapes), ways, compiled, args.repeats)
        except Exception as error:  # the boundary of a case: the others are still tried
            print(f"FAILED {name}: {type(error).__name__}: {error}"[:400], flush=True)
            failed.append(name)
    if args.json:
        head = {"device": torch.cuda.get_device_name(), "torch": torch.__version__}
        head["date"] = datetime.date.today().isoformat()
        args.json.write_text(json.dumps({**head, "rows": rows}, indent=1))
    failed += [row["name"] for row in rows if not row["right"]]
    print(f"{len(rows)} rows, wrong or failed: {failed or 'none'}")
    return bool(failed)
