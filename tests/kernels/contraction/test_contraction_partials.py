"""Contractions with reductions of runs of columns among their outputs."""

import pytest
from tvm import relax, tirx
from tvm.relax import op
from tvm.script import tirx as T

from tvm_fusion.errors import Unsupported
from tvm_fusion.kernels.contraction.model import RowPartial
from tvm_fusion.kernels.contraction.reader import analyze_contraction

from ...support import gemm_cases as graphs
from ...support.gemm_cases import HALF
from ...support.kernel_cases import fuse
from ...support.partial_cases import PARTIAL_CASES, residual_squares, runs, squares, squares_only


def read(emit, *shapes, exact=False):
    return analyze_contraction(fuse(emit, *((s, HALF) for s in shapes)), exact)


@pytest.mark.parametrize("case", PARTIAL_CASES, ids=lambda c: c.name)
def test_every_output_is_read_and_reductions_say_what_they_reduce(case):
    contraction = analyze_contraction(case.func())
    outputs = [o for s in contraction.segments for o in s.outputs]
    assert sorted(o.param for o in outputs) == list(
        range(len(case.inputs), len(case.func().params))
    )
    whole = [o for o in outputs if o.partial is None]
    assert all(o.dtype in ("float16", "bfloat16") for o in whole)
    assert len(whole) < len(outputs)


def partials(contraction):
    (segment,) = contraction.segments
    return [o.partial for o in segment.outputs]


def test_a_reduction_of_runs_is_an_output_with_the_value_of_one_element():
    contraction = read(residual_squares(64), (64, 32), (32, 192), (64, 192))
    (segment,) = contraction.segments
    assert partials(contraction) == [None, RowPartial("sum", 64)]
    h, sums = segment.outputs
    assert [str(i) for i in sums.indices] == ["i0", "i1 // T.int64(64)"]
    assert str(sums.value) == f"{h.value} * {h.value}"
    assert contraction.has_partials


def test_leading_axes_and_symbolic_rows_keep_their_places():
    n = tirx.Var("n", "int64")
    (segment,) = read(residual_squares(64), (2, n, 32), (32, 128), (2, n, 128)).segments
    assert [str(i) for i in segment.outputs[1].indices] == ["i0", "i1", "i2 // T.int64(64)"]


def test_a_whole_row_may_be_one_run():
    contraction = read(squares_only(64), (64, 32), (32, 64))
    assert partials(contraction) == [RowPartial("sum", 64)]


def test_a_maximum_is_one_of_what_is_pointwise_in_the_product():
    def emit(bb, x, w):
        return runs(bb, bb.emit(graphs.matmul(bb, x, w)), 64, op.max)

    assert partials(read(emit, (64, 32), (32, 128))) == [RowPartial("max", 64)]


def test_exact_rounding_reduces_what_the_graph_stores():
    shapes = ((64, 32), (32, 192), (64, 192))
    found = []
    for exact in (False, True):
        (segment,) = read(residual_squares(64), *shapes, exact=exact).segments
        found.append("".join(str(b.value) for b in segment.bindings).count('"float16"'))
    assert found == [0, 2]


def test_columns_are_the_axis_that_is_reduced_wherever_the_whole_output_goes():
    def emit(bb, x, w):
        product = bb.emit(op.matmul(x, w))
        turned = bb.emit(op.permute_dims(product, (1, 0)))
        return relax.Tuple([turned, squares(bb, product, 64)])

    contraction = read(emit, (32, 16), (16, 128))
    (segment,) = contraction.segments
    assert (contraction.M, segment.N) == (32, 128)


def test_reductions_of_rows_make_rows_columns():
    def emit(bb, x, w):
        view = bb.emit(op.reshape(bb.emit(op.matmul(x, w)), (2, 64, 48)))
        return op.sum(view, axis=[1])

    contraction = read(emit, (128, 16), (16, 48))
    (segment,) = contraction.segments
    assert (contraction.M, segment.N, partials(contraction)) == (48, 128, [RowPartial("sum", 64)])


def test_the_listing_names_the_reduction():
    text = str(read(squares_only(64), (64, 32), (32, 128)))
    assert "= sum over runs of 64 columns of" in text


# ---- refusals


def read_again(bb, x, w):
    product = bb.emit(op.matmul(x, w))
    view = bb.emit(op.reshape(product, (64, 2, 64)))
    top = bb.emit(op.max(view, axis=[-1], keepdims=True))
    return relax.Tuple([bb.emit(op.subtract(view, top)), top])


def interleaved(bb, x, w):
    return op.sum(bb.emit(op.reshape(bb.emit(op.matmul(x, w)), (64, 64, 2))), axis=[1])


def two_axes(bb, x, w):
    return op.sum(bb.emit(op.reshape(bb.emit(op.matmul(x, w)), (64, 2, 8, 8))), axis=[2, 3])


def smallest(bb, x, w):
    return runs(bb, bb.emit(op.matmul(x, w)), 64, op.min)


def across_rows(bb, x, w):
    return op.sum(bb.emit(op.reshape(bb.emit(op.matmul(x, w)), (32, 256))), axis=[1])


REFUSED = {
    "a reduction that the kernel reads": (read_again, "reads"),
    "columns that do not lie side by side": (interleaved, "aligned runs"),
    "two axes": (two_axes, "run of columns"),
    "a minimum": (smallest, "another way"),
    "runs that go on in the next row": (across_rows, "aligned runs"),
}


@pytest.mark.parametrize("what", REFUSED)
def test_refuses(what):
    emit, why = REFUSED[what]
    with pytest.raises(Unsupported, match=why):
        read(emit, (64, 32), (32, 128))


def test_refuses_a_sum_of_columns_that_does_not_start_at_zero():
    @T.prim_func(s_tir=True)
    def func(x: T.Buffer((8, 8)), w: T.Buffer((8, 8)), y: T.Buffer((8,))):
        t = T.alloc_buffer((8, 8))
        for i, j, k in T.grid(8, 8, 8):
            with T.sblock("t"):
                vi, vj, vk = T.axis.remap("SSR", [i, j, k])
                with T.init():
                    t[vi, vj] = T.float32(0)
                t[vi, vj] = t[vi, vj] + x[vi, vk] * w[vk, vj]
        for i, j in T.grid(8, 8):
            with T.sblock("y"):
                vi, vj = T.axis.remap("SR", [i, j])
                with T.init():
                    y[vi] = T.float32(1)
                y[vi] = y[vi] + t[vi, vj]

    with pytest.raises(Unsupported, match="another way"):
        analyze_contraction(func)


def test_a_sum_of_squares_in_one_block_is_no_product():
    @T.prim_func(s_tir=True)
    def func(x: T.Buffer((8, 8)), w: T.Buffer((8, 8)), y: T.Buffer((8,))):
        t = T.alloc_buffer((8, 8))
        for i, j, k in T.grid(8, 8, 8):
            with T.sblock("t"):
                vi, vj, vk = T.axis.remap("SSR", [i, j, k])
                with T.init():
                    t[vi, vj] = T.float32(0)
                t[vi, vj] = t[vi, vj] + x[vi, vk] * w[vk, vj]
        for i, j in T.grid(8, 8):
            with T.sblock("y"):
                vi, vj = T.axis.remap("SR", [i, j])
                with T.init():
                    y[vi] = T.float32(0)
                y[vi] = y[vi] + t[vi, vj] * t[vi, vj]

    contraction = analyze_contraction(func)
    assert partials(contraction) == [RowPartial("sum", 8)]
    assert len(contraction.products) == 1
