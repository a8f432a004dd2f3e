"""The analytic estimate of a launch on a CPU.

    T = min(T_one_core, T_all_cores)        T_n = T_start(n) + (M_n^p + C_n^p)^(1/p)

M is the way of the data: bytes that a cache still holds at the rate of the last-level cache, the
others at that of the memory. A launch finds its inputs there, and the pages of its outputs, where
all that it touches fits: a CPU's cache is large beside most kernels, and calls follow each other.
Conversions of half precision come with loads and stores, so that the slower of both shows.
C adds up what the instructions take: on a CPU loads aside all of them share the vector ports. p
(`roofline_exponent`) says how far both overlap, T_start what it takes to call a kernel
(`kernel_gap_us`) and, on all cores, to wake them (`launch_us`).

Does not handle: weights that a launch finds in the cache or not depending on how much the rest of
the model reads between two calls.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from ..config import HardwareProfile

if TYPE_CHECKING:  # the cost model is below the kernel classes; it reads what they return
    from .traffic import Traffic

COMPUTING = ("arithmetic", "special", "integer", "tensor")
"""Terms of instructions that the operators of a group need, together or apart."""


def cpu_terms(traffic: Traffic, hw: HardwareProfile) -> tuple[dict[str, float], float]:
    """What a launch is made of, each term alone, and all of it, in seconds; "launch" among them.

    Parameters
    ----------
    traffic : Traffic
    hw : HardwareProfile
    """
    cores = max(1, hw.num_sms)
    terms = _terms(traffic, hw)
    filled = max(1.0 / cores, min(1.0, traffic.parallel))
    call, wake = hw.kernel_gap_us * 1e-6, hw.launch_us * 1e-6
    alone = {name: t * cores for name, t in terms.items()}
    alone["hbm"] = terms["hbm"]  # a core asks for nearly all that the memory gives
    together = {name: t / filled for name, t in terms.items()}
    one, all_cores = call + _body(alone, hw), call + wake + _body(together, hw)
    found, start = (alone, call) if one <= all_cores else (together, call + wake)
    return {**found, "launch": start}, min(one, all_cores)


def _terms(traffic: Traffic, hw: HardwareProfile) -> dict[str, float]:
    """Seconds on all cores, by resource."""
    ops: Mapping[str, Any] = traffic.operations
    size = max(traffic.l2_bytes, traffic.sector_bytes)
    held = resident(traffic.l2_bytes, hw)
    rate = hw.tensor_flop_per_s.get(traffic.tensor_dtype, hw.fma_per_s_f32)
    special = ops.get("special", 0.0) + ops.get("division", 0.0)
    return {
        "hbm": (1.0 - held) * size / hw.hbm_bytes_per_s,
        "l2": held * size / hw.l2_bytes_per_s,
        "arithmetic": ops.get("arithmetic", 0.0) * 2.0 / hw.fma_per_s_f32,
        "special": special / hw.special_per_s,
        "integer": ops.get("integer", 0.0) / hw.int_div_per_s,
        "conversion": ops.get("conversion", 0.0) / hw.conversion_per_s,
        "tensor": traffic.tensor_flops / (rate * traffic.tensor_efficiency),
    }


def resident(size: float, hw: HardwareProfile) -> float:
    """Share of `size` bytes, touched one after the other, that the last-level cache still holds the
    next time.
    """
    filled = size / (hw.l2_usable_share * hw.l2_bytes)
    return 1.0 / (1.0 + filled**hw.l2_residence_exponent)


def _body(terms: Mapping[str, float], hw: HardwareProfile) -> float:
    """Data and instructions, as far as they do not overlap."""
    moving = max(terms["hbm"] + terms["l2"], terms["conversion"])
    computing = sum(terms[name] for name in COMPUTING)
    most = max(moving, computing)
    if most <= 0.0:
        return 0.0
    p = hw.roofline_exponent
    return most * ((moving / most) ** p + (computing / most) ** p) ** (1.0 / p)
