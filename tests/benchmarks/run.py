"""Measure the workloads beside other compilers: one process, interleaved, checked, written down.

    python -m tests.benchmarks --suite memory --target cuda --out tests/results/memory.json

On a GPU a time is the sum of the kernels of one call (CUPTI), with the L2 cleaned before each timed
call; on a CPU it is wall-clock time. What fails is recorded with its reason, and the run goes on.
`tvm_fusion.bench.compare` does the same for one model of the user's.
"""

import logging
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import tvm

from tvm_fusion.bench.apart import INSTRUCTIONS, PROCESSORS, cores_for
from tvm_fusion.config import resolve_target
from tvm_fusion.errors import InputError, TargetError
from tvm_fusion.runtime.timing.timing import device_works

from . import workloads
from .peers.registry import PEERS, peer
from .record import REFERENCES, header, line, summary, write
from .rows import apart, prepare, together
from .rows.accuracy import CEILINGS
from .rows.setup import Setup, exact_float32

log = logging.getLogger(__name__)


def run_suite(
    names: Sequence[str],
    peers: Sequence[str] | None = None,
    target: Any = None,
    out: str | Path | None = None,
    *,
    dtype: str | None = None,
    scale: float = 1.0,
    repeats: int = 20,
    budget_s: float = 5.0,
    workers: int = 0,
    plain_peers: Sequence[str] | None = None,
    patience_s: float | None = None,
    threads: int | None = None,
    instructions: str | None = None,
) -> dict[str, Any]:
    """Compile, check and time workloads by us and by the peers.

    Parameters
    ----------
    names : sequence of str
        Workloads; `workloads.SUITES["memory"]` for a suite.
    peers : sequence of str, optional
        Keys of `peers.registry.PEERS`, or "sdpa" and "flex", which only some workloads have; the
        former by default. "unfused" is our own build with one kernel an operator, "cublas" the
        matrix products alone; both are measured beside a row, without being a peer of it.
    target : Any
        See `tvm_fusion.config.resolve_target`.
    out : path, optional
        A JSON file, written again after every workload.
    dtype : str, optional
        Of all workloads; by default each workload's own, else "float16" on a GPU and "float32" on a
        CPU.
    scale : float
        Factor on the extents; 1 is the size that results are compared at.
    repeats : int
        Samples of every time.
    budget_s : float
        On a CPU, the time for all samples of a workload; at least three are taken.
    workers : int
        Processes that compile ahead, see `rows.prepare`; 0 for none.
    plain_peers : sequence of str, optional
        The peers of workloads that are a matrix product alone; by default those of all.
    patience_s : float, optional
        Time after which a peer that still compiles a workload is given up for it.
    threads : int, optional
        On a CPU: each compiler has a process of its own on the same cores, with as many threads;
        without, all are called in turn in this process, where their threads disturb each other.
    instructions : str, optional
        With `threads`: all compilers keep to these, of `bench.apart.INSTRUCTIONS`; ours by a
        target.

    Returns
    -------
    dict
        What is written to `out`. A row's time, error or count is None where it failed; `failures`
        then says why.

    Raises
    ------
    InputError
        An unknown workload, peer, dtype or target.
    TargetError
        There is no such device, or a kernel made it unusable; rows up to then are in `out`.
    """

    peers = tuple(PEERS) if peers is None else tuple(peers)
    tvm_target, hw = resolve_target(target)
    workloads.require(names)
    plain_peers = peers if plain_peers is None else tuple(plain_peers)
    for name in (*peers, *plain_peers):
        if name not in REFERENCES:
            peer(name)
    if dtype is not None and dtype not in CEILINGS:
        raise InputError(f"unknown dtype {dtype!r}; there are {', '.join(CEILINGS)}")
    if threads is not None:
        if tvm_target.kind.name != "llvm":
            raise InputError(f"--threads is for a CPU, and the target is {tvm_target.kind.name}")
        cores_for(threads)
    if instructions is not None:
        target, tvm_target, hw = limited(instructions, threads)
    if not tvm.runtime.device_from_target(tvm_target).exist:
        raise TargetError(f"this machine has no {tvm_target.kind.name} device to measure on")
    setup = Setup(
        target,
        tvm_target,
        hw,
        peers,
        dtype,
        float(scale),
        repeats,
        budget_s,
        plain_peers=plain_peers,
        patience_s=patience_s,
        instructions=instructions,
    )
    if threads is not None:
        with apart.Field(setup, threads) as field:
            return _measure_all(
                names, setup, out, lambda name, _: field.measure(name), threads, field.rates
            )
    exact_float32()
    with tempfile.TemporaryDirectory(prefix="tvm_fusion_bench_") as folder:
        if workers:
            prepared = prepare.prepare(names, setup, workers, Path(folder))
            setup.given_up.update(prepared.given_up)
            setup.saved.update(prepared.saved)
        return _measure_all(names, setup, out, together.measure)


def limited(instructions: str, threads: int | None) -> tuple[Any, Any, Any]:
    """The target for a set of instructions, as it is named, itself, and its profile."""
    if instructions not in INSTRUCTIONS:
        known = ", ".join(INSTRUCTIONS)
        raise InputError(f"--instructions: {instructions!r} is unknown; there are {known}")
    if threads is None:
        raise InputError("--instructions: only compilers in processes of their own keep to them")
    spec = {"kind": "llvm", "mcpu": PROCESSORS[instructions], "num-cores": threads}
    target = tvm.target.Target(spec)
    return target, *resolve_target(target)


def _measure_all(
    names: Sequence[str],
    setup: Setup,
    out: str | Path | None,
    measure: Callable[[str, Setup], dict[str, Any]],
    threads: int | None = None,
    rates: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """Measure the workloads one by one; the result is written after each. `rates` are those of the
    processes that compile, where these are others than this one.
    """
    on_gpu, limit = setup.device == "cuda", setup.instructions
    result = header(setup.hw.name, on_gpu, setup.scale, setup.repeats, threads, limit)
    if setup.device != "cuda":  # plans and limits are made with these
        result["rates"] = (setup.hw.measured if rates is None else rates) or "as shipped"
    for index, name in enumerate(names):
        row = measure(name, setup)
        result["rows"].append(row)
        result["summary"] = summary(result["rows"])
        log.info("%s", line(row))
        if out is not None:
            write(result, Path(out))
        if setup.device == "cuda" and not device_works():
            rest = ",".join(names[index + 1 :])
            raise TargetError(
                f"the GPU is lost to this process after {name}"
                + (f"; run the rest with --only {rest}, and --merge the files" if rest else "")
            )
    return result
