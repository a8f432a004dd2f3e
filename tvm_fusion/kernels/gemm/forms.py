"""The forms of a GEMM kernel, and all their configurations in the order of predicted time.

A form ranks its own configurations, in seconds of one launch, and writes a kernel from one of them;
lists of several forms are merged by those seconds. `simt` takes every contraction.
"""

from __future__ import annotations

from typing import Any

from tvm import tirx

from ...config import HardwareProfile, Policy
from ..contraction.reader import Contraction
from ..forms import Form, Ranked, emitted, ranked
from ..forms import form_of as form_among
from .hopper.kernel import emit_gemm_hopper, hopper_ranked
from .hopper.plan import HopperConfig
from .mma.kernel import emit_gemm_mma
from .mma.plan import MmaConfig
from .mma.rank import mma_ranked
from .simt.config import SimtConfig
from .simt.kernel import emit_gemm_simt, simt_ranked
from .skinny.config import SkinnyConfig
from .skinny.kernel import emit_gemm_skinny
from .skinny.rank import skinny_ranked

FORMS = (
    Form("a matrix product", "hopper", HopperConfig, hopper_ranked, emit_gemm_hopper),
    Form("a matrix product", "skinny", SkinnyConfig, skinny_ranked, emit_gemm_skinny),
    Form("a matrix product", "mma", MmaConfig, mma_ranked, emit_gemm_mma),
    Form("a matrix product", "simt", SimtConfig, simt_ranked, emit_gemm_simt),
)


def gemm_ranked(contraction: Contraction, hw: HardwareProfile, policy: Policy) -> Ranked:
    """Predicted seconds and configurations of all forms, the fastest first (see `forms.ranked`)."""
    return ranked(FORMS, contraction, hw, policy)


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
    return emitted(FORMS, contraction, hw, policy, config)


def form_of(config: Any) -> Form:
    """The form that a configuration belongs to."""
    return form_among(FORMS, config)
