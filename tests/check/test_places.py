"""Integers from which places are computed range over all that keeps the places within a table."""

import pytest
from tvm import relax
from tvm.relax import op

from tvm_fusion.check.inputs import ranges_of

from ..planted import tried
from ..support.graphs import module

TABLE = ((7, 5), "float32")


def range_of_ids(compute, dtype="int64", table=TABLE):
    def emit(bb, x, ids):
        for step in compute:
            ids = bb.emit(step(ids))
        return bb.emit(op.take(x, ids, 0))

    return ranges_of(module(emit, table, ((9,), dtype))["main"])["x1"]


def number(value):
    return relax.const(value, "int64")


@pytest.mark.parametrize(
    ("compute", "expected"),
    [
        ([], range(7)),
        ([op.abs], range(-6, 7)),
        ([lambda i: op.add(i, number(2))], range(-2, 5)),
        ([lambda i: op.subtract(number(6), i)], range(7)),
        ([op.abs, lambda i: op.multiply(i, number(2))], range(-3, 4)),
        ([op.negative], range(-6, 1)),
        ([op.abs, lambda i: op.minimum(i, number(3))], range(-127, 128)),
        ([lambda i: op.astype(i, "int32"), op.abs], range(-6, 7)),
        ([lambda i: op.add(i, number(9))], range(2)),
        ([op.bitwise_not], range(2)),
        ([lambda i: op.where(op.less(i, number(0)), op.add(i, number(7)), i)], range(-7, 7)),
    ],
    ids=[
        "none",
        "abs",
        "add",
        "subtract",
        "twice",
        "negative",
        "nested",
        "cast",
        "beyond",
        "other",
        "from the end",
    ],
)
def test_inputs_range_over_all_that_keeps_places_in_the_table(compute, expected):
    assert range_of_ids(compute) == expected


def test_of_two_tables_the_shorter_one_counts():
    def emit(bb, x, y, ids):
        rows = bb.emit(op.take(x, bb.emit(op.abs(ids)), 0))
        return bb.emit(op.add(rows, bb.emit(op.take(y, bb.emit(op.abs(ids)), 0))))

    func = module(emit, TABLE, ((4, 5), "float32"), ((9,), "int64"))["main"]
    assert ranges_of(func)["x2"] == range(-3, 4)


def test_a_place_that_is_wrong_for_negative_inputs_only_is_not_returned():
    outcome = tried("gather", "mask", 0)
    assert outcome.effective
    assert outcome.verdict == "right"
