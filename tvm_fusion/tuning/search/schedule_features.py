"""Features of scheduled functions: TVM's columns of each store, and this package's of the whole.

TVM's `PerStoreFeature` (in C++) gives a row for each store; the columns of `COLUMNS`, equal in all
rows of one candidate, stand beside them:

    rows of candidate c = [TVM's 164 columns of store s | the columns of c],  s = 1, 2, ...

The learned model adds up its predictions over the rows. Until there are measurements, and as one of
the columns, there is a first guess from what the launches do (`nest_walk`):

    T = sum over launches of gap + (sum_i T_i^p)^(1/p)

with the terms of a roofline: main memory once, the last-level cache for what the accesses touch in
whole sectors, arithmetic, special functions, and on a GPU the latency of a thread's own chain of
steps. All rates are those of the profile.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence

import numpy as np
import tvm
import tvm_ffi
from tvm import tirx
from tvm.ir.utils import derived_object
from tvm.s_tir import meta_schedule as ms

from ...config.hardware import HardwareProfile
from ...ir.access import Pipe
from .nest_walk import Access, Launch, launches_of

CLASSES = ("one", "vector", "run", "apart", "data")
"""How a load or store meets memory: all threads at one address, neighbours side by side by vectors,
side by side one by one, apart from one another, or where data say."""


def access_class(access: Access, vector: int) -> str:
    """One of CLASSES."""
    if access.thread_stride is None or access.vector_stride is None:
        return "data"
    thread, lane = abs(access.thread_stride), abs(access.vector_stride)
    if thread == 0 and lane == 0:
        return "one"
    if vector > 1 and lane == 1 and thread in (0, vector):
        return "vector"
    return "run" if max(thread, lane) <= 1 else "apart"


def touched_bytes(access: Access, vector: int, hw: HardwareProfile) -> float:
    """Bytes that a load or store moves between the last-level cache and the cores."""
    kind = access_class(access, vector)
    if kind == "one":
        return access.runs * access.element_bytes / hw.warp_size
    if kind in ("vector", "run"):
        return access.runs * access.element_bytes
    return access.runs * max(access.element_bytes, hw.sector_bytes)


def unique_bytes(accesses: Iterable[Access]) -> float:
    """Bytes of the tensors accessed, each at most once."""
    most: dict = {}
    for access in accesses:
        moved = min(access.whole_bytes, access.runs * access.element_bytes)
        most[access.buffer] = max(most.get(access.buffer, 0.0), moved)
    return sum(most.values())


def busy_share(launch: Launch, hw: HardwareProfile) -> float:
    """Share of the device that the launch fills."""
    if hw.kind == "llvm":
        rounds = -(-launch.parallel // hw.num_sms)
        return launch.parallel / (rounds * hw.num_sms)
    resident = max(1, min(hw.max_threads_per_sm // max(1, launch.threads), hw.max_blocks_per_sm))
    at_once = hw.num_sms * resident
    waves = -(-launch.grid // at_once)
    in_waves = launch.grid / (waves * at_once)
    per_sm = min(1.0, resident * launch.threads / hw.max_threads_per_sm)
    return max(1e-6, in_waves * per_sm)


def terms(launch: Launch, hw: HardwareProfile) -> dict[str, float]:
    """Seconds of each limit by itself."""
    outer = [a for a in launch.accesses if a.scope == "global"]
    share = busy_share(launch, hw)
    inner = sum(a.runs * a.element_bytes for a in launch.accesses if a.scope == "shared")
    arithmetic = launch.operations.get(Pipe.ARITHMETIC, 0.0)
    if hw.kind == "llvm":  # what is in no vector loop uses one lane
        arithmetic += launch.scalar_runs * (hw.warp_size - 1)
    found = {
        "memory": unique_bytes(outer) / hw.hbm_bytes_per_s,
        "cache": sum(touched_bytes(a, launch.vector, hw) for a in outer) / hw.l2_bytes_per_s,
        "shared": inner / hw.smem_bytes_per_s,
        "arithmetic": 2 * arithmetic / hw.fma_per_s_f32,
        "special": launch.operations.get(Pipe.SPECIAL, 0.0) / hw.special_per_s,
        "division": launch.operations.get(Pipe.DIVISION, 0.0) / hw.special_per_s,
        "integer": launch.operations.get(Pipe.INTEGER, 0.0) / hw.int_div_per_s,
    }
    found = {name: value / share for name, value in found.items()}
    latency = hw.memory_latency_s if hw.kind == "cuda" else 0.0
    found["latency"] = launch.steps / min(8.0, launch.unrolled) * latency
    found["barriers"] = launch.reduced_by_threads * hw.barrier_s
    return found


def seconds(parts: Mapping[str, float], hw: HardwareProfile) -> float:
    """The guess for a launch with these terms."""
    gap = hw.kernel_gap_us * 1e-6
    largest = max(parts.values())
    if largest == 0.0:
        return gap
    power = max(1.0, hw.roofline_exponent)
    return gap + largest * sum((p / largest) ** power for p in parts.values()) ** (1 / power)


_TERMS = (
    "memory",
    "cache",
    "shared",
    "arithmetic",
    "special",
    "division",
    "integer",
    "latency",
    "barriers",
)
_OF_LONGEST = (
    "grid",
    "threads",
    "threads_in_all",
    "parallel",
    "vector",
    "unrolled",
    "steps",
    "local_bytes",
    "shared_bytes",
    "registers",
    "thread_reductions",
)

COLUMNS = (
    "microseconds",
    "launches",
    "busy",
    *(f"time_{name}" for name in _TERMS),
    *_OF_LONGEST,
    *(f"{way}_{kind}" for way in ("read", "written") for kind in CLASSES),
    "touched",
    "local_traffic",
    "shared_traffic",
    "vectorised",
    *(f"operations_{pipe.value}" for pipe in Pipe),
)

TVM_COLUMNS = 164


def columns(func: tirx.PrimFunc, hw: HardwareProfile) -> np.ndarray:
    """The values of `COLUMNS` for a scheduled function: logarithms, but for shares."""
    launches = launches_of(func)
    limits = [terms(launch, hw) for launch in launches]
    guesses = [seconds(parts, hw) for parts in limits]
    longest = launches[guesses.index(max(guesses))]
    found: dict[str, float] = {
        "microseconds": _log(sum(guesses) * 1e6),
        "launches": float(len(launches)),
        "busy": busy_share(longest, hw),
        "vectorised": 1.0 - _share_of_scalars(launches),
    }
    for name in _TERMS:
        found[f"time_{name}"] = _log(sum(parts[name] for parts in limits) * 1e6)
    found |= {name: _log(value) for name, value in _of_longest(longest).items()}
    for name, value in _traffic(launches, hw).items():
        found[name] = _log(value)
    for pipe in Pipe:
        total = sum(launch.operations.get(pipe, 0.0) for launch in launches)
        found[f"operations_{pipe.value}"] = _log(total)
    return np.array([found[name] for name in COLUMNS], "float32")


def guess_us(values: np.ndarray) -> float:
    """The analytic time of a candidate with these values of `COLUMNS`."""
    return 2.0 ** float(values[0]) - 1.0


def _of_longest(launch: Launch) -> dict[str, float]:
    held = launch.local_bytes / 4 + launch.vector * min(launch.unrolled, 16.0)
    return {
        "grid": launch.grid,
        "threads": launch.threads,
        "threads_in_all": launch.grid * launch.threads,
        "parallel": launch.parallel,
        "vector": launch.vector,
        "unrolled": launch.unrolled,
        "steps": launch.steps,
        "local_bytes": launch.local_bytes,
        "shared_bytes": launch.shared_bytes,
        "registers": held,
        "thread_reductions": launch.reduced_by_threads,
    }


def _traffic(launches: Sequence[Launch], hw: HardwareProfile) -> dict[str, float]:
    found = {f"{way}_{kind}": 0.0 for way in ("read", "written") for kind in CLASSES}
    found |= {"touched": 0.0, "local_traffic": 0.0, "shared_traffic": 0.0}
    for launch in launches:
        for access in launch.accesses:
            moved = access.runs * access.element_bytes
            if access.scope != "global":
                found[f"{access.scope}_traffic"] += moved
                continue
            way = "written" if access.store else "read"
            found[f"{way}_{access_class(access, launch.vector)}"] += moved
            found["touched"] += touched_bytes(access, launch.vector, hw)
    return found


def _share_of_scalars(launches: Sequence[Launch]) -> float:
    stores = sum(a.runs for launch in launches for a in launch.accesses if a.store)
    return sum(launch.scalar_runs for launch in launches) / max(1.0, stores)


def _log(value: float) -> float:
    return math.log2(1.0 + max(0.0, value))


@derived_object
class Features(ms.feature_extractor.PyFeatureExtractor):
    """The extractor of the module docstring, which remembers what it has seen.

    Parameters
    ----------
    hw : HardwareProfile
    """

    def __init__(self, hw: HardwareProfile) -> None:
        super().__init__()
        self.hw = hw
        self.tvm = ms.feature_extractor.PerStoreFeature()
        self.known: dict[int, np.ndarray] = {}
        self.known_columns: dict[int, np.ndarray] = {}

    def extract_from(
        self, context: ms.TuneContext, candidates: list[ms.MeasureCandidate]
    ) -> list[tvm.runtime.Tensor]:
        """One matrix for each candidate, of at least one row."""
        return [tvm.runtime.tensor(x) for x in self.matrices(context, candidates)]

    def matrices(
        self, context: ms.TuneContext, candidates: Sequence[ms.MeasureCandidate]
    ) -> list[np.ndarray]:
        """As `extract_from`, in NumPy."""
        keys = [tvm_ffi.structural_hash(c.sch.mod) for c in candidates]
        new = {k: c for k, c in zip(keys, candidates, strict=True) if k not in self.known}
        of_stores = self._of_stores(context, list(new.values())) if new else []
        for (key, candidate), rows in zip(new.items(), of_stores, strict=True):
            rows = rows if len(rows) else np.zeros((1, TVM_COLUMNS), "float32")
            beside = np.tile(self.columns(candidate), (len(rows), 1))
            self.known[key] = np.concatenate([rows, beside], axis=1).astype("float32")
        return [self.known[key] for key in keys]

    def columns(self, candidate: ms.MeasureCandidate) -> np.ndarray:
        """The values of `COLUMNS`."""
        key = tvm_ffi.structural_hash(candidate.sch.mod)
        if key not in self.known_columns:
            self.known_columns[key] = columns(candidate.sch.mod["main"], self.hw)
        return self.known_columns[key]

    def _of_stores(
        self, context: ms.TuneContext, candidates: list[ms.MeasureCandidate]
    ) -> list[np.ndarray]:
        """TVM's features; none where it cannot lower a candidate."""
        try:
            return [x.numpy() for x in self.tvm.extract_from(context, candidates)]
        except Exception:  # of a candidate: find which
            if len(candidates) == 1:
                return [np.zeros((0, TVM_COLUMNS), "float32")]
        return [x for c in candidates for x in self._of_stores(context, [c])]


EARLY_STOPPING_ROUNDS = 20
LEAST_SCORE = 1e-3  # the model's scores are not bounded; a time needs one above 0


@derived_object
class Judge(ms.cost_model.PyCostModel):
    """Scores candidates: 1 for the best measured one, 0 for the worst thinkable.

    Scores are those of `XGBModel` on `Features`, once it has `warm` measurements; before that, the
    ratio of the smallest analytic time among the candidates to each one's.

    Parameters
    ----------
    extractor : Features
    warm : int
    seed : int
    """

    def __init__(self, extractor: Features, warm: int, seed: int) -> None:
        super().__init__()
        self.extractor = extractor
        self.warm = warm
        self.best_us = float("inf")
        self.measured = 0
        config = ms.cost_model.xgb_model.XGBConfig(seed=seed, nthread=1)
        self.learned = ms.cost_model.XGBModel(
            extractor=extractor,
            config=config,
            num_warmup_samples=0,
            early_stopping_rounds=EARLY_STOPPING_ROUNDS,
            verbose_eval=0,
        )

    def load(self, path: str) -> None:
        """Reads the learned model."""
        self.learned.load(path)

    def save(self, path: str) -> None:
        """Writes the learned model."""
        self.learned.save(path)

    def update(
        self,
        context: ms.TuneContext,
        candidates: list[ms.MeasureCandidate],
        results: list[ms.runner.RunnerResult],
    ) -> None:
        """Learns from measurements; all of them have a time."""
        if not candidates:
            return
        times = [float(np.median([float(s) for s in r.run_secs])) for r in results]
        self.best_us = min(self.best_us, *(t * 1e6 for t in times))
        self.measured += len(candidates)
        self.learned.update(context, candidates, results)

    def predict(self, context: ms.TuneContext, candidates: list[ms.MeasureCandidate]) -> np.ndarray:
        """A score for each candidate."""
        if self.is_warm():
            return self.learned.predict(context, candidates)
        guesses = self._guesses(candidates)
        return guesses.min() / guesses

    def predicted_us(
        self, context: ms.TuneContext, candidates: list[ms.MeasureCandidate]
    ) -> list[float]:
        """Microseconds of each candidate."""
        if not self.is_warm():
            return self._guesses(candidates).tolist()
        scores = self.learned.predict(context, candidates)
        return [self.best_us / max(LEAST_SCORE, float(score)) for score in scores]

    def is_warm(self) -> bool:
        """Whether the learned model is the one that answers."""
        return self.measured >= self.warm and self.learned.booster is not None

    def _guesses(self, candidates: Sequence[ms.MeasureCandidate]) -> np.ndarray:
        guesses = [guess_us(self.extractor.columns(c)) for c in candidates]
        return np.maximum(1e-3, guesses)
