"""Measure the workloads beside other compilers: one process, interleaved, checked, written down.

    python -m tvm_fusion.bench memory --target cuda --out tests/results/memory.json

On a GPU a time is the sum of the kernels of one call (CUPTI), with the L2 cleaned before each timed
call; on a CPU it is wall-clock time. What fails is recorded with its reason, and the run goes on.
"""

import argparse
import datetime
import gc
import importlib.metadata
import json
import logging
import math
import platform
import re
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import tvm

from .._version import __version__
from ..config import HardwareProfile, resolve_target
from ..errors import TargetError
from ..runtime.module import CompiledModule
from ..runtime.timing import time_calls
from . import workloads
from .accuracy import CEILINGS, checked_error, reference
from .compare import bench as bench
from .peers import PEERS, peer

OURS = "tvm_fusion"
FORMAT = 1
_PACKAGES = ("apache-tvm", "apache-tvm-ffi", "torch", "triton", "jax", "numpy")
_log = logging.getLogger(__name__)


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


def run_suite(
    names: Sequence[str],
    peers: Sequence[str] = tuple(PEERS),
    target: Any = None,
    out: str | Path | None = None,
    *,
    dtype: str | None = None,
    scale: float = 1.0,
    repeats: int = 20,
    budget_s: float = 5.0,
) -> dict[str, Any]:
    """Compile, check and time workloads by us and by the peers.

    Parameters
    ----------
    names : sequence of str
        Workloads; `workloads.SUITES["memory"]` for a suite.
    peers : sequence of str
        Keys of `peers.PEERS`.
    target : Any
        See `tvm_fusion.config.resolve_target`.
    out : path, optional
        A JSON file, written again after every workload.
    dtype : str, optional
        "float16" on a GPU, "float32" on a CPU by default.
    scale : float
        Factor on the extents; 1 is the size that results are compared at.
    repeats : int
        Samples of every time.
    budget_s : float
        On a CPU, the time for all samples of a workload; at least three are taken.

    Returns
    -------
    dict
        What is written to `out`. A row's time, error or count is None where it failed; `failures`
        then says why.

    Raises
    ------
    InputError
        An unknown workload, peer or target.
    """
    tvm_target, hw = resolve_target(target)
    workloads.require(names)
    for name in peers:
        peer(name)
    if not tvm.runtime.device_from_target(tvm_target).exist:
        raise TargetError(f"this machine has no {tvm_target.kind.name} device to measure on")
    default = "float16" if tvm_target.kind.name == "cuda" else "float32"
    setup = Setup(
        target, tvm_target, hw, tuple(peers), dtype or default, float(scale), repeats, budget_s
    )
    result = _header(setup)
    for name in names:
        row = measure(name, setup)
        result["rows"].append(row)
        _log.info("%s", _line(row))
        if out is not None:
            Path(out).parent.mkdir(parents=True, exist_ok=True)
            Path(out).write_text(json.dumps(result, indent=1, allow_nan=False) + "\n")
    return result


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
        row["failures"]["workload"] = _reason(error)
    gc.collect()
    if setup.device == "cuda":
        torch.cuda.empty_cache()
    return row


def _fill(row: dict[str, Any], setup: Setup) -> None:
    instance = workloads.make(row["name"], setup.device, setup.dtype, setup.scale)
    wanted, flop = reference(instance)
    row["shape"] = instance.shape
    row["limit_us"] = limit_us(instance, wanted, flop, setup.hw)
    torch._dynamo.reset()
    calls: dict[str, Callable[[], Any]] = {}
    for label in (OURS, *setup.peers):
        try:
            if label == OURS:
                call, facts = _ours(instance, setup)
            else:
                call, facts = peer(label)(instance, setup.target), {}
            error = checked_error(call, instance.inputs, wanted)
        except Exception as failure:  # a trial
            row["failures"][label] = _reason(failure)
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


def _header(setup: Setup) -> dict[str, Any]:
    on_gpu = setup.device == "cuda"
    return {
        "format": FORMAT,
        "device": torch.cuda.get_device_name() if on_gpu else _cpu_name(),
        "profile": setup.hw.name,
        "date": datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d"),
        "versions": _versions(),
        "command": " ".join(["python -m tvm_fusion.bench", *sys.argv[1:]]),
        "method": "kernel time (CUPTI), L2 cleaned before each call" if on_gpu else "wall time",
        "scale": setup.scale,
        "repeats": setup.repeats,
        "rows": [],
    }


def _cpu_name() -> str:
    try:
        found = re.search(r"^model name\s*:\s*(.+)$", Path("/proc/cpuinfo").read_text(), re.M)
    except OSError:
        found = None
    return found[1] if found else platform.processor() or platform.machine()


def _versions() -> dict[str, str]:
    found = {"python": platform.python_version(), OURS: __version__}
    for package in _PACKAGES:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    if torch.version.cuda:
        found["cuda"] = torch.version.cuda
    return found


def _reason(error: Exception) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[0] if lines else 'no message'}"[:500]


def _line(row: dict[str, Any]) -> str:
    def us(value: float | None) -> str:
        return "-" if value is None else f"{value:.1f}"

    others = ", ".join(f"{name} {us(value)}" for name, value in row["peers_us"].items())
    failed = "; ".join(f"{name}: {why}" for name, why in row["failures"].items())
    return (
        f"{row['name']} {row['shape']}: ours {us(row['ours_us'])} us ({row['launches']} launches, "
        f"limit {us(row['limit_us'])}), {others}{' | ' if failed else ''}{failed}"
    )


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a suite from the command line; the exit status is 1 if any of our rows failed."""
    parser = argparse.ArgumentParser(prog="python -m tvm_fusion.bench", description=__doc__)
    parser.add_argument("names", help='a suite ("memory", "all") or workloads, by commas')
    parser.add_argument("--peers", default=",".join(PEERS), help="by commas; default: %(default)s")
    parser.add_argument("--target", help="cuda, llvm, or a profile; default: the GPU if any")
    parser.add_argument("--out", type=Path, help="the JSON file to write")
    parser.add_argument("--dtype", help="float16 on a GPU, float32 on a CPU")
    parser.add_argument("--scale", type=float, default=1.0, help="factor on the extents")
    parser.add_argument("--repeats", type=int, default=20)
    given = parser.parse_args(arguments)
    logging.basicConfig(level=logging.WARNING, format="%(message)s")
    _log.setLevel(logging.INFO)
    suite = workloads.SUITES.get(given.names) or tuple(given.names.split(","))
    result = run_suite(
        suite,
        tuple(filter(None, given.peers.split(","))),
        given.target,
        given.out,
        dtype=given.dtype,
        scale=given.scale,
        repeats=given.repeats,
    )
    return int(any({OURS, "workload"} & row["failures"].keys() for row in result["rows"]))
