"""Elements that shapes repeat before a convolution, as Before and Expected."""

import pytest
import tvm
from tvm import relax
from tvm.relax import op

from tvm_fusion.transform.rewrites.tell_repeats import TellRepeats

from ..support.graphs import module

INPUTS = [((2, 8, 5, 7), "float32"), ((16, 8, 3, 3), "float32")]


def spread(bb, x, axis, count):
    """Each element `count` times along an axis, as PyTorch opens `repeat_interleave`."""
    shape = [int(n) for n in x.ty.shape]
    y = bb.emit(op.expand_dims(x, axis + 1))
    y = bb.emit(op.broadcast_to(y, [*shape[: axis + 1], count, *shape[axis + 1 :]]))
    return bb.emit(op.reshape(y, [*shape[:axis], shape[axis] * count, *shape[axis + 1 :]]))


def told(bb, x, axis, count):
    return bb.emit(op.repeat(x, count, axis))


def twice(repeat):
    return lambda bb, x, w: op.nn.conv2d(repeat(bb, repeat(bb, x, 2, 2), 3, 3), w)


def padded(repeat):
    def emit(bb, x, w):
        y = bb.emit(op.nn.pad(repeat(bb, x, 3, 4), [0, 0, 0, 0, 1, 0, 0, 2]))
        return op.nn.conv2d(y, w, padding=1)

    return emit


def both_at_once(bb, x, w):
    y = bb.emit(op.reshape(x, (2, 8, 5, 1, 7, 1)))
    y = bb.emit(op.broadcast_to(y, (2, 8, 5, 3, 7, 2)))
    return op.nn.conv2d(bb.emit(op.reshape(y, (2, 8, 15, 14))), w)


def both_told(bb, x, w):
    return op.nn.conv2d(told(bb, told(bb, x, 2, 3), 3, 2), w)


def found(emit):
    return relax.transform.DeadCodeElimination()(TellRepeats()(module(emit, *INPUTS)))


@pytest.mark.parametrize(
    ("before", "expected"),
    [
        (twice(spread), twice(told)),
        (padded(spread), padded(told)),
        (both_at_once, both_told),
    ],
    ids=["one by one", "padded", "at once"],
)
def test_shapes_that_repeat_are_told_by_operators(before, expected):
    mod = found(before)
    tvm.ir.assert_structural_equal(mod["main"], module(expected, *INPUTS)["main"])
    tvm.ir.assert_structural_equal(TellRepeats()(mod), mod)


def tiled(bb, x, w):
    y = bb.emit(op.expand_dims(x, 2))
    y = bb.emit(op.broadcast_to(y, (2, 8, 2, 5, 7)))
    return op.nn.conv2d(bb.emit(op.reshape(y, (2, 8, 10, 7))), w)


def read_by_others(bb, x, w):
    return op.add(spread(bb, x, 2, 2), relax.const(1.0))


@pytest.mark.parametrize("emit", [tiled, read_by_others, twice(told)])
def test_other_shapes_stay_as_they_are(emit):
    mod = module(emit, *INPUTS)
    assert TellRepeats()(mod).same_as(mod)
