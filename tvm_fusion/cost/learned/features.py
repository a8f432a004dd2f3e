"""What the learned residual knows of a launch: a versioned list of numbers.

A feature is the logarithm of a size, a count for one point of the space that the kernel runs over,
or a ratio, so that what was learned on some graphs holds on others. `BYTE_FEATURES` are those that
grow with the bytes that a launch moves; no other feature changes with them (more bytes with the
same pattern of access: as many sectors, wavefronts and bytes of shared memory for each byte). The
prediction may not fall in any of them (`cost.learned.refit`), so that a launch that moves more
bytes over the same space is never predicted to be faster.

    log T = anchor + trees(features),   anchor = A log body + (1 - A) log reference

`body` is the analytic time without the launch. With A = 1 the trees would have to keep every rise
of the analytic model with the bytes, also where it rises too steeply. The reference is what the
analytic model says of everything but the bytes, and of a fixed number of bytes for each point; what
is lacking of the rise is the trees' to add.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from ...config import HardwareProfile
from ...kernels.base import Fit
from ..analytic import Estimate, resident_blocks
from ..traffic import Resources, Traffic

FEATURES_VERSION = 1

CLASSES = ("pointwise", "row", "column", "mixed", "transpose", "gemm", "nest", "fallback")
BYTE_FEATURES = (
    "body",
    "memory_time",
    "l2_fill",
    "memory_bytes_a_point",
    "l2_bytes_a_point",
)
FREE_FEATURES = (
    "sectors_a_byte",
    "wavefronts_a_byte",
    "smem_bytes_a_byte",
    "own_time",
    "points",
    "rows",
    "columns",
    "columns_power_of_two",
    "arithmetic_a_point",
    "special_a_point",
    "division_a_point",
    "integer_a_point",
    "conversion_a_point",
    "tensor_flops_a_point",
    "tensor_rate",
    "tensor_time",
    "compute_time",
    "latency_time",
    "evaluations_a_point",
    "blocks_of_code",
    "parallel",
    "blocks_a_multiprocessor",
    "last_wave",
    "exchanges",
    "shuffles",
    "rounds",
    "in_flight",
    "registers",
    "threads",
    "resident",
    "smem_share",
    "code_share",
    "products",
    "batch",
    "depth",
    "side_by_side",
    *(f"is_{name}" for name in CLASSES),
)
FEATURES = (*BYTE_FEATURES, *FREE_FEATURES)
MOST_POWER_OF_TWO = 128
ANALYTIC_SHARE = 0.6
"""A of the anchor: of 1, 0.8, 0.6 and 0.4 the one with the least errors in cross-validation on the
kernels measured on an H200."""
# Of the reference, which only sets a scale.
REFERENCE_BYTES = 4.0
REFERENCE_START_US = 1.0
# Terms of an estimate that do not depend on the bytes.
COMPUTE_TERMS = (
    "arithmetic",
    "special",
    "division",
    "integer",
    "conversion",
    "operations",
    "epilogue",
)
LATENCY_TERMS = ("latency", "tail", "start", "exchange")


@dataclass(frozen=True, slots=True)
class Query:
    """A launch as its kernel class describes it, and its analytic estimate."""

    kernel_class: str
    fit: Fit
    traffic: Traffic
    resources: Resources
    estimate: Estimate = field(hash=False)

    @property
    def body_us(self) -> float:
        return body_us(self.estimate)


def body_us(estimate: Estimate) -> float:
    """The analytic time without what the launch itself costs."""
    analytic = estimate.time_us if estimate.analytic_us is None else estimate.analytic_us
    return max(analytic - estimate.terms.get("launch", 0.0), 1e-3)


def anchor_of(query: Query, hw: HardwareProfile) -> float:
    """What the trees add to: see the module docstring."""
    body = math.log(query.body_us)
    if query.traffic.seconds is not None:  # a time that does not depend on `hbm_bytes`
        return body
    points = float(max(1, query.fit.rows) * max(1, query.fit.columns))
    moving = points * REFERENCE_BYTES / hw.hbm_bytes_per_s * 1e6
    terms = query.estimate.terms
    reference = REFERENCE_START_US + max(moving, _compute_us(terms), _latency_us(terms))
    return ANALYTIC_SHARE * body + (1 - ANALYTIC_SHARE) * math.log(reference)


def features_of(query: Query, hw: HardwareProfile) -> tuple[float, ...]:
    """The features of a launch in the order of `FEATURES`; all are finite.

    Parameters
    ----------
    query : Query
    hw : HardwareProfile
    """
    fit, traffic, resources = query.fit, query.traffic, query.resources
    log, log1p = math.log, math.log1p
    points = float(max(1, fit.rows) * max(1, fit.columns))
    ops, terms = traffic.operations, query.estimate.terms
    registers = min(resources.registers_per_thread, hw.max_registers_per_thread)
    resident = resident_blocks(resources.threads, registers, resources.smem_bytes, hw)
    waves = traffic.blocks / hw.num_sms
    rate = hw.tensor_flop_per_s.get(traffic.tensor_dtype, hw.fma_per_s_f32)
    needed = hw.hbm_bytes_per_s * hw.bytes_in_flight_latency_s / hw.num_sms
    columns = max(1, fit.columns)
    shapes = fit.contractions
    moved = max(traffic.l2_bytes, 1.0)
    body = log(query.body_us)
    return (
        body,
        _log(traffic.hbm_bytes / hw.hbm_bytes_per_s * 1e6),
        _log(traffic.l2_bytes / hw.l2_bytes),
        _log(traffic.hbm_bytes / points),
        _log(traffic.l2_bytes / points),
        _log(traffic.sector_bytes / moved),
        _log(traffic.wavefronts / moved),
        _log(traffic.smem_bytes / moved),
        body if traffic.seconds is not None else 0.0,
        log(points),
        log(max(1, fit.rows)),
        log(columns),
        log(min(MOST_POWER_OF_TWO, columns & -columns)),
        log1p(ops.get("arithmetic", 0.0) / points),
        log1p(ops.get("special", 0.0) / points),
        log1p(ops.get("division", 0.0) / points),
        log1p(ops.get("integer", 0.0) / points),
        log1p(ops.get("conversion", 0.0) / points),
        log1p(traffic.tensor_flops / points),
        log(rate / hw.fma_per_s_f32) if traffic.tensor_flops else 0.0,
        log1p(traffic.tensor_flops / rate * 1e6),
        log1p(_compute_us(terms)),
        log1p(_latency_us(terms)),
        log1p(sum(fit.evaluations) / points),
        log1p(len(fit.evaluations)),
        log(max(traffic.parallel, 1e-6)),
        _log(waves),
        math.ceil(waves) / waves if waves > 1 else 1.0,
        log1p(traffic.exchanges),
        log1p(traffic.shuffles),
        log1p(traffic.rounds),
        _log(traffic.in_flight_bytes / needed) if needed else 0.0,
        float(registers),
        log1p(resources.threads),
        log(resident),
        resources.smem_bytes / max(1, hw.smem_per_block_bytes),
        resources.code_bytes / max(1, hw.instruction_cache_bytes),
        float(len(shapes)),
        log(shapes[0][0]) if shapes else 0.0,
        log(shapes[0][3]) if shapes else 0.0,
        float(fit.side_by_side),
        *_OF_CLASS.get(query.kernel_class, _OF_NO_CLASS),
    )


_OF_CLASS = {name: tuple(float(name == other) for other in CLASSES) for name in CLASSES}
_OF_NO_CLASS = (0.0,) * len(CLASSES)


def _compute_us(terms: Mapping[str, float]) -> float:
    return max([terms.get(name, 0.0) for name in COMPUTE_TERMS])


def _latency_us(terms: Mapping[str, float]) -> float:
    return sum([terms.get(name, 0.0) for name in LATENCY_TERMS])


def _log(value: float) -> float:
    """The logarithm of what may be nothing."""
    return math.log(value + 1e-4)
