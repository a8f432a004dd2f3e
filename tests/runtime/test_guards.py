"""Indices and divisors that are data are checked on a CPU; on a GPU nothing is read or written out
of bounds.
"""

import numpy as np
import pytest
import tvm
import tvm_ffi
from tvm import relax, tirx
from tvm.relax import op
from tvm.script import tirx as T

import tvm_fusion
from tvm_fusion.check.reference import run_reference
from tvm_fusion.config import load_profile
from tvm_fusion.errors import DividedByZero, InputError, OutOfRange, VerificationError
from tvm_fusion.runtime.build.guards import with_guards
from tvm_fusion.runtime.build.lowering import ScheduleLeftovers
from tvm_fusion.transform.pipeline import lower

from ..support.graphs import module
from ..support.stock_cuda_on_cpu import run_launches_on_cpu

QUICK = tvm.target.Target({"kind": "llvm", "opt-level": 0})


@T.prim_func(s_tir=True)
def rows(
    x: T.Buffer((6, 8), "float32"), i: T.Buffer((4,), "int64"), y: T.Buffer((4, 8), "float32")
):
    for n in T.parallel(4):
        for v in T.vectorized(8):
            y[n, v] = x[i[n], v]


@T.prim_func(s_tir=True)
def elements(
    x: T.Buffer((6, 8), "float32"), i: T.Buffer((6, 8), "int32"), y: T.Buffer((6, 8), "float32")
):
    for n in range(6):
        for v in T.vectorized(8):
            at: T.let[T.int32] = i[n, v] + 1
            y[n, v] = x[n, at]


@T.prim_func(s_tir=True)
def shorter(x: T.Buffer((6,), "float32"), i: T.Buffer((4,), "int64"), y: T.Buffer((6,), "float32")):
    for n in range(6):
        y[n] = T.if_then_else(n < 4, x[i[n]], T.float32(0))


@T.prim_func(s_tir=True)
def added(x: T.Buffer((4,), "float32"), i: T.Buffer((4,), "int64"), y: T.Buffer((6,), "float32")):
    for n in range(4):
        with T.sblock("write"):
            v = T.axis.opaque(4, n)
            y[i[v]] = y[i[v]] + x[v]


@T.prim_func(s_tir=True)
def clipped(x: T.Buffer((6,), "float32"), i: T.Buffer((4,), "int64"), y: T.Buffer((4,), "float32")):
    for n in range(4):
        y[n] = x[T.min(T.max(i[n], T.int64(0)), T.int64(5))]


@T.prim_func(s_tir=True)
def named(x: T.Buffer((6,), "float32"), i: T.Buffer((4,), "int64"), y: T.Buffer((4,), "float32")):
    for n in range(4):
        known, at = T.bool(), T.int64()
        place = T.Let(T.if_then_else(known, i[n], T.int64(0)), where={known: i[n] != T.int64(-1)})
        y[n] = T.Let(x[at] * T.float32(2), where={at: place})


@T.prim_func(s_tir=True)
def own(i: T.Buffer((4,), "int64"), x: T.Buffer((6,), "float32"), y: T.Buffer((4,), "float32")):
    at = T.alloc_buffer((1,), "int64")
    for n in range(4):
        at[0] = i[n] * T.int64(2)
        y[n] = x[at[0]]


def built(func):
    mod = with_guards(tvm.IRModule({"main": func.with_attr("global_symbol", "main")}), "llvm")
    return tvm.compile(mod, QUICK)["main"]


def numbers(*shape):
    return np.arange(1, 1 + np.prod(shape), dtype="float32").reshape(shape)


CASES = {
    "rows": (rows, numbers(6, 8), np.array([0, 5, 1, 2]), lambda x, i: x[i]),
    "elements": (
        elements,
        numbers(6, 8),
        np.arange(48, dtype="int32").reshape(6, 8) % 7,
        lambda x, i: np.take_along_axis(x, i + 1, 1),
    ),
    "shorter": (shorter, numbers(6), np.array([5, 0, 0, 1]), lambda x, i: np.append(x[i], [0, 0])),
    "named": (named, numbers(6), np.array([5, -1, 0, 1]), lambda x, i: 2 * x[np.maximum(i, 0)]),
    "own": (own, np.array([2, 0, 1, 1]), numbers(6), lambda i, x: x[2 * i]),
}


@pytest.mark.parametrize("name", CASES)
def test_an_index_out_of_range_is_an_error_that_says_where(name):
    func, *inputs, wanted = CASES[name]
    expected, run = wanted(*inputs).astype("float32"), built(func)
    y = tvm.runtime.tensor(np.zeros_like(expected))
    run(*map(tvm.runtime.tensor, inputs), y)
    np.testing.assert_array_equal(y.numpy(), expected)
    places = next(x for x in inputs if x.dtype.kind == "i")
    for wrong in (-100, 8):
        places.reshape(-1)[1] = wrong
        with pytest.raises(
            OutOfRange, match=r"main: an index along axis \d, which has \d elements"
        ):
            run(*map(tvm.runtime.tensor, inputs), y)


def test_a_check_stands_before_the_loops_that_it_is_the_same_for():
    text = with_guards(tvm.IRModule({"rows": rows}), "llvm")["rows"].script()
    assert text.index("T.parallel") < text.index("assert") < text.index("T.vectorized")
    assert text.count("assert") == 1
    text = with_guards(tvm.IRModule({"e": elements}), "llvm")["e"].script()
    assert text.index("assert") < text.index("T.vectorized")  # in a loop of its own


def test_what_is_in_range_for_sure_is_not_checked():
    assert "assert" not in with_guards(tvm.IRModule({"clipped": clipped}), "llvm").script()


def test_on_a_gpu_what_is_out_of_range_is_not_written():
    func = with_guards(tvm.IRModule({"added": added}), "cuda")["added"]
    found = []
    tvm_ffi.structural_walk(func.body, [(tirx.IfThenElse, found.append)])
    (choice,) = found
    assert isinstance(choice.then_case, tirx.BufferStore)
    assert choice.else_case is None
    for place, holds in ((-1, False), (0, True), (5, True), (6, False)):
        put = lambda load, place=place: tirx.const(place, "int64")  # noqa: E731
        condition = tvm_ffi.structural_map(choice.condition, [(tvm.ir.TensorLoad, put)])
        assert bool(tvm.sym.Analyzer().simplify(condition).value) is holds


@pytest.mark.parametrize("name", ["take", "gather_elements", "gather_nd"])
def test_on_a_gpu_the_nearest_element_is_read(name):
    call = {
        "take": lambda bb, x, i: op.take(x, i, axis=1),
        "gather_elements": lambda bb, x, i: op.gather_elements(x, i, axis=1),
        "gather_nd": lambda bb, x, i: op.gather_nd(x, i),
    }[name]
    mod = module(call, ((3, 5), "float32"), ((3, 2), "int64"))
    gpu = lower(mod, load_profile("nvidia_h100").to_target())
    x, i = numbers(3, 5), np.array([[-9, 1], [2, 99], [0, 3]])
    clip = np.clip(i, 0, 4)
    expected = {
        "take": lambda: x[:, clip],
        "gather_elements": lambda: np.take_along_axis(x, clip, 1),
        "gather_nd": lambda: x[np.clip(i[:, 0], 0, 2), clip[:, 1]],
    }[name]()
    np.testing.assert_array_equal(run_reference(gpu, [x, i])[0], expected)


SCATTERED = lambda bb, x, i, u: op.scatter_elements(x, i, u, axis=1)  # noqa: E731
BEYOND = np.array([[0, 1], [-5, 7], [4, -9]])  # 7 in a row of 5 is 2 in the next one


def test_a_place_beyond_its_axis_is_no_other_element_of_the_tensor():
    mod = module(SCATTERED, ((3, 5), "float32"), ((3, 2), "int64"), ((3, 2), "float32"))
    x, u = numbers(3, 5), -numbers(3, 2)
    compiled = tvm_fusion.compile(mod, "llvm", verify=False)
    index = np.where(abs(BEYOND) > 5, BEYOND % 5, BEYOND)
    expected = x.copy()
    np.put_along_axis(expected, index, u, 1)
    np.testing.assert_array_equal(compiled(x, index, u), expected)
    for row in (1, 2):
        index[row] = BEYOND[row]
        with pytest.raises(OutOfRange, match="along axis 1, which has 5 elements"):
            compiled(x, index, u)
        index[row] = 0


def test_on_a_gpu_a_place_beyond_its_axis_is_not_written():
    mod = module(SCATTERED, ((3, 5), "float32"), ((3, 2), "int64"), ((3, 2), "float32"))
    gpu = load_profile("nvidia_h100").to_target()
    func = ScheduleLeftovers(gpu)(lower(mod, gpu))["scatter_elements"]
    x, u = numbers(3, 5), -numbers(3, 2)
    expected, found = x.copy(), np.zeros_like(x)
    expected[[0, 0, 1, 2], [0, 1, 0, 4]] = u[[0, 0, 1, 2], [0, 1, 0, 0]]
    run_launches_on_cpu(func, [x, BEYOND, u, found])
    np.testing.assert_array_equal(found, expected)


LEAST = np.iinfo("int64").min
A, B = np.array([7, -7, 7, -7, LEAST, 0]), np.array([2, 2, -3, -1, -1, 5])
with np.errstate(all="ignore"):
    QUOTIENTS = np.append(A[:4] // B[:4], [LEAST, 0])
DIVISIONS = {
    "floor_divide": QUOTIENTS,
    "floor_mod": A - QUOTIENTS * B,
    "divide": np.array([3, -3, -2, 7, LEAST, 0]),
    "mod": np.array([1, -1, 1, 0, 0, 0]),
}


def test_a_division_of_integers_by_zero_is_an_error_and_the_least_by_minus_one_is_not():
    def all_four(bb, a, b):
        return relax.Tuple([bb.emit(getattr(op, name)(a, b)) for name in DIVISIONS])

    mod = module(all_four, ((6,), "int64"), ((6,), "int64"))
    compiled = tvm_fusion.compile(mod, "llvm", verify=False)
    for found, wanted in zip(compiled(A, B), DIVISIONS.values(), strict=True):
        np.testing.assert_array_equal(found, wanted)
    wrong = B.copy()
    wrong[3] = 0
    with pytest.raises(DividedByZero, match="an integer is divided by zero"):
        compiled(A, wrong)
    with pytest.raises(InputError, match="an integer is divided by zero"):
        run_reference(lower(mod, QUICK), [A, wrong])


def test_inputs_that_a_model_does_not_take_are_drawn_again():
    mod = module(
        lambda bb, a: op.floor_divide(a, bb.emit(op.bitwise_and(a, relax.const(1, "int64")))),
        ((2,), "int64"),
    )
    compiled = tvm_fusion.compile(mod, "llvm")  # of two random numbers one in four pairs is odd
    np.testing.assert_array_equal(compiled(np.array([3, -5])), [3, -5])
    mod = module(lambda bb, a: op.floor_divide(a, bb.emit(op.subtract(a, a))), ((2,), "int64"))
    with pytest.raises(VerificationError, match="refuses 64 random inputs"):
        tvm_fusion.compile(mod, "llvm")
