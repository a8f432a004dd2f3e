"""Design spaces and contexts of tasks, as MetaSchedule has them.

`class_space` is a `ScheduleFn`: one sampled choice among the configurations of a kernel class, put
down as an annotation of the root block, which a builder reads. `schedule_space` is TVM's own
`PostOrderApply`, for what no class of this package writes and for what competes with it.

Contexts and schedulers are made without what their constructors do beside (TVM 0.27): that of
`TuneContext` imports TVM's tensor intrinsics, which takes 27 s (`schedule_space` has them
registered quickly, where they are needed); loggers of both write tables to the root's handlers, and
clear what a notebook shows.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager

import tvm
import tvm_ffi
from tvm import s_tir, tirx
from tvm.s_tir import meta_schedule as ms
from tvm.s_tir.meta_schedule import _ffi_api
from tvm.target import Target

from ...ir.quick_stacks import register_tensor_intrinsics

_log = logging.getLogger(__name__)

USING_IPYTHON = "s_tir.meta_schedule.using_ipython"
TEXT = "tvm_fusion.text"
CONFIGURATION = "tvm_fusion.configuration"  # number of a choice (`choices.class_choices`)


def annotate(sch: s_tir.Schedule, count: int, number: int | None = None, text: str = "") -> None:
    """Chooses one of `count` configurations: `number`, or one that is sampled. A builder goes by
    its text: at another place the list may be another.
    """
    chosen = sch.sample_categorical(list(range(count)), [1 / count] * count, decision=number)
    root = sch.get_sblock(sch.mod["main"].body.block.name_hint)
    sch.annotate(root, CONFIGURATION, chosen)
    if text:
        sch.annotate(root, TEXT, text)


def class_space(count: int) -> ms.space_generator.ScheduleFn:
    """The space of a task whose kernel class offers `count` configurations."""
    return ms.space_generator.ScheduleFn(
        lambda sch: annotate(sch, count), sch_rules=[], postprocs=[], mutator_probs={}
    )


def schedule_space(func: tirx.PrimFunc, target: Target) -> ms.space_generator.PostOrderApply:
    """What TVM's rules make of a function on a device, tensor cores included."""
    kind = "llvm" if target.kind.name == "llvm" else "cuda"
    if kind == "cuda" and _multiplies_halves(func):
        register_tensor_intrinsics()
        kind = "cuda-tensorcore"
    return ms.space_generator.PostOrderApply(sch_rules=kind, postprocs=kind, mutator_probs=kind)


def _multiplies_halves(func: tirx.PrimFunc) -> bool:
    """Whether tensor cores could take a reduction of the function."""
    found: list[bool] = []

    def block(node: s_tir.SBlock) -> None:
        read = [str(region.source.ty.dtype) for region in node.reads]
        found.append(node.init is not None and read.count("float16") >= 2)

    tvm_ffi.structural_walk(func.body, [(s_tir.SBlock, block)])
    return any(found)


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


@contextmanager
def as_in_a_program() -> Iterator[None]:
    """In a notebook MetaSchedule shows tables of pandas, which need not be installed; meanwhile it
    logs, as everywhere else.
    """
    notebook = tvm_ffi.get_global_func(USING_IPYTHON)
    tvm_ffi.register_global_func(USING_IPYTHON, lambda: False, override=True)
    try:
        yield
    finally:
        tvm_ffi.register_global_func(USING_IPYTHON, notebook, override=True)


def _write_log(_level: int, _file: str, _line: int, message: str) -> None:
    _log.debug("%s", message)
