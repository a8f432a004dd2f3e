"""What the NVIDIA driver says of GPU 0, by ctypes: TVM's own device tells neither the width of the
memory bus nor its clock.
"""

from __future__ import annotations

import ctypes
import sys
from ctypes import byref, c_int, c_size_t

LIBRARY = "nvcuda.dll" if sys.platform == "win32" else "libcuda.so.1"
"""The driver's library."""

_ATTRIBUTES = {  # CUdevice_attribute, cuda.h
    "clock_khz": 13,
    "num_sms": 16,
    "is_integrated": 18,
    "memory_clock_khz": 36,
    "memory_bus_bits": 37,
    "l2_bytes": 38,
    "max_threads_per_sm": 39,
    "smem_per_sm_bytes": 81,
    "registers_per_sm": 82,
    "smem_per_block_bytes": 97,
    "max_blocks_per_sm": 106,
    "smem_reserved_per_block_bytes": 111,
}


def gpu_attributes() -> dict[str, int]:
    """Attributes of GPU 0 by name, `memory_bytes` among them; those that the driver does not know
    are left out, all where there is no driver or no GPU.
    """
    library = _library()
    device, value, size = c_int(), c_int(), c_size_t()
    if library is None or library.cuInit(0) or library.cuDeviceGet(byref(device), 0):
        return {}
    found = {}
    for name, number in _ATTRIBUTES.items():
        if library.cuDeviceGetAttribute(byref(value), number, device) == 0:
            found[name] = value.value
    if library.cuDeviceTotalMem_v2(byref(size), device) == 0:
        found["memory_bytes"] = size.value
    return found


def _library() -> ctypes.CDLL | None:
    try:
        return ctypes.CDLL(LIBRARY)
    except OSError:
        return None
