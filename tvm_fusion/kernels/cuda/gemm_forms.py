"""The forms of a GEMM kernel, and all their configurations in the order of predicted time.

A form ranks its own configurations, in seconds of one launch, and writes a kernel from one of them;
lists of several forms are merged by those seconds. `simt` takes every contraction.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from tvm import tirx

from ...config import HardwareProfile, Policy
from ...errors import Unsupported
from ..contraction import Contraction
from .gemm_hopper import emit_gemm_hopper, hopper_ranked
from .gemm_hopper_plan import HopperConfig
from .gemm_mma import emit_gemm_mma
from .gemm_mma_plan import MmaConfig
from .gemm_mma_rank import mma_ranked
from .gemm_simt import SimtConfig, emit_gemm_simt, simt_ranked
from .gemm_skinny import emit_gemm_skinny
from .gemm_skinny_config import SkinnyConfig
from .gemm_skinny_rank import skinny_ranked

Ranked = list[tuple[float, Any]]


@dataclass(frozen=True, slots=True)
class Form:
    """One way to write a matrix product.

    Attributes
    ----------
    name : for messages.
    config : the class of its configurations.
    rank : (contraction, hw, policy) -> predicted seconds and configuration, the fastest first;
        raises Unsupported where the form cannot compute the contraction.
    emit : (contraction, hw, config) -> the kernel.
    """

    name: str
    config: type
    rank: Callable[[Contraction, HardwareProfile, Policy], Ranked]
    emit: Callable[[Contraction, HardwareProfile, Any], tirx.PrimFunc]


FORMS = (
    Form("hopper", HopperConfig, hopper_ranked, emit_gemm_hopper),
    Form("skinny", SkinnyConfig, skinny_ranked, emit_gemm_skinny),
    Form("mma", MmaConfig, mma_ranked, emit_gemm_mma),
    Form("simt", SimtConfig, simt_ranked, emit_gemm_simt),
)


def gemm_ranked(contraction: Contraction, hw: HardwareProfile, policy: Policy) -> Ranked:
    """Predicted seconds and configurations of all forms, the fastest first.

    Raises
    ------
    Unsupported
        No form takes the contraction; the message has each one's reason.
    """
    lists, reasons = [], []
    for form in FORMS:
        try:
            lists.append(form.rank(contraction, hw, policy))
        except Unsupported as why:
            reasons.append(f"{form.name}: {why}")
    ranked = list(heapq.merge(*lists, key=lambda entry: entry[0]))
    if not ranked:
        raise Unsupported("; ".join(reasons))
    return ranked


def emit_gemm(
    contraction: Contraction, hw: HardwareProfile, policy: Policy, config: Any = None
) -> tirx.PrimFunc:
    """Write a contraction as one TIRx kernel.

    Parameters
    ----------
    contraction : Contraction
    hw : HardwareProfile
        A CUDA device.
    policy : Policy
    config : optional
        One of `gemm_ranked`; where None, the first that can be written.

    Raises
    ------
    Unsupported
        The configuration, or no configuration at all, can be written.
    """
    if config is not None:
        return form_of(config).emit(contraction, hw, config)
    reasons = {}
    for form, choice in _choices(contraction, hw, policy):
        try:
            return form.emit(contraction, hw, choice)
        except Unsupported as why:
            reasons[form.name] = f"{form.name}: {why}"
    raise Unsupported("; ".join(reasons.values()))


def form_of(config: Any) -> Form:
    """The form that a configuration belongs to."""
    for form in FORMS:
        if type(config) is form.config:
            return form
    raise Unsupported(f"{type(config).__name__} is no configuration of a matrix product")


def _choices(
    contraction: Contraction, hw: HardwareProfile, policy: Policy
) -> Iterator[tuple[Form, Any]]:
    for _, config in gemm_ranked(contraction, hw, policy):
        yield form_of(config), config
