"""Evolutionary search over schedules, driven by whoever measures.

TVM's `EvolutionarySearch` proposes candidates out of a population of measured, random and mutated
traces, ranked by a cost model. Here it runs without a task scheduler, builder or runner:

    search = Evolving(func, target, space="own", seed=1, trials=64, batch=16)
    texts = search.ask(16)                          # traces, `replay.scheduled` builds them
    search.tell([(text, measure(text)) for text in texts])
"""

from __future__ import annotations

import logging
import math
from collections import Counter
from collections.abc import Sequence

import tvm_ffi
from tvm import DataType, s_tir, tirx
from tvm.s_tir import SBlock
from tvm.s_tir import meta_schedule as ms
from tvm.s_tir.meta_schedule import _ffi_api
from tvm.s_tir.schedule import Trace
from tvm.target import Target

from ...config.targets import profile_of_target
from ...errors import Unsupported
from ..database.metaschedule import trace_text
from . import replay
from .schedule_features import Features, Judge
from .space_blocks import module_of
from .spaces import Design, SpaceKind, design

POPULATION = 64
GENERATIONS = 3
RANDOM_SHARE = 0.2  # of what is proposed once the learned model ranks; before that, half
ROUNDS = 3  # populations looked at before a space counts as exhausted
LEAST_POPULATION = 8
POSTPROC = "EnterPostproc"  # the instruction after which those of post-processors stand

_log = logging.getLogger(__name__)


class Evolving:
    """A search for a fast schedule of one function; on one thread, the seed and what it is told
    decide what it proposes.

    Parameters
    ----------
    func : tirx.PrimFunc
        The s_tir function before any schedule.
    target : Target
        On llvm with `num-cores`.
    space : "own" or "stock"
        See `spaces`.
    seed : int
        From 1.
    seeds : sequence of (text, us)
        Starting points: proposed first, the fastest before the others, and parents of what follows
        (in own spaces, those that no post-processors of TVM finished). Their times are those of
        elsewhere: they rank the parents and teach the cost model nothing.
    known : sequence of (text, us or None)
        Measured before, here; None for a failure. Never proposed.
    trials : int
        Most candidates to propose.
    batch : int
        Measurements after which the learned cost model takes over from the analytic guess.
    population : int
        Candidates of one generation.
    threads : int
        Of TVM's search; more than one in "stock" spaces alone, since mutators of own ones are in
        Python. What is proposed then depends on which thread is faster, too.

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
        *,
        space: SpaceKind = "own",
        seed: int = 1,
        seeds: Sequence[tuple[str, float]] = (),
        known: Sequence[tuple[str, float | None]] = (),
        trials: int,
        batch: int,
        population: int = POPULATION,
        threads: int = 1,
    ) -> None:
        _refuse_symbolic(func)
        self.func, self.target, self.space = func, target, space
        self.left = trials
        self._mod = module_of(func)
        found = design(func, target, space, seed)
        self._strategy = _strategy(population)
        threads = threads if space == "stock" else 1
        self._context = _context(self._mod, target, found, self._strategy, seed, threads)
        self._spaces = _schedules(found, self._context)
        self._database = ms.database.MemoryDatabase()
        self._workload = self._database.commit_workload(self._mod)
        self._extractor = Features(profile_of_target(target))
        self._judge = Judge(self._extractor, max(1, batch), seed)
        self._texts: set[str] = set()  # asked, or known before
        self._hashes: set[int] = set()
        self._candidates: dict[str, ms.MeasureCandidate] = {}  # asked and not told
        for text, _ in known:
            self._remember(_canonical(text))
        self.tell(known)
        self._waiting = self._starting_points(seeds)

    def ask(self, n: int) -> list[str]:
        """Up to `n` texts of traces to measure, best expectations first; fewer at the end.

        No text, and no schedule whatever its text, comes twice.
        """
        count = min(n, self.left)
        found: list[str] = []
        while self._waiting and len(found) < count:
            text, candidate = self._waiting.pop(0)
            self._take(text, candidate, found)
        for _ in range(ROUNDS):
            if len(found) >= count:
                break
            self._propose(count, found)
        self.left -= len(found)
        return found

    def tell(self, results: Sequence[tuple[str, float | None]]) -> None:
        """Learns what was measured: microseconds of one run, None for a failure.

        A failure is remembered and teaches the cost model nothing.
        """
        candidates, times = [], []
        for text, us in results:
            text = _canonical(text)
            candidate = self._candidates.pop(text, None) or self._replayed(text)
            self._remember(text, candidate)
            if candidate is None or us is None or not (math.isfinite(us) and us > 0):
                continue
            candidates.append(candidate)
            times.append(ms.runner.RunnerResult([us * 1e-6], None))
            self._commit(candidate, us)
        self._judge.update(self._context, candidates, times)

    def predicted(self, text: str) -> float | None:
        """Microseconds that the cost model expects; None for a trace that does not fit."""
        text = _canonical(text)
        candidate = self._candidates.get(text) or self._replayed(text)
        if candidate is None:
            return None
        (us,) = self._judge.predicted_us(self._context, [candidate])
        return us

    def _starting_points(
        self, seeds: Sequence[tuple[str, float]]
    ) -> list[tuple[str, ms.MeasureCandidate]]:
        waiting = []
        for text, us in sorted(seeds, key=lambda item: item[1]):
            text = _canonical(text)
            if text in self._texts:
                continue
            candidate = self._replayed(text)
            if candidate is None:
                _log.info("a starting point does not fit the function and is left out")
                continue
            self._commit(candidate, us)
            waiting.append((text, candidate))
        return waiting

    def _propose(self, count: int, found: list[str]) -> None:
        """Adds to `found`, up to `count`, what one evolution of a population proposes."""
        missing = count - len(found)
        looked_at = 2 * (missing + len(self._hashes))
        self._context.pre_tuning(looked_at, looked_at, self._spaces, self._database, self._judge)
        try:
            picks = list(self._context.generate_measure_candidates() or [])
        finally:
            self._context.post_tuning()
        randoms = math.ceil(missing * (RANDOM_SHARE if self._judge.is_warm() else 0.5))
        for _ in range(len(picks)):  # best ones stand in front, random ones behind
            if len(found) >= count:
                return
            candidate = picks.pop(-1 if count - len(found) <= randoms else 0)
            self._take(trace_text(candidate.sch.trace), candidate, found)

    def _take(self, text: str, candidate: ms.MeasureCandidate, found: list[str]) -> None:
        if text in self._texts or _hash(candidate) in self._hashes:
            return
        self._remember(text, candidate)
        if self.target.kind.name == "cuda" and beyond_limits(candidate.sch.mod["main"]):
            return
        self._candidates[text] = candidate
        found.append(text)

    def _remember(self, text: str, candidate: ms.MeasureCandidate | None = None) -> None:
        self._texts.add(text)
        if candidate is not None:
            self._hashes.add(_hash(candidate))

    def _replayed(self, text: str) -> ms.MeasureCandidate | None:
        try:
            sch = replay.schedule(self.func, text)
        except Unsupported as why:
            _log.info("a known trace is stale: %s", why)
            return None
        return ms.MeasureCandidate(sch, _arguments(sch))

    def _commit(self, candidate: ms.MeasureCandidate, us: float) -> None:
        """Makes a schedule a parent of those that follow.

        Own spaces leave out what TVM's post-processors added to: a mutation drops that (such as the
        instructions of tensor cores), and only a stock space adds it again.
        """
        if self.space == "own" and _was_finished(candidate.sch.trace):
            return
        self._database.commit_tuning_record(
            ms.database.TuningRecord(
                candidate.sch.trace,
                self._workload,
                [us * 1e-6],
                self.target,
                candidate.args_info,
            )
        )


def _was_finished(trace: Trace) -> bool:
    """Whether post-processors added instructions to a trace."""
    names = [inst.kind.name for inst in trace.insts]
    return POSTPROC in names[:-1]


def _refuse_symbolic(func: tirx.PrimFunc) -> None:
    for param in func.params:
        shape = param.ty.shape if isinstance(param.ty, tirx.BufferType) else ()
        if not all(isinstance(extent, tirx.IntImm) for extent in shape):
            raise Unsupported(f"{param.name} has a symbolic extent")


def _strategy(population: int) -> ms.search_strategy.EvolutionarySearch:
    return ms.search_strategy.EvolutionarySearch(
        population_size=population,
        init_min_unmeasured=LEAST_POPULATION,
        genetic_num_iters=GENERATIONS,
        eps_greedy=0.5,
    )


def _context(
    mod,
    target: Target,
    found: Design,
    strategy: ms.search_strategy.SearchStrategy,
    seed: int,
    threads: int,
) -> ms.TuneContext:
    """A tuning context; `TuneContext` itself imports TVM's tensor intrinsics, which takes long."""
    context = ms.TuneContext.__new__(ms.TuneContext)
    context.__init_handle_by_constructor__(
        _ffi_api.TuneContext,
        mod,
        target,
        found.generator,
        strategy,
        "main",
        threads,
        seed,
        _write_log,
    )
    _ffi_api.TuneContextInitialize(context)
    return context


def _schedules(found: Design, context: ms.TuneContext) -> list[s_tir.Schedule]:
    if found.schedules:
        return list(found.schedules)
    try:
        schedules = list(context.generate_design_space())
    except Exception as error:  # of a rule of TVM's: this function is not for it
        raise Unsupported(f"TVM's rules fail on the function: {error}") from error
    if not schedules:
        raise Unsupported("TVM's rules make no schedule of the function")
    return schedules


def _write_log(_level: int, _file: str, _line: int, message: str) -> None:
    _log.debug("%s", message)


def _canonical(text: str) -> str:
    try:
        return replay.canonical(text)
    except Unsupported:
        return text


def _arguments(sch: s_tir.Schedule) -> list:
    return ms.arg_info.ArgInfo.from_entry_func(sch.mod, remove_preproc=True)


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
