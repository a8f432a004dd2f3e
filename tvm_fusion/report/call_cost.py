"""What a call costs beside its kernels: device memory, and time on the host."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from .facts import Comparison, Report

if TYPE_CHECKING:
    from ..runtime.calls.call_memory import MemoryPlan
    from ..runtime.calls.compiled_module import CompiledModule

logger = logging.getLogger(__name__)


def with_calls(
    report: Report,
    compiled: CompiledModule,
    unfused: MemoryPlan,
    inputs: Sequence[Any] | None,
    time: bool,
) -> Report:
    """The report with the memory and the CUDA graph of a call.

    Parameters
    ----------
    report : Report
    compiled : CompiledModule
        With its `cuda_graph` set.
    unfused : MemoryPlan
        Of the module to compare with.
    inputs : sequence or None
        To run it with, where there is a device.
    time : bool
        Time calls with and without a graph.
    """
    report = replace(
        report,
        memory=Comparison(compiled.peak_memory_bytes, unfused.peak_bytes()),
    )
    runs_on_gpu = inputs is not None and compiled.target.kind.name == "cuda"
    if runs_on_gpu and report.memory.fused is not None:  # else at sizes that are nobody's
        report = replace(report, measured_memory_bytes=compiled.measure_peak_memory(*inputs))
    if compiled.cuda_graph is None:
        return report
    host_us = Comparison()
    if inputs is not None and compiled.cuda_graph_refusal is None:
        host_us = _captured_and_timed(compiled, inputs, time)
    why = compiled.cuda_graph_refusal
    if why is not None:
        logger.warning("no CUDA graph: %s", why)
    state = "captured at the first call" if why is None else f"not captured: {why}"
    return replace(report, cuda_graph=state, call_us=host_us)


def _captured_and_timed(compiled: CompiledModule, inputs: Sequence[Any], time: bool) -> Comparison:
    """Capture a call, to know whether that works; wall-clock time of calls with a graph and
    without.
    """
    from ..runtime.timing.timing import wall_times

    graph = compiled.bind(*inputs)
    if not time or compiled.cuda_graph_refusal is not None:
        return Comparison()
    options, compiled.cuda_graph = compiled.cuda_graph, False
    try:
        stream = compiled.bind(*inputs)
    finally:
        compiled.cuda_graph = options
    times = wall_times({"graph": graph, "stream": stream}, wait=compiled.device.sync)
    return Comparison(times["graph"].median_us, times["stream"].median_us)
