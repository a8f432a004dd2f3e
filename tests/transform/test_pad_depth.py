"""Products filled up with zeros: which, where the zeros are, and that the numbers stay."""

import ml_dtypes
import numpy as np
import pytest
import tvm
from tvm import relax, tirx
from tvm.relax import op
from tvm.script import ir as I
from tvm.script import relax as R

from tvm_fusion.config import load_policy, load_profile
from tvm_fusion.ir.graph import build_graph
from tvm_fusion.plan.search.search import search
from tvm_fusion.transform.pipeline import lower
from tvm_fusion.transform.rewrites.pad_depth import PadDepth

from ..support.decompose_tools import calls, operators
from ..support.graphs import module
from ..support.helpers_tir import quick_executable

H200 = load_profile("nvidia_h200")
RNG = np.random.default_rng(13)


def product(bb, x, w):
    return bb.emit(op.matmul(x, w, out_dtype="float32"))


def linear(bb, x, w):
    return product(bb, x, bb.emit(op.permute_dims(w)))


def run(mod, *arrays):
    executable = quick_executable(mod)
    result = relax.VirtualMachine(executable, tvm.cpu())["main"](*map(tvm.runtime.tensor, arrays))
    many = not isinstance(result, tvm.runtime.Tensor)
    return [r.numpy() for r in result] if many else [result.numpy()]


def terms(mod):
    """How many terms each product of a module sums up."""
    products = [call for _, call in calls(mod) if call.op.name == "relax.matmul"]
    return [int(call.args[0].ty.shape[-1]) for call in products]


@pytest.mark.parametrize("emit", [product, linear])
@pytest.mark.parametrize("known", [True, False], ids=["constant", "input"])
@pytest.mark.parametrize(("depth", "filled"), [(61, 64), (99, 104), (9, 16)])
def test_a_product_over_an_odd_number_of_terms_is_filled_up(emit, known, depth, filled):
    x = RNG.standard_normal((2, 40, depth)).astype("float16")
    w = RNG.standard_normal((24, depth) if emit is linear else (depth, 24)).astype("float16")
    given = [x] if known else [x, w]
    mod = module(
        lambda bb, a, *b: emit(bb, a, *(b or [relax.const(w)])),
        *[(a.shape, "float16") for a in given],
    )
    result = PadDepth(H200)(mod)
    assert relax.analysis.check_well_formed(result)
    assert terms(result) == [filled]
    assert operators(result).count("nn.pad") == len(given)
    assert PadDepth(H200)(result).same_as(result)
    expected = x.astype("float64") @ (w.T if emit is linear else w).astype("float64")
    (got,) = run(result, *given)
    assert np.abs(got - expected).max() <= 1e-5 * np.abs(expected).max()


def test_products_of_one_tensor_share_its_copy():
    weights = [relax.const(RNG.standard_normal((24, 61)).astype("float16")) for _ in range(2)]
    mod = module(lambda bb, x: [linear(bb, x, w) for w in weights], ((80, 61), "float16"))
    assert operators(PadDepth(H200)(mod)).count("nn.pad") == 1


def test_symbolic_rows_are_filled_too():
    n = tirx.Var("n", "int64")
    w = RNG.standard_normal((61, 24)).astype("float16")
    mod = module(lambda bb, x: product(bb, x, relax.const(w)), ((n, 61), "float16"))
    x = RNG.standard_normal((7, 61)).astype("float16")
    (got,) = run(PadDepth(H200)(mod), x)
    np.testing.assert_allclose(got, x.astype("float64") @ w.astype("float64"), atol=1e-3)


@pytest.mark.parametrize(
    ("emit", "inputs"),
    [
        (product, (((80, 64), "float16"), ((64, 24), "float16"))),
        (product, (((63, 61), "float16"), ((61, 24), "float16"))),
        (product, (((80, 61), "float32"), ((61, 24), "float32"))),
        (product, (((80, tirx.Var("k", "int64")), "float16"), ((61, 24), "float16"))),
        (
            lambda bb, x, w: product(bb, bb.emit(op.permute_dims(x)), w),
            (((61, 80), "float16"), ((61, 24), "float16")),
        ),
        (lambda bb, x, w: op.add(x, w), (((80, 61), "float16"), ((80, 61), "float16"))),
    ],
    ids=["even", "few rows", "float32", "symbolic", "transposed", "no product"],
)
def test_what_need_not_be_filled_is_returned_as_it_is(emit, inputs):
    if any(not isinstance(e, int) for e in inputs[0][0]):
        (shape, dtype), (_, other) = inputs
        inputs = ((shape, dtype), ((shape[1], 24), other))
    mod = module(emit, *inputs)
    assert PadDepth(H200)(mod).same_as(mod)


def test_a_cpu_fills_nothing():
    mod = module(product, ((80, 61), "float16"), ((61, 24), "float16"))
    assert PadDepth(load_profile("llvm"))(mod).same_as(mod)
    assert PadDepth(None)(mod).same_as(mod)


def test_float8_rows_are_filled_to_sixteen_elements():
    w = relax.const(RNG.standard_normal((100, 24)).astype(ml_dtypes.float8_e4m3fn))
    mod = module(lambda bb, x: product(bb, x, w), ((80, 100), "float8_e4m3fn"))
    assert terms(PadDepth(H200)(mod)) == [112]


def test_the_zeros_are_written_by_what_computes_the_operand():
    w = relax.const(RNG.standard_normal((999, 512)).astype("float16"))

    def emit(bb, x):
        return product(bb, bb.emit(op.nn.relu(x)), w)

    mod = module(emit, ((1024, 999), "float16"))
    low = lower(mod, H200.to_target(), hw=H200, rewrites=("pad_depth",))
    graph = build_graph(low)
    found = search(graph, H200, load_policy(None))
    assert [g.kernel_class for g in found.groups] == ["pointwise", "gemm"]


@I.ir_module
class Branches:
    @R.function
    def main(
        x: R.Tensor((70, 99), "float16"), w: R.Tensor((99, 8), "float16"), c: R.Tensor((), "bool")
    ):
        if c:
            a = R.matmul(x, w)
            y = R.add(a, a)
        else:
            y = R.matmul(x, w)
        z = R.matmul(x, w)
        out = R.add(y, z)
        return out


def test_what_is_filled_within_a_branch_is_not_read_behind_it():
    result = PadDepth(H200)(Branches)
    assert relax.analysis.check_well_formed(result)
    *_, last = [call for _, call in calls(result) if call.op.name == "relax.matmul"]
    assert [int(n) for n in last.args[0].ty.shape] == [70, 104]
