"""The operators that programs are drawn from, by groups."""

from __future__ import annotations

from .draw import Step
from .steps_layers import STEPS as LAYERS
from .steps_math import STEPS as MATH
from .steps_moves import STEPS as MOVES
from .steps_writes import STEPS as WRITES

STEPS: tuple[Step, ...] = (*MATH, *MOVES, *LAYERS, *WRITES)
