"""Times of one model, fused and unfused and by other compilers.

On a CPU each has a process of its own (see `apart`): ours load the libraries that were built here,
peers make the model from its Relax module. On a GPU all are called in this process, interleaved.
"""

import contextlib
import dataclasses
import functools
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import tvm

from ..check.checked_sizes import drawn_inputs
from ..compilation.compiler import graph_policy
from ..compilation.one_function import Wishes, has_inputs
from ..compilation.several_functions import compile_functions
from ..compilation.tuned_parts import TunedParts
from ..config import load_policy, resolve_target
from ..errors import TargetError
from ..flow.functions import planned_functions
from ..flow.planned import Planned
from ..host.stages import stage, stepped
from ..host.threads import thread_count
from ..ir.weights import with_values
from ..report.screen import FunctionReports, Report
from ..runtime.calls.compiled_module import CompiledFunctions, CompiledModule
from ..runtime.graphs.capture_rules import CudaGraphOptions
from ..runtime.timing.spans import kernel_walls
from ..runtime.timing.timing import FUSED, UNFUSED, TimeReport, Timing, time_calls
from .apart import Call, Failed, Process, in_rounds, reason
from .patience import within
from .peers import DEFAULT_PEERS, PEERS

MAKING_S = 90.0  # a peer that is not ready by then is left out
SAMPLE_LIMIT_S = 60.0
KERNELS = "kernels"


def bench(
    model: Any,
    *,
    target: Any = None,
    policy: Any = None,
    plan: Any = None,
    cuda_graph: bool | None = False,
    peers: Sequence[str] = DEFAULT_PEERS,
) -> Report:
    """Compile a model, and time it beside the unfused module and other compilers.

    Parameters
    ----------
    model, target, policy, plan, cuda_graph
        See `tvm_fusion.compile`; peers and the unfused module have no graph.
    peers : sequence of str
        Keys of `peers.PEERS`. One that fails has no time, and says why.

    Raises
    ------
    TargetError
        If this machine lacks the device, or for `cuda_graph` on a CPU.
    """
    found = resolve_target(target)[0]
    if not tvm.runtime.device_from_target(found).exist:
        raise TargetError(
            f"this machine has no {found.kind.name} device to measure on"
            "; run it where there is one, or with --target llvm"
        )
    how = {"target": target, "policy": policy, "plan": plan, "cuda_graph": cuda_graph}
    return compile_beside(model, peers, **how).report


def compile_beside(
    model: Any,
    peers: Sequence[str],
    *,
    target: Any = None,
    policy: Any = None,
    plan: Any = None,
    measure: bool = False,
    cuda_graph: Any = False,
    database: str | Path | None = None,
) -> CompiledModule | CompiledFunctions:
    """Compile a model as `tvm_fusion.compile` does, and time it beside other compilers as `bench`
    does, if this machine has the device; of several functions each that inputs can be drawn for.
    """
    graphs = CudaGraphOptions.of(cuda_graph)
    if graphs is not None:
        policy = graph_policy(target, policy)
    tuned = TunedParts(database).of if database is not None else None
    functions = planned_functions(model, target, policy, plan, tuned=tuned)
    wishes = Wishes(load_policy(policy).verify, measure, graphs is not None, graphs)
    compiled = compile_functions(functions, wishes)
    exists = tvm.runtime.device_from_target(compiled.target).exist
    if isinstance(compiled, CompiledModule):
        if exists:
            (planned,) = functions.values()
            compiled.report = beside(planned, compiled, peers)
        return compiled
    for name, planned in functions.items():
        if exists and has_inputs(planned):
            compiled[name].report = beside(planned, compiled[name], peers)
    compiled.report = FunctionReports({n: one.report for n, one in compiled.items()})
    return compiled


def beside(planned: Planned, compiled: CompiledModule, peers: Sequence[str]) -> Report:
    """Return the report of a compiled function with the times of the unfused module and of peers,
    and on a CPU of each of our kernels.
    """
    with stage("building the unfused module"):
        unfused = CompiledModule.of(planned.build_unfused())
    if planned.target.kind.name != "llvm":
        times = _together(planned, compiled, unfused, peers)
        return dataclasses.replace(compiled.report, times=times)
    with tempfile.TemporaryDirectory(prefix="tvm_fusion_bench_") as folder:
        times, kernels = _apart(planned, compiled, unfused, peers, Path(folder))
    return _with_kernels(dataclasses.replace(compiled.report, times=times), kernels)


def _together(
    planned: Planned, compiled: CompiledModule, unfused: CompiledModule, peers: Sequence[str]
) -> dict[str, TimeReport]:
    inputs = drawn_inputs(planned.mod)
    fused = CompiledModule.of(compiled.built, beside=compiled)  # takes them as `planned.mod` does
    fused.cuda_graph = compiled.cuda_graph
    calls = {FUSED: fused.bind(*inputs), UNFUSED: unfused.bind(*inputs)}
    mod, failed = with_values(planned.mod), {}
    for name in stepped("peers made ready", peers, len(peers)):
        try:
            with within(MAKING_S):
                call = PEERS[name](mod, planned.target, inputs)
                call()
            calls[name] = call
        except Exception as error:  # a trial
            failed[name] = TimeReport(failure=reason(error))
    times = time_calls(calls, compiled.device)
    return {name: TimeReport.of(timing) for name, timing in times.items()} | failed


def _apart(
    planned: Planned,
    compiled: CompiledModule,
    unfused: CompiledModule,
    peers: Sequence[str],
    folder: Path,
) -> tuple[dict[str, TimeReport], list[tuple[str, Timing]]]:
    threads = thread_count()
    given = folder / "model.json"
    given.write_text(tvm.ir.save_json(with_values(planned.mod)))
    inputs, target = drawn_inputs(planned.mod), str(planned.target)
    with _processes((FUSED, UNFUSED, *peers), threads) as processes:
        fused = CompiledModule.of(compiled.built, beside=compiled)  # as `planned.mod` takes them
        for name, module in ((FUSED, fused), (UNFUSED, unfused)):
            processes[name].begin(str(module.save(folder / f"{name}.so")), inputs)
        for name in peers:
            processes[name].begin(str(given), target, inputs)
        failed = {}
        for name, process in stepped("compilers ready", processes.items(), len(processes)):
            try:
                process.finish(MAKING_S)
            except Failed as failure:
                failed[name] = str(failure)
        made = {name: p for name, p in processes.items() if name not in failed}
        times, failures = in_rounds(made, limit_s=SAMPLE_LIMIT_S)
        failed |= failures
        kernels = []
        if FUSED in times:
            with contextlib.suppress(Failed):
                kernels = processes[FUSED].make(str(folder / f"{FUSED}.so"), inputs, KERNELS)
    reports = {name: TimeReport.of(timing) for name, timing in times.items()}
    reports |= {name: TimeReport(failure=why) for name, why in failed.items()}
    return {name: reports[name] for name in (FUSED, UNFUSED, *peers)}, kernels


@contextlib.contextmanager
def _processes(names: Sequence[str], threads: int) -> Iterator[dict[str, Process]]:
    makers: dict[str, Callable[..., Any]] = {FUSED: make_ours, UNFUSED: make_ours}
    with contextlib.ExitStack() as stack:
        yield {
            name: stack.enter_context(
                Process(makers.get(name) or functools.partial(make_peer, name), threads, quiet=True)
            )
            for name in names
        }


def make_ours(path: str, inputs: Sequence[Any], what: str = "call") -> tuple[Call, Any]:
    """A call of a saved library; or the times of its kernels."""
    compiled = CompiledModule.load(path)
    call = compiled.bind(*inputs)
    call()
    return call, kernel_walls(compiled, inputs) if what == KERNELS else None


def make_peer(name: str, path: str, target: str, inputs: Sequence[Any]) -> tuple[Call, None]:
    """A call of the model in a file by another compiler."""
    mod = tvm.ir.load_json(Path(path).read_text())
    call = PEERS[name](mod, tvm.target.Target(target), list(inputs))
    call()  # compiles
    return call, None


def _with_kernels(report: Report, kernels: Sequence[tuple[str, Timing]]) -> Report:
    """The report with the time of each group; groups of one name run in the plan's order."""
    found: dict[str, list[Timing]] = {}
    for name, timing in kernels:
        found.setdefault(name, []).append(timing)
    counts: dict[str, int] = {}
    for group in report.groups:
        counts[group.name] = counts.get(group.name, 0) + 1
    groups = []
    for group in report.groups:
        calls = found.get(group.name, [])
        timing = calls.pop(0) if counts[group.name] <= len(calls) else None
        counts[group.name] -= 1
        if timing is not None:
            measured = TimeReport.of(timing)
            group = dataclasses.replace(group, measured_us=timing.median_us, measured=measured)
        groups.append(group)
    return dataclasses.replace(report, groups=tuple(groups))
