"""Early launches beside late ones: chains of tokens bitwise, and times.

    python tests/gpu/check_early.py OUT.json [--batch N ...] [--steps N]

A layer of Llama 3 8B (cache of 2048) decodes a token a step, each made of the one before, with
kernels launched late, early where the cost model says it pays, and all early, by one plan; in CUDA
graphs and on a stream. Outputs and caches of all steps are compared bit by bit. Times: CUDA events
around 30 calls, interleaved, median and least of 15 rounds. 1 if a bit differs.
"""

import argparse
import json
import os
import statistics
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch

import tvm_fusion
from tests.benchmarks import workloads
from tvm_fusion.kernels.gpu.ahead import VARIABLE

WAYS = {"late": "0", "where it pays": "", "all early": "1"}
ROUNDS, CALLS, WARM = 15, 30, 3


class Layer:
    """A workload, and what its ways do."""

    def __init__(self, batch: int) -> None:
        made = workloads.make(f"llama_decode_{batch}", "cuda", "float16")
        self.module, self.inputs = made.module, made.inputs

    def compiled(self) -> dict[str, Callable]:
        """By way, in CUDA graphs and on a stream."""
        found, plan = {}, None
        for name, value in WAYS.items():
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
    early = {name: sorted(way.built.early) for name, way in ways.items()}
    return {"equal": equal, "finite": finite, "early": early, "times": times(calls)}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("out", type=Path)
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 16])
    parser.add_argument("--steps", type=int, default=1000)
    given = parser.parse_args()
    found = {batch: of_batch(batch, given.steps) for batch in given.batch}
    said = {"device": torch.cuda.get_device_name(), "steps": given.steps, "batches": found}
    given.out.write_text(json.dumps(said, indent=1) + "\n")
    return int(not all(f["finite"] and all(f["equal"].values()) for f in found.values()))


if __name__ == "__main__":
    sys.exit(main())
