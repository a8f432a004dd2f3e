"""Contractions read from fused PrimFuncs: which axes, operands and outputs they have."""

import pytest
from tvm import relax, tirx
from tvm.relax import op
from tvm.script import tirx as T

from tvm_fusion.errors import Unsupported
from tvm_fusion.kernels.contraction.reader import analyze_contraction
from tvm_fusion.kernels.gpu.access import Digit, affine_access

from ...support import gemm_cases as graphs
from ...support.gemm_cases import CUDA_CORE_CASES, FLOAT, HALF, TENSOR_CORE_CASES
from ...support.kernel_cases import fuse


def read(emit, *shapes, dtype=HALF, exact=False):
    inputs = (s if isinstance(s[-1], str) else (s, dtype) for s in shapes)
    return analyze_contraction(fuse(emit, *inputs), exact)


def sizes(contraction):
    """(batch, M, N, K) of each product."""
    return [
        (contraction.batch, contraction.M, s.N, p.K)
        for s in contraction.segments
        for p in s.products
    ]


@pytest.mark.parametrize("case", TENSOR_CORE_CASES + CUDA_CORE_CASES, ids=lambda c: c.name)
def test_every_case_is_a_contraction_that_reads_only_parameters(case):
    contraction = analyze_contraction(case.func())
    outputs = [o.param for s in contraction.segments for o in s.outputs]
    assert sorted(outputs) == list(range(len(case.inputs), len(contraction.params)))


def test_leading_axes_of_the_left_operand_are_rows():
    (segment,) = read(graphs.matmul, (2, 64, 32), (32, 48)).segments
    assert [a.extent for a in segment.m] == [2, 64]
    assert [a.extent for a in segment.n] == [48]
    assert segment.batch == ()


def test_axes_of_both_operands_are_the_batch():
    contraction = read(graphs.scores(4), (2, 64, 128), (2, 64, 128))
    assert sizes(contraction) == [(8, 64, 64, 32)]


def test_transposes_and_reshapes_of_operands_become_strides():
    (segment,) = read(graphs.scores(4), (2, 64, 128), (2, 64, 128)).segments
    (product,) = segment.products
    load = product.b.load
    groups = {"batch": segment.batch, "n": segment.n, "k": product.k}
    access = affine_access(load.indices, (2, 64, 128), groups)
    assert access.digits == {
        "batch": (Digit(2, 64 * 128), Digit(4, 32)),
        "n": (Digit(64, 128),),
        "k": (Digit(32, 1),),
    }


def test_axes_that_follow_each_other_in_memory_are_one_digit():
    (segment,) = read(graphs.matmul, (2, 64, 32), (32, 48)).segments
    (product,) = segment.products
    access = affine_access(product.a.load.indices, (2, 64, 32), {"m": segment.m, "k": product.k})
    assert access.digits == {"m": (Digit(128, 32),), "k": (Digit(32, 1),)}


def test_an_access_through_an_index_tensor_is_not_affine():
    (segment,) = read(
        graphs.embedding, ((7,), "int64"), ((100, 32), HALF), ((32, 24), HALF)
    ).segments
    (product,) = segment.products
    groups = {"m": segment.m, "k": product.k}
    assert affine_access(product.a.load.indices, (100, 32), groups) is None


def test_the_output_of_merged_heads_goes_to_its_own_place():
    (segment,) = read(graphs.values(4), (2, 4, 64, 64), (2, 64, 128)).segments
    access = affine_access(
        segment.outputs[0].indices,
        (2, 64, 128),
        {"batch": segment.batch, "m": segment.m, "n": segment.n},
    )
    assert access.digits["batch"] == (Digit(2, 64 * 128), Digit(4, 32))
    assert access.digits["m"] == (Digit(64, 128),)
    assert access.digits["n"] == (Digit(32, 1),)


def test_the_columns_are_what_the_output_is_contiguous_along():
    contraction = read(graphs.output_transposed, (64, 32), (32, 48))
    assert sizes(contraction) == [(1, 48, 64, 32)]
    assert contraction.products[0].a.load.source.same_as(contraction.params[1].var)


def test_products_that_meet_are_one_segment_and_others_stand_side_by_side():
    together = read(graphs.gate_up, (64, 32), (32, 48), (32, 48))
    assert [len(s.products) for s in together.segments] == [2]
    apart = read(graphs.qkv, (64, 32), (32, 48), (32, 16), (32, 16))
    assert sizes(apart) == [(1, 64, 48, 32), (1, 64, 16, 32), (1, 64, 16, 32)]


def test_a_temporary_read_twice_is_bound_once_and_one_read_once_is_inlined():
    (segment,) = read(graphs.bias_gelu, (64, 32), (32, 48), (48,)).segments
    assert len(segment.bindings) == 1
    (plain,) = read(graphs.residual, (64, 32), (32, 48), (64, 48)).segments
    assert plain.bindings == ()


def test_exact_rounding_rounds_what_the_graph_stores_and_fast_rounding_does_not():
    def halves(contraction):
        (segment,) = contraction.segments
        text = str(segment.outputs[0].value) + "".join(str(b.value) for b in segment.bindings)
        return text.count('"float16"')

    shapes = ((64, 32), (32, 48), (48,), (64, 48))
    assert halves(read(graphs.bias_gelu_residual, *shapes)) == 0
    assert halves(read(graphs.bias_gelu_residual, *shapes, exact=True)) > 5


def test_a_sum_that_is_rounded_at_once_counts_as_stored_in_half():
    rounded = read(graphs.wide_sum_cast, (64, 32), (32, 48), (64, 48))
    assert rounded.products[0].stored_dtype == HALF
    kept = read(graphs.wide_bias, (64, 32), (32, 48), ((48,), FLOAT))
    assert kept.products[0].stored_dtype == FLOAT


def test_a_question_about_rounded_numbers_is_read_with_them():
    def infinite(bb, x, w):
        total = bb.emit(op.matmul(x, w, "float32"))
        rounded = bb.emit(op.astype(total, HALF))
        return relax.Tuple([rounded, bb.emit(op.isinf(rounded))])  # fabs(rounded) == inf

    (segment,) = read(infinite, (64, 32), (32, 48)).segments
    assert len(segment.outputs) == 2
    assert segment.products[0].stored_dtype == HALF


def test_symbolic_sizes_stay_symbolic():
    n = tirx.Var("n", "int64")
    contraction = read(graphs.values(4), (2, 4, n, n), (2, n, 128))
    (segment,) = contraction.segments
    assert not contraction.is_static
    assert (contraction.batch, segment.N) == (8, 32)
    assert [str(i) for i in segment.outputs[0].indices] == ["i0", "i2", "i1 * T.int64(32) + i3"]


def test_the_listing_names_axes_operands_and_outputs():
    text = str(read(graphs.residual, (64, 32), (32, 48), (64, 48)))
    assert text.startswith("segment batch () M (i0: 64) N (i1: 48)")
    assert "acc0 = sum over (k0: 32) in float32, stored as float16" in text


# ---- refusals


def shifted(bb, x, w):
    product = bb.emit(op.matmul(x, w))
    ends = [bb.emit(op.strided_slice(product, [1], [a], [b])) for a, b in ((47, 48), (0, 47))]
    return op.concat(ends, axis=1)


def spread(bb, x, w, y):
    return op.add(bb.emit(op.expand_dims(bb.emit(op.matmul(x, w)), 0)), y)


def chained(bb, x, w):
    return op.matmul(bb.emit(op.matmul(x, w)), w)


def normalised(bb, x, w):
    return op.nn.softmax(bb.emit(op.matmul(x, w)), axis=-1)


def pooled(bb, x):
    return op.sum(x, axis=-1)


def pointwise(bb, x):
    return op.nn.relu(x)


def side_output(bb, x, w):
    return relax.Tuple([bb.emit(op.matmul(x, w)), bb.emit(op.exp(x))])


REFUSED = {
    "an epilogue that shifts": (shifted, ((64, 32), (32, 48)), "several points"),
    "an epilogue that broadcasts": (spread, ((64, 32), (32, 48), (3, 64, 48)), "rearrangement"),
    "a product of a product": (chained, ((64, 32), (32, 32)), "through another product"),
    "a softmax behind a product": (normalised, ((64, 32), (32, 48)), "no sum of products"),
    "a sum without a product": (pooled, ((64, 32),), "no sum of products"),
    "a pointwise graph": (pointwise, ((64, 32),), "no reduction"),
    "an output without a product": (side_output, ((64, 32), (32, 48)), "does not depend"),
}


@pytest.mark.parametrize("what", REFUSED)
def test_refuses(what):
    emit, shapes, why = REFUSED[what]
    with pytest.raises(Unsupported, match=why):
        read(emit, *shapes)


def test_refuses_a_sum_that_does_not_start_at_zero():
    @T.prim_func(s_tir=True)
    def func(x: T.Buffer((8, 8)), w: T.Buffer((8, 8)), y: T.Buffer((8, 8))):
        for i, j, k in T.grid(8, 8, 8):
            with T.sblock("y"):
                vi, vj, vk = T.axis.remap("SSR", [i, j, k])
                with T.init():
                    y[vi, vj] = T.float32(1)
                y[vi, vj] = y[vi, vj] + x[vi, vk] * w[vk, vj]

    with pytest.raises(Unsupported, match="no sum of products"):
        analyze_contraction(func)


def test_reads_a_users_own_function_with_32_bit_indices():
    @T.prim_func(s_tir=True)
    def func(x: T.Buffer((8, 16)), w: T.Buffer((4, 16)), y: T.Buffer((8, 4))):
        for i, j, k in T.grid(8, 4, 16):
            with T.sblock("y"):
                vi, vj, vk = T.axis.remap("SSR", [i, j, k])
                with T.init():
                    y[vi, vj] = T.float32(0)
                y[vi, vj] = y[vi, vj] + x[vi, vk] * w[vj, vk] * T.if_then_else(
                    vk < 12, T.float32(1), T.float32(0)
                )

    contraction = analyze_contraction(func)
    assert sizes(contraction) == [(1, 8, 4, 16)]
