"""Steps of a tensor parallel model, recorded with their collectives and launched one by one.

    python tests/gpu/check_collectives.py OUT.json [--ranks N] [--steps N] [--device cpu --tiny]

Layers of Llama 3 8B decode a token a step, at positions that rise, by plans for CUDA graphs: in one
graph with NCCL, and without a graph. Outputs of all steps, kept until the end, and the caches are
compared bit by bit; halfway all weights are written to. Told are recordings and why there are none,
and microseconds a step. With one rank NCCL has nobody to talk to, and one GPU will do. 1 if a bit
differs or nothing was recorded.
"""

import argparse
import gc
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch

from tests.benchmarks.real_models.models import Where
from tests.benchmarks.tensor_parallel.child import Rank, Work, free_port
from tests.benchmarks.tensor_parallel.models import cut, make
from tvm_fusion.torch_backend.step_graphs import StepGraph

CASE = "llama_8b_decode_16"
TIMED = 50


def main() -> int:
    """Check on all ranks."""
    arguments = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    arguments.add_argument("out")
    arguments.add_argument("--ranks", type=int, default=2)
    arguments.add_argument("--steps", type=int, default=100)
    arguments.add_argument("--device", default="cuda")
    arguments.add_argument("--tiny", action="store_true")
    args = arguments.parse_args()
    how = (args, free_port())
    torch.multiprocessing.spawn(work, how, nprocs=args.ranks)
    found = json.loads(Path(args.out).read_text())
    print(json.dumps(found, indent=1))
    return int(not found["right"])


def work(number: int, args: argparse.Namespace, port: int) -> None:
    """One rank."""
    dtype = "bfloat16" if args.device == "cuda" else "float32"
    what = Work(CASE, args.device, dtype, args.tiny, (), 1, args.ranks)
    rank = Rank(what, number, port)
    where = Where(rank.device, getattr(torch, dtype), args.tiny)
    module, (x, position) = make(CASE, where)
    module = cut(CASE, module, rank.device, number, args.ranks)
    context = module.cos.shape[1]
    steps = min(args.steps, context)
    inputs = torch.randn(steps, *x.shape, device=x.device, dtype=x.dtype)
    fresh = {name: getattr(module, name).clone() for name in module.names()}
    weights = {name: weight.clone() for name, weight in module.named_parameters()}
    found: dict[str, Any] = {"ranks": args.ranks, "steps": steps, "us": {}}
    results = {}
    with torch.no_grad():
        for label, graph in (("one by one", False), ("one graph", args.device == "cuda")):
            for name, cache in fresh.items():
                getattr(module, name).copy_(cache)
            for name, weight in module.named_parameters():
                weight.copy_(weights[name])
            torch._dynamo.reset()
            options = {"verify": False, "cuda_graph": graph, "policy": {"launch": "graph"}}
            run = torch.compile(module, backend="tvm_fusion", dynamic=False, options=options)
            kept = []
            for step in range(steps):
                if step == steps // 2:
                    for weight in module.parameters():
                        weight.mul_(0.5)
                kept.append(run(inputs[step], position - (steps - 1 - step)))
            results[label] = [torch.stack(kept), *(getattr(module, n).clone() for n in fresh)]
            _wait(rank)
            began = time.perf_counter()
            for _ in range(TIMED):
                run(inputs[0], position)
            _wait(rank)
            found["us"][label] = (time.perf_counter() - began) / TIMED * 1e6
    graphs = [one for one in gc.get_objects() if type(one) is StepGraph]  # proxies may be dead
    found["recordings"] = [one._count for one in graphs]
    found["refusals"] = [one.refusal for one in graphs]
    pairs = zip(*results.values(), strict=True)
    found["equal"] = [torch.equal(a, b) and bool(a.isfinite().all()) for a, b in pairs]
    is_recorded = bool(graphs) and all(n >= 1 for n in found["recordings"])
    is_recorded &= not any(found["refusals"])
    found["right"] = all(found["equal"]) and (is_recorded or args.device == "cpu")
    everywhere = rank.all(found)
    if number == 0:
        told = everywhere[0] | {"right": all(one["right"] for one in everywhere)}
        Path(args.out).write_text(json.dumps(told | {"others": everywhere[1:]}))
    rank.all(None)
    os._exit(0)  # graphs hold on to what NCCL would wait for


def _wait(rank: Rank) -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    rank.all(None)


if __name__ == "__main__":
    sys.exit(main())
