"""Products that a policy lets tensor cores round: right ones pass, wrong ones do not."""

import numpy as np
import pytest
import torch
from tvm import te, tirx
from tvm.relax import op

from tests.support.graphs import module
from tvm_fusion.check.allowance import Reference
from tvm_fusion.check.bounds.rounded_products import adds_products, with_rounded_products
from tvm_fusion.check.inputs import random_inputs
from tvm_fusion.check.verify import judge_outputs
from tvm_fusion.config import load_policy, resolve_target
from tvm_fusion.torch_backend.options import BackendOptions
from tvm_fusion.transform.pipeline import lower

EXACT, ROUNDED = load_policy(None), load_policy({"allow_tf32": True})
LLVM, _ = resolve_target("llvm")


def lowered(emit, *inputs):
    graph = module(lambda bb, *params: bb.emit(emit(bb, *params)), *inputs)
    return lower(graph, LLVM, decompose=False)


def to_tfloat32(x):
    """To the nearest number of 10 bits of mantissa."""
    bits = x.view("uint32").astype("uint64")
    return ((bits + 0x1000) & 0xFFFFE000).astype("uint32").view("float32")


def products_of(emit, *inputs):
    mod = lowered(emit, *inputs)
    funcs = [f for _, f in mod.functions_items() if isinstance(f, tirx.PrimFunc)]
    return [adds_products(f.body) for f in funcs]


def weighted_sum(x):
    """Terms are multiplied by what no memory holds."""
    k = te.reduce_axis((0, x.shape[1]), "k")
    return te.compute((x.shape[0],), lambda i: te.sum(x[i, k] * k.var.astype(x.dtype), axis=k))


@pytest.mark.parametrize(
    ("emit", "shapes", "dtype", "expected"),
    [
        (lambda bb, x, w: op.matmul(x, w), [(4, 8), (8, 6)], "float32", [True]),
        (
            lambda bb, x, w: op.nn.conv2d(x, w, padding=1),
            [(1, 4, 6, 6), (8, 4, 3, 3)],
            "float32",
            [True],
        ),
        (lambda bb, x, w: op.matmul(x, w), [(4, 8), (8, 6)], "float16", [False]),
        (lambda bb, x: op.variance(x, axis=-1), [(4, 8)], "float32", [False]),
        (lambda bb, x: op.sum(x, axis=-1), [(4, 8)], "float32", [False]),
        (lambda bb, x: bb.call_te(weighted_sum, x), [(4, 8)], "float32", [False]),
        (lambda bb, x, w: op.multiply(x, w), [(4, 8), (4, 8)], "float32", [False]),
    ],
)
def test_products_are_told_by_what_they_read(emit, shapes, dtype, expected):
    assert products_of(emit, *((shape, dtype) for shape in shapes)) == expected


BEHIND = [(lambda y: y, lambda y: y), (op.tanh, np.tanh)]


@pytest.mark.parametrize(("behind", "last"), BEHIND, ids=["alone", "tanh"])
def test_rounded_operands_pass_where_the_policy_allows_them_and_wrong_sums_never(behind, last):
    mod = lowered(
        lambda bb, x, w: behind(bb.emit(op.matmul(x, w))),
        ((40, 300), "float32"),
        ((300, 24), "float32"),
    )
    x, w = inputs = [x.copy() for x in random_inputs(mod["main"])]
    w /= np.float32(300**0.5)  # where tanh bends
    right = last(to_tfloat32(x).astype("float64") @ to_tfloat32(w)).astype("float32")
    wrong = last(to_tfloat32(x)[:, 1:].astype("float64") @ to_tfloat32(w)[1:]).astype("float32")
    exact = Reference(with_rounded_products(mod, EXACT), inputs)
    rounded = Reference(with_rounded_products(mod, ROUNDED), inputs)
    assert not judge_outputs([right], exact).passed
    assert judge_outputs([right], rounded).passed
    assert not judge_outputs([wrong], rounded).passed


def test_what_is_no_product_is_as_exact_as_before():
    mod = lowered(lambda bb, x: op.sum(x, axis=-1), ((40, 300), "float32"))
    inputs = [x.copy() for x in random_inputs(mod["main"])]
    off = to_tfloat32(inputs[0]).astype("float64").sum(-1).astype("float32")
    assert not judge_outputs([off], Reference(with_rounded_products(mod, ROUNDED), inputs)).passed


@pytest.fixture
def precision():
    """torch's switches, as they were before."""
    matmul, conv = torch.backends.cuda.matmul, torch.backends.cudnn.conv
    before = torch.get_float32_matmul_precision(), conv.fp32_precision
    yield conv
    torch.set_float32_matmul_precision(before[0])
    conv.fp32_precision = before[1]
    assert matmul.fp32_precision != "tf32"


def test_torch_compile_rounds_where_torch_does(precision):
    gpu, cpu = torch.device("cuda"), torch.device("cpu")
    options = BackendOptions.of({}, None)
    assert options.policy_on(gpu) is None
    torch.set_float32_matmul_precision("high")
    assert options.policy_on(gpu) == {"allow_tf32": True}
    assert options.policy_on(cpu) is None
    assert BackendOptions.of({"policy": "default"}, None).policy_on(gpu) == "default"
    precision.fp32_precision = "ieee"
    assert options.policy_on(gpu) is None
