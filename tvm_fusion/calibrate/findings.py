"""What a benchmark is and what it finds: from measured curves to the numbers of a profile.

No device, no clock.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import numpy as np

from ..errors import TvmFusionError

# What a benchmark finds, and what a benchmark is.

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


Curve = Mapping[int, float]
"""Size in bytes -> rate in bytes a second."""

MEMORY_SIZES = 4
"""A size counts as one of the memory from this many caches on: nothing of it is found again."""

SATURATED = 0.9
"""Share of the highest rate from which more parallelism does not pay."""

KNEE = 1.15
"""Growth of the time of an instruction that counts as the end of the cache."""


def memory_rate(curve: Curve, cache_bytes: int) -> float:
    """Median rate of the sizes that are far larger than the cache.

    Raises
    ------
    ValueError
        There is no such size.
    """
    rates = [rate for size, rate in curve.items() if size >= MEMORY_SIZES * cache_bytes]
    if not rates:
        raise ValueError(f"no size of at least {MEMORY_SIZES} x {cache_bytes} bytes was measured")
    return float(np.median(rates))


def cache_rate(curve: Curve, cache_bytes: int, below: int = 0) -> float:
    """Highest rate of the sizes of at most half the cache, and more than `below` bytes.

    Raises
    ------
    ValueError
        There is no such size.
    """
    rates = [rate for size, rate in curve.items() if below < size <= cache_bytes / 2]
    if not rates:
        raise ValueError(f"no size between {below} and {cache_bytes // 2} bytes was measured")
    return max(rates)


def usable_bytes(curve: Curve, fast: float, slow: float) -> float:
    """Size at which the rate has fallen half-way (of the logarithm) from `fast` to `slow`.

    Interpolated between the sizes around it, in logarithms of size and rate.

    Raises
    ------
    ValueError
        The two rates do not differ, or the curve does not pass between them.
    """
    if fast <= 1.1 * slow:
        raise ValueError("the cache is not faster than the memory")
    middle = math.sqrt(fast * slow)
    peak = max(curve, key=lambda size: curve[size])
    points = sorted((size, rate) for size, rate in curve.items() if size >= peak)
    for (size, rate), (next_size, next_rate) in pairwise(points):
        if rate >= middle > next_rate:
            share = math.log(rate / middle) / math.log(rate / next_rate)
            return size * (next_size / size) ** share
    raise ValueError("the rate does not fall to that of the memory")


def littles_latency(rates: Mapping[int, float]) -> float:
    """Latency that the bytes in flight have to hide, in seconds.

    Parameters
    ----------
    rates : Mapping[int, float]
        Bytes a second by bytes in flight on the whole device.

    Returns
    -------
    float
        Little's law at the knee: the fewest bytes in flight that reach 90 % of the highest rate
        (interpolated), divided by that rate.
    """
    best = max(rates.values())
    wanted = SATURATED * best
    points = sorted(rates.items())
    for (size, rate), (next_size, next_rate) in pairwise(points):
        if rate < wanted <= next_rate:
            share = (wanted - rate) / (next_rate - rate)
            return (size + share * (next_size - size)) / wanted
    return points[0][0] / wanted


def slope(points: Sequence[tuple[float, float]]) -> float:
    """Slope of the least-squares line through (x, y)."""
    if len({x for x, _ in points}) < 2:
        raise ValueError("a slope needs two different places")
    mean_x, mean_y = np.mean(points, axis=0)
    above = math.fsum((x - mean_x) * (y - mean_y) for x, y in points)
    below = math.fsum((x - mean_x) ** 2 for x, _ in points)
    return above / below


def cache_knee(seconds_a_byte: Mapping[int, float]) -> int | None:
    """Largest size before the time of a byte grows, or None where it does not grow."""
    sizes = sorted(seconds_a_byte)
    base = min(seconds_a_byte.values())
    inside = [size for size in sizes if seconds_a_byte[size] <= KNEE * base]
    # the smallest sizes hold the loop's own overhead: what counts is the last size that is fast
    return None if inside[-1] == sizes[-1] else inside[-1]


def power_of_two(value: float, low: int, high: int) -> int:
    """Nearest power of two (of the logarithm) between `low` and `high`."""
    return min(max(2 ** round(math.log2(value)), low), high)


def readable(size: float) -> str:
    """ "64 KiB" and the like."""
    for unit in ("B", "KiB", "MiB"):
        if size < 1024:
            return f"{size:.4g} {unit}"
        size /= 1024
    return f"{size:.4g} GiB"


def curve_text(curve: Curve) -> str:
    """A curve in one line, in GB/s."""
    return ", ".join(f"{readable(size)} {rate / 1e9:.4g}" for size, rate in sorted(curve.items()))
