"""Calls on small tensors: what a call costs on the host, wall time, many calls back to back.

Nothing waits between the calls of a batch; the batch ends when its last outputs are there. Kernels
of a few microseconds run while the host prepares the next launch, so that the time is the host's.
"""

import statistics
import time
from collections.abc import Callable, Mapping
from typing import Any

import torch

from tvm_fusion.bench.apart import reason

from ..peers.registry import outputs_of, peer, xla_unawaited
from ..record import OURS, REFERENCES, note_error
from .accuracy import CEILINGS, reference, relative_error
from .ours import Ours
from .setup import Setup

CALLS = 1000
FEW_CALLS = 20  # on reduced sizes, which are for trying
WARMUP = 50
THROUGH_BIND, GRAPHS = "tvm_fusion.bind", "torch.cudagraphs"


def fill(row: dict[str, Any], setup: Setup) -> None:
    """Fill a row with wall times a call: ours by the plain call and by `bind`, and the peers'.

    `ours_us` is the plain call's, with its checks and conversions, as the peers' are.
    """
    instance = setup.instance(row["name"])
    wanted, _ = reference(instance)
    row |= {"shape": instance.shape, "dtype": instance.dtype, "clock": "wall"}
    calls: dict[str, Callable[[], Any]] = {}

    def attempt(label: str, make: Callable[[], Callable[[], Any]]) -> None:
        try:
            call = make()
            error = relative_error(outputs_of(call()), wanted)
        except Exception as failure:  # a trial
            row["failures"][label] = reason(failure)
            return
        calls[label] = call
        note_error(row, label, error, CEILINGS[instance.dtype])

    def ours() -> Callable[[], Any]:
        built = Ours(instance, setup)
        compiled = built.fused
        row.update(built.facts)
        attempt(THROUGH_BIND, lambda: compiled.bind(*instance.inputs))
        return lambda: compiled(*instance.inputs)

    attempt(OURS, ours)
    for label in setup.peers_of(row["name"]):
        if label in REFERENCES:
            continue
        make = xla_unawaited if label == "jax" else peer(label)
        attempt(label, lambda make=make: make(instance, setup.target))
    if "torch.compile" in setup.peers and setup.device == "cuda":
        attempt(GRAPHS, lambda: _graphs(instance))
    full = setup.scale == 1
    times = batch_times(calls, setup.repeats, CALLS if full else FEW_CALLS)
    row["ours_us"], row["ours_bind_us"] = times.pop(OURS, None), times.pop(THROUGH_BIND, None)
    row["peers_us"] |= times


def batch_times(
    calls: Mapping[str, Callable[[], Any]], batches: int, number: int | Mapping[str, int]
) -> dict[str, float]:
    """Return the median time of one of `number` calls back to back, in microseconds; of each its
    own number where they are given by label.
    """
    samples: dict[str, list[float]] = {label: [] for label in calls}
    numbers = dict.fromkeys(calls, number) if isinstance(number, int) else number
    for label, call in calls.items():
        for _ in range(min(WARMUP, numbers[label])):
            last = call()
        _wait(last)
    for _ in range(batches):
        for label, call in calls.items():
            start = time.perf_counter()
            for _ in range(numbers[label]):
                last = call()
            _wait(last)
            samples[label].append((time.perf_counter() - start) / numbers[label] * 1e6)
    return {label: statistics.median(times) for label, times in samples.items()}


def _wait(outputs: Any) -> None:
    """Block until outputs are there."""
    if hasattr(outputs, "block_until_ready"):  # JAX runs on streams of its own
        outputs.block_until_ready()
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def _graphs(instance: Any) -> Callable[[], Any]:
    """torch.compile that replays a CUDA graph: one launch for all kernels of a call."""
    compiled = torch.compile(instance.module, mode="reduce-overhead")

    def call() -> Any:
        torch.compiler.cudagraph_mark_step_begin()
        return compiled(*instance.inputs)

    for _ in range(3):  # the graph is recorded after the first calls
        call()
    return call
