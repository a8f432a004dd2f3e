"""Features of scheduled functions: TVM's columns of each store, and this package's of the whole.

TVM's `PerStoreFeature` (in C++) gives a row for each store; the columns of `COLUMNS`, equal in all
rows of one candidate, stand beside them:

    rows of candidate c = [TVM's 164 columns of store s | the columns of c],  s = 1, 2, ...

The learned model adds up its predictions over the rows.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import tvm
import tvm_ffi
from tvm import tirx
from tvm.ir.utils import derived_object
from tvm.s_tir import meta_schedule as ms

from ...config.hardware import HardwareProfile
from ...ir.access import Pipe
from .nest_time import CLASSES, access_class, busy_share, seconds, terms, touched_bytes
from .nest_walk import Launch, launches_of

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
