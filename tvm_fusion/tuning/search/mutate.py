"""A mutator of MetaSchedule traces that changes any one sampled choice.

TVM's mutators change categorical choices only where these are thread counts or unroll steps that
its own rules have made.
"""

from __future__ import annotations

import random

from tvm.ir.utils import derived_object
from tvm.s_tir import meta_schedule as ms
from tvm.s_tir.schedule import Instruction, Trace

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
