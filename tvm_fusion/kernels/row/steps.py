"""The parts of a row kernel: steps between exchanges, and chunks of a row."""

from __future__ import annotations

from dataclasses import dataclass

from tvm.ir import Expr

from ..program.program import Output, Program, Reduction


@dataclass(frozen=True, slots=True, eq=False)
class Chunk:
    """One vector of a thread: its number within the row, and its slot in the register arrays.

    `edge`: some of its lanes may lie outside of the row (see windows.py).
    """

    vector: Expr
    slot: Expr | int
    edge: bool = False


@dataclass(frozen=True, slots=True, eq=False)
class Step:
    """What is done between two exchanges: reductions of one phase, and outputs known before it."""

    plain: tuple[Reduction, ...]
    running: tuple[Reduction, ...]
    outputs: tuple[Output, ...]
    row_outputs: tuple[Output, ...]

    @property
    def swept(self) -> list[Expr]:
        """Expressions of the first sweep."""
        return [r.body for r in self.plain] + [o.value for o in self.outputs]


def steps_of(program: Program) -> list[Step]:
    """The sweeps of a program in order."""
    steps = []
    for phase in range(program.phases + 1):
        reductions = [r for r in program.reductions if r.phase == phase]
        outputs = [o for o in program.outputs if o.phase == phase]
        steps.append(
            Step(
                tuple(r for r in reductions if r.online is None),
                tuple(r for r in reductions if r.online is not None),
                tuple(o for o in outputs if o.full),
                tuple(o for o in outputs if not o.full),
            )
        )
    return steps
