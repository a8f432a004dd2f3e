"""Schedules of one function by TVM's `EvolutionarySearch`, with what it leaves out around it:

- it proposes what was measured in a session before: known schedules are filtered out, by the
  module that they make;
- it starts from nothing: measured schedules of elsewhere are proposed first and are parents;
- it proposes grids that no GPU launches: `beyond_limits`.

A batch cannot be interrupted (a convolution takes TVM up to 20 s); `seconds` says how long the last
one took.
"""

from __future__ import annotations

import logging
import math
import time
from collections import Counter
from collections.abc import Sequence

import tvm_ffi
from tvm import DataType, s_tir, tirx
from tvm.s_tir import SBlock
from tvm.s_tir import meta_schedule as ms
from tvm.target import Target

from ...errors import Unsupported
from ...host.cores import available_cores
from ..database import replay
from ..database.replay import module_of, trace_text
from .space import initialized, schedule_space, tune_context

POPULATION = 64
GENERATIONS = 3
LEAST_POPULATION = 8
RANDOM_SHARE = 0.2  # of what is proposed
ROUNDS = 3  # populations looked at before a space counts as exhausted
THREADS = 4  # of TVM's search at most: builders want the others

_log = logging.getLogger(__name__)

Proposed = tuple[str, ms.MeasureCandidate]  # with the text of its trace


class Evolved:
    """A search for a fast schedule of one function.

    Parameters
    ----------
    func : tirx.PrimFunc
        The s_tir function before any schedule.
    target : Target
        On llvm with `num-cores`.
    model : CostModel
        Of MetaSchedule; it learns from what is told.
    known : sequence of (text, us or None)
        Measured before, here; None for a failure. Never proposed.
    seeds : sequence of (text, us)
        Starting points: proposed first, and parents of what follows.
    trials : int
        Most schedules to propose.
    batch : int
        That are proposed at once.
    seed : int
        From 1.

    Raises
    ------
    Unsupported
        The space holds no schedule of this function, or an extent is symbolic: MetaSchedule
        describes the arguments of a candidate by numbers.
    """

    def __init__(
        self,
        func: tirx.PrimFunc,
        target: Target,
        model: ms.cost_model.CostModel,
        *,
        known: Sequence[tuple[str, float | None]] = (),
        seeds: Sequence[tuple[str, float]] = (),
        trials: int = 64,
        batch: int = 8,
        seed: int = 1,
    ) -> None:
        _refuse_symbolic(func)
        self.seconds = 0.0
        self._func, self._target, self._model = func, target, model
        self._mod = module_of(func)
        strategy = ms.search_strategy.EvolutionarySearch(
            population_size=POPULATION,
            init_min_unmeasured=LEAST_POPULATION,
            genetic_num_iters=GENERATIONS,
            eps_greedy=RANDOM_SHARE,
        )
        threads = min(THREADS, available_cores())
        space = schedule_space(func, target)
        self._context = initialized(
            tune_context(self._mod, target, space, strategy, seed=seed, threads=threads)
        )
        self._database = ms.database.MemoryDatabase()
        self._workload = self._database.commit_workload(self._mod)
        self._hashes: set[int] = set()
        self._open: dict[str, ms.MeasureCandidate] = {}
        try:
            schedules = list(self._context.generate_design_space())
        except Exception as error:  # of a rule of TVM's: this function is not for it
            raise Unsupported(f"TVM's rules fail on the function: {error}") from error
        if not schedules:
            raise Unsupported("TVM's rules make no schedule of the function")
        self._context.pre_tuning(trials * ROUNDS, batch, schedules, self._database, model)
        self.tell(known)
        self._waiting = self._starting_points(seeds)

    def next(self, count: int) -> list[Proposed]:
        """Up to `count` schedules to measure, fewer at the end; none comes twice."""
        began = time.monotonic()
        found: list[Proposed] = []
        while self._waiting and len(found) < count:
            self._take(*self._waiting.pop(0), found)
        for _ in range(ROUNDS):
            if len(found) >= count:
                break
            picks = list(self._context.generate_measure_candidates() or [])
            # what is proposed counts as measured, for TVM's count of trials
            self._context.notify_runner_results(
                picks, [ms.runner.RunnerResult(None, "not yet")] * len(picks)
            )
            for candidate in picks:
                text = trace_text(candidate.sch.trace)
                if len(found) < count:
                    self._take(text, candidate, found)
        self.seconds = time.monotonic() - began
        return found

    def tell(self, results: Sequence[tuple[str, float | None]]) -> None:
        """Learns what was measured: microseconds of one run, None for a failure.

        A failure is remembered and teaches the cost model nothing.
        """
        candidates, times = [], []
        for text, us in results:
            candidate = self._open.pop(text, None) or self._replayed(text)
            if candidate is None:
                continue
            self._hashes.add(_hash(candidate))
            if us is not None:
                candidates.append(candidate)
                times.append(ms.runner.RunnerResult([us * 1e-6], None))
                self._commit(candidate, us)
        if candidates:
            self._model.update(self._context, candidates, times)

    def _starting_points(self, seeds: Sequence[tuple[str, float]]) -> list[Proposed]:
        waiting = []
        for text, us in sorted(seeds, key=lambda item: item[1]):
            if (candidate := self._replayed(text)) is not None:
                self._commit(candidate, us)
                waiting.append((text, candidate))
        return waiting

    def _take(self, text: str, candidate: ms.MeasureCandidate, found: list[Proposed]) -> None:
        if (key := _hash(candidate)) in self._hashes:
            return
        self._hashes.add(key)
        on_gpu = self._target.kind.name == "cuda"
        if on_gpu and beyond_limits(candidate.sch.mod["main"]):
            return
        self._open[text] = candidate
        found.append((text, candidate))

    def _replayed(self, text: str) -> ms.MeasureCandidate | None:
        try:
            sch = replay.schedule(self._func, text)
        except Unsupported as why:
            _log.info("a known trace is stale: %s", why)
            return None
        return ms.MeasureCandidate(sch, arguments(sch))

    def _commit(self, candidate: ms.MeasureCandidate, us: float) -> None:
        """Makes a schedule a parent of those that follow."""
        record = ms.database.TuningRecord(
            candidate.sch.trace, self._workload, [us * 1e-6], self._target, candidate.args_info
        )
        self._database.commit_tuning_record(record)


def arguments(sch: s_tir.Schedule) -> list[ms.arg_info.ArgInfo]:
    """How MetaSchedule describes the arguments of a schedule's function; none where an extent is
    symbolic, for which it has no words.
    """
    try:
        return list(ms.arg_info.ArgInfo.from_entry_func(sch.mod, remove_preproc=True))
    except Exception:  # TVM's own error, of no type of its own
        return []


def _refuse_symbolic(func: tirx.PrimFunc) -> None:
    for param in func.params:
        shape = param.ty.shape if isinstance(param.ty, tirx.BufferType) else ()
        if not all(isinstance(extent, tirx.IntImm) for extent in shape):
            raise Unsupported(f"{param.name} has a symbolic extent")


def _hash(candidate: ms.MeasureCandidate) -> int:
    return tvm_ffi.structural_hash(candidate.sch.mod)


LARGEST_GRID = {"blockIdx.x": (1 << 31) - 1, "blockIdx.y": 65535, "blockIdx.z": 65535}
LARGEST_BYTES = 1 << 32  # of what one launch of a function hands to the next


def beyond_limits(func: tirx.PrimFunc) -> str:
    """Why a scheduled function cannot run; empty where nothing speaks against it.

    Extents have to be numbers. Registers, shared memory and threads are `VerifyGPUCode`'s.
    """
    grids: Counter[str] = Counter()
    sizes: list[int] = []

    def loop(node: tirx.For) -> None:
        if node.thread_binding is not None:
            tag = str(node.thread_binding.thread_tag)
            grids[tag] = max(grids[tag], int(node.extent))

    def block(node: SBlock) -> None:
        for buffer in node.alloc_buffers:
            if buffer.scope() == "global":
                count = math.prod(int(extent) for extent in buffer.shape)
                sizes.append(count * DataType(str(buffer.dtype)).itemsize)

    tvm_ffi.structural_walk(func.body, [(tirx.For, loop), (SBlock, block)])
    for tag, most in LARGEST_GRID.items():
        if grids[tag] > most:
            return f"a grid of {grids[tag]} blocks along {tag}, {most} can be launched"
    if sum(sizes) > LARGEST_BYTES:
        return f"intermediates of {sum(sizes)} bytes, {LARGEST_BYTES} at most"
    return ""
