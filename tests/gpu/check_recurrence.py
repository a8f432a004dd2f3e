"""Recurrent layers on a GPU: error against float64, and time beside cuDNN.

    python tests/gpu/check_recurrence.py [--only TEXT] [--workers N] [--json F]

Kernels of all forms that take a layer; "linear" is torch's product of all inputs, which they come
behind, so that a layer takes both. Outputs hold NaN before the checked run. Times are those of the
kernels (CUPTI) and of calls back to back (events), medians in us; they are compiled in several
processes first. Kernels wait for each other within a launch: give the whole a timeout.
"""

import argparse
import json
import math
import multiprocessing
import statistics
import sys
import tempfile
import time
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch
import torch.nn.functional as F
import tvm
from torch import Tensor, nn
from tvm import tirx

from tvm_fusion.config import load_policy, load_profile
from tvm_fusion.errors import Unsupported
from tvm_fusion.kernels.recurrence.cell import Cell
from tvm_fusion.kernels.recurrence.form import Recurrence
from tvm_fusion.kernels.recurrence.kernel import WRITER
from tvm_fusion.runtime.build.build import build_functions
from tvm_fusion.runtime.timing.timing import kernel_times

LAYERS = {"lstm": nn.LSTM, "gru": nn.GRU}
STEPS = (16, 256, 512)
SIZES = [
    (kind, units, batch, "float16")
    for units in (128, 192, 256, 384, 512, 1024, 2048)
    for kind in LAYERS
    for batch in (1, 32)
]
SIZES += [("lstm", units, batch, "float32") for units in (128, 512, 1024) for batch in (1, 32)]
TOLERANCE = {"float16": 4e-3, "float32": 2e-3}  # cuDNN rounds float32 to tfloat32
MOST_ALONE = 64  # units: above, the form is a last resort that takes long
Size = tuple[str, int, int, str]


def written(size: Size, path: str, profile: str) -> list[str]:
    """A library of the first configuration of each form; the names of the forms."""
    kind, units, batch, dtype = size
    made = Recurrence(Cell(kind), tirx.Var("steps", "int64"), batch, units, dtype, False)
    hw, policy, kernels, names = load_profile(profile), load_policy(None), {}, []
    for number, form in enumerate(WRITER.forms):
        if form is WRITER.forms[-1] and units > MOST_ALONE:
            continue
        try:
            ranked = form.rank(made, hw, policy)
            if not ranked:
                continue
            func = form.emit(made, hw, ranked[0][1])
        except Unsupported:
            continue
        kernels[f"form{number}"] = func.with_attr("global_symbol", f"form{number}")
        names.append(form.name)
    library, _ = build_functions(tvm.IRModule(kernels), hw.to_target())
    library.export_library(path)
    return names


class Layer:
    """A layer of torch's, its inputs, and tensors as our kernels take them."""

    def __init__(self, size: Size, steps: int) -> None:
        kind, units, batch, dtype = size
        self.dtype = getattr(torch, dtype)
        self.layer = LAYERS[kind](units, units).cuda().to(self.dtype).eval()
        self.layer.flatten_parameters()
        self.x = self._drawn(steps, batch, units)
        self.first = [self._drawn(1, batch, units) for _ in range(2 if kind == "lstm" else 1)]
        self.into = self.layer.weight_ih_l0.detach()
        own, more = self.layer.bias_ih_l0.float(), self.layer.bias_hh_l0.float()
        self.extra: list[Tensor] = []
        if kind == "gru":  # the last third of the second one is within a product with a gate
            self.extra = [more[2 * units :].to(self.dtype).detach()]
            more[2 * units :] = 0
        self.bias = (own + more).to(self.dtype).detach()
        like = torch.empty(batch, units, device="cuda", dtype=self.dtype)
        self.outputs = [torch.empty_like(self.x), *(torch.empty_like(like) for _ in self.first)]

    def _drawn(self, *shape: int) -> Tensor:
        return torch.randn(*shape, device="cuda").to(self.dtype)

    def linear(self) -> Tensor:
        """The product of all inputs."""
        return F.linear(self.x, self.into, self.bias)

    def torch(self, dtype: torch.dtype | None = None) -> list[Tensor]:
        """What the layer gives, computed in a dtype."""
        layer, x, first = self.layer, self.x, self.first
        if dtype is not None:
            layer = type(layer)(layer.input_size, layer.hidden_size).cuda().to(dtype)
            layer.load_state_dict(self.layer.state_dict())
            x, first = x.to(dtype), [s.to(dtype) for s in first]
        y, last = layer(x, tuple(first) if len(first) > 1 else first[0])
        return [y, *(s[0] for s in (last if len(first) > 1 else [last]))]

    def arguments(self) -> list[tvm.runtime.Tensor]:
        """What a kernel takes."""
        states = [s[0].contiguous() for s in self.first]
        hidden = self.layer.weight_hh_l0.detach()
        tensors = [self.linear(), hidden, *self.extra, *states, *self.outputs]
        return [tvm.runtime.from_dlpack(t.detach()) for t in tensors]


def event_us(call: Any, count: int) -> float:
    """Time of a call, of several back to back."""
    for _ in range(3):
        call()
    found = []
    for _ in range(5):
        began, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        began.record()
        for _ in range(count):
            call()
        ended.record()
        ended.synchronize()
        found.append(began.elapsed_time(ended) * 1e3 / count)
    return statistics.median(found)


def check(size: Size, steps: int, path: str, names: list[str]) -> dict[str, Any]:
    """One length of a layer."""
    layer = Layer(size, steps)
    wanted, theirs = layer.torch(torch.float64), layer.torch()
    main, arguments = tvm.runtime.load_module(path), layer.arguments()
    calls: dict[str, Any] = {"cudnn": layer.torch, "linear": layer.linear}
    errors = {"cudnn": _error(theirs, wanted)}
    for number, form in enumerate(WRITER.forms):
        if form.name not in names:
            continue
        kernel = main[f"form{number}"]
        for output in layer.outputs:
            output.fill_(math.nan)
        kernel(*arguments)
        torch.cuda.synchronize()
        errors[form.name] = _error(layer.outputs, wanted)
        calls[form.name] = lambda kernel=kernel: kernel(*arguments)
    times = {name: t.median_us for name, t in kernel_times(calls, 4).items()}
    events = {name: event_us(call, max(1, 200 // steps)) for name, call in calls.items()}
    return {"size": size, "steps": steps, "errors": errors, "kernel_us": times, "event_us": events}


def _error(given: list[Tensor], wanted: list[Tensor]) -> float:
    found = [(a.double() - b).abs().max().item() for a, b in zip(given, wanted, strict=True)]
    return max(math.inf if math.isnan(e) else e for e in found)


def line(row: dict[str, Any]) -> str:
    """A row in one line of text: our best form with the product of inputs beside cuDNN."""
    kernels, ours = row["kernel_us"], row["kernel_us"].keys() - {"cudnn", "linear"}
    best = min(ours, key=kernels.__getitem__)
    whole = kernels[best] + kernels["linear"]
    kind, units, batch, dtype = row["size"]
    wrong = [n for n, e in row["errors"].items() if n in ours and not e <= TOLERANCE[dtype]]
    return (
        f"{kind} {units:5d} batch {batch:3d} steps {row['steps']:4d} {dtype}: {whole:8.1f}"
        f" ({best}), cuDNN {kernels['cudnn']:8.1f}, {kernels['cudnn'] / whole:5.2f}x"
        + "".join(f" WRONG {n} {row['errors'][n]:.1e}" for n in wrong)
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", default="", help="layers whose name holds this text")
    parser.add_argument("--profile", default="nvidia_h200")
    parser.add_argument("--workers", type=int, default=14)
    parser.add_argument("--json", metavar="F")
    args = parser.parse_args()
    sizes = [size for size in SIZES if args.only in "_".join(map(str, size))]
    spawn, rows = multiprocessing.get_context("spawn"), []
    print(torch.cuda.get_device_name(), torch.__version__, flush=True)
    with (
        tempfile.TemporaryDirectory() as folder,
        ProcessPoolExecutor(args.workers, mp_context=spawn) as pool,
        torch.no_grad(),
    ):
        paths = [f"{folder}/{number}.so" for number in range(len(sizes))]
        made = [pool.submit(written, *job, args.profile) for job in zip(sizes, paths, strict=True)]
        for size, path, names in zip(sizes, paths, made, strict=True):
            for steps in STEPS:
                rows.append(check(size, steps, path, names.result()))
                print(line(rows[-1]), flush=True)
    if args.json:
        found = {
            "device": torch.cuda.get_device_name(),
            "date": time.strftime("%Y-%m-%d"),
            "versions": {"torch": torch.__version__, "apache-tvm": tvm.__version__},
            "rows": rows,
        }
        Path(args.json).write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    wrong = sum("WRONG" in line(row) for row in rows)
    print(f"{len(rows)} rows; wrong: {wrong}")
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main())
