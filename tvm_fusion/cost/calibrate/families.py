"""All families of benchmarks, by kind of device, in the order in which they are run."""

from __future__ import annotations

from ...config import HardwareProfile
from .finding import Family


def families_of(hw: HardwareProfile) -> tuple[Family, ...]:
    """The families that measure a device."""
    if hw.kind == "llvm":
        from . import cpu_arithmetic, cpu_bandwidth, cpu_launch

        return cpu_bandwidth.FAMILY, cpu_launch.FAMILY, cpu_arithmetic.FAMILY
    from . import (
        cuda_access,
        cuda_arithmetic,
        cuda_bandwidth,
        cuda_code_size,
        cuda_exchange,
        cuda_flight,
        cuda_launch,
        cuda_shared,
        cuda_spill,
        cuda_tensor,
    )

    return (
        cuda_bandwidth.FAMILY,
        cuda_access.FAMILY,
        cuda_flight.FAMILY,
        cuda_arithmetic.FAMILY,
        cuda_shared.FAMILY,
        cuda_exchange.FAMILY,
        cuda_spill.FAMILY,
        cuda_code_size.FAMILY,
        cuda_launch.FAMILY,
        cuda_tensor.FAMILY,
    )
