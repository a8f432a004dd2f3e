"""References on whole arrays: the numbers of the compiled one, or none."""

import sys
from itertools import pairwise

import ml_dtypes
import numpy as np
import pytest
import torch
import tvm
from torch.utils._python_dispatch import TorchDispatchMode
from tvm import relax
from tvm.relax import op

from tests.support.graphs import module
from tvm_fusion.check import allowance
from tvm_fusion.check.allowance import Reference, disturbed_module
from tvm_fusion.check.arrays.operations import NotOnArrays
from tvm_fusion.check.arrays.programs import on_arrays
from tvm_fusion.check.bounds.noise import Draw
from tvm_fusion.check.inputs import random_inputs
from tvm_fusion.check.plain import plain_module
from tvm_fusion.check.reference import build_reference
from tvm_fusion.check.rules import as_array, like
from tvm_fusion.check.verify import judge_outputs
from tvm_fusion.frontends.torch.written.writes import Write, write_function
from tvm_fusion.transform.lower.scans import SCANS, scanned

LLVM = tvm.target.Target({"kind": "llvm"})


def plain(call, *inputs):
    return plain_module(module(lambda bb, *params: bb.emit(call(bb, *params)), *inputs), LLVM)


def attention(bb, q, k, v):
    scores = bb.emit(op.matmul(q, bb.emit(op.permute_dims(k, (0, 2, 1)))))
    return op.matmul(bb.emit(op.nn.softmax(scores)), v)


def pooled(bb, x, w):
    y = bb.emit(op.nn.conv2d(x, w, strides=2, padding=1, groups=2))
    return op.nn.avg_pool2d(bb.emit(op.nn.max_pool2d(y, 2)), 2, padding=1)


def normalised(bb, x, w, b):
    return op.nn.gelu(bb.emit(op.nn.layer_norm(x, w, b, axes=-1)))


def rows(bb, table, places):
    return op.take(table, places, axis=0)


def moved(bb, x):
    y = bb.emit(op.reshape(bb.emit(op.permute_dims(x, (1, 0, 2))), (7, 10)))
    return op.concat([y, bb.emit(op.strided_slice(y, [0], [1], [4]))], axis=0)


def whole_numbers(bb, x, y):
    return op.sum(bb.emit(op.floor_divide(x, y)), axis=0)


def corner(bb, x):
    return op.tril(bb.emit(op.flip(bb.emit(op.nn.pad(x, (1, 2, 0, 1))), axis=1)))


def extremes(bb, x):
    return op.subtract(bb.emit(op.max(x, axis=1)), bb.emit(op.min(x, axis=1)))


def scan(bb, x, axis, name, exclusive):
    return bb.emit(bb.call_te(lambda x: scanned(x, axis, SCANS[name], exclusive), x))


def scans(bb, x, y):
    sums = scan(bb, x, 1, "relax.cumsum", False)
    least = bb.emit(op.add(sums, scan(bb, y, 0, "relax.cummin", False)))
    logarithms = bb.emit(op.add(least, scan(bb, y, 2, "relax.logcumsumexp", False)))
    return op.add(logarithms, scan(bb, y, 0, "relax.cumprod", True))


F32 = "float32"
CASES = {
    "attention": (attention, ((2, 5, 7), F32), ((2, 9, 7), F32), ((2, 9, 3), F32)),
    "convolution": (pooled, ((2, 4, 13, 11), F32), ((6, 2, 3, 3), F32)),
    "layer norm, gelu": (normalised, ((5, 33), "float16"), ((33,), "float16"), ((33,), "float16")),
    "product": (lambda bb, x, w: op.matmul(x, w), ((131, 37), "bfloat16"), ((37, 17), "bfloat16")),
    "embedding": (rows, ((11, 6), F32), ((4, 3), "int64")),
    "layouts": (moved, ((5, 7, 2), F32)),
    "integers": (whole_numbers, ((9, 5), "int32"), ((9, 5), "int32")),
    "padding, mask": (corner, ((5, 6), F32)),
    "maxima": (extremes, ((5, 1), F32)),
    "scans": (scans, ((3, 70, 2), F32), ((3, 70, 2), F32)),
    "one number": (lambda bb, x: op.exp(x), ((), F32)),
}


def values(mod):
    """Random inputs; integers are places of a table and divisors alike."""
    ranges = {p.name: 9 for p in mod["main"].params if "int" in str(p.ty.dtype)}
    return [
        np.abs(x) + 1 if x.dtype.kind == "i" else x
        for x in random_inputs(mod["main"], integers=ranges)
    ]


@pytest.mark.one_in(6)
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("noisy", [False, True], ids=["exact", "disturbed"])
def test_it_gives_the_numbers_of_the_compiled_reference(case, noisy):
    mod = plain(*CASES[case])
    inputs = values(mod)
    if noisy:
        mod, inputs = disturbed_module(mod), [*inputs, Draw(3, 1).array()]
    found = on_arrays(mod, ["main"], None)["main"](inputs)
    expected = build_reference(mod)(inputs)
    assert [x.dtype for x in found] == [x.dtype for x in expected]
    for x, y in zip(found, expected, strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-12, atol=1e-13)


def test_extrema_keep_nan_and_infinities():
    mod = plain(extremes, ((3, 4), F32))
    x = np.zeros((3, 4), "float32")
    x[0, 1], x[1, 2], x[2, 3] = np.nan, np.inf, -np.inf
    (found,) = on_arrays(mod, ["main"], None)["main"]([x])
    np.testing.assert_array_equal(found, build_reference(mod)([x])[0])


def test_finite_extremes_of_a_type_are_those_of_float64():
    mod = plain(lambda bb, x: op.maximum(x, op.negative(x)), ((3,), "float16"))
    x = np.array([-65504, 65504, 2], "float16")
    (found,) = on_arrays(mod, ["main"], None)["main"]([x])
    np.testing.assert_array_equal(found, build_reference(mod)([x])[0])
    assert found.max() > 1e308


@pytest.mark.parametrize(
    ("call", "shape", "dtype"),
    [
        (lambda bb, x: op.argmax(x, axis=1), (3, 5), F32),
        (lambda bb, x: op.cumsum(x, axis=1), (3, 5), F32),
        (lambda bb, x: op.add(x, x), (3, 5), "uint16"),
        (lambda bb, x: op.add(x, x), (3, "n"), F32),
    ],
    ids=["two results", "a scan", "dtype", "symbolic size"],
)
def test_it_refuses_what_it_does_not_compute(call, shape, dtype):
    sizes = [tvm.tirx.Var(n, "int64") if isinstance(n, str) else n for n in shape]
    assert not on_arrays(plain(call, (sizes, dtype)), ["main"], None)


@pytest.mark.parametrize(
    ("case", "wrong", "why"),
    [
        ("embedding", 11, "out of range"),
        ("embedding", -12, "out of range"),
        ("integers", 0, "zero"),
    ],
)
def test_it_refuses_data_that_compiled_code_refuses(case, wrong, why):
    mod = plain(*CASES[case])
    inputs = values(mod)
    inputs[1].flat[-1] = wrong
    with pytest.raises(NotOnArrays, match=why):
        on_arrays(mod, ["main"], None)["main"](inputs)


def test_without_torch_nothing_is_computed_this_way(monkeypatch):
    monkeypatch.delitem(sys.modules, "torch")
    assert not on_arrays(plain(extremes, ((3, 4), F32)), ["main"], None)


def test_a_right_result_takes_nothing_compiled_and_a_wrong_one_does(monkeypatch):
    mod = plain(*CASES["layer norm, gelu"])
    inputs = values(mod)
    exact = build_reference(mod)(inputs)[0]
    built = []

    def build(*arguments, **how):
        built.append(arguments)
        return build_reference(*arguments, **how)

    monkeypatch.setattr(allowance, "build_reference", build)
    right = exact.astype("float16")
    assert judge_outputs([right], Reference(mod, inputs)).passed
    assert not built
    right.flat[7] += 1
    assert not judge_outputs([right], Reference(mod, inputs)).passed
    assert len(built) == 2  # undisturbed, and disturbed


def test_no_more_is_drawn_than_a_result_takes():
    mod = plain(lambda bb, x: op.sum(x, axis=1), ((5, 300), F32))
    x = random_inputs(mod["main"])[0]
    x[:, 1::2] = -x[:, ::2]
    x[:, 0] += 1
    reference = Reference(mod, [x])
    grown = [bounds[0] for bounds in Reference(mod, [x]).growing_bounds()]
    assert len(grown) == len(allowance.DRAWS) + len(allowance.DECIDING)
    assert all((a <= b).all() for a, b in pairwise(grown))
    (bound,), (exact,) = reference.bounds, reference.outputs
    np.testing.assert_allclose(grown[-1], bound)
    quick = Reference(mod, [x])
    assert judge_outputs([(exact + bound.max()).astype("float32")], quick).passed
    assert "bounds" not in vars(quick.on_arrays)


def test_modes_of_torch_look_at_nothing_of_it():
    seen = []

    class Looks(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            seen.append(func)
            return func(*args, **(kwargs or {}))

    mod = plain(*CASES["attention"])
    with Looks():
        torch.ones(2)
        assert judge_outputs(build_reference(mod)(values(mod)), Reference(mod, values(mod)))
    assert len(seen) == 1


@pytest.mark.parametrize("threads", [1, 2])
def test_torch_has_its_threads_back(threads):
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        mod = plain(*CASES["attention"])
        on_arrays(mod, ["main"], None)["main"](values(mod))
        assert torch.get_num_threads() == threads
    finally:
        torch.set_num_threads(before)


def test_arrays_become_tensors_and_tensors_arrays():
    half = np.arange(6).reshape(2, 3).astype(ml_dtypes.bfloat16)[:, ::-1]
    tensor = like(half, torch.zeros(1))
    assert tensor.dtype == torch.bfloat16
    np.testing.assert_array_equal(like(tensor, half), half)
    np.testing.assert_array_equal(as_array(tensor.T).astype("float32"), half.T.astype("float32"))


# ---- Tensors that are written to.

ROWS = relax.TensorType((6, 3), F32)


def writes(write, in_place, reads_old=False):
    """`main` of a tensor, the indices of its rows and values to the tensor after a write and what
    is computed of it."""
    x, places = relax.Var("x", ROWS), relax.Var("places", relax.TensorType((4,), "int64"))
    values = relax.Var("values", relax.TensorType(write.values, F32))
    bb = relax.BlockBuilder()
    function = bb.add_func(write_function(write, in_place), "write")
    with bb.function("main", [x, places, values]):
        before = bb.emit(op.exp(x))
        arguments = [x, places, values]
        if in_place:
            new = bb.emit(op.call_tir_inplace(function, arguments, [0], ROWS))
        else:
            new = bb.emit(op.call_tir(function, arguments, ROWS))
        after = bb.emit(op.add(x if reads_old else new, before))
        bb.emit_func_output(relax.Tuple([new, after]))
    return plain_module(bb.get(), LLVM)


def row_write(adds=False, wraps=True, values=(4, 3)):
    return Write((6, 3), F32, (((4,), "int64"), None), values, adds, wraps=wraps)


@pytest.mark.one_in(3)
@pytest.mark.parametrize("in_place", [False, True], ids=["copy", "in place"])
@pytest.mark.parametrize("values", [(4, 3), (3,), ()], ids=["rows", "row", "number"])
@pytest.mark.parametrize("adds", [False, True], ids=["writes", "adds"])
def test_writes_are_those_of_compiled_loops(in_place, values, adds):
    mod = writes(row_write(adds, values=values), in_place)
    x, _, new = random_inputs(mod["main"])
    kept, places = x.copy(), np.array([4, -6, 2, 0])  # the last one is where the second is
    found = on_arrays(mod, ["main"], None)["main"]([x, places, new])
    expected = build_reference(mod)([x, places, new])
    for ours, theirs in zip(found, expected, strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-14)
    np.testing.assert_array_equal(x, kept)
    np.testing.assert_array_equal(found[0][[1, 3, 5]], kept[[1, 3, 5]].astype("float64"))


@pytest.mark.parametrize("place", [6, -1])
def test_a_write_out_of_range_is_refused(place):
    mod = writes(row_write(wraps=False), in_place=True)
    x, _, new = random_inputs(mod["main"])
    with pytest.raises(NotOnArrays, match="out of range"):
        on_arrays(mod, ["main"], None)["main"]([x, np.array([4, place, 2, 0]), new])


def test_what_is_read_by_its_old_name_after_a_write_in_place_is_left_to_compiled_loops():
    assert on_arrays(writes(row_write(), in_place=False, reads_old=True), ["main"], None)
    assert not on_arrays(writes(row_write(), in_place=True, reads_old=True), ["main"], None)
