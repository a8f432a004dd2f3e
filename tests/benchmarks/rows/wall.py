"""Wall time of calls that replay CUDA graphs, and the memory that a call takes.

Kernel times leave out what lies between kernels; here everything that torch or we launch in a call
is captured into one graph, on the same inputs, and many replays run back to back. JAX, which makes
graphs itself, is called as it is, without waiting for one call before the next.

Memory is what a call without graphs takes beside its inputs and weights, its outputs included, in
two counts, each made in one way for ours and for torch; JAX's is not counted. `memory_bytes` is
what is allocated at once at most: torch's allocator counts its blocks, and our plan the storages.
`memory_taken_bytes` is what the device has less of after the call, where the pools were empty
before: what both keep for the next call is counted too.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from tvm_fusion.bench.apart import reason
from tvm_fusion.runtime.calls.channels_last import returned
from tvm_fusion.runtime.calls.tensors import Kind, raw_stream

from ..peers.registry import xla_unawaited
from ..record import OURS, REFERENCES, too_wrong
from ..workloads.instance import Instance
from .accuracy import CEILINGS, checked_error
from .ours import Ours
from .setup import Setup
from .small import batch_times

BATCH_S = 0.03  # of replays back to back
MOST_CALLS = 200
WARMUP = 3

Call = Callable[[], Any]


@dataclass(frozen=True, slots=True)
class Probe:
    """What looks into a call.

    Attributes
    ----------
    memory : Callable
        Takes a call; gives its `memory_bytes` and `memory_taken_bytes`.
    graph : Callable
        Takes a call; gives one that replays what it launches.
    """

    memory: Callable[[Call], tuple[int, int]]
    graph: Callable[[Call], Call]

    @classmethod
    def of(cls, ours: Ours, instance: Instance) -> "Probe":
        """For our call of a workload."""
        return cls(partial(_memory_of_ours, ours), lambda _call: _graph_of_ours(ours, instance))


def fill(
    row: dict[str, Any],
    instance: Instance,
    wanted: list[torch.Tensor],
    ours: Probe,
    calls: Mapping[str, Call],
    setup: Setup,
    others: Probe | None = None,
) -> None:
    """Fill in `wall_us`, and but for JAX `memory_bytes` and `memory_taken_bytes`.

    Parameters
    ----------
    wanted : list of torch.Tensor
        The float64 outputs.
    ours, others : Probe
        For our call, and for those of torch: by default `memory_of_torch` and `graph_of_torch`.
    calls : mapping of str to Callable
        What ran without graphs and is timed by its kernels already.
    """
    others = others or Probe(memory_of_torch, graph_of_torch)
    replays: dict[str, Call] = {}
    for label, call in calls.items():
        if label in REFERENCES or label == "tvm":
            continue
        try:
            if label == "jax":
                replays[label] = xla_unawaited(instance, setup.target)
                continue
            probe = ours if label == OURS else others
            allocated, taken = probe.memory(call)
            row["memory_bytes"][label] = allocated
            row.setdefault("memory_taken_bytes", {})[label] = taken
            replay = probe.graph(call)
            error = checked_error(replay, instance.inputs, wanted)
        except Exception as failure:  # a trial
            row["failures"][f"{label}, CUDA graph"] = reason(failure)
            continue
        if why := too_wrong(error, CEILINGS[instance.dtype]):
            row["failures"][f"{label}, CUDA graph"] = why
        else:
            replays[label] = replay
    if replays:
        row["wall_us"] |= batch_times(replays, setup.repeats, calls_of_batch(replays))


def calls_of_batch(replays: Mapping[str, Call]) -> int:
    """The number of calls of a batch: enough for the clock, few where one call takes long."""
    slowest = max(batch_times(replays, 1, WARMUP).values())
    return max(WARMUP, min(MOST_CALLS, int(BATCH_S / (slowest * 1e-6))))


def graph_of_torch(call: Call) -> Call:
    """Return a function that replays what a call launches, and returns its outputs."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(WARMUP):
            call()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        outputs = call()

    def replay() -> Any:
        graph.replay()
        return outputs

    return replay


def memory_of_torch(call: Call) -> tuple[int, int]:
    """Return the bytes that torch allocates in a call at most at once, and those that it takes from
    the device.
    """
    call()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    before, free = torch.cuda.memory_allocated(), torch.cuda.mem_get_info()[0]
    torch.cuda.reset_peak_memory_stats()
    outputs = call()
    torch.cuda.synchronize()
    taken = free - torch.cuda.mem_get_info()[0]
    del outputs
    return torch.cuda.max_memory_allocated() - before, max(0, taken)


def _graph_of_ours(ours: Ours, instance: Instance) -> Call:
    from tvm_fusion.runtime.graphs.capture import CapturedCall
    from tvm_fusion.runtime.graphs.driver import CudaDriver

    compiled = ours.fused
    device = compiled.device
    arguments = compiled.arguments(instance.inputs)
    compiled.run(arguments)  # loads the kernels
    captured = CapturedCall(compiled.vm, arguments, device, CudaDriver(device.index))
    outputs = returned(compiled.signature.formats, captured.outputs)

    def replay(_kept: Any = arguments) -> Any:
        captured.launch(raw_stream(device, Kind.TORCH))
        return outputs

    return replay


def _memory_of_ours(ours: Ours, call: Call) -> tuple[int, int]:
    from tvm_fusion.runtime.calls.call_memory import measured_call_bytes

    compiled = ours.fused
    planned = compiled.peak_memory_bytes
    taken = measured_call_bytes(call, compiled.device)
    return taken if planned is None else planned - compiled.memory.weights_bytes, taken
