"""Concatenations of what is concatenated already, as Before and Expected."""

import pytest
import tvm
from tvm import relax
from tvm.relax import op

from tvm_fusion.transform.rewrites.nest_concats import NestConcats

from ..support.graphs import module

INPUTS = [((4, 2), "float32"), ((4, 3), "float32"), ((4, 5), "float32"), ((4, 7), "float32")]


def dense(bb, x, y, z, w):
    c = bb.emit(op.concat([x, y], 1))
    d = bb.emit(op.concat([x, y, z], 1))
    return relax.Tuple([c, d, bb.emit(op.concat([x, y, z, w], -1))])


def dense_nested(bb, x, y, z, w):
    c = bb.emit(op.concat([x, y], 1))
    d = bb.emit(op.concat([c, z], 1))
    return relax.Tuple([c, d, bb.emit(op.concat([d, w], -1))])


def in_front(bb, x, y, z, w):
    c = bb.emit(op.concat([z, w], 1))
    return relax.Tuple([c, bb.emit(op.concat([x, y, z, w], 1))])


def in_front_nested(bb, x, y, z, w):
    c = bb.emit(op.concat([z, w], 1))
    return relax.Tuple([c, bb.emit(op.concat([x, y, c], 1))])


def apart(bb, x, y, z, w):
    c = bb.emit(op.concat([x, z], 1))
    return relax.Tuple([c, bb.emit(op.concat([x, y, z], 1))])


def other_axis(bb, x, y, z, w):
    c = bb.emit(op.concat([x, x], 0))
    return relax.Tuple([c, bb.emit(op.concat([x, x, y], 1))])


@pytest.mark.parametrize(
    ("before", "expected"),
    [
        (dense, dense_nested),
        (in_front, in_front_nested),
        (apart, apart),
        (other_axis, other_axis),
        (dense_nested, dense_nested),
    ],
)
def test_what_is_concatenated_is_taken_as_it_is(before, expected):
    mod = NestConcats()(module(before, *INPUTS))
    tvm.ir.assert_structural_equal(mod, module(expected, *INPUTS))
