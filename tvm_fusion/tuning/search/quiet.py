"""Objects of MetaSchedule made without what their constructors do beside (TVM 0.27):

- `TuneContext` imports TVM's tensor intrinsics, which takes 27 s; `schedule_space` has them
  registered quickly, where they are needed;
- loggers of `TuneContext` and `RoundRobin` write tables to the root's handlers, and clear what a
  notebook shows.
"""

from __future__ import annotations

import logging

import tvm
from tvm.s_tir import meta_schedule as ms
from tvm.s_tir.meta_schedule import _ffi_api
from tvm.target import Target

_log = logging.getLogger(__name__)


def tune_context(
    mod: tvm.IRModule,
    target: Target,
    space: ms.space_generator.SpaceGenerator,
    strategy: ms.search_strategy.SearchStrategy,
    *,
    name: str = "main",
    seed: int = 1,
    threads: int = 1,
) -> ms.TuneContext:
    """A `TuneContext`, which a task scheduler initialises."""
    context = ms.TuneContext.__new__(ms.TuneContext)
    context.__init_handle_by_constructor__(
        _ffi_api.TuneContext, mod, target, space, strategy, name, threads, seed, _write_log
    )
    return context


def initialized(context: ms.TuneContext) -> ms.TuneContext:
    """A `TuneContext` that is used without a scheduler."""
    _ffi_api.TuneContextInitialize(context)
    return context


def round_robin() -> ms.task_scheduler.RoundRobin:
    """A `RoundRobin`."""
    scheduler = ms.task_scheduler.RoundRobin.__new__(ms.task_scheduler.RoundRobin)
    scheduler.__init_handle_by_constructor__(_ffi_api.TaskSchedulerRoundRobin, _write_log)
    return scheduler


def _write_log(_level: int, _file: str, _line: int, message: str) -> None:
    _log.debug("%s", message)
