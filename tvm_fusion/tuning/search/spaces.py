"""Design spaces of s_tir functions for MetaSchedule: this package's own, and TVM's.

A space is a schedule with sampled choices (tile sizes, threads, vector widths, unrolling); a
function has several, which differ in structure. `own` spaces take any function of leaf blocks:

    injective blocks are inlined (all, or all but those with expensive arithmetic that several
    blocks or a reduction read), and what is left is scheduled by `space_cuda` or `space_llvm`

Symbolic extents are taken: sizes are then sampled from lists instead of from divisors. `stock` is
what TVM's rules make of the function; they refuse symbolic extents.
"""

from __future__ import annotations

import logging
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Literal

from tvm import s_tir, tirx
from tvm.ir.utils import derived_object
from tvm.s_tir import meta_schedule as ms
from tvm.s_tir.schedule import Instruction, Trace
from tvm.target import Target

from ...errors import Unsupported
from ...ir.quick_stacks import register_tensor_intrinsics
from . import space_cuda, space_llvm
from .space_blocks import Blocks, inline, module_of, refuse_unknown, schedule_of, shared_rows

SpaceKind = Literal["own", "stock"]
Scheduling = Callable[[s_tir.Schedule], None]

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Design:
    """The spaces of a function, and how traces in them are changed and completed.

    Attributes
    ----------
    schedules : one for each space, whose traces hold the choices; none where the generator makes
        them
    generator : holds TVM's post-processors and the mutators
    """

    schedules: tuple[s_tir.Schedule, ...]
    generator: ms.space_generator.SpaceGenerator


def design(func: tirx.PrimFunc, target: Target, kind: SpaceKind, seed: int) -> Design:
    """The design spaces of a function.

    Raises
    ------
    Unsupported
        There is none: the function is no composition of leaf blocks, or no rule takes it.
    """
    if kind == "stock":
        return Design((), _stock(func, target))
    return Design(tuple(_own_schedules(func, target, seed)), _own(target, seed))


def _own(target: Target, seed: int) -> ms.space_generator.SpaceGenerator:
    """A generator that is asked for post-processors and mutators alone."""
    checks = [ms.postproc.VerifyGPUCode()] if target.kind.name == "cuda" else []
    mutators = {MutateChoice(seed): 1.0}
    return ms.space_generator.ScheduleFn(
        lambda sch: sch, sch_rules=[], postprocs=checks, mutator_probs=mutators
    )


def _own_schedules(func: tirx.PrimFunc, target: Target, seed: int) -> Iterator[s_tir.Schedule]:
    refuse_unknown(func)
    found: list[str] = []
    reasons: list[str] = []
    for name, scheduling in _variants(func, target):
        sch = schedule_of(func, seed)
        try:
            scheduling(sch)
        except Exception as error:  # of a candidate: a structure that is not for this function
            reasons.append(f"{name}: {_first_line(error)}")
            _log.debug("space %s does not apply: %s", name, error)
            continue
        text = str(sch.trace.simplified(remove_postproc=True))
        if text not in found:
            found.append(text)
            yield sch
    if not found:
        raise Unsupported("no design space of this package applies: " + "; ".join(reasons))


def _variants(func: tirx.PrimFunc, target: Target) -> Iterator[tuple[str, Scheduling]]:
    for keeping, prepare in (("", inline_all), ("kept ", inline_light)):
        count = shared_rows(func, prepare)
        for name, then in _schedulings(target, count):
            yield keeping + name, _after(prepare, then)


def _after(prepare: Scheduling, then: Scheduling) -> Scheduling:
    def scheduling(sch: s_tir.Schedule) -> None:
        prepare(sch)
        then(sch)

    return scheduling


def _schedulings(target: Target, count: int) -> Iterator[tuple[str, Scheduling]]:
    if target.kind.name == "cuda":
        if count:
            yield "rows", lambda sch: space_cuda.rows(sch, count)
        yield "serial", space_cuda.serial
        yield "cross", space_cuda.cross
        yield "split", space_cuda.split
    else:
        cores = int(target.attrs.get("num-cores", 1))
        if count:
            yield "rows", lambda sch: space_llvm.rows(sch, count, cores)
        yield "nests", lambda sch: space_llvm.nests(sch, cores)


def inline_all(sch: s_tir.Schedule) -> None:
    """Inlines whatever can be."""
    inline(Blocks(sch))


def inline_light(sch: s_tir.Schedule) -> None:
    """Inlines all but blocks whose arithmetic costs more than reading it back."""
    blocks = Blocks(sch)
    inline(blocks, blocks.is_heavy)


def _stock(func: tirx.PrimFunc, target: Target) -> ms.space_generator.SpaceGenerator:
    kind = "llvm" if target.kind.name == "llvm" else "cuda"
    if kind == "cuda" and _multiplies_halves(func):
        register_tensor_intrinsics()
        kind = "cuda-tensorcore"
    return ms.space_generator.PostOrderApply(sch_rules=kind, postprocs=kind, mutator_probs=kind)


def _multiplies_halves(func: tirx.PrimFunc) -> bool:
    """Whether tensor cores could take a reduction of the function."""
    blocks = Blocks(sch := s_tir.Schedule(module_of(func)))
    for block in blocks.all():
        found = sch.get(block)
        if found.init is None:
            continue
        read = [str(region.source.ty.dtype) for region in found.reads]
        if sum(dtype == "float16" for dtype in read) >= 2:
            return True
    return False


def _first_line(error: Exception) -> str:
    lines = [line for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[-1][:200]}" if lines else type(error).__name__


_PICKED = "SampleCategorical"
_TILED = "SamplePerfectTile"


@derived_object
class MutateChoice(ms.mutator.PyMutator):
    """Changes one choice of a trace: an element of a list, or a factor between two loops of a tile.

    Parameters
    ----------
    seed : int
        Of the choices; the state that MetaSchedule hands over is not advanced by a mutator in
        Python.
    """

    def __init__(self, seed: int) -> None:
        super().__init__()
        self.seed = seed
        self.random = random.Random(seed)

    def _initialize_with_tune_context(self, context: ms.TuneContext) -> None:
        """Nothing depends on the context."""

    def apply(self, trace: Trace, _) -> Trace | None:
        """The trace with another choice, without what post-processors added."""
        sites = [i for i in trace.insts if i.kind.name in (_PICKED, _TILED)]
        self.random.shuffle(sites)
        for inst in sites:
            decision = trace.get_decision(inst)
            changed = (
                self._other_element(inst, int(decision))
                if inst.kind.name == _PICKED
                else self._other_tile(inst, [int(f) for f in decision])
            )
            if changed is not None:
                return trace.with_decision(inst, changed, remove_postproc=True)
        return None

    def clone(self) -> MutateChoice:
        """A mutator that makes the same choices."""
        return MutateChoice(self.seed)

    def _other_element(self, inst: Instruction, index: int) -> int | None:
        others = [i for i in range(len(inst.attrs[0])) if i != index]
        return self.random.choice(others) if others else None

    def _other_tile(self, inst: Instruction, tile: list[int]) -> list[int] | None:
        """Moves a prime factor from one loop to another."""
        largest = int(inst.attrs[1])
        moves = []
        for i, extent in enumerate(tile):
            for prime in prime_factors(extent):
                for j in range(len(tile)):
                    fits = j != len(tile) - 1 or tile[j] * prime <= largest
                    if j != i and fits:
                        moves.append((i, j, prime))
        if not moves:
            return None
        i, j, prime = self.random.choice(moves)
        changed = list(tile)
        changed[i] //= prime
        changed[j] *= prime
        return changed


def prime_factors(number: int) -> list[int]:
    """The primes that divide a number, each once.

    Examples
    --------
    >>> prime_factors(60)
    [2, 3, 5]
    """
    found, divisor = [], 2
    while divisor * divisor <= number:
        if number % divisor == 0:
            found.append(divisor)
            while number % divisor == 0:
                number //= divisor
        divisor += 1
    return [*found, number] if number > 1 else found
