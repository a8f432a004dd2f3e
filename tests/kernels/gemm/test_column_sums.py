"""Sums over runs of rows in the epilogues of the products of tensor cores."""

import dataclasses

import numpy as np
import pytest
from tvm import relax
from tvm.relax import op

from tvm_fusion.config import load_profile
from tvm_fusion.errors import Unsupported
from tvm_fusion.kernels.contraction.model import ColumnPartial
from tvm_fusion.kernels.contraction.reader import analyze_contraction
from tvm_fusion.kernels.gemm.hopper.kernel import emit_gemm_hopper, hopper_configs
from tvm_fusion.kernels.gemm.mma.kernel import emit_gemm_mma
from tvm_fusion.kernels.gemm.mma.rank import mma_ranked
from tvm_fusion.kernels.gemm.simt.kernel import emit_gemm_simt
from tvm_fusion.transform.rewrites.partial_columns import sums_of_runs

from ...support.column_sums import emit_sums, product_case
from ...support.cuda_on_cpu import run_cuda_on_cpu
from ...support.gemm_cases import HALF
from ...support.hopper_on_cpu import compile_hopper, run_hopper_on_cpu
from ...support.kernel_cases import TOLERANCE, fuse, outputs_of

H200, A100 = load_profile("nvidia_h200"), load_profile("nvidia_a100")
TINY_H200 = dataclasses.replace(H200, num_sms=2)

CASES = [
    product_case("rows of images that are no multiple of 16", (3, 7, 7), 88, 64),
    product_case("rows in front of images of 256", (2, 16, 16), 64, 192),
    product_case("one image of odd size", (9, 13), 136, 64, dtype="bfloat16"),
    product_case("sums alone", (2, 5, 9), 72, 64, stored=False),
]


def forms(case):
    """The first configuration of each form of the epilogue, and of blocks that split the terms."""
    seen = {}
    for c in hopper_configs(analyze_contraction(case.func()), TINY_H200):
        seen.setdefault((c.staged, c.deferred, c.split > 1), c)
    return seen


def errors(case, run):
    """Of each output, beside its largest element."""
    inputs, outputs = case.arrays(), outputs_of(case.func(), 3)
    run([*inputs, *outputs])
    expected = case.expected(inputs)
    pairs = zip(outputs, expected, strict=True)
    return [np.abs(o.astype("float64") - e).max() / np.abs(e).max() for o, e in pairs]


@pytest.mark.one_in(8)
@pytest.mark.parametrize(
    ("case", "config"),
    [
        pytest.param(case, c, id=f"{case.name}-{'-'.join(map(str, form))}")
        for case in CASES
        for form, c in forms(case).items()
    ],
)
def test_rows_are_summed_in_every_form_of_the_epilogue(case, config):
    kernel = emit_gemm_hopper(analyze_contraction(case.func()), TINY_H200, config)
    stored = TOLERANCE[case.inputs[0][1]]
    found = errors(case, lambda arrays: run_hopper_on_cpu(kernel, arrays))
    # Where the accumulators wait as halves, a sum is as exact as they are.
    assert max(found) <= stored
    assert max(found[-2:]) <= (stored if config.deferred else 2e-6)


def test_the_forms_tested_are_all_there_are():
    found = {form[:2] for case in CASES for form in forms(case)}
    assert found == {(True, True), (True, False), (False, False)}


def test_warps_of_the_form_for_other_gpus_sum_rows_that_tiles_start_at():
    case = product_case("rows of whole runs", (2, 6, 8), 72, 64)
    contraction = analyze_contraction(case.func())
    (_, config), *_ = mma_ranked(contraction, A100)
    kernel = emit_gemm_mma(contraction, A100, config)
    assert max(errors(case, lambda arrays: run_cuda_on_cpu(kernel, arrays))[1:]) <= 2e-6
    with pytest.raises(Unsupported, match="rows that are no 16"):
        mma_ranked(analyze_contraction(CASES[0].func()), A100)
    with pytest.raises(Unsupported, match="columns or rows"):
        emit_gemm_simt(contraction, A100)


def test_tiles_start_at_images_where_runs_do():
    assert {c.batched for c in hopper_configs(analyze_contraction(CASES[0].func()), H200)} == {1}
    assert 0 in {c.batched for c in hopper_configs(analyze_contraction(CASES[1].func()), H200)}


def test_a_sum_of_rows_is_an_output_with_the_value_of_one_element():
    (segment,) = analyze_contraction(CASES[0].func()).segments
    h, total, squares = segment.outputs
    assert [o.partial for o in segment.outputs] == [None, *[ColumnPartial("sum")] * 2]
    assert [str(i) for i in total.indices] == ["i0", "(i1 * T.int64(7) + i2) // T.int64(16)", "i3"]
    assert str(total.value) == str(h.value)
    assert str(squares.value) == f"{h.value} * {h.value}"
    assert "sum over runs of 16 rows of" in str(analyze_contraction(CASES[0].func()))


def _summed(heights, view=None):
    def emit(bb, x, w):
        return relax.Tuple(emit_sums(bb, bb.emit(op.matmul(x, w)), heights, view))

    return emit


def _some_rows(bb, x, w):
    """The sum leaves out what lies beyond 40 rows."""
    h = bb.emit(op.astype(bb.emit(op.matmul(x, w)), "float32"))
    part = bb.emit(op.strided_slice(h, [0], [0], [40]))
    return bb.emit_te(sums_of_runs((16, 1)), part)


@pytest.mark.parametrize("emit", [_summed((32, 1)), _summed((2, 8, 1), (8, 6, 64)), _some_rows])
def test_other_sums_are_refused(emit):
    func = fuse(emit, ((48, 64), HALF), ((64, 64), HALF))
    with pytest.raises(Unsupported):
        emit_gemm_hopper(analyze_contraction(func), H200)


@pytest.mark.nightly
@pytest.mark.parametrize("stored", [True, False])
def test_kernels_that_sum_rows_compile_without_spills(stored):
    case = product_case("layer of ResNet-50", (32, 14, 14), 1024, 256, stored)
    compiled = compile_hopper(emit_gemm_hopper(analyze_contraction(case.func()), H200))
    assert (compiled.spill_bytes, compiled.remarks) == (0, ())
