"""Indices that TVM's simplification of iterators gets wrong: descending, or with shifted parts."""

import numpy as np
import pytest
import tvm
import tvm_ffi
from tvm import tirx
from tvm.script import tirx as T
from tvm.tirx.build import codegen_build

from tvm_fusion.runtime.build.hidden_divisions import with_hidden_divisions
from tvm_fusion.runtime.build.kernel_code import lowered_parts
from tvm_fusion.runtime.build.lowering import mixed_tir_pipeline

from ..support.runtime_cases import LLVM


def reader(start, divisor, extent, bound=False):
    """y[i] = x[(start - i) // divisor * divisor + (start - i) % divisor]: x, backwards."""

    @T.prim_func(private=True, s_tir=True)
    def direct(x: T.Buffer((64,), "float32"), y: T.Buffer((extent,), "float32")):
        for i in range(extent):
            y[i] = x[(start - i) // divisor * divisor + (start - 4 * divisor - i) % divisor]

    @T.prim_func(private=True, s_tir=True)
    def by_name(x: T.Buffer((64,), "float32"), y: T.Buffer((extent,), "float32")):
        for i in range(extent):
            place: T.let[T.int32] = start - i
            y[i] = x[place // divisor * divisor + (place - 4 * divisor) % divisor]

    func = by_name if bound else direct
    return tvm.IRModule({"reader": func.with_attr("global_symbol", "reader")})


def run(mod, extent):
    """y, where x[i] is i."""
    host, _ = lowered_parts(mod, LLVM)
    _, finish_host, _ = mixed_tir_pipeline()
    library = codegen_build(finish_host()(host), LLVM)
    y = tvm.runtime.tensor(np.full(extent, np.nan, "float32"))
    library["reader"](tvm.runtime.tensor(np.arange(64, dtype="float32")), y)
    return y.numpy()


@pytest.mark.parametrize("bound", [False, True], ids=["direct", "by name"])
@pytest.mark.parametrize(
    ("start", "divisor", "extent"), [(5, 2, 6), (5, 2, 4), (10, 3, 6), (9, 4, 8)]
)
def test_what_is_read_backwards_is_right(start, divisor, extent, bound):
    y = run(reader(start, divisor, extent, bound), extent)
    np.testing.assert_array_equal(y, start - np.arange(extent))


SHIFTED = {
    "rests": lambda i: i % 4 * 8 + (i + 1) % 4,
    "a rest of a rest": lambda i: (i + 1) % 4 // 2 * 2 + i % 2,
    "a part of a part": lambda i: i // 4 * 6 + (i % 4 // 2 + 1) % 2 * 3 + 1,
    "quotients": lambda i: i // 4 + (i + 1) // 4 * 7,
}


def shifted(index, bound):
    """y[i] = x[index(i)], or with `i + 1` bound to a variable before."""
    i, name = tirx.Var("i", "int32"), tirx.Var("name", "int32")
    x, y = (tirx.decl_buffer((n,), "float32", name=m) for m, n in (("x", 64), ("y", 9)))
    place = index(name - 1 if bound else i)
    body = tirx.BufferStore(y, tirx.BufferLoad(x, [place]), [i])
    if bound:
        body = tirx.SeqStmt([tirx.Bind(name, i + 1), body])
    func = tirx.PrimFunc([x, y], tirx.For(i, 0, 9, tirx.ForKind.SERIAL, body))
    return tvm.IRModule({"reader": func.with_attr("global_symbol", "reader")})


@pytest.mark.parametrize("bound", [False, True], ids=["direct", "by name"])
@pytest.mark.parametrize("kind", SHIFTED)
def test_what_is_divided_beside_itself_and_a_constant_is_right(kind, bound):
    y = run(shifted(SHIFTED[kind], bound), 9)
    np.testing.assert_array_equal(y, [SHIFTED[kind](i) for i in range(9)])


def test_what_counts_upwards_stays_as_it_is():
    @T.prim_func(private=True, s_tir=True)
    def upwards(x: T.Buffer((64,), "float32"), y: T.Buffer((30,), "float32")):
        for i in range(30):
            y[i] = x[(i + 7) // 3 * 3 + (i - 2) % 3] / (x[0] - x[i])

    mod = tvm.IRModule({"upwards": upwards})
    assert with_hidden_divisions(mod)["upwards"].same_as(mod["upwards"])


def test_only_divisions_of_integers_that_fall_are_hidden():
    found = with_hidden_divisions(reader(5, 2, 6))["reader"]
    hidden = []
    tvm_ffi.structural_walk(found.body, [(tirx.BitwiseOr, lambda e: hidden.append(type(e.a)))])
    assert hidden == [tirx.FloorDiv, tirx.FloorMod]
