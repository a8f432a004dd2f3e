"""Indices that count downwards, which TVM's simplification of iterators gets wrong."""

import numpy as np
import pytest
import tvm
import tvm_ffi
from tvm import tirx
from tvm.script import tirx as T
from tvm.tirx.build import codegen_build

from tvm_fusion.runtime.build.kernel_code import lowered_parts
from tvm_fusion.runtime.build.lowering import mixed_tir_pipeline, with_hidden_divisions

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


@pytest.mark.parametrize("bound", [False, True], ids=["direct", "by name"])
@pytest.mark.parametrize(
    ("start", "divisor", "extent"), [(5, 2, 6), (5, 2, 4), (10, 3, 6), (9, 4, 8)]
)
def test_what_is_read_backwards_is_right(start, divisor, extent, bound):
    host, _ = lowered_parts(reader(start, divisor, extent, bound), LLVM)
    _, finish_host, _ = mixed_tir_pipeline()
    library = codegen_build(finish_host()(host), LLVM)
    x, y = np.arange(64, dtype="float32"), np.full(extent, np.nan, "float32")
    y = tvm.runtime.tensor(y)
    library["reader"](tvm.runtime.tensor(x), y)
    np.testing.assert_array_equal(y.numpy(), x[start - np.arange(extent)])


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
