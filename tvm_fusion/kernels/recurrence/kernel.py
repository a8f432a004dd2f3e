"""How recurrences are written: on a GPU spread over it where that can be, or a sequence a block;
on a CPU as loops. Each says what it takes.
"""

from __future__ import annotations

import math

from tvm import tirx

from ...config import HardwareProfile, Policy
from ...ir.extents import ASSUMED_SYMBOLIC_EXTENT
from ..cpu.machine import machine_of
from ..forms import Form, Ranked, Writer
from ..program.expr import bytes_of
from .alone import AloneConfig, alone_configs, emit_alone
from .cpu import write_on_cpu
from .form import Recurrence
from .problem import read_recurrence
from .spread import SpreadConfig, emit_spread, spread_configs

BARRIER_S = 2e-6
"""Of a step that all blocks wait for: the barrier, and hidden states from the L2 cache before and
behind it. A guess; the kernel was not timed."""
STEP_S = 1e-6
"""Of a step within a block, without its weights. A guess as well."""


def _sequences(made: Recurrence) -> int:
    return made.batch if isinstance(made.batch, int) else ASSUMED_SYMBOLIC_EXTENT


def _spread(made: Recurrence, hw: HardwareProfile, policy: Policy) -> Ranked:
    """A step for each of some sequences; weights stay where they are."""
    return [
        (math.ceil(_sequences(made) / config.sequences) * BARRIER_S, config)
        for config in spread_configs(made, hw)
    ]


def _alone(made: Recurrence, hw: HardwareProfile, policy: Policy) -> Ranked:
    """A step of each block: all weights come from the L2 cache, of which it has its share."""
    turns = math.ceil(_sequences(made) / hw.num_sms)
    weights = made.columns * made.units * bytes_of(made.dtype)
    seconds = turns * (STEP_S + weights / hw.sm_bytes_per_s)
    return [(seconds, config) for config in alone_configs(made, hw)]


WRITER = Writer(
    "a recurrence",
    read_recurrence,
    (
        Form("spread over all multiprocessors", SpreadConfig, _spread, emit_spread),
        Form("a block a sequence", AloneConfig, _alone, emit_alone),
    ),
)


def kernel_of(func: tirx.PrimFunc, hw: HardwareProfile, policy: Policy) -> tirx.PrimFunc:
    """The kernel of a function that is a recurrence.

    Raises
    ------
    Unsupported
        It is none, or no form takes it on this device: its plain loops are right there, too.
    """
    made = read_recurrence(func)
    if hw.kind == "llvm":
        return write_on_cpu(func, made, machine_of(hw))
    return WRITER.emit(made, hw, policy)
