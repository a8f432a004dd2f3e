"""Early launches beside late ones: chains of tokens bitwise, times, and what races.

    python tests/gpu/check_early.py OUT.json [--batch N ...] [--steps N]
    python tests/gpu/check_early.py OUT.json --sanitize [TOOL ...] [--batch N ...]

A layer of Llama 3 8B (cache of 2048) decodes a token a step, each made of the one before, with
kernels launched late, early where the cost model says it pays, and all early, by one plan; in CUDA
graphs and on a stream. Outputs and caches of all steps are compared bit by bit. Times: CUDA events
around 30 calls, interleaved, median and least of 15 rounds; a copy among them says what the memory
gives, and so the limit of each kernel, by the bytes of the plan, and of all. Times of single
kernels are CUPTI's, of late launches on a stream. 1 if a bit differs.

`--sanitize` has compute-sanitizer (racecheck and memcheck) watch two steps of a layer of a quarter
of all sizes, all kernels early: in a CUDA graph and on a stream. 1 if it finds something.
"""

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch

import tvm_fusion
from tests.benchmarks.workloads.instance import Workload
from tests.benchmarks.workloads.transformers import decode_step
from tvm_fusion.kernels.gpu.ahead import VARIABLE
from tvm_fusion.profile.measured import labelled
from tvm_fusion.runtime.timing.spans import recorded_calls

WAYS = {"late": "0", "where it pays": "", "all early": "1"}
ROUNDS, CALLS, WARM = 15, 30, 3
COPIED_BYTES = 1 << 30
COPY = "copy"  # among the times
TOOLS = ("racecheck", "memcheck")
SMALL, SMALL_STEPS = 0.25, 2
FOUND, LIMIT_S = 7, 120
SANITIZERS = ("compute-sanitizer", "/usr/local/cuda/bin/compute-sanitizer")


class Layer:
    """A workload, and what its ways do."""

    def __init__(self, batch: int, scale: float = 1.0) -> None:
        work = Workload(decode_step(round(batch / scale)))
        made = work.instance("decode", "cuda", "float16", scale)
        self.module, self.inputs = made.module, made.inputs

    def compiled(self, ways: Mapping[str, str] = WAYS) -> dict[str, Callable]:
        """By way, in CUDA graphs and on a stream."""
        found, plan = {}, None
        for name, value in ways.items():
            os.environ[VARIABLE] = value
            for graph in (True, False):
                how = {"example_inputs": self.inputs, "verify": False, "cuda_graph": graph}
                made = tvm_fusion.compile(self.module, "cuda", plan=plan, **how)
                plan = made.plan if plan is None else plan
                found[f"{name}, {'graph' if graph else 'stream'}"] = made
        return found

    def steps(self, call: Callable, count: int) -> tuple[torch.Tensor, ...]:
        """Outputs of a chain of steps, and the caches that it leaves."""
        x, _, keys, values = (tensor.clone() for tensor in self.inputs)
        at, found = torch.tensor([keys.shape[2] - count - 1], device="cuda"), []
        for _ in range(count):
            result = call(x, at, keys, values)
            y = torch.as_tensor(result[0] if isinstance(result, tuple | list) else result)
            found.append(y.clone())
            x = (y / y.float().square().mean(-1, keepdim=True).sqrt()).half()
            at = at + 1
        torch.cuda.synchronize()
        return torch.stack(found), keys, values


def times(calls: Mapping[str, Callable[[], object]]) -> dict[str, dict[str, float]]:
    """Microseconds a call, interleaved."""
    found: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(ROUNDS):
        for name, call in calls.items():
            for _ in range(WARM):
                call()
            torch.cuda.synchronize()
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            for _ in range(CALLS):
                call()
            end.record()
            torch.cuda.synchronize()
            found[name].append(begin.elapsed_time(end) / CALLS * 1e3)
    return {n: {"median_us": statistics.median(us), "least_us": min(us)} for n, us in found.items()}


def kernels(module: tvm_fusion.CompiledModule, inputs, bytes_per_us: float) -> list[dict]:
    """Each launch of a call: what it is, its time, and that of its bytes."""
    calls = recorded_calls(module, inputs, module.built.kernels).calls
    groups, found = module.report.groups, []
    for place, (index, label) in enumerate(labelled([span.name for span in calls[0]], groups)):
        row = {"name": calls[0][place].name, "computes": label}
        row["median_us"] = statistics.median(call[place].busy_us for call in calls)
        if index is not None:
            row["bytes"] = groups[index].bytes_fused
            row["limit_us"] = row["bytes"] / bytes_per_us
        found.append(row)
    return found


@torch.no_grad()
def of_batch(batch: int, count: int) -> dict[str, object]:
    """What one batch size gives."""
    layer = Layer(batch)
    ways = layer.compiled()
    late = layer.steps(next(iter(ways.values())), count)
    equal = {
        name: all(torch.equal(a, b) for a, b in zip(layer.steps(way, count), late, strict=True))
        for name, way in ways.items()
    }
    finite = bool(late[0].isfinite().all())
    calls = {name: lambda way=way: way(*layer.inputs) for name, way in ways.items()}
    source, target = (torch.zeros(COPIED_BYTES, dtype=torch.uint8, device="cuda") for _ in range(2))
    taken = times(calls | {COPY: lambda: target.copy_(source)})
    bytes_per_us = 2 * COPIED_BYTES / taken[COPY]["median_us"]
    apart = kernels(ways["late, stream"], layer.inputs, bytes_per_us)
    return {
        "equal": equal,
        "finite": finite,
        "early": {name: sorted(way.built.early) for name, way in ways.items()},
        "times": taken,
        "bytes_per_s": bytes_per_us * 1e6,
        "limit_us": sum(row.get("limit_us", 0.0) for row in apart),
        "kernels": apart,
    }


@torch.no_grad()
def small(batch: int) -> bool:
    """Whether a small layer's chains are bitwise the same: what a sanitizer watches."""
    layer = Layer(batch, SMALL)
    ways = layer.compiled({name: WAYS[name] for name in ("late", "all early")})
    late, *others = (layer.steps(way, SMALL_STEPS) for way in ways.values())
    return all(torch.equal(a, b) for other in others for a, b in zip(other, late, strict=True))


def sanitized(tool: str, batch: int) -> dict[str, object]:
    """What a tool says of a small layer."""
    found = next(filter(None, map(shutil.which, SANITIZERS)), None)
    if found is None:
        raise SystemExit("there is no compute-sanitizer")
    command = [found, "--tool", tool, "--error-exitcode", str(FOUND), sys.executable, __file__]
    began = time.monotonic()
    try:
        done = subprocess.run(
            [*command, os.devnull, "--small", "--batch", str(batch)],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=LIMIT_S,
        )
    except subprocess.TimeoutExpired as late:
        return {"status": None, "said": str(late.stdout)[-2000:], "seconds": LIMIT_S}
    said = [line for line in done.stdout.splitlines() if line.startswith("=====")]
    seconds = round(time.monotonic() - began, 1)
    shown = [*said[:30], *said[-3:]] if done.returncode else said[-3:]
    return {
        "status": done.returncode,
        "said": shown if said else done.stdout[-2000:],
        "seconds": seconds,
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("out", type=Path)
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 16])
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--sanitize", nargs="*", choices=TOOLS, metavar="TOOL")
    parser.add_argument("--small", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.small:
        return int(not all(map(small, given.batch)))
    device = {"device": torch.cuda.get_device_name()}
    if given.sanitize is not None:
        all(map(small, given.batch))  # kernels are built without the tool, and kept
        rows = {
            f"{tool}, batch {batch}": sanitized(tool, batch)
            for tool in given.sanitize or TOOLS
            for batch in given.batch
        }
        given.out.write_text(json.dumps(device | {"sanitizer": rows}, indent=1) + "\n")
        return int(any(row["status"] != 0 for row in rows.values()))
    found = {batch: of_batch(batch, given.steps) for batch in given.batch}
    said = device | {"steps": given.steps, "batches": found}
    given.out.write_text(json.dumps(said, indent=1) + "\n")
    return int(not all(f["finite"] and all(f["equal"].values()) for f in found.values()))


if __name__ == "__main__":
    sys.exit(main())
