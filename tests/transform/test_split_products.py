"""Products of long sums taken apart: which, in what pieces, and that the numbers stay."""

import dataclasses

import numpy as np
import pytest
import tvm
from tvm import relax, tirx
from tvm.relax import op

from tvm_fusion.config import load_policy, load_profile
from tvm_fusion.flow.planned import Planned
from tvm_fusion.transform.rewrites.split_products import Sizes, SplitProducts, piece_terms

from ..support.decompose_tools import calls
from ..support.graphs import module
from ..support.helpers_tir import quick_executable
from ..support.module_on_cpu import EmulatedModule

H200 = load_profile("nvidia_h200")
RNG = np.random.default_rng(32)


def product(bb, x, w):
    return bb.emit(op.matmul(x, w, out_dtype="float32"))


def gradient(bb, x, w):
    """Of a weight: the terms are the rows of both."""
    return product(bb, bb.emit(op.permute_dims(x)), w)


def linear(bb, x, w):
    return product(bb, x, bb.emit(op.permute_dims(w)))


def turned(bb, x, w):
    """The left operand transposed within its batches, the right one shared by these."""
    return product(bb, bb.emit(op.permute_dims(x, [0, 2, 1])), w)


def in_half(bb, x, w):
    return bb.emit(op.matmul(bb.emit(op.permute_dims(x)), w, out_dtype="float16"))


def products(mod):
    return [call for _, call in calls(mod) if call.op.name == "relax.matmul"]


CASES = {
    "gradient, equal pieces": (gradient, (4096, 40), (4096, 24), "float32"),
    "gradient, terms left over": (gradient, (5003, 37), (5003, 21), "float32"),
    "neighbouring terms": (linear, (48, 4099), (24, 4099), "float32"),
    "batches": (turned, (3, 4100, 24), (4100, 20), "float16"),
    "stored in half": (in_half, (16000, 40), (16000, 24), "float16"),
}


@pytest.mark.one_in(2)
@pytest.mark.parametrize(("emit", "x", "w", "dtype"), CASES.values(), ids=CASES)
def test_a_product_of_long_sums_becomes_a_sum_of_products(emit, x, w, dtype):
    mod = module(emit, (x, dtype), (w, dtype))
    result = SplitProducts(H200)(mod)
    assert relax.analysis.check_well_formed(result)
    found = products(result)
    assert {str(call.ty.dtype) for call in found} == {"float32"}
    pieces = int(found[0].ty.shape[-3])
    assert pieces > 8
    each, *left = (int(call.args[0].ty.shape[-1]) for call in found)
    assert pieces * each + sum(left) == x[-2 if emit is not linear else -1]
    arrays = [RNG.standard_normal(shape).astype(dtype) for shape in (x, w)]
    machine = relax.VirtualMachine(quick_executable(result), tvm.cpu())
    got = machine["main"](*map(tvm.runtime.tensor, arrays)).numpy()
    left, right = (a.astype("float64") for a in arrays)
    left = left if emit is linear else np.swapaxes(left, -1, -2)
    expected = left @ (right.T if emit is linear else right)
    bound = (1e-3 if emit is in_half else 1e-5) * np.abs(expected).max()
    assert np.abs(got - expected).max() <= bound


@pytest.mark.parametrize(
    ("emit", "x", "w", "dtype"),
    [
        (product, (4096, 4096), (4096, 4096), "float32"),
        (product, (16, 8192), (8192, 64), "float16"),
        (product, (64, 200), (200, 64), "float32"),
        (product, (64, tirx.Var("k", "int64")), None, "float32"),
        (product, (tirx.Var("m", "int64"), 8192), (8192, 64), "float16"),
        (product, (64, 8192), (8192, 64), "float64"),
        (lambda bb, x, w: op.add(x, w), (64, 8192), (64, 8192), "float32"),
    ],
    ids=[
        "many tiles",
        "few rows",
        "short",
        "symbolic terms",
        "symbolic rows",
        "float64",
        "no product",
    ],
)
def test_other_products_are_returned_as_they_are(emit, x, w, dtype):
    mod = module(emit, (x, dtype), (w or (x[1], 64), dtype))
    assert SplitProducts(H200)(mod).same_as(mod)


@pytest.mark.parametrize("terms", [1 << 16, 36569, 99991])
@pytest.mark.parametrize(("rows", "columns"), [(443, 109), (64, 64), (512, 512)])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_pieces_start_at_whole_vectors_and_fill_the_device(terms, rows, columns, dtype):
    sizes = Sizes(1, rows, columns, terms, dtype)
    each = piece_terms(sizes, H200)
    assert each * sizes.element_bytes % 16 == 0
    tiles = -(-rows // 32) * -(-columns // 64)  # of the smaller ones
    assert terms / each * tiles >= 0.75 * H200.num_sms


@pytest.mark.one_in(2)
@pytest.mark.parametrize(("dtype", "terms"), [("float32", 3001), ("float16", 9001)])
def test_the_plan_sums_the_pieces_and_the_emulator_gets_it_right(dtype, terms):
    shapes = [(terms, 72), (terms, 40)]
    mod = module(gradient, *((shape, dtype) for shape in shapes))
    few = dataclasses.replace(H200, num_sms=16, launch_us=0.2)
    policy = dataclasses.replace(load_policy(None), probe="off")
    planned = Planned.of(mod, few.to_target(), few, policy)
    assert planned.plan.rewrites == ("split_products",)
    arrays = [RNG.standard_normal(shape).astype(dtype) for shape in shapes]
    run = EmulatedModule.of(planned)
    (got,) = run(arrays)
    assert not run.failures
    assert not run.cuts
    expected = arrays[0].T.astype("float64") @ arrays[1].astype("float64")
    assert np.abs(got - expected).max() <= 1e-5 * np.abs(expected).max()
