"""Registers that wgmma reads A from are left alone until its wait, in machine code."""

import pytest

from tvm_fusion.config import load_profile
from tvm_fusion.kernels.attention.hopper.kernel import emit_attention_hopper
from tvm_fusion.kernels.contraction.reader import analyze_contraction
from tvm_fusion.kernels.gemm.hopper.kernel import emit_gemm_hopper
from tvm_fusion.kernels.gemm.hopper.plan import HopperConfig

from ..support import attention_by_hand as forms
from ..support.attention_by_hand import Sizes, attention
from ..support.wgmma_registers import early_writes, machine_code
from .gemm.test_prologue import affine, rows_normed

H200 = load_profile("nvidia_h200")

TURN = """
.L_x_0:
        /*0000*/                   {first} ;
        /*0010*/                   WARPGROUP.DEPBAR.LE gsb0, 0x{groups} ;
        /*0020*/                   WARPGROUP.ARRIVE ;
        /*0030*/                   HGMMA.64x64x16.F32 R24, R56, gdesc[UR4], R24, UP0 ;
        /*0040*/                   HGMMA.64x64x16.F32 R24, R60, gdesc[UR8], R24, gsb0 ;
        /*0050*/              @!P0 BRA `(.L_x_0) ;
        /*0060*/                   EXIT ;
"""


@pytest.mark.parametrize(
    ("first", "groups", "early"),
    [
        ("LDG.E.64.CONSTANT R62, desc[UR6][R10.64]", 0, True),
        ("LDSM.16.M88.4 R52, [R8+UR4]", 0, False),
        ("@P1 LDSM.16.M88.4 R56, [R8+UR4]", 0, True),
        ("STS.128 [R8], R56", 0, False),
        ("IMAD.WIDE R54, R5, 0x4, R10", 1, False),
        ("ISETP.NE.AND P1, PT, R60, 0x8, PT", 0, False),
    ],
)
def test_the_next_turn_of_a_loop_counts(first, groups, early):
    assert (early_writes(TURN.format(first=first, groups=groups)) != []) == early


def test_what_lies_behind_the_wait_may_write():
    text = TURN.format(first="NOP", groups=0).replace("WARPGROUP.ARRIVE", "MOV R57, R3")
    assert early_writes(text) == []
    assert early_writes(text.replace("gsb0, 0x0", "gsb0, 0x1")) == ["MOV R57, R3"]


def product(example, *config):
    return emit_gemm_hopper(analyze_contraction(example.func()), H200, HopperConfig(*config))


def scores(terms, form=None):
    sizes = Sizes(batch=2, heads=16, queries=2048, keys=2048, terms=terms)
    return emit_attention_hopper(attention(sizes, form), H200)


@pytest.mark.one_in(8)
@pytest.mark.parametrize(
    "kernel",
    [
        lambda: product(affine(8192, 512, 4096), 128, 256, 3, True, False, 2),
        lambda: scores(128, forms.causal()),
        lambda: product(affine(8192, 512, 4096), 128, 24, 6, False, False, 0),
        lambda: product(rows_normed(4096, 512, 256), 192, 128, 3, True, False, 2),
        lambda: scores(64),
        lambda: scores(256),
        lambda: scores(128, forms.documents(2, 2048)),
        lambda: scores(128, forms.softcap(30.0)),
    ],
    ids=["product", "causal", "narrow", "rows", "plain", "wide", "documents", "softcap"],
)
def test_no_kernel_writes_what_wgmma_still_reads(kernel):
    code = machine_code(kernel())
    assert "HGMMA" in code
    assert early_writes(code) == []
