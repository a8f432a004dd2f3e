"""What a benchmark finds, and what a benchmark is."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ..errors import TvmFusionError

Number = int | float


class NotMeasured(TvmFusionError):
    """A number cannot be measured here; the message says why."""


# The fields of a profile that the family "arithmetic" measures, on any device.
ARITHMETIC = (
    "fma_per_s_f32",
    "special_per_s",
    "special_slots",
    "conversion_per_s",
    "int_per_s",
    "int_div_per_s",
)


@dataclass(frozen=True, slots=True)
class Measured:
    """A measured field of the hardware profile.

    Attributes
    ----------
    field : str
        Name of the field of `HardwareProfile`.
    value : number or Mapping[str, number]
        In the unit of the field. Of a mapping only what was measured; other keys stay.
    how : str
        What was run, for the file.
    """

    field: str
    value: Number | Mapping[str, Number] = field(hash=False)
    how: str


@dataclass(frozen=True, slots=True)
class Finding:
    """What a family of benchmarks found.

    Attributes
    ----------
    values : sequence of Measured
        What goes into the profile.
    notes : sequence of str
        Curves, and numbers that the profile holds in fitted form; comments in the file.
    missing : sequence of str
        What could not be measured, and why.
    """

    values: Sequence[Measured]
    notes: Sequence[str] = ()
    missing: Sequence[str] = ()


@dataclass(frozen=True, slots=True)
class Family:
    """Benchmarks that are run together.

    Attributes
    ----------
    name : str
        For `--only`.
    title : str
        For the progress display.
    fields : tuple of str
        Fields of the profile that it measures.
    measure : callable
        bench -> Finding. On CUDA the bench is a `calibrate.cuda.bench.CudaBench`, on llvm a
        `calibrate.cpu.bench.CpuBench`.
    kernels : callable
        hw -> PrimFuncs by name, built before anything is measured; empty on llvm.
    """

    name: str
    title: str
    fields: tuple[str, ...]
    measure: Callable[[Any], Finding]
    kernels: Callable[[Any], Mapping[str, Any]] = lambda hw: {}
