"""What is computed for all rows of which a slice is read: computed for the slice, with the same
numbers.
"""

import numpy as np
import pytest
import tvm
from tvm import relax
from tvm.relax import op

from tvm_fusion.config import load_profile
from tvm_fusion.transform.decompose import Decompose
from tvm_fusion.transform.lower.needed_rows import NeededRows, Rows, sliced_rows

from ..support.graphs import module
from ..support.helpers_tir import quick_executable

FLOAT = "float32"
H200 = load_profile("nvidia_h200")
BATCH, TOKENS, WIDTH, HEADS = 2, 12, 32, 4


def rows(x, axis, first, last, step=1):
    return op.strided_slice(x, [axis], [first], [last], [step], assume_inbound=True)


def heads(bb, x):
    split = bb.emit(op.reshape(x, (BATCH, TOKENS, HEADS, WIDTH // HEADS)))
    return bb.emit(op.permute_dims(split, (0, 2, 1, 3)))


def norm(bb, x):
    return bb.emit(op.nn.rms_norm(x, relax.const(np.ones(WIDTH, FLOAT)), axes=[-1], epsilon=1e-5))


def layer(bb, x, w, mask):
    """A layer of a transformer."""
    normal = norm(bb, x)
    q, k, v = (heads(bb, bb.emit(op.matmul(normal, w))) for _ in range(3))
    scores = bb.emit(op.matmul(q, bb.emit(op.permute_dims(k, (0, 1, 3, 2)))))
    weights = bb.emit(op.nn.softmax(bb.emit(op.add(scores, mask)), axis=-1))
    mixed = bb.emit(op.permute_dims(bb.emit(op.matmul(weights, v)), (0, 2, 1, 3)))
    mixed = bb.emit(op.reshape(mixed, (BATCH, TOKENS, WIDTH)))
    h = bb.emit(op.add(x, bb.emit(op.matmul(mixed, w))))
    return bb.emit(op.add(h, bb.emit(op.matmul(norm(bb, h), w))))


def last_token(bb, x, w, mask):
    return bb.emit(op.matmul(bb.emit(rows(norm(bb, layer(bb, x, w, mask)), 1, -1, TOKENS)), w))


def every_third(bb, x, w, mask):
    return rows(layer(bb, layer(bb, x, w, mask), w, mask), 1, 1, TOKENS, 3)


def one_of_the_batch(bb, x, w, mask):
    return rows(layer(bb, x, w, mask), 0, 1, 2)


def same_slice_twice(bb, x, w, mask):
    h = layer(bb, x, w, mask)
    return [bb.emit(rows(h, 1, 0, 1)), bb.emit(op.abs(bb.emit(rows(h, 1, 0, 1))))]


def clipped(bb, x, w, mask):
    h = bb.emit(op.clip(layer(bb, x, w, mask), -0.1, 0.1))
    flags = bb.emit(op.greater(h, relax.const(0.0, FLOAT)))
    return rows(bb.emit(op.where(flags, h, bb.emit(op.nn.relu(h)))), 1, 2, 4)


def over_the_batch(bb, x, w, mask):
    total = bb.emit(op.sum(layer(bb, x, w, mask), axis=[0]))
    return rows(total, 0, 3, 5)


SHAPES = [
    ((BATCH, TOKENS, WIDTH), FLOAT),
    ((WIDTH, WIDTH), FLOAT),
    ((1, 1, TOKENS, TOKENS), FLOAT),
]


def opened(emit, shapes=SHAPES):
    return Decompose(hw=H200)(module(emit, *shapes))


def run(mod, shapes=SHAPES):
    executable = quick_executable(mod)
    rng = np.random.default_rng(0)
    given = [0.3 * rng.standard_normal(shape).astype(FLOAT) for shape, _ in shapes]
    found = relax.VirtualMachine(executable, tvm.cpu())["main"](*map(tvm.runtime.tensor, given))
    found = [found] if isinstance(found, tvm.runtime.Tensor) else found
    return [result.numpy() for result in found]


def products(mod):
    """Rows of the products, one after the other: those of a matrix, times those of a batch."""
    found = []
    for bound in mod["main"].body.blocks[0].bindings:
        if getattr(getattr(bound.value, "op", None), "name", "") == "relax.matmul":
            *leading, _ = (int(n) for n in bound.var.ty.shape)
            found.append(int(np.prod(leading)))
    return found


def of_layer(queries, rest):
    """The products of a layer of which so many rows are read: queries, keys and values of `rest`,
    scores, mixed values, and two more.
    """
    return [queries, rest, rest, HEADS * queries, HEADS * queries, queries, queries]


ALL = BATCH * TOKENS


@pytest.mark.one_in(6)
@pytest.mark.parametrize(
    ("emit", "expected"),
    [
        (last_token, [*of_layer(BATCH, ALL), BATCH]),
        (every_third, [*of_layer(ALL, ALL), *of_layer(4 * BATCH, ALL)]),
        (one_of_the_batch, of_layer(TOKENS, TOKENS)),
        (same_slice_twice, of_layer(BATCH, ALL)),
        (over_the_batch, of_layer(2 * BATCH, ALL)),
        (clipped, of_layer(2 * BATCH, ALL)),
    ],
)
def test_products_and_norms_are_of_the_rows_that_are_read(emit, expected):
    mod = opened(emit)
    narrow = NeededRows()(mod)
    relax.analysis.well_formed(narrow)
    assert products(narrow) == expected
    for got, wanted in zip(run(narrow), run(mod), strict=True):
        np.testing.assert_allclose(got, wanted, rtol=1e-5, atol=1e-6)
    assert NeededRows()(narrow).same_as(narrow)


def two_slices(bb, x, w, mask):
    h = layer(bb, x, w, mask)
    return [bb.emit(rows(h, 1, 0, 1)), bb.emit(rows(h, 1, 1, 2))]


def read_in_whole(bb, x, w, mask):
    h = layer(bb, x, w, mask)
    return [bb.emit(rows(h, 1, 0, 1)), h]


def most_rows(bb, x, w, mask):
    return rows(layer(bb, x, w, mask), 1, 0, TOKENS - 1)


def columns(bb, x, w, mask):
    return rows(bb.emit(op.matmul(x, w)), 2, 0, 8)


def pointwise_only(bb, x, w, mask):
    return rows(bb.emit(op.exp(bb.emit(op.abs(x)))), 1, 0, 1)


def along_what_is_reduced(bb, x, w, mask):
    return rows(bb.emit(op.sum(x, axis=[1], keepdims=True)), 2, 0, 4)


def within_a_joined_axis(bb, x, w, mask):
    h = bb.emit(op.matmul(x, w))
    return rows(bb.emit(op.reshape(h, (BATCH * TOKENS, WIDTH))), 0, 0, 3)


@pytest.mark.parametrize(
    "emit",
    [two_slices, read_in_whole, most_rows, columns, pointwise_only, within_a_joined_axis],
)
def test_what_is_read_otherwise_is_left_as_it_is(emit):
    mod = opened(emit)
    assert NeededRows()(mod).same_as(mod)


def test_a_slice_along_another_axis_of_a_reduction_goes_through_it():
    mod = opened(along_what_is_reduced)
    narrow = NeededRows()(mod)
    assert not narrow.same_as(mod)
    np.testing.assert_allclose(run(narrow)[0], run(mod)[0], rtol=1e-6)


@pytest.mark.parametrize(
    ("limits", "found"),
    [
        ((-1, TOKENS), Rows(1, 11, 12, 1)),
        ((2, 9, 3), Rows(1, 2, 9, 3)),
        ((3, -6), Rows(1, 3, 6, 1)),
        ((5, 5), None),
        ((11, 2, -3), None),
        ((0, 7), None),
    ],
)
def test_the_rows_of_a_slice(limits, found):
    x = relax.Var("x", relax.TensorType((BATCH, TOKENS, WIDTH), FLOAT))
    first, last, *step = limits
    assert sliced_rows(op.strided_slice(x, [1], [first], [last], step or [1])) == found


def is_known(extent):
    return isinstance(extent, tvm.tirx.IntImm)


def heads_of(bb, x, n):
    split = bb.emit(op.reshape(x, (BATCH, n, HEADS, WIDTH // HEADS)))
    return bb.emit(op.permute_dims(split, (0, 2, 1, 3)))


def attended(bb, x, w, n):
    """Attention between tokens of any number, and a norm."""
    q, k, v = (heads_of(bb, bb.emit(op.matmul(norm(bb, x), w)), n) for _ in range(3))
    scores = bb.emit(op.matmul(q, bb.emit(op.permute_dims(k, (0, 1, 3, 2)))))
    mixed = bb.emit(op.matmul(bb.emit(op.nn.softmax(scores, axis=-1)), v))
    mixed = bb.emit(op.permute_dims(mixed, (0, 2, 1, 3)))
    return norm(bb, bb.emit(op.add(x, bb.emit(op.reshape(mixed, (BATCH, n, WIDTH))))))


@pytest.mark.parametrize(
    ("limits", "queries"),
    [
        (lambda n: (n - 1, n), BATCH),
        (lambda n: (n - 5, n - 1), 4 * BATCH),
        (lambda n: (1, 3), 2 * BATCH),
    ],
)
def test_rows_next_to_the_ends_of_a_symbolic_extent_are_told(limits, queries):
    n = tvm.tirx.Var("n", "int64")

    def emit(bb, x, w):
        return rows(attended(bb, x, w, n), 1, *limits(n))

    mod = opened(emit, [((BATCH, n, WIDTH), FLOAT), SHAPES[1]])
    narrow = NeededRows()(mod)
    relax.analysis.well_formed(narrow)
    products = [
        bound.var.ty.shape.values[:-1]
        for bound in narrow["main"].body.blocks[0].bindings
        if getattr(getattr(bound.value, "op", None), "name", "") == "relax.matmul"
    ]
    of_few = [np.prod([int(e) for e in lead]) for lead in products if all(map(is_known, lead))]
    assert of_few == [queries, HEADS * queries, HEADS * queries]
    for got, wanted in zip(run(narrow, SHAPES[:2]), run(mod, SHAPES[:2]), strict=True):
        np.testing.assert_allclose(got, wanted, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("limits", "inbound"),
    [
        (lambda n, m: (m, m + 1), True),
        (lambda n, m: (n - 100, n), True),
        (lambda n, m: (0, 100), True),
        (lambda n, m: (0, n - 1), True),
        (lambda n, m: (0, 2), False),
    ],
)
def test_other_rows_of_symbolic_extents_are_left_alone(limits, inbound):
    n, m = tvm.tirx.Var("n", "int64"), tvm.tirx.Var("m", "int64")

    def emit(bb, x, w, _):
        first, last = limits(n, m)
        y = bb.emit(op.matmul(x, w))
        return op.strided_slice(y, [1], [first], [last], assume_inbound=inbound)

    mod = opened(emit, [((BATCH, n, WIDTH), FLOAT), SHAPES[1], ((m,), FLOAT)])
    assert NeededRows()(mod).same_as(mod)
