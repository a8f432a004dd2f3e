"""Loops that write where loaded numbers say run in order; others stay as they are."""

import numpy as np
import pytest
import tvm
import tvm_ffi
from tvm import tirx
from tvm.relax import op
from tvm.script import tirx as T

import tvm_fusion
from tvm_fusion.check.plain import plain_module
from tvm_fusion.runtime.build.lowering import ScheduleLeftovers
from tvm_fusion.runtime.build.plain_schedule import PLAIN_ATTR
from tvm_fusion.transform.lower.ordered_writes import OrderedWrites, meeting_loops
from tvm_fusion.transform.pipeline import lower

from ..support.graphs import module

LLVM = tvm.target.Target({"kind": "llvm"})


@T.prim_func(s_tir=True)
def added(P: T.Buffer((64,), "int32"), X: T.Buffer((64,), "float32"), Y: T.Buffer((7,), "float32")):
    for v in T.parallel(64):
        Y[P[v] % 7] = Y[P[v] % 7] + X[v]


@T.prim_func(s_tir=True)
def added_in_order(
    P: T.Buffer((64,), "int32"), X: T.Buffer((64,), "float32"), Y: T.Buffer((7,), "float32")
):
    for v in range(64):
        Y[P[v] % 7] = Y[P[v] % 7] + X[v]


@T.prim_func(s_tir=True)
def rows_apart(
    P: T.Buffer((9, 5), "int32"), X: T.Buffer((9, 5), "float32"), Y: T.Buffer((9, 7), "float32")
):
    for i in T.parallel(9):
        for k in range(5):
            Y[i, P[i, k]] = X[i, k]


@T.prim_func(s_tir=True)
def gathered(
    P: T.Buffer((9,), "int32"), X: T.Buffer((5,), "float32"), Y: T.Buffer((9,), "float32")
):
    for i in T.parallel(9):
        Y[i] = X[P[i]]


@T.prim_func(s_tir=True)
def bound_to_a_name(
    P: T.Buffer((9,), "int32"), X: T.Buffer((9,), "float32"), Y: T.Buffer((5,), "float32")
):
    for i in T.parallel(9):
        place: T.let[T.int32] = P[i] + 1
        Y[place] = X[i]


def ordered(func):
    return OrderedWrites()(tvm.IRModule({"main": func}))["main"]


def test_what_may_meet_runs_in_order():
    expected = tvm.IRModule({"main": added_in_order.with_attr("global_symbol", "added")})["main"]
    tvm.ir.assert_structural_equal(ordered(added), expected)
    tvm.ir.assert_structural_equal(ordered(ordered(added)), expected)


@pytest.mark.parametrize("func", [rows_apart, gathered], ids=["rows apart", "gathered"])
def test_what_cannot_meet_stays_parallel(func):
    tvm.ir.assert_structural_equal(ordered(func), func)


@pytest.mark.parametrize(
    ("func", "names"),
    [(added, {"v"}), (rows_apart, {"k"}), (gathered, set()), (bound_to_a_name, {"i"})],
    ids=["added", "rows apart", "gathered", "bound"],
)
def test_loops_that_meet_are_those_whose_variable_is_loaded_with_only(func, names):
    assert {var.name for var in meeting_loops(func)} == names


def put(accumulate, dtype="float32"):
    return module(
        lambda bb, x, i, v: bb.emit(op.index_put(x, (i,), v, accumulate)),
        ((7,), dtype),
        ((301,), "int64"),
        ((301,), dtype),
    )


@pytest.mark.parametrize("accumulate", [True, False])
@pytest.mark.parametrize("lowered", [lambda m: plain_module(m, LLVM), lambda m: lower(m, LLVM)])
def test_no_loop_of_an_index_put_is_for_several_cores_but_its_copy(lowered, accumulate):
    kinds = []
    for func in lowered(put(accumulate)).functions.values():
        if isinstance(func, tirx.PrimFunc):
            tvm_ffi.structural_walk(func.body, [(tirx.For, lambda loop: kinds.append(loop.kind))])
    assert kinds == [tirx.ForKind.PARALLEL, tirx.ForKind.SERIAL]


@pytest.mark.parametrize("dtype", ["float32", "int32"])
def test_what_is_added_at_places_that_repeat_is_added_once(dtype):
    rng = np.random.default_rng(0)
    x, v = rng.integers(-9, 9, 7).astype(dtype), rng.integers(-9, 9, 301).astype(dtype)
    places = rng.integers(-7, 7, 301)
    compiled = tvm_fusion.compile(put(True, dtype), "llvm")
    wanted = x.copy()
    np.add.at(wanted, places, v)
    for _ in range(5):
        np.testing.assert_array_equal(compiled(x, places, v), wanted)


def test_on_a_gpu_no_rule_spreads_them_over_threads():
    target = tvm.target.Target("nvidia/nvidia-a100")
    mod = tvm.IRModule({"main": added.with_attr("global_symbol", "main")})
    (func,) = ScheduleLeftovers(target)(mod).functions.values()
    assert "in one thread" in func.attrs[PLAIN_ATTR]


def test_of_rows_written_at_one_place_the_last_one_stays():
    rows = module(
        lambda bb, x, i, v: bb.emit(op.scatter_nd(x, bb.emit(op.expand_dims(i, 1)), v, "update")),
        ((7, 5), "float32"),
        ((9,), "int64"),
        ((9, 5), "float32"),
    )
    x, v = np.zeros((7, 5), "float32"), np.arange(45, dtype="float32").reshape(9, 5)
    places = np.array([1, 3, 1, 0, 3, 3, 6, 6, 1])
    wanted = x.copy()
    for place, row in zip(places, v, strict=True):
        wanted[place] = row
    np.testing.assert_array_equal(tvm_fusion.compile(rows, "llvm")(x, places, v), wanted)
