"""The benchmarks of a CUDA device, in the order in which they are run."""

from __future__ import annotations

from ..findings import Family
from . import (
    access,
    arithmetic,
    bandwidth,
    code_size,
    exchange,
    flight,
    launch,
    shared,
    spill,
    tensor,
)

FAMILIES: tuple[Family, ...] = (
    bandwidth.FAMILY,
    access.FAMILY,
    flight.FAMILY,
    arithmetic.FAMILY,
    shared.FAMILY,
    exchange.FAMILY,
    spill.FAMILY,
    code_size.FAMILY,
    launch.FAMILY,
    tensor.FAMILY,
)
