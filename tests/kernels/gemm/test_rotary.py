"""Rotary embeddings behind matrix products, in the epilogue of every form of the kernel."""

import dataclasses

import numpy as np
import pytest
from tvm import relax
from tvm.relax import op

from tvm_fusion.config import load_profile
from tvm_fusion.errors import Unsupported
from tvm_fusion.kernels.contraction.reader import analyze_contraction
from tvm_fusion.kernels.gemm.hopper.kernel import emit_gemm_hopper, hopper_configs
from tvm_fusion.kernels.gemm.mma.kernel import emit_gemm_mma
from tvm_fusion.kernels.gemm.mma.plan import MmaConfig
from tvm_fusion.kernels.gemm.simt.config import SimtConfig
from tvm_fusion.kernels.gemm.simt.kernel import emit_gemm_simt
from tvm_fusion.kernels.gemm.skinny.kernel import emit_gemm_skinny
from tvm_fusion.kernels.gemm.skinny.rank import skinny_ranked

from ...support.cuda_on_cpu import run_cuda_on_cpu
from ...support.gemm_cases import FLOAT, HALF
from ...support.hopper_on_cpu import compile_hopper, run_hopper_on_cpu
from ...support.kernel_cases import TOLERANCE, fuse, outputs_of, rope
from ...support.rotary_cases import WAYS, rotary_case

H200 = load_profile("nvidia_h200")
TINY_H200 = dataclasses.replace(H200, num_sms=2)  # blocks of the small cases take several tiles
QKV = {"heads": (2, 1), "plain": (1,)}


def read(case, exact=False):
    return analyze_contraction(case.func(), exact)


def pairs(contraction):
    """Width of runs and distance of each segment."""
    return [s.partners and (s.partners.width, s.partners.distance) for s in contraction.segments]


def check(case, kernel, run=run_cuda_on_cpu):
    """Every output is poisoned before, and close to float64 after."""
    inputs = case.arrays()
    outputs = outputs_of(case.func(), len(inputs))
    assert run(kernel, [*inputs, *outputs]) == 1
    for got, expected in zip(outputs, case.expected(inputs), strict=True):
        error = np.abs(got.astype(np.float64) - expected).max() / np.abs(expected).max()
        assert error <= 2 * TOLERANCE[str(got.dtype)]


# ---- what is read of the graph


@pytest.mark.parametrize("early", [False, True], ids=["heads last", "heads first"])
@pytest.mark.parametrize("way", WAYS)
def test_pairs_of_columns_are_found_however_they_are_spelled(way, early):
    contraction = read(rotary_case(way, 64, early=early, **QKV))
    found = {"first columns": (64, 16)}.get(way, (2, 1) if "interleaved" in way else (64, 32))
    assert pairs(contraction) == [found, found, None]
    assert contraction.has_partners
    (product,) = contraction.segments[0].products
    assert f"pair0 = {product.accumulator} of the other column" in str(contraction)


def test_tables_are_read_ahead_of_conditions_on_the_column():
    (segment,) = read(rotary_case("halves, joined", 64)).segments
    assert "if_then_else" not in str(segment.outputs[0].value)


def test_an_embedding_of_transposed_heads_keeps_columns_of_the_product():
    (segment,) = read(rotary_case("halves", 64, axes=(0, 2, 3, 1))).segments
    assert (segment.M, segment.N) == (80, 192)
    assert pairs(read(rotary_case("halves", 64, axes=(0, 2, 3, 1)))) == [(64, 32)]


def shifted(bb, x, w):
    """Each column beside its left neighbour, which the first column of a run lacks."""
    t = bb.emit(op.matmul(x, w))
    moved = [bb.emit(op.strided_slice(t, [1], [a], [b])) for a, b in ((63, 64), (0, 63))]
    return op.add(t, bb.emit(op.concat(moved, axis=-1)))


def rows_in_pairs(bb, x, w):
    """The halves of the rows, not of the columns."""
    t = bb.emit(op.matmul(x, w))
    upper, lower = (bb.emit(v) for v in bb.emit(op.split(t, 2, axis=0)))
    return op.add(t, bb.emit(op.concat([lower, upper], axis=0)))


def twice(bb, x, w):
    """Two embeddings, one behind the other, of other distances."""
    t = bb.emit(op.reshape(bb.emit(op.matmul(x, w)), (64, 2, 32)))
    one = relax.const(1.0, HALF)
    return rope(bb, bb.emit(op.reshape(bb.emit(rope(bb, t, one, one)), (64, 64))), one, one)


@pytest.mark.parametrize("emit", [shifted, twice])
def test_refuses_other_reads_of_several_columns(emit):
    with pytest.raises(Unsupported, match="several points"):
        analyze_contraction(fuse(emit, ((64, 32), HALF), ((32, 64), HALF)))


def test_pairs_of_rows_are_columns_of_the_transposed_product():
    contraction = analyze_contraction(fuse(rows_in_pairs, ((64, 32), HALF), ((32, 48), HALF)))
    assert (contraction.M, pairs(contraction)) == (48, [(64, 32)])


# ---- the Hopper kernel

HOPPER = {
    "halves of 64, Q K V": (rotary_case("halves", 64, **QKV, k=192), "deferred"),
    "halves of 128": (rotary_case("halves", 128, (1,), (1,), k=192, linear=True), "deferred"),
    "interleaved": (rotary_case("interleaved", 64, (2,), (1,), k=192), "deferred"),
    "float32 tables, factors of rows": (
        rotary_case("halves, joined", 64, (2,), (1,), k=192, tables=FLOAT, statistic=True),
        "staged",
    ),
    "first columns": (rotary_case("first columns", 64, (3,), (), early=True), "direct"),
}


@pytest.mark.one_in(6)
@pytest.mark.parametrize("name", HOPPER)
def test_numbers_of_the_hopper_kernel(name):
    case, form = HOPPER[name]
    contraction = read(case)
    forms = {"deferred": (True, True), "staged": (True, False), "direct": (False, False)}
    config = next(
        c
        for c in hopper_configs(contraction, TINY_H200)
        if (c.staged, c.deferred) == forms[form] and c.block_m == 64 and c.block_n <= 128
    )
    check(case, emit_gemm_hopper(contraction, TINY_H200, config), run_hopper_on_cpu)


def test_blocks_that_split_the_terms_hold_whole_runs():
    case = rotary_case("halves", 64, (4,), (), rows=(1, 64), k=256)
    contraction = read(case)
    single = next(c for c in hopper_configs(contraction, TINY_H200) if not c.deferred)
    split = dataclasses.replace(
        single, block_m=64, block_n=128, split=2, stages=3, staged=False, boxes=0
    )
    check(case, emit_gemm_hopper(contraction, TINY_H200, split), run_hopper_on_cpu)
    with pytest.raises(Unsupported, match="runs of 64 columns"):
        emit_gemm_hopper(contraction, H200, dataclasses.replace(split, split=4))


def test_tiles_hold_whole_runs():
    configs = hopper_configs(read(rotary_case("halves", 128, (4,), (2,), rows=(1, 512))), H200)
    assert {c.block_n % 128 for c in configs} == {0}


LARGE = {
    "4096 + 1024 + 1024": rotary_case("halves", 128, (32, 8), (8,), rows=(2, 2048), k=4096),
    "2048 + 2048 + 2048, factors of rows": rotary_case(
        "halves", 128, (16, 16), (16,), rows=(2, 2048), k=2048, linear=True, statistic=True
    ),
}


@pytest.mark.nightly  # ptxas takes 13 and 26 s
@pytest.mark.parametrize("name", LARGE)
def test_large_products_compile_without_spills(name):
    contraction = read(LARGE[name])
    config = hopper_configs(contraction, H200)[0]
    assert config.deferred
    compiled = compile_hopper(emit_gemm_hopper(contraction, H200, config))
    assert (compiled.spill_bytes, compiled.remarks) == (0, ())


# ---- the other kernels


@pytest.mark.one_in(2)
@pytest.mark.parametrize("way", ["halves", "interleaved", "halves to neighbours"])
def test_numbers_of_the_kernel_for_mma_sync(way):
    case = rotary_case(way, 64, (2,), (1,), rows=(2, 20), k=64)
    config = MmaConfig(32, 64, 16, 32, 64, 3)
    check(case, emit_gemm_mma(read(case), H200, config))


SIMT = {
    "groups": ("halves", SimtConfig(128, 128, 8, 8, 8)),
    "a group": ("halves", SimtConfig(64, 64, 16, 4, 4)),
    "neighbours": ("interleaved", SimtConfig(64, 64, 16, 4, 4)),
}


@pytest.mark.parametrize("name", SIMT)
def test_numbers_of_the_kernel_on_cuda_cores(name):
    way, config = SIMT[name]
    case = rotary_case(way, 64, (2,), (1,), rows=(2, 20), k=32, dtype=FLOAT)
    check(case, emit_gemm_simt(read(case), H200, config))


@pytest.mark.one_in(4)
@pytest.mark.parametrize("linear", [False, True], ids=["columns", "terms"])
@pytest.mark.parametrize("way", ["halves", "interleaved"])
@pytest.mark.parametrize("rows", [1, 4])
def test_numbers_of_the_kernel_for_few_rows(way, linear, rows):
    case = rotary_case(way, 64, (2,), (1,), rows=(rows, 1), k=128, linear=linear)
    contraction = read(case)
    _, config = skinny_ranked(contraction, H200)[0]
    check(case, emit_gemm_skinny(contraction, H200, config))


def test_only_the_hopper_kernel_has_columns_without_partner():
    contraction = read(rotary_case("first columns", 64, (2,), (), rows=(2, 1)))
    for emit in (emit_gemm_skinny, emit_gemm_mma, emit_gemm_simt):
        with pytest.raises(Unsupported, match="columns 16 apart"):
            emit(contraction, H200)
