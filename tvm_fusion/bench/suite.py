"""One row of the benchmark: a workload compiled, checked and timed by us and by the peers."""

import gc
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import tvm

from ..config import HardwareProfile
from ..runtime.module import CompiledModule
from ..runtime.timing import time_calls
from . import workloads
from .accuracy import CEILINGS, checked_error, reference
from .peers import peer
from .record import OURS, reason


@dataclass(frozen=True, slots=True)
class Setup:
    """What all rows of a run share."""

    named: Any  # the target as the caller named it: a profile of his own is more than its Target
    target: tvm.target.Target
    hw: HardwareProfile
    peers: tuple[str, ...]
    dtype: str
    scale: float
    repeats: int
    budget_s: float

    @property
    def device(self) -> str:
        """torch's name of the device."""
        return "cuda" if self.target.kind.name == "cuda" else "cpu"


def measure(name: str, setup: Setup) -> dict[str, Any]:
    """Return the row of one workload."""
    row: dict[str, Any] = {
        "name": name,
        "shape": None,
        "dtype": setup.dtype,
        "ours_us": None,
        "launches": None,
        "limit_us": None,
        "error": None,
        "registers": None,
        "spill_bytes": None,
        "peers_us": dict.fromkeys(setup.peers),
        "peers_launches": dict.fromkeys(setup.peers),
        "peers_error": dict.fromkeys(setup.peers),
        "failures": {},
    }
    try:
        with torch.no_grad():
            _fill(row, setup)
    except Exception as error:  # a trial: recorded, and the next workload follows
        row["failures"]["workload"] = reason(error)
    gc.collect()
    if setup.device == "cuda":
        torch.cuda.empty_cache()
    return row


def _fill(row: dict[str, Any], setup: Setup) -> None:
    instance = workloads.make(row["name"], setup.device, setup.dtype, setup.scale)
    wanted, flop = reference(instance)
    row["shape"] = instance.shape
    row["limit_us"] = limit_us(instance, wanted, flop, setup.hw)
    if any(label.startswith("torch.") for label in setup.peers):
        torch.compiler.reset()  # what it compiled for the last workload
    calls: dict[str, Callable[[], Any]] = {}
    for label in (OURS, *setup.peers):
        try:
            if label == OURS:
                call, facts = _ours(instance, setup)
            else:
                call, facts = peer(label)(instance, setup.target), {}
            error = checked_error(call, instance.inputs, wanted)
        except Exception as failure:  # a trial
            row["failures"][label] = reason(failure)
            continue
        calls[label] = call
        _note_error(row, label, error)
        row |= facts
    times = time_calls(calls, torch.device(setup.device), setup.repeats, setup.budget_s)
    for label, timing in times.items():
        if label == OURS:
            row["ours_us"] = timing.median_us
        else:
            row["peers_us"][label] = timing.median_us
            row["peers_launches"][label] = timing.kernels


def _note_error(row: dict[str, Any], label: str, error: float) -> None:
    ceiling = CEILINGS[row["dtype"]]
    shown = error if math.isfinite(error) else None
    if label == OURS:
        row["error"] = shown
    else:
        row["peers_error"][label] = shown
    if error > ceiling:
        found = "a value that is not finite" if shown is None else f"an error of {error:.1e}"
        row["failures"][label] = f"{found} against float64; {ceiling:.0e} is allowed"


def _ours(
    instance: workloads.Instance, setup: Setup
) -> tuple[Callable[[], Any], dict[str, int | None]]:
    from ..compiler import compile

    # Checked by us against torch in float64, since the compiler's own check takes long in full size
    compiled: CompiledModule = compile(
        (instance.module, instance.inputs), setup.named, verify=False
    )
    resources = compiled.built.resources.values()
    facts = {
        "launches": compiled.launches,
        "registers": max((r.registers for r in resources), default=None),
        "spill_bytes": sum(r.spill_bytes for r in resources) if resources else None,
    }
    return compiled.bind(*instance.inputs), facts


def limit_us(
    instance: workloads.Instance, outputs: Sequence[torch.Tensor], flop: int, hw: HardwareProfile
) -> float:
    """Return the least time of a workload: each byte moved once, or the matrix products.

    Inputs, parameters and outputs are moved once at the profile's measured bandwidth; `flop` runs
    at its rate for the dtype.
    """
    read = [*instance.inputs, *instance.module.parameters()]
    item = getattr(torch, instance.dtype).itemsize
    moved = sum(t.numel() * t.element_size() for t in read) + sum(t.numel() * item for t in outputs)
    rate = hw.tensor_flop_per_s.get(instance.dtype) or hw.fma_per_s_f32
    return 1e6 * max(moved / hw.hbm_bytes_per_s, flop / rate)
