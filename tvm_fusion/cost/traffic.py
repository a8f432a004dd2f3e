"""A launch in numbers: what it moves and executes, and what its threads need."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Traffic:
    """What one launch moves and executes.

    Bytes are unions of footprints, operations are counts. A class with a model of its own gives its
    time as `seconds`, with the `terms` it is made of; the other fields then only say what the
    launch does.

    Attributes
    ----------
    hbm_bytes, l2_bytes : bytes that cross the memory's and the L2's interface, each once
    operations : operations by pipe (`ir.access.Pipe`)
    parallel : share of the device the launch can fill (0 to 1]
    sector_bytes : bytes that the loads and stores ask for in whole sectors, those of stores counted
        as the reads that take the L2 as long; more than `l2_bytes` where accesses are not coalesced
        or what is read is read again
    read_bytes : bytes of loads whose latency has to be covered by others in flight
    wavefronts : passes through the load/store units (up to 128 bytes of one instruction each)
    smem_bytes : bytes written to and read from shared memory
    exchanges : block-wide exchanges (a barrier with the shuffles around it) one block goes through
    shuffles : steps of reductions within warps that a thread goes through
    rounds : loads of a thread that wait for one another
    blocks : thread blocks
    in_flight_bytes : bytes of loads that one multiprocessor keeps in flight
    assumed_l2 : inputs (tensor number, bytes) that are taken to lie in the L2 when the launch
        starts, since a launch before it has just written them
    launches : whether there is a launch at all
    """

    hbm_bytes: float
    l2_bytes: float
    operations: Mapping[str, float] = field(default_factory=dict, hash=False)
    tensor_flops: float = 0.0
    tensor_dtype: str = "float32"
    tensor_efficiency: float = 1.0
    parallel: float = 1.0
    seconds: float | None = None
    terms: Mapping[str, float] = field(default_factory=dict, hash=False)
    sector_bytes: float = 0.0
    read_bytes: float = 0.0
    wavefronts: float = 0.0
    smem_bytes: float = 0.0
    exchanges: float = 0.0
    blocks: float = 0.0
    in_flight_bytes: float = 0.0
    shuffles: float = 0.0
    rounds: float = 0.0
    assumed_l2: tuple[tuple[int, float], ...] = ()
    launches: bool = True


@dataclass(frozen=True, slots=True)
class Resources:
    """What a thread and its block need: first estimates, or what `cost.probe` found.

    Attributes
    ----------
    registers_per_thread : 32-bit registers; above the device's limit they are spilled
    smem_bytes : shared memory of a block
    threads : threads of a block; 0 where not known
    code_bytes : machine code of the kernel; 0 where not known
    spill_bytes : bytes a thread stores to and loads from local memory, if the probe told
    turns : how often a thread uses these registers anew (points it computes one after the other)
    """

    registers_per_thread: int
    smem_bytes: int
    threads: int = 0
    code_bytes: int = 0
    spill_bytes: int | None = None
    turns: float = 1.0
