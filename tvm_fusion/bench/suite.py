"""One row of the benchmark: a workload compiled, checked and timed by us and by the peers."""

import gc
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import tvm

from ..config import HardwareProfile
from ..runtime.module import CompiledModule
from ..runtime.timing import Timing, time_calls
from . import small, workloads
from .accuracy import CEILINGS, checked_error, output_shapes, reference
from .instance import Instance
from .peers import peer
from .record import OURS, compare, empty_row, note_error, reason

SLOW_S, SLOW_REPEATS = 0.1, 3  # slower calls are timed apart, a few times


@dataclass(frozen=True, slots=True)
class Setup:
    """What all rows of a run share."""

    named: Any  # the target as the caller named it: a profile of his own is more than its Target
    target: tvm.target.Target
    hw: HardwareProfile
    peers: tuple[str, ...]
    dtype: str | None
    scale: float
    repeats: int
    budget_s: float

    @property
    def device(self) -> str:
        """torch's name of the device."""
        return "cuda" if self.target.kind.name == "cuda" else "cpu"

    def instance(self, name: str) -> Instance:
        """Make a workload in the dtype of the run, else its own, else that of the device."""
        default = "float16" if self.device == "cuda" else "float32"
        dtype = self.dtype or workloads.dtype_of(name, default)
        return workloads.make(name, self.device, dtype, self.scale)


def measure(name: str, setup: Setup) -> dict[str, Any]:
    """Return the row of one workload."""
    row = empty_row(name, setup.peers)
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


def device_works() -> bool:
    """Whether this process can still use the GPU: one wild access of a kernel ends that."""
    try:
        torch.cuda.synchronize()
    except RuntimeError:
        return False
    return True


def _fill(row: dict[str, Any], setup: Setup) -> None:
    instance = setup.instance(row["name"])
    wanted, flop = reference(instance)
    row |= {"shape": instance.shape, "dtype": instance.dtype}
    row["limit_us"] = limit_us(instance, output_shapes(instance), flop, setup.hw)
    if any(label.startswith("torch.") for label in setup.peers):
        torch.compiler.reset()  # what it compiled for the last workload
    calls: dict[str, Callable[[], Any]] = {}
    for label in (OURS, *setup.peers):
        try:
            if label == OURS:
                compiled = compile_ours(instance, setup)
                call = compiled.bind(*instance.inputs)
                row |= kernel_facts(compiled)
            else:
                call = peer(label)(instance, setup.target)
            error = checked_error(call, instance.inputs, wanted)
        except Exception as failure:  # a trial
            row["failures"][label] = reason(failure)
            continue
        calls[label] = call
        note_error(row, label, error, CEILINGS[instance.dtype])
    for label, timing in _times(calls, setup).items():
        if label == OURS:
            row["ours_us"] = timing.median_us
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


def compile_ours(instance: Instance, setup: Setup) -> CompiledModule:
    """Compile a workload by us."""
    from ..compiler import compile

    # Checked by us against torch in float64, since the compiler's own check takes long in full size
    return compile((instance.module, instance.inputs), setup.named, verify=False)


def kernel_facts(compiled: CompiledModule) -> dict[str, Any]:
    """Return launches, what fell back and why, and what ptxas says of every kernel."""
    resources = compiled.built.resources.values()
    return {
        "launches": compiled.launches,
        "registers": max((r.registers for r in resources), default=None),
        "spill_bytes": sum(r.spill_bytes for r in resources) if resources else None,
        "fallbacks": [g.fallback for g in compiled.report.groups if g.fallback],
        "kernels": [
            {
                "name": r.name,
                "registers": r.registers,
                "spill_bytes": r.spill_bytes,
                "static_smem_bytes": r.smem_bytes,
            }
            for r in resources
        ],
    }


def limit_us(
    instance: Instance, outputs: Sequence[torch.Tensor], flop: int, hw: HardwareProfile
) -> float:
    """Return the least time of a workload: each byte moved once, or the matrix products.

    What is read of inputs and parameters, each tensor once, and the outputs are moved at the
    profile's measured bandwidth; `flop` runs at its rate for the dtype.
    """
    read = {id(t): t.nbytes for t in (*instance.inputs, *instance.module.parameters())}
    moved = sum(read.values()) - instance.unread_bytes + sum(t.nbytes for t in outputs)
    rate = hw.tensor_flop_per_s.get(instance.dtype) or hw.fma_per_s_f32
    return 1e6 * max(moved / hw.hbm_bytes_per_s, flop / rate)
