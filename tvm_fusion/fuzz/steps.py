"""The operators that programs are drawn from, by groups; and a program of them."""

from __future__ import annotations

import random

from .draw import ATTEMPTS, FLOAT_SHARES, LEAST, MOST, Draft, Step, first_shape
from .steps_layers import STEPS as LAYERS
from .steps_math import STEPS as MATH
from .steps_moves import STEPS as MOVES
from .steps_writes import STEPS as WRITES
from .torch_program import Program

STEPS: tuple[Step, ...] = (*MATH, *MOVES, *LAYERS, *WRITES)


def draw_program(seed: int, most: int = MOST) -> Program:
    """The program of a seed, of `LEAST` to `most` statements."""
    rng = random.Random(seed)
    dtype = rng.choices(list(FLOAT_SHARES), list(FLOAT_SHARES.values()))[0]
    draft = Draft(rng, seed, dtype)
    for _ in range(rng.randint(1, 3)):
        draft.input(first_shape(draft), draft.dtype)
    wanted, failed = rng.randint(LEAST, most), 0
    weights = [step.weight for step in STEPS]
    while len(draft.statements) < wanted and failed < ATTEMPTS:
        statement = rng.choices(STEPS, weights)[0].draw(draft)
        kept = statement is not None and draft.keep(statement)
        failed = 0 if kept else failed + 1
    return draft.program()
