"""Tier 1 of the cost model: an analytic estimate of one launch from what it moves and executes.

    T = T_launch + (sum_i T_i^p)^(1/p)

over the terms i = HBM bytes, L2 bytes, operations by pipe, tensor cores; p is `roofline_exponent`
of the device (infinity would be the classical roofline max(T_i) of Williams et al., CACM 52(4),
2009). All rates come from the hardware profile. A kernel class that predicts the time of its
launches itself (`Traffic.seconds`) is only charged the launch on top.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from ..config import HardwareProfile

if (
    TYPE_CHECKING
):  # the cost model is below the kernel classes; it only reads the fields of what they return
    from ..kernels.base import Resources, Traffic

US = 1e6


@dataclass(frozen=True, slots=True)
class Estimate:
    """Predicted time of one launch in microseconds, and its terms (each alone, in microseconds)."""

    time_us: float
    terms: Mapping[str, float] = field(hash=False)

    @property
    def dominant(self) -> str:
        return max(self.terms, key=lambda k: (self.terms[k], k))


def launch_us(hw: HardwareProfile, launch: str) -> float:
    """What one launch costs by itself, in a stream or as a node of a CUDA graph."""
    return hw.graph_launch_us if launch == "graph" else hw.launch_us


def estimate(
    traffic: Traffic, resources: Resources, hw: HardwareProfile, launch: str = "stream"
) -> Estimate:
    """Predicts the time of one launch.

    Parameters
    ----------
    traffic : Traffic
        Bytes and operations of the whole launch.
    resources : Resources
        Registers a thread; those above the device's limit are charged as spill traffic.
    hw : HardwareProfile
    launch : {"stream", "graph"}

    Returns
    -------
    Estimate
    """
    if traffic.seconds is not None:
        shown = {name: seconds * US for name, seconds in traffic.terms.items() if seconds > 0}
        shown["launch"] = launch_us(hw, launch)
        return Estimate(traffic.seconds * US + shown["launch"], shown)
    share = max(traffic.parallel, 1e-6)
    ops = traffic.operations
    scalar_flops = ops.get("arithmetic", 0.0)
    tensor_rate = hw.tensor_flop_per_s.get(traffic.tensor_dtype, hw.fma_per_s_f32)
    terms = {
        "hbm": traffic.hbm_bytes / (hw.hbm_bytes_per_s * share),
        "l2": traffic.l2_bytes / (hw.l2_bytes_per_s * share),
        "arithmetic": scalar_flops / (hw.fma_per_s_f32 / 2 * share),
        "special": ops.get("special", 0.0) / (hw.special_per_s * share),
        "division": ops.get("division", 0.0) / (hw.special_per_s * share),
        "integer": ops.get("integer", 0.0) / (hw.int_div_per_s * share),
        "tensor": traffic.tensor_flops / (tensor_rate * traffic.tensor_efficiency),
        "spill": _spill_seconds(traffic, resources, hw),
    }
    p = hw.roofline_exponent
    largest = max(terms.values())
    body = largest * sum((t / largest) ** p for t in terms.values()) ** (1 / p) if largest else 0.0
    terms_us = {name: t * US for name, t in terms.items() if t > 0}
    terms_us["launch"] = launch_us(hw, launch)
    return Estimate(body * US + terms_us["launch"], terms_us)


def _spill_seconds(traffic: Traffic, resources: Resources, hw: HardwareProfile) -> float:
    """Registers above the limit go out and back once per element they stand for: charged against L1
    as L2 bytes, no cliff.
    """
    excess = resources.registers_per_thread - hw.max_registers_per_thread
    if hw.kind == "llvm" or excess <= 0:
        return 0.0
    return excess / hw.max_registers_per_thread * 2 * traffic.l2_bytes / hw.l2_bytes_per_s
