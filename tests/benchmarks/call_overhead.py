"""What a call costs on the host, beside inductor: `python -m tests.benchmarks.call_overhead`.

A model of a number of inputs that adds one to each, through `torch.compile` on a CPU: so little is
computed that what is left is Dynamo, AOTAutograd, the checks and conversions of a call, and memory
for its results. The time is the process's own (others may use the machine), the least of many
batches, those of the compilers in turns.
"""

import argparse
import json
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import FunctionType
from typing import Any

import torch

from .record import header, write

BACKENDS = ("tvm_fusion", "inductor", "eager")
CALLS = 50  # of a batch
WARM_CALLS = 3


def add_one(*inputs: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """All inputs, and one more."""
    return tuple(x + 1 for x in inputs)


def overheads(
    count: int, batches: int, backends: Sequence[str] = BACKENDS, size: int = 4
) -> dict[str, float]:
    """Microseconds of a call with `count` inputs of `size` numbers, by backend."""
    inputs = [torch.randn(size) for _ in range(count)]
    calls = {}
    with torch.no_grad():
        for backend in backends:
            # one code object is one model to Dynamo
            code = add_one.__code__.replace(co_name=f"add_one_{backend}")
            run = torch.compile(FunctionType(code, globals()), backend=backend, dynamic=False)
            for _ in range(WARM_CALLS):
                run(*inputs)
            calls[backend] = run
        return _least(calls, inputs, batches)


def _least(
    calls: Mapping[str, Callable[..., Any]], inputs: Sequence[torch.Tensor], batches: int
) -> dict[str, float]:
    found = dict.fromkeys(calls, float("inf"))
    for _ in range(batches):
        for name, call in calls.items():
            began = time.process_time_ns()
            for _ in range(CALLS):
                call(*inputs)
            spent = (time.process_time_ns() - began) / CALLS / 1e3
            found[name] = min(found[name], spent)
    return {name: round(spent, 2) for name, spent in found.items()}


def main() -> None:
    """Print a line of JSON for each number of inputs, and write all to a file."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--inputs", type=int, nargs="+", default=[1, 5, 20])
    parser.add_argument("--batches", type=int, default=400)
    parser.add_argument("--out", metavar="FILE", help="write JSON, again after every line")
    given = parser.parse_args()
    torch.set_num_threads(1)
    result = header("", False, 1.0, given.batches, threads=1)
    result["method"] = f"time of the process, the least of batches of {CALLS} calls in turns"
    for count in given.inputs:
        found = overheads(count, given.batches)
        ratio = round(found["tvm_fusion"] / found["inductor"], 3)
        result["rows"].append({"inputs": count, "us": found, "over_inductor": ratio})
        print(json.dumps(result["rows"][-1]), flush=True)
        if given.out is not None:
            write(result, Path(given.out))


if __name__ == "__main__":
    main()
