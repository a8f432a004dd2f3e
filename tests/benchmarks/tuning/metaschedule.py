"""TVM's own MetaSchedule on a model, as its users run it: tune, apply the database, build.

The model is legalised and fused by TVM's passes; its fused functions are tuned in TVM's design
space by TVM's evolutionary search, with an xgboost model that learns from the trials, a builder
with one process a core and a runner on this device. `compile_relax` then builds the module: tuned
functions as the database has them, others by DLight. Its times are of TVM's `time_evaluator`, with
the settings that TVM gives it: back-to-back runs for 100 ms between CUDA events, the L2 as the run
before leaves it.
"""

from __future__ import annotations

import contextlib
import logging
import math
import os
import statistics
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import tvm
import tvm_ffi
from tvm import relax
from tvm.ir.utils import derived_object
from tvm.relax import pipeline
from tvm.s_tir import meta_schedule as ms
from tvm.support import nvcc

from tvm_fusion.host.cores import available_cores

BUILD_TIMEOUT_S, RUN_TIMEOUT_S = 90.0, 30.0
REASONS = 5  # failures of trials that are written down, those seen most often
_COMPILE = "tvm_callback_cuda_compile"


@dataclass
class StockTuning:
    """What a session of MetaSchedule did.

    Attributes
    ----------
    database : ms.database.Database
    tasks : dict of str to int
        Names of the tuned functions, and how often the model calls each.
    history : list of (int, float or None)
        After each trial: its number, and the microseconds of all calls, each with its best schedule
        so far; None while a function has none that ran.
    failed : Counter
        Why trials gave no time.
    seconds : float
    cut_short : bool
        Whether the time limit ended it before its last trial.
    """

    database: Any
    tasks: dict[str, int]
    history: list[tuple[int, float | None]] = field(default_factory=list)
    failed: Counter = field(default_factory=Counter)
    seconds: float = 0.0
    cut_short: bool = False

    @property
    def trials(self) -> int:
        """Candidates that were built, those that failed included."""
        return len(self.history)

    @property
    def best_us(self) -> float | None:
        """The microseconds of all calls at the end."""
        return self.history[-1][1] if self.history else None


def warm_up() -> None:
    """Registers what MetaSchedule imports for a first task."""
    from tvm_fusion.ir.quick_stacks import register_tensor_intrinsics

    register_tensor_intrinsics()


def fused(mod: tvm.IRModule, target: tvm.target.Target) -> tvm.IRModule:
    """The module with fused functions, by the passes that `compile_relax` runs."""
    passes = [
        *pipeline.library_dispatch_passes(target),
        relax.transform.LegalizeOps(),
        relax.transform.AnnotateTIROpPattern(),
        relax.transform.FoldConstant(),
        relax.transform.FuseOps(),
        relax.transform.FuseTIR(),
    ]
    with target, tvm.transform.PassContext(opt_level=3):
        return tvm.transform.Sequential(passes)(mod)


def tune(
    mod: tvm.IRModule,
    target: tvm.target.Target,
    folder: Path,
    trials: int,
    batch: int = 16,
    seconds: float = 0.0,
    seed: int = 1,
    runner: Any = None,
    space: Any = "post-order-apply",
    strategy: Any = "evolutionary",
) -> StockTuning:
    """Tunes a model as it comes from a frontend.

    Parameters
    ----------
    mod : IRModule
    target : Target
        On llvm with `num-cores`.
    folder : Path
        For the database and the logs.
    trials : int
        In all, over all functions; TVM ends with the batch that reaches it.
    batch : int
        Trials that are built and measured together; the cost model learns after each batch.
    seconds : float
        No batch begins later, what runs then is measured; 0 is no limit.
    seed : int
    runner : ms.runner.Runner, optional
        In place of TVM's `LocalRunner`.
    space, strategy
        As `ms.relax_integration.tune_relax` takes them.
    """
    tasks = ms.relax_integration.extract_tasks(fused(mod, target), target)
    cores = available_cores()
    limit = _Limit()
    if isinstance(strategy, str):
        strategy = ms.search_strategy.SearchStrategy.create(strategy)
    with _nvcc(), _quiet():
        contexts, weights = ms.relax_integration.extracted_tasks_to_tune_contexts(
            tasks, str(folder), space, _Limited(strategy, limit), cores, seed
        )
        database = ms.database.JSONDatabase(work_dir=str(folder))
        names = {t.task_name: int(t.weight) for t in tasks}
        tuning = StockTuning(database, names)
        builder = ms.builder.LocalBuilder(
            max_workers=cores, timeout_sec=BUILD_TIMEOUT_S, f_build=light_build()
        )
        began = time.monotonic()
        limit.until = began + seconds if seconds else math.inf
        watch = _Watch(tuning, [int(w) for w in weights])
        with _runner(runner) as runner:
            ms.tune_tasks(
                tasks=contexts,
                task_weights=weights,
                work_dir=str(folder),
                max_trials_global=trials,
                num_trials_per_iter=min(batch, trials),
                builder=builder,
                runner=runner,
                database=database,
                measure_callbacks=[*ms.measure_callback.MeasureCallback.create("default"), watch],
            )
    tuning.seconds = time.monotonic() - began
    tuning.cut_short = limit.ended and tuning.trials < trials
    return tuning


def build(
    mod: tvm.IRModule, target: tvm.target.Target, tuning: StockTuning
) -> tvm.runtime.Executable:
    """The module with the best schedules of the database, compiled by TVM's own callback."""
    with _nvcc(), _tvm_compiles():
        return ms.relax_integration.compile_relax(tuning.database, mod, target, None)


def tuned_functions(
    mod: tvm.IRModule, target: tvm.target.Target, tuning: StockTuning
) -> tuple[int, int]:
    """How many fused functions the database has a schedule of, and how many the model has."""
    functions = [
        tvm.IRModule({"main": f.with_attr("global_symbol", "main")})
        for f in fused(mod, target).functions.values()
        if isinstance(f, tvm.tirx.PrimFunc)
    ]
    known = [tuning.database.query_tuning_record(m, target, "main") for m in functions]
    return sum(k is not None for k in known), len(known)


@derived_object
class _Watch(ms.measure_callback.PyMeasureCallback):
    """Writes down each trial."""

    def __init__(self, tuning: StockTuning, weights: Sequence[int]) -> None:
        super().__init__()
        self.tuning, self.weights = tuning, weights
        self.best_us: dict[int, float] = {}

    def apply(
        self,
        task_scheduler: Any,
        task_id: int,
        measure_candidates: Sequence[Any],
        builder_results: Sequence[Any],
        runner_results: Sequence[Any],
    ) -> None:
        """Takes the results of a batch."""
        for built, ran in zip(builder_results, runner_results, strict=True):
            us = _us(ran)
            if us is None:
                self.tuning.failed[_why(built, ran)] += 1
            else:
                self.best_us[task_id] = min(us, self.best_us.get(task_id, us))
            self.tuning.history.append((self.tuning.trials + 1, self._total_us()))

    def _total_us(self) -> float | None:
        if len(self.best_us) < len(self.weights):
            return None
        return sum(w * self.best_us[i] for i, w in enumerate(self.weights))


@dataclass
class _Limit:
    """When a session ends (`time.monotonic`), and whether it did."""

    until: float = math.inf
    ended: bool = False

    def is_over(self) -> bool:
        self.ended = self.ended or time.monotonic() > self.until
        return self.ended


@derived_object
class _Limited(ms.search_strategy.PySearchStrategy):
    """A strategy that has no candidates after a time.

    That ends its task at a moment when TVM's scheduler expects it: a task that is terminated while
    its results come in may be the next that the scheduler goes on with, which it refuses.
    """

    def __init__(self, strategy: Any, limit: _Limit) -> None:
        super().__init__()
        self.strategy, self.limit = strategy, limit

    def _initialize_with_tune_context(self, context: Any) -> None:
        self.strategy._initialize_with_tune_context(context)

    def pre_tuning(self, *arguments: Any) -> None:
        """See `SearchStrategy`, as for the other methods."""
        self.strategy.pre_tuning(*arguments)

    def post_tuning(self) -> None:
        self.strategy.post_tuning()

    def generate_measure_candidates(self) -> Any:
        return None if self.limit.is_over() else self.strategy.generate_measure_candidates()

    def notify_runner_results(self, candidates: Any, results: Any) -> None:
        self.strategy.notify_runner_results(candidates, results)

    def clone(self) -> Any:
        return _Limited(self.strategy.clone(), self.limit)


def _us(ran: Any) -> float | None:
    if ran.error_msg is not None or not ran.run_secs:
        return None
    return 1e6 * statistics.median(float(s) for s in ran.run_secs)


def _why(built: Any, ran: Any) -> str:
    """The last line of an error, which says most."""
    stage, message = ("build", built.error_msg) if built.error_msg else ("run", ran.error_msg)
    lines = [line.strip() for line in str(message or "no time").splitlines() if line.strip()]
    return f"{stage}: {lines[-1][:200]}"


@contextlib.contextmanager
def _runner(given: Any) -> Iterator[Any]:
    """The given runner, or TVM's, whose process ends with the session."""
    if given is not None:
        yield given
        return
    runner = ms.runner.LocalRunner(timeout_sec=RUN_TIMEOUT_S)
    try:
        yield runner
    finally:
        runner.pool.shutdown()


def light_build() -> Callable[..., Any]:
    """TVM's `default_build` without its import of tensor intrinsics, which takes each of the
    builder's processes many seconds; a scheduled function needs them no more. A function inside
    of a function travels by value: the processes import TVM alone.
    """

    def build_candidate(mod: Any, target: Any, _params: Any) -> Any:
        from tvm.driver import build as tvm_build
        from tvm.s_tir.transform import RemoveWeightLayoutRewriteBlock

        mod = RemoveWeightLayoutRewriteBlock(skip_tensor_rewrite=True)(mod)
        return tvm_build(mod, target=target)

    return build_candidate


@contextlib.contextmanager
def _nvcc() -> Iterator[None]:
    """TVM and the processes that it starts compile CUDA by nvcc, as this package does."""
    name = "TVM_CUDA_COMPILE_MODE"
    before = os.environ.get(name)
    os.environ[name] = before or "nvcc"
    try:
        yield
    finally:
        if before is None:
            del os.environ[name]


@contextlib.contextmanager
def _tvm_compiles() -> Iterator[None]:
    """CUDA sources go through TVM's own callback, not through `cubin_cache`."""
    before = tvm_ffi.get_global_func(_COMPILE)
    tvm_ffi.register_global_func(_COMPILE, nvcc.tvm_callback_cuda_compile, override=True)
    try:
        yield
    finally:
        tvm_ffi.register_global_func(_COMPILE, before, override=True)


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """MetaSchedule writes its log to files alone, and leaves its logger as it is found; it names
    the handlers that it finds, and fails for those without a name.
    """
    logger = logging.getLogger("tvm.s_tir.meta_schedule")
    before = logger.level, logger.propagate, list(logger.handlers)
    logger.handlers.clear()
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        for handler in logger.handlers:
            handler.close()
        logger.level, logger.propagate, logger.handlers[:] = before
