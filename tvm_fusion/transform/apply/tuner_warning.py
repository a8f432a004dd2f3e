"""Written kernels before TVM's tuners, which can change nothing of them: they warn, and go on.

MetaSchedule asks the rule that a block names, `schedule_rule`, for the schedules of the block. That
of written kernels, which `kernel_bodies` puts there, warns and leaves the kernel as it is. Yet a
tuner would search among copies of it for minutes and end without a sample. So `tune_relax`, and the
passes that call it, leave written kernels out: TVM means to skip what is scheduled there, but looks
for the mark on the module of a task, which has none.
"""

from __future__ import annotations

import warnings
from functools import wraps
from inspect import signature
from typing import Any

import tvm_ffi
from tvm import s_tir
from tvm.ir.utils import derived_object
from tvm.s_tir.meta_schedule import TuneContext, relax_integration
from tvm.s_tir.meta_schedule.search_strategy import PySearchStrategy, SearchStrategy

from ...ir.reader import has_opaque_pattern

RULE = "tvm_fusion.written"
"""What blocks name, under the key of MetaSchedule's annotation, "schedule_rule"."""

_TEXT = (
    "a tuner of TVM is given kernels that tvm_fusion wrote, and finds nothing to tune in them. Let "
    "Fuse(write=False) fuse for the tuner, and Fuse() write behind it what it leaves; or tune "
    "these kernels with tvm_fusion.tune"
)
_stock_contexts = relax_integration.extracted_tasks_to_tune_contexts


def _warn() -> None:
    warnings.warn(_TEXT, stacklevel=1)  # once, as Python's filters have it


def _written(schedule: s_tir.Schedule, _block: s_tir.schedule.SBlockRV) -> list[s_tir.Schedule]:
    """The one schedule of a written kernel: itself."""
    _warn()
    return [schedule]


def _is_written(task: relax_integration.ExtractedTask) -> bool:
    return all(
        has_opaque_pattern(func) and bool(func.attrs.get("tirx.is_scheduled", False))
        for _, func in task.dispatched[0].functions_items()
    )


@wraps(_stock_contexts)
def _contexts(
    extracted_tasks: list[relax_integration.ExtractedTask], *arguments: Any, **options: Any
) -> tuple[list[TuneContext], list[float]]:
    """The contexts of tasks, without those of written kernels; where there is nothing else, of one
    for which nothing is tried, since to have no tasks is an error.
    """
    left = [task for task in extracted_tasks if not _is_written(task)]
    if len(left) < len(extracted_tasks):
        _warn()
    if left or not extracted_tasks:
        return _stock_contexts(left, *arguments, **options)
    given = signature(_stock_contexts).bind(extracted_tasks[:1], *arguments, **options)
    given.arguments["strategy"] = _Nothing()
    return _stock_contexts(*given.args, **given.kwargs)


@derived_object
class _Nothing(PySearchStrategy):
    """A search that proposes nothing."""

    def _initialize_with_tune_context(self, context: TuneContext) -> None:
        pass

    def pre_tuning(self, *_: Any) -> None:
        """See `SearchStrategy`, as for the other methods."""

    def post_tuning(self) -> None:
        pass

    def generate_measure_candidates(self) -> None:
        return None

    def notify_runner_results(self, *_: Any) -> None:
        pass

    def clone(self) -> SearchStrategy:
        return _Nothing()


def register() -> None:
    """Let MetaSchedule know of written kernels: its rules, for CPUs and GPUs, and its tuner."""
    for key in ("cpu", "gpu"):
        tvm_ffi.register_global_func(f"s_tir.meta_schedule.{key}.{RULE}", _written, override=True)
    relax_integration.extracted_tasks_to_tune_contexts = _contexts
