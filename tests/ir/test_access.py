"""Access maps of PrimFuncs."""

import pytest
import tvm
from tvm import relax, te, tirx
from tvm.relax import op
from tvm.script import tirx as T

from tests.support.graphs import module
from tvm_fusion.frontends.torch.written.writes import Write, write_function
from tvm_fusion.ir.access import Affine, AxisKind, Irregular, Pipe, Reduction
from tvm_fusion.ir.extents import assumed, product_key
from tvm_fusion.ir.reader import read_prim_func
from tvm_fusion.kernels.convolution.blocks import is_convolution
from tvm_fusion.kernels.gemm.product import match_product


def only_func(emit, *inputs):
    mod = relax.transform.LegalizeOps()(module(emit, *inputs))
    funcs = [f for f in mod.functions.values() if isinstance(f, tirx.PrimFunc)]
    assert len(funcs) == 1
    return read_prim_func(funcs[0])


def test_an_elementwise_operator_reads_its_own_index():
    access = only_func(lambda bb, x: op.exp(x), ((4, 8), "float32"))
    (block,) = access.blocks
    assert block.reads[0].index == block.writes[0].index == (Affine((1, 0)), Affine((0, 1)))
    assert dict(block.counts) == {Pipe.SPECIAL: 1}
    assert [a.extent for a in block.axes] == [4, 8]


def test_a_broadcast_does_not_read_the_axis_it_repeats():
    access = only_func(lambda bb, x, y: op.add(x, y), ((4, 8), "float32"), ((4, 1), "float32"))
    wide, narrow = access.blocks[0].reads
    assert wide.axes == {0, 1}
    assert narrow.axes == {0}


def test_a_strided_slice_keeps_stride_and_offset():
    access = only_func(lambda bb, x: op.strided_slice(x, [1], [3], [16], [2]), ((4, 16), "float32"))
    assert access.blocks[0].reads[0].index[1] == Affine((0, 2), 3)


def test_a_subtracted_constant_keeps_its_sign():
    padded = only_func(lambda bb, x: op.nn.pad(x, [3, 1, 0, 0]), ((4, 8), "float32"))
    assert padded.blocks[0].reads[0].index == (Affine((1, 0), -3), Affine((0, 1)))


def test_a_subtracted_axis_has_a_negative_coefficient():
    flipped = only_func(lambda bb, x: op.flip(x, 1), ((4, 8), "float32"))
    assert flipped.blocks[0].reads[0].index == (Affine((1, 0)), Affine((0, -1), 7))


def test_a_sum_is_a_reduction_over_its_axis():
    access = only_func(lambda bb, x: op.sum(x, axis=-1), ((4, 8), "float32"))
    (block,) = access.blocks
    assert block.reduction is Reduction.SUM
    assert not block.is_contraction
    assert [a.kind for a in block.axes] == [AxisKind.SPATIAL, AxisKind.REDUCE]
    assert len(block.reads) == 1, "the accumulator is no read"


def test_a_matmul_is_a_contraction():
    access = only_func(
        lambda bb, x, y: op.matmul(x, y, out_dtype="float32"),
        ((4, 8), "float16"),
        ((8, 16), "float16"),
    )
    (block,) = access.blocks
    assert block.is_contraction
    assert block.is_matrix_product
    left, right = block.reads
    assert (left.axes, right.axes) == ({0, 2}, {1, 2})


@pytest.mark.parametrize("what", [match_product, is_convolution])
def test_what_a_contraction_is_is_found_once_for_all_groups(what):
    operands = ((4, 8), "float32"), ((8, 16), "float32")
    (block,) = only_func(lambda bb, x, y: op.matmul(x, y), *operands).blocks
    found = what(block)
    assert [*block.derived.values()] == [found]
    assert what(block) is found


def sum_of(term, *shapes):
    """The only block of ``y[i] = sum_k term(i, k, *inputs)``, with eight times five terms."""
    inputs = [te.placeholder(shape, "float32") for shape in shapes]
    k = te.reduce_axis((0, 5))
    y = te.compute((8,), lambda i: te.sum(term(i, k, *inputs), k))
    (block,) = read_prim_func(te.create_prim_func([*inputs, y])).blocks
    return block


def test_a_sum_of_squares_is_no_contraction():
    block = sum_of(lambda i, k, x: x[i, k] * x[i, k], (8, 5))
    assert block.reduction is Reduction.SUM
    assert not block.is_contraction


@pytest.mark.parametrize(
    "term", [lambda i, k, x, v: x[i, k] * v[k], lambda i, k, x, v: v[k] * x[i, k]]
)
def test_a_product_with_a_vector_is_a_contraction_but_no_matrix_product(term):
    block = sum_of(term, (8, 5), (5,))
    assert block.is_contraction
    assert not block.is_matrix_product


def test_a_sum_over_a_batch_of_rows_is_no_matrix_product():
    block = sum_of(lambda i, k, x, y: x[i, k] * y[i, k], (8, 5), (8, 5))
    assert block.is_contraction
    assert not block.is_matrix_product


def test_argmax_is_a_reduction_of_its_own_kind_with_inner_buffers():
    access = only_func(lambda bb, x: op.argmax(x, axis=-1), ((4, 8), "float32"))
    assert access.blocks[0].reduction is Reduction.ARGMAX
    assert access.num_inner == 2
    assert access.inner_dtypes == ("int64", "float32")


def test_what_repeats_elements_says_how_often():
    repeated = only_func(lambda bb, x: op.repeat(x, 3, 1), ((4, 8), "float32")).blocks[0]
    assert repeated.reads[0].index == (Affine((1, 0)), Irregular(frozenset({1}), repeats=3))
    assert repeated.moves
    tiled = only_func(lambda bb, x: op.tile(x, (1, 3)), ((4, 8), "float32")).blocks[0]
    assert tiled.reads[0].index[1] == Irregular(frozenset({1}))


@pytest.mark.parametrize(("value", "moves"), [(0.0, True), (1.0, False)])
def test_padding_with_zeros_only_moves(value, moves):
    padded = only_func(lambda bb, x: op.nn.pad(x, [1, 1, 0, 0], pad_value=value), ((4, 8), "int8"))
    assert padded.blocks[0].moves == moves


@pytest.mark.parametrize(("factor", "moves"), [(1.0, True), (2.0, False)])
def test_what_picks_elements_of_several_tensors_only_moves(factor, moves):
    x, y = (te.placeholder((8,), "float32") for _ in range(2))

    def picked(i):
        other = y[i - 4] if factor == 1.0 else y[i - 4] * factor
        return tirx.if_then_else(i < 4, x[i], other)

    (block,) = read_prim_func(te.create_prim_func([x, y, te.compute((8,), picked)])).blocks
    assert block.moves == moves
    assert all(read.guarded for read in block.reads)


def test_what_rounds_does_not_only_move():
    def rounded(x):
        return te.compute(x.shape, lambda i: x[i].astype("float16").astype("float32"))

    x = te.placeholder((8,), "float32")
    (block,) = read_prim_func(te.create_prim_func([x, rounded(x)])).blocks
    assert not block.moves


def test_places_that_are_clamped_are_no_repetition():
    x = te.placeholder((8,), "float32")
    y = te.compute((32,), lambda i: x[tirx.Min(tirx.floordiv(i, 2), 7)])
    (block,) = read_prim_func(te.create_prim_func([x, y])).blocks
    assert block.reads[0].index == (Irregular(frozenset({0})),)


def test_a_concatenation_reads_under_a_condition():
    access = only_func(
        lambda bb, x, y: op.concat([x, y], 1), ((4, 8), "float32"), ((4, 3), "float32")
    )
    assert all(r.guarded for r in access.blocks[0].reads)


def test_a_gather_is_data_dependent_and_reads_its_index_tensor():
    access = only_func(lambda bb, x, i: op.take(x, i, axis=0), ((9, 8), "float32"), ((3,), "int64"))
    table = next(r for r in access.blocks[0].reads if len(r.index) == 2)
    assert table.data_dependent
    assert table.index[0] == Irregular(frozenset({0}), data_dependent=True)
    assert any(len(r.index) == 1 and not r.data_dependent for r in access.blocks[0].reads)


@pytest.mark.parametrize("emit", [op.right_shift, op.left_shift, op.bitwise_and, op.bitwise_or])
def test_shifts_and_masks_read_their_operands(emit):
    access = only_func(lambda bb, x, y: emit(x, y), ((8, 4), "int32"), ((4,), "int32"))
    (block,) = access.blocks
    assert [a.axes for a in block.reads] == [{0, 1}, {1}]
    assert dict(block.counts) == {Pipe.ARITHMETIC: 1}


def test_symbolic_extents_are_text():
    n = tirx.Var("n", "int64")
    access = only_func(lambda bb, x: op.reshape(x, (n * 4, 2)), ((n, 8), "float32"))
    assert access.blocks[0].axes[0].extent == "n * 4"


def test_a_user_prim_func_with_a_while_loop_is_refused():
    @T.prim_func(s_tir=True)
    def search(a: T.Buffer((8,), "float32"), b: T.Buffer((1,), "int32")):
        with T.sblock("root"):
            i = T.sblock_alloc_buffer((1,), "int32")
            i[0] = 0
            while a[i[0]] > T.float32(0):
                i[0] = i[0] + 1
            b[0] = i[0]

    access = read_prim_func(search)
    assert access.refusal is not None
    assert access.blocks == ()


def test_a_scheduled_function_is_opaque():
    mod = relax.transform.LegalizeOps()(module(lambda bb, x: op.exp(x), ((4,), "float32")))
    func = next(f for f in mod.functions.values() if isinstance(f, tvm.tirx.PrimFunc))
    assert "scheduled" in read_prim_func(func.with_attr("tirx.is_scheduled", True)).refusal


@pytest.mark.parametrize(
    ("left", "right"),
    [((4, "n"), ("n", 4)), (("n * 4",), (2, 2, "n")), ((6,), (2, 3)), (("n + 2", 3), (3, "n + 2"))],
)
def test_equal_products_have_equal_keys(left, right):
    assert product_key(left) == product_key(right)


@pytest.mark.parametrize(
    ("left", "right"), [((4, "n"), ("m", 4)), ((6,), (2, 2)), (("n + 2",), ("n",))]
)
def test_different_products_have_different_keys(left, right):
    assert product_key(left) != product_key(right)


@pytest.mark.parametrize(("text", "size"), [(7, 7), ("n", 128), ("n * 4 + 2", 514), ("n // 2", 64)])
def test_a_symbol_counts_as_an_assumed_size(text, size):
    assert assumed(text) == size


def test_a_write_at_a_place_that_is_data_is_refused():
    write = Write((6,), "float32", (((3,), "int64"),), (3,))
    access = read_prim_func(write_function(write, in_place=True))
    assert "writes at places that are data" in access.refusal
