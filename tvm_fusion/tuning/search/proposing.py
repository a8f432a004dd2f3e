"""What a process that evolves schedules answers: the next batch of one search.

A request holds all that its search needs, what was measured so far too. A process keeps its
searches from one request to the next and tells them what is new; where it has never seen a search,
since the process before it died, it builds the search from the request.
"""

from __future__ import annotations

import os
from dataclasses import dataclass

import tvm

from ...host.cores import available_cores
from ..measure.building import Place, enter
from .evolutionary_search import Evolving
from .spaces import SpaceKind

NICE = 9  # beside that of a builder: evolving gives way to building, too
THREADS = 4  # of a search at most: a batch of a convolution takes one thread 22 s


@dataclass(frozen=True, slots=True)
class Ask:
    """A request for a batch of schedules.

    Attributes
    ----------
    workload : str
        JSON of the PrimFunc without stamps (`tvm.ir.save_json`).
    space : "own" or "stock"
    seed : int
    told : tuple of (text, us or None)
        All that was measured so far, in the order it was; None for a failure.
    left : int
        Most schedules that the search may still propose.
    batch : int
        Schedules of this request.
    seeds : tuple of (text, us)
        See `Evolving`.
    """

    workload: str
    space: SpaceKind
    seed: int
    told: tuple[tuple[str, float | None], ...]
    left: int
    batch: int
    seeds: tuple[tuple[str, float], ...] = ()


@dataclass
class _Kept:
    search: Evolving
    told: int


_kept: dict[tuple[str, str], _Kept] = {}


def enter_thinking(memory_bytes: int) -> None:
    """Sets a process up that evolves schedules."""
    enter(memory_bytes)
    os.nice(NICE)


def propose(place: Place, ask: Ask) -> list[str]:
    """The texts of traces to measure next; none where the space is exhausted.

    Raises
    ------
    Unsupported
        The space holds no schedule of the function.
    """
    key = ask.workload, ask.space
    kept = _kept.get(key)
    if kept is None:
        kept = _kept[key] = _Kept(_search(place, ask), len(ask.told))
    elif len(ask.told) > kept.told:
        kept.search.tell(ask.told[kept.told :])
        kept.told = len(ask.told)
    return kept.search.ask(ask.batch)


def _search(place: Place, ask: Ask) -> Evolving:
    return Evolving(
        tvm.ir.load_json(ask.workload),
        place.resolved()[0],
        space=ask.space,
        seed=ask.seed,
        seeds=ask.seeds,
        known=ask.told,
        trials=ask.left,
        batch=ask.batch,
        threads=min(THREADS, available_cores()),
    )
