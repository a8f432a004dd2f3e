"""How recurrences are written: on a GPU by blocks that keep the weights of small ones, or spread
over all of it, or a sequence a block; on a CPU as loops. Each says what it takes.
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
from .kept import KeptConfig, emit_kept, kept_configs
from .problem import read_recurrence
from .spread import COLUMNS, SpreadConfig, emit_spread, spread_configs
from .spread_floats import FloatsConfig, emit_floats, floats_configs

BARRIER_S = 2e-6
"""Of a step that all blocks wait for, float16 on an H200: 1.6 to 2.5 us for up to 32 sequences and
512 units, 3.1 for 1024, where weights count (6.3 for an LSTM of 2048)."""
FLOATS_S, FLOATS_SEQUENCE_S = 1.6e-6, 0.13e-6
"""Of such a step in float32, and of each sequence in it: LSTMs of 128 units take 1.7 us for one
sequence and 5.8 for 32, of 512 units 3.1 for one."""
KEPT_S, CLUSTER_S = 0.85e-6, 1.4e-6
"""Of a step within a block that keeps its weights, 0.7 to 0.85 us at 128 units, or a cluster, 1.2
to 1.4 at 192 and 256, for up to 32 sequences."""
ALONE_S = 1e-6
ALONE_BYTES_PER_S = 35e9
"""Of a step of a block that loads its weights, on an H200: LSTMs of 128 and 512 units take 4.7 and
61 us, GRUs of 512 38."""


def _sequences(made: Recurrence) -> int:
    return made.batch if isinstance(made.batch, int) else ASSUMED_SYMBOLIC_EXTENT


def _spread(made: Recurrence, hw: HardwareProfile, policy: Policy) -> Ranked:
    """A step for each of some sequences; weights stay where they are."""
    return [
        (math.ceil(_sequences(made) / config.sequences) * BARRIER_S, config)
        for config in spread_configs(made, hw)
    ]


def _floats(made: Recurrence, hw: HardwareProfile, policy: Policy) -> Ranked:
    """As `_spread`."""
    return [
        (
            math.ceil(_sequences(made) / config.sequences)
            * (FLOATS_S + config.sequences * FLOATS_SEQUENCE_S),
            config,
        )
        for config in floats_configs(made, hw)
    ]


def _kept(made: Recurrence, hw: HardwareProfile, policy: Policy) -> Ranked:
    """A step of each block or cluster, for as many turns as the device takes for all."""
    found = []
    for config in kept_configs(made, hw):
        turns = math.ceil(math.ceil(_sequences(made) / COLUMNS) * config.blocks / hw.num_sms)
        found.append((turns * (CLUSTER_S if config.blocks > 1 else KEPT_S), config))
    return found


def _alone(made: Recurrence, hw: HardwareProfile, policy: Policy) -> Ranked:
    """A step of each block: all weights come from the L2 cache."""
    turns = math.ceil(_sequences(made) / hw.num_sms)
    weights = made.columns * made.units * bytes_of(made.dtype)
    seconds = turns * (ALONE_S + weights / ALONE_BYTES_PER_S)
    return [(seconds, config) for config in alone_configs(made, hw)]


WRITER = Writer(
    "a recurrence",
    read_recurrence,
    (
        Form("kept by a block or a cluster", KeptConfig, _kept, emit_kept),
        Form("spread over all multiprocessors", SpreadConfig, _spread, emit_spread),
        Form("spread in float32", FloatsConfig, _floats, emit_floats),
        Form("a block a sequence", AloneConfig, _alone, emit_alone),
    ),
)


def kernel_of(
    func: tirx.PrimFunc, made: Recurrence, hw: HardwareProfile, policy: Policy
) -> tirx.PrimFunc:
    """The kernel of a function that is this recurrence (`read_recurrence`).

    Raises
    ------
    Unsupported
        No form takes it on this device: its plain loops are right there, too.
    """
    if hw.kind == "llvm":
        return write_on_cpu(func, made, machine_of(hw))
    return WRITER.emit(made, hw, policy)
