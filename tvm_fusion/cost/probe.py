"""Tier 2 of the cost model: what ptxas makes of a group's kernel, without a GPU.

    group -> fused PrimFunc -> written kernel -> CUDA source -> nvcc -> registers, spills, shared
    memory, bytes of code

Kernels are written one after the other and compiled side by side. What was compiled once lies in
the cubin cache, by the hash of its source, and compiling the chosen plan finds it there. The
results feed the analytic model: an Evaluator takes them as `probed`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import tvm
import tvm_ffi
from tvm import tirx

from ..config import HardwareProfile, Policy
from ..errors import BuildError
from ..host.cores import use_all_cores
from ..plan.group_view import GroupView
from ..plan.plan import UNWRITTEN
from ..plan.refusal import RefusalCode
from ..runtime.build.cubin_cache import available_cores
from ..runtime.build.cuda_compiler import cuda_arch, find_compiler
from ..runtime.build.kernel_code import kernel_sources
from ..runtime.build.resources import ptxas_resources
from ..runtime.timing.launch_kernels import LaunchSpec, LaunchWriter
from ..transform.apply.materialize import group_views
from .traffic import Resources

if TYPE_CHECKING:
    from ..ir.graph import FusionGraph
    from ..plan.plan import FusionPlan

GroupKey = tuple[tuple[str, ...], tuple[str, ...]]
"""Names of a group's operators and of the tensors it writes."""


@dataclass(frozen=True, slots=True)
class ProbeFailure:
    """Why there is no kernel to look at: its writer (WRITER) or the compiler (BUILD) refused."""

    code: RefusalCode
    why: str


@dataclass(frozen=True, slots=True)
class Candidate:
    """A group, and the name of the kernel class that is to write it."""

    view: GroupView
    kernel_class: str

    @property
    def key(self) -> GroupKey:
        return group_key(self.view)


Probed = dict[GroupKey, Resources | ProbeFailure]


def group_key(view: GroupView) -> GroupKey:
    """What a group is known by: it stays the same when the graph around it is shortened."""
    return view.names, tuple(view.graph.tensors[t].name for t in view.outputs)


def candidates_of(graph: FusionGraph, plan: FusionPlan) -> list[Candidate]:
    """The groups of a plan that kernels are written for."""
    pairs = zip(group_views(graph, plan), plan.groups, strict=True)
    return [Candidate(v, g.kernel_class) for v, g in pairs if g.kernel_class not in UNWRITTEN]


def can_probe(hw: HardwareProfile) -> bool:
    """Whether there is a compiler that tells the registers of kernels for this device."""
    if hw.kind != "cuda":
        return False
    try:
        return find_compiler().kind == "nvcc"
    except BuildError:
        return False


def probe(
    low: tvm.IRModule,
    graph: FusionGraph,
    groups: Iterable[Candidate],
    hw: HardwareProfile,
    policy: Policy,
    target: tvm.target.Target | None = None,
    jobs: int | None = None,
) -> Probed:
    """Compiles the kernels of groups and tells what they need.

    Parameters
    ----------
    low : IRModule
        The module that the graph was read from.
    graph : FusionGraph
    groups : iterable of Candidate
        In any order, of this graph.
    hw : HardwareProfile
    policy : Policy
    target : Target, optional
        That of `hw` by default.
    jobs : int, optional
        Compilers that run side by side; one a core by default.

    Returns
    -------
    dict
        For each group its `Resources` (registers a thread, spilled bytes a thread, static and
        dynamic shared memory of a block, threads, bytes of machine code), or why there are none.

    Raises
    ------
    BuildError
        There is no CUDA compiler.
    """
    if hw.kind != "cuda":
        return {}
    find_compiler()
    target = target or hw.to_target()
    arch = cuda_arch(target)
    writer = LaunchWriter(low, graph, hw, policy)
    started: dict[GroupKey, Future | ProbeFailure] = {}
    known = _Known()
    with ThreadPoolExecutor(jobs or available_cores(), initializer=use_all_cores) as pool:
        for group in groups:
            if group.key in started:
                continue
            func = _write(writer, group)
            if isinstance(func, ProbeFailure):
                started[group.key] = func
                continue
            started[group.key] = known.of(func, lambda f: _start(pool, f, target, arch))
        return {key: _result(outcome) for key, outcome in started.items()}


class _Known:
    """What was started for a kernel, so that equal ones (the layers of a model) share it."""

    def __init__(self) -> None:
        self._found: dict[int, list[tuple[tirx.PrimFunc, Future | ProbeFailure]]] = {}

    def of(self, func: tirx.PrimFunc, start: Callable[[tirx.PrimFunc], Any]) -> Any:
        func = func.without_attr("global_symbol") if "global_symbol" in func.attrs else func
        same = self._found.setdefault(tvm_ffi.structural_hash(func), [])
        for known, outcome in same:
            if tvm_ffi.structural_equal(known, func):
                return outcome
        same.append((func, start(func)))
        return same[-1][1]


def _write(writer: Any, group: Candidate) -> tirx.PrimFunc | ProbeFailure:
    view = group.view
    spec = LaunchSpec(view.ops, tuple(sorted(view.outputs)), group.kernel_class)
    try:
        return writer.write(spec)[0]
    except Exception as error:  # a writer's or TVM's refusal: it belongs to this group alone
        return ProbeFailure(RefusalCode.WRITER, _line(error))


def _start(
    pool: ThreadPoolExecutor, func: tirx.PrimFunc, target: tvm.target.Target, arch: str
) -> Future | ProbeFailure:
    try:
        sources = kernel_sources(func, target)
    except Exception as error:  # a kernel build
        return ProbeFailure(RefusalCode.BUILD, _line(error))
    return pool.submit(_compile, sources, arch)


def _compile(sources: tuple, arch: str) -> Resources:
    """Resources of one launch; of several kernels (that only the fallback class has), the most."""
    told = [(s, k) for s in sources for k in ptxas_resources(s.source, arch)]
    return Resources(
        registers_per_thread=max(k.registers for _, k in told),
        smem_bytes=max(k.smem_bytes + s.dynamic_smem_bytes for s, k in told),
        threads=max(s.threads for s, _ in told),
        code_bytes=max(k.code_bytes for _, k in told),
        spill_bytes=max(k.spill_bytes for _, k in told),
    )


def _result(started: Future | ProbeFailure) -> Resources | ProbeFailure:
    if isinstance(started, ProbeFailure):
        return started
    try:
        return started.result()
    except (BuildError, ValueError) as error:
        return ProbeFailure(RefusalCode.BUILD, _line(error))


def _line(error: Exception) -> str:
    """The last line of what an error says."""
    lines = [line for line in str(error).splitlines() if line.strip()]
    return lines[-1].strip() if lines else type(error).__name__
