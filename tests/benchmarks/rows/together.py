"""One row of the benchmark: a workload compiled, checked and timed by us and by the peers."""

import gc
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch

from tvm_fusion.bench.apart import reason
from tvm_fusion.bench.patience import within
from tvm_fusion.config import HardwareProfile
from tvm_fusion.runtime.timing.timing import Timing, device_works, time_calls

from .. import workloads
from ..peers.names import FLEX
from ..peers.registry import peer
from ..record import OURS, PRODUCTS, REFERENCES, UNFUSED, compare, empty_row, note_error
from ..workloads.instance import Instance
from . import small, wall
from .accuracy import CEILINGS, checked_error, output_shapes, reference
from .ours import Ours
from .products import products_alone
from .setup import Setup

SLOW_S, SLOW_REPEATS = 0.1, 3  # slower calls are timed apart, a few times


def measure(name: str, setup: Setup) -> dict[str, Any]:
    """Return the row of one workload."""
    workloads.require([name])
    row = empty_row(name, setup.peers_of(name), workloads.workload(name).plain)
    start = time.monotonic()
    try:
        with torch.no_grad():
            if name in workloads.SUITES["small"]:
                small.fill(row, setup)
            else:
                _fill(row, setup)
    except Exception as error:  # a trial: recorded, and the next workload follows
        row["failures"]["workload"] = reason(error)
    compare(row)
    row["spent_s"] = round(time.monotonic() - start, 1)
    gc.collect()
    if setup.device == "cuda" and device_works():
        torch.cuda.empty_cache()
    return row


def _fill(row: dict[str, Any], setup: Setup) -> None:
    instance = setup.instance(row["name"])
    wanted, flop = reference(instance)
    row |= {"shape": instance.shape, "dtype": instance.dtype}
    flop = round(flop * instance.flop_share)
    row["limit_us"] = limit_us(instance, output_shapes(instance), flop, setup.hw)
    labels = setup.peers_of(row["name"])
    if any(label.startswith("torch.") or label == FLEX for label in labels):
        torch.compiler.reset()  # what it compiled for the last workload
    ours = Ours(instance, setup)
    calls: dict[str, Callable[[], Any]] = {}
    for label in (OURS, *labels):
        if why := setup.given_up.get((row["name"], label)):
            row["failures"][label] = why
            continue
        try:
            if label == PRODUCTS:
                calls[label] = products_alone(instance)
                calls[label]()
                continue
            with within(None if label in (OURS, UNFUSED) else setup.patience_s):
                if label == OURS:
                    call = ours.fused.bind(*instance.inputs)
                    row |= ours.facts
                elif label == UNFUSED:
                    call = ours.unfused.bind(*instance.inputs)
                else:
                    call = peer(label)(instance, setup.target)
                error = checked_error(call, instance.inputs, wanted)
        except Exception as failure:  # a trial
            row["failures"][label] = reason(failure)
            calls.pop(label, None)
            continue
        calls[label] = call
        if note := getattr(call, "note", None):
            row["notes"][label] = note
        note_error(row, label, error, CEILINGS[instance.dtype])
    for label, timing in _times(calls, setup).items():
        _note_time(row, label, timing)
    if workloads.workload(row["name"]).wall and setup.device == "cuda":
        wall.fill(row, instance, wanted, wall.Probe.of(ours, instance), calls, setup)


def _note_time(row: dict[str, Any], label: str, timing: Timing) -> None:
    if label == OURS:
        row["ours_us"] = timing.median_us
    elif label in REFERENCES:
        row[f"{label}_us"] = timing.median_us
        row[f"{label}_launches"] = timing.kernels
    else:
        row["peers_us"][label] = timing.median_us
        row["peers_launches"][label] = timing.kernels


def _times(calls: dict[str, Callable[[], Any]], setup: Setup) -> dict[str, Timing]:
    """Time all calls, interleaved; on a GPU those that take long apart, and a few times."""
    device = torch.device(setup.device)
    slow = {}
    if setup.device == "cuda":
        slow = {label: call for label, call in calls.items() if _seconds(call) > SLOW_S}
    fast = {label: call for label, call in calls.items() if label not in slow}
    times = time_calls(fast, device, setup.repeats, setup.budget_s) if fast else {}
    for label, call in slow.items():
        times |= time_calls({label: call}, device, SLOW_REPEATS)
    return times


def _seconds(call: Callable[[], Any]) -> float:
    torch.cuda.synchronize()
    start = time.perf_counter()
    call()
    torch.cuda.synchronize()
    return time.perf_counter() - start


def limit_us(
    instance: Instance, outputs: Sequence[torch.Tensor], flop: int, hw: HardwareProfile
) -> float:
    """Return the least time of a workload: each byte moved once, or the matrix products.

    What is read of inputs, parameters and buffers, each tensor once, and the outputs are moved at
    the profile's measured bandwidth; `flop` runs at its rate for the dtype, which for float32 is
    that of three products of tfloat32 where that is more than the multipliers'.
    """
    module = instance.module
    tensors = (*instance.inputs, *module.parameters(), *module.buffers())
    read = {id(t): t.nbytes for t in tensors}
    moved = sum(read.values()) - instance.unread_bytes + sum(t.nbytes for t in outputs)
    rate = hw.tensor_flop_per_s.get(instance.dtype)
    rate = rate or max(hw.fma_per_s_f32, hw.tensor_flop_per_s.get("tfloat32", 0.0) / 3)
    return 1e6 * max(moved / hw.hbm_bytes_per_s, flop / rate)
