"""All families of benchmarks, by kind of device, in the order in which they are run."""

from __future__ import annotations

from ..config import HardwareProfile
from .findings import Family


def families_of(hw: HardwareProfile) -> tuple[Family, ...]:
    """The families that measure a device."""
    if hw.kind == "llvm":
        from .cpu import arithmetic as cpu_arithmetic
        from .cpu import bandwidth as cpu_bandwidth
        from .cpu import launch as cpu_launch

        return cpu_bandwidth.FAMILY, cpu_launch.FAMILY, cpu_arithmetic.FAMILY
    from .cuda import access as cuda_access
    from .cuda import arithmetic as cuda_arithmetic
    from .cuda import bandwidth as cuda_bandwidth
    from .cuda import code_size as cuda_code_size
    from .cuda import exchange as cuda_exchange
    from .cuda import flight as cuda_flight
    from .cuda import launch as cuda_launch
    from .cuda import shared as cuda_shared
    from .cuda import spill as cuda_spill
    from .cuda import tensor as cuda_tensor

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
