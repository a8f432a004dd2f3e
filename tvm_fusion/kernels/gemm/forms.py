"""The forms of a GEMM kernel; `simt` takes every contraction."""

from __future__ import annotations

from ..contraction.reader import analyze_contraction
from ..forms import Form, Writer
from .hopper.kernel import emit_gemm_hopper, hopper_ranked
from .hopper.plan import HopperConfig
from .mma.kernel import emit_gemm_mma
from .mma.plan import MmaConfig
from .mma.rank import mma_ranked
from .runs.rank import emit_product, product_ranked
from .runs.shape import RunsConfig
from .simt.config import SimtConfig
from .simt.kernel import emit_gemm_simt, simt_ranked
from .skinny.config import SkinnyConfig
from .skinny.kernel import emit_gemm_skinny
from .skinny.rank import skinny_ranked
from .versions import write_versions

WRITER = Writer(
    "a matrix product",
    analyze_contraction,
    (
        Form("hopper", HopperConfig, hopper_ranked, emit_gemm_hopper),
        Form("skinny", SkinnyConfig, skinny_ranked, emit_gemm_skinny),
        Form("runs", RunsConfig, product_ranked, emit_product),
        Form("mma", MmaConfig, mma_ranked, emit_gemm_mma),
        Form("simt", SimtConfig, simt_ranked, emit_gemm_simt),
    ),
    write_versions,
)
