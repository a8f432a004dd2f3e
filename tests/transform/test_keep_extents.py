"""An index of a part of a tensor is looked up among those of the part."""

import numpy as np
import pytest
import tvm
from tvm import relax
from tvm.relax import op

from tvm_fusion.transform.lower.keep_extents import KeepExtents

from ..support.graphs import module

X, INDEX = ((4, 6), "float32"), ((2,), "int64")


def rows(bb, x, first, last):
    return bb.emit(op.strided_slice(x, [0], [first], [last]))


def looked_up(bb, extent, index):
    return bb.emit(op.take(relax.const(np.arange(extent), "int64"), index, axis=0))


def long_chain(bb, x):
    for _ in range(700):
        x = bb.emit(op.exp(x))
    return x


PARTS = {
    "slice": (lambda bb, x: rows(bb, x, 1, 3), 2),
    "padding": (lambda bb, x: bb.emit(op.nn.pad(x, [1, 2, 0, 0])), 7),
    "repetition": (lambda bb, x: bb.emit(op.tile(x, [2, 1])), 8),
    "piece": (lambda bb, x: bb.emit(relax.TupleGetItem(bb.emit(op.split(x, 2, 0)), 1)), 2),
    "computed": (lambda bb, x: bb.emit(op.exp(rows(bb, x, 1, 3))), 2),
    "computed in many steps": (lambda bb, x: long_chain(bb, rows(bb, x, 1, 3)), 2),
    "joined": (lambda bb, x: bb.emit(op.concat([x, rows(bb, x, 1, 3)], 0)), 6),
    "joined pieces": (lambda bb, x: bb.emit(op.concat(bb.emit(op.split(x, 2, 0)), 0)), 4),
    "stacked": (lambda bb, x: bb.emit(op.stack([rows(bb, x, 1, 3), rows(bb, x, 0, 2)], 1)), 2),
    "broadcast": (lambda bb, x: bb.emit(op.broadcast_to(x, (3, 4, 6))), 3),
    "added to a row": (lambda bb, x: bb.emit(op.add(rows(bb, x, 1, 3), rows(bb, x, 0, 1))), 2),
    "outer sum": (
        lambda bb, x: bb.emit(op.add(bb.emit(op.expand_dims(rows(bb, x, 1, 3), 1)), x)),
        2,
    ),
    "turned": (lambda bb, x: bb.emit(op.permute_dims(rows(bb, x, 1, 3))), 6),
}


@pytest.mark.parametrize("name", PARTS)
def test_the_index_of_a_part_is_looked_up(name):
    part, extent = PARTS[name]
    before = module(lambda bb, x, i: op.take(part(bb, x), i, axis=0), X, INDEX)
    expected = module(
        lambda bb, x, i: op.take(part(bb, x), looked_up(bb, extent, i), axis=0), X, INDEX
    )
    after = KeepExtents()(before)
    tvm.ir.assert_structural_equal(after, expected)
    assert KeepExtents()(after).same_as(after)


UNCHANGED = {
    "an input": lambda bb, x, i: op.take(x, i, axis=0),
    "computed of all": lambda bb, x, i: op.take(bb.emit(op.exp(x)), i, axis=0),
    "computed of all in many steps": lambda bb, x, i: op.take(long_chain(bb, x), i, axis=0),
    "joined of all": lambda bb, x, i: op.take(bb.emit(op.concat([x, x], 0)), i, axis=0),
    "sums of a part": lambda bb, x, i: op.take(bb.emit(op.sum(rows(bb, x, 1, 3), 1)), i, axis=0),
    "clipped": lambda bb, x, i: op.take(rows(bb, x, 1, 3), i, axis=0, mode="clip"),
    "product of a part": lambda bb, x, i: op.take(
        bb.emit(op.matmul(rows(bb, x, 0, 3), bb.emit(op.permute_dims(x)))), i, axis=0
    ),
    "no index": lambda bb, x, i: op.exp(rows(bb, x, 1, 3)),
}


@pytest.mark.parametrize("name", UNCHANGED)
def test_others_stay_as_they_are(name):
    mod = module(UNCHANGED[name], X, INDEX)
    assert KeepExtents()(mod).same_as(mod)
