"""Operators of 16-bit floats, whole: their types, and what they compute.

Modules are checked and left as they are, since a check of another kind mends what is wrong.
"""

import ml_dtypes
import numpy as np
import pytest
import torch
import tvm
from torch.nn import functional as F
from tvm import relax, tirx
from tvm.relax import op

import tvm_fusion
from tvm_fusion.transform.lower.legalizers import DTYPES
from tvm_fusion.transform.pipeline import lower

from ..support import graphs

SHAPE, CHANNELS = (2, 4, 8, 6), 4
HALVES = ["float16", "bfloat16"]


def module(dtype, shapes, result):
    """A module that returns `result(*inputs)`."""
    return graphs.module(
        lambda bb, *inputs: bb.normalize(result(*inputs)), *((shape, dtype) for shape in shapes)
    )


def batch_norm(dtype, training=False):
    """relu(batch_norm(x) + x)."""

    def result(x, *numbers):
        normed = op.nn.batch_norm(x, *numbers, axis=1, training=training)
        return op.nn.relu(op.add(relax.TupleGetItem(normed, 0), x))

    return module(dtype, [SHAPE, *[(CHANNELS,)] * 4], result)


POOLS = {
    f"relax.nn.adaptive_avg_pool{n}d": (
        [(2, 4, *(7, 5, 3)[:n])],
        lambda x, n=n: getattr(op.nn, f"adaptive_avg_pool{n}d")(x, (3, 2, 2)[:n]),
    )
    for n in (1, 2, 3)
}
OTHERS = {
    **POOLS,
    "relax.image.grid_sample": ([SHAPE, (2, 2, 8, 6)], op.image.grid_sample),
    "relax.isfinite": ([SHAPE], op.isfinite),
    "relax.isinf": ([SHAPE], op.isinf),
    "relax.isnan": ([SHAPE], op.isnan),
    "relax.log_add_exp": ([SHAPE, SHAPE], op.log_add_exp),
    "relax.power": ([SHAPE, SHAPE], op.power),
    "relax.vision.roi_align": (
        [SHAPE, (3, 5)],
        lambda x, boxes: op.vision.roi_align(x, boxes, (3, 3), 1.0, 2),
    ),
}


def roi_align(x, boxes):
    """3 by 3 bins of boxes within the map, each the mean of 2 by 2 samples."""
    places = (torch.arange(6, dtype=torch.float64) + 0.5) / 6
    found = []
    for number, left, top, right, bottom in boxes:
        columns = 2 * (left + (right - left) * places) / (x.shape[3] - 1) - 1
        rows = 2 * (top + (bottom - top) * places) / (x.shape[2] - 1) - 1
        grid = torch.stack(torch.meshgrid(columns, rows, indexing="xy"), -1)
        samples = F.grid_sample(x[int(number)][None], grid[None], align_corners=True)
        found.append(F.avg_pool2d(samples, 2)[0])
    return torch.stack(found)


EXACT = {
    "relax.nn.adaptive_avg_pool1d": lambda x: F.adaptive_avg_pool1d(x, 3),
    "relax.nn.adaptive_avg_pool2d": lambda x: F.adaptive_avg_pool2d(x, (3, 2)),
    "relax.nn.adaptive_avg_pool3d": lambda x: F.adaptive_avg_pool3d(x, (3, 2, 2)),
    "relax.image.grid_sample": lambda x, grid: F.grid_sample(
        x, grid.permute(0, 2, 3, 1), align_corners=False
    ),
    "relax.isfinite": torch.isfinite,
    "relax.isinf": torch.isinf,
    "relax.isnan": torch.isnan,
    "relax.log_add_exp": torch.logaddexp,
    "relax.power": torch.pow,
    "relax.vision.roi_align": roi_align,
}


def inputs_of(name, dtype):
    """Arrays of which the operator has a result, other than the same everywhere."""
    rng = np.random.default_rng(0)
    given = [rng.standard_normal(shape) for shape in OTHERS[name][0]]
    if name.startswith("relax.is"):
        given[0].flat[:3] = np.nan, np.inf, -np.inf
    if name == "relax.power":
        given[0] = np.abs(given[0])
    if name == "relax.vision.roi_align":
        given[1] = np.array([[0, 0, 0, 5, 7], [1, 1, 2, 4.5, 6], [1, 0.5, 0.25, 3, 3.5]])
    return [x.astype(dtype) for x in given]


def other(name, dtype):
    """An operator, and one of the same type that reads its result."""
    shapes, call = OTHERS[name]

    def result(*inputs):
        found = call(*inputs)
        return (
            op.logical_not(found)
            if name.startswith("relax.is")
            else op.add(found, relax.const(1.0, dtype))
        )

    return module(dtype, shapes, result)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
@pytest.mark.parametrize("training", [False, True])
def test_a_batch_norm_keeps_its_type(dtype, training):
    low = lower(batch_norm(dtype, training), tvm.target.Target("llvm"), decompose=False)
    assert str(low["main"].body.ty.dtype) == dtype
    assert any("batch_norm" in gvar.name_hint for gvar in low.functions)


def test_a_batch_norm_computes_in_float32():
    rng = np.random.default_rng(0)
    x = rng.standard_normal(SHAPE).astype("float16")
    gamma, beta, mean = (rng.standard_normal(CHANNELS).astype("float16") for _ in range(3))
    variance = rng.uniform(0.5, 2, CHANNELS).astype("float16")
    compiled = tvm_fusion.compile(batch_norm("float16"), "llvm", verify="report")
    assert compiled.report.verify.passed
    g, b, m, v = (a.astype("float64").reshape(1, -1, 1, 1) for a in (gamma, beta, mean, variance))
    wanted = np.maximum((x - m) / np.sqrt(v + 1e-5) * g + b + x, 0)
    got = compiled(x, gamma, beta, mean, variance)
    assert np.abs(got - wanted).max() < 5e-3 * np.abs(wanted).max()


def test_every_operator_of_the_table_is_tested():
    elsewhere = {
        "relax.nn.batch_norm",
        "relax.median",
    }  # median: tests/transform/test_widen_sorts.py
    assert OTHERS.keys() | elsewhere == DTYPES.keys() | {"relax.isfinite", "relax.isinf"}


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("name", OTHERS)
def test_results_keep_their_types_and_the_operator_is_one_kernel(name, dtype):
    mod = other(name, dtype)
    low = lower(mod, tvm.target.Target("llvm"), decompose=False)
    tvm.ir.assert_structural_equal(low["main"].ret_ty, mod["main"].ret_ty)
    calls = [b for block in low["main"].body.blocks for b in block.bindings]
    calls = [b for b in calls if isinstance(b.value, relax.Call)]
    assert len(calls) == 2


@pytest.mark.one_in(16)
@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("name", OTHERS)
def test_they_compile_and_agree_with_float64(name, dtype):
    compiled = tvm_fusion.compile(other(name, dtype), "llvm", verify="report")
    given = inputs_of(name, dtype)
    wanted = EXACT[name](*(torch.from_numpy(x.astype("float64")) for x in given)).numpy()
    wanted = np.logical_not(wanted) if name.startswith("relax.is") else wanted + 1
    got = np.asarray(compiled(*given)).astype("float64")
    eps = float(ml_dtypes.finfo(dtype).eps)  # rounded twice: the operator, and the sum with 1
    np.testing.assert_allclose(got, wanted, rtol=eps, atol=eps)
    assert compiled.report.verify.passed


def test_a_power_is_rounded_once_and_fuses_with_what_stands_around():
    def result(x):
        power = op.power(op.abs(x), relax.const(2.5, "bfloat16"))
        return op.nn.relu(op.add(power, x))

    compiled = tvm_fusion.compile(module("bfloat16", [SHAPE], result), "llvm", verify="report")
    assert len(compiled.plan.groups) == 1
    x = np.random.default_rng(0).standard_normal(SHAPE).astype(ml_dtypes.bfloat16)
    wide = x.astype("float64")
    wanted = np.maximum(np.abs(wide) ** 2.5 + wide, 0)
    got = np.asarray(compiled(x)).astype("float64")
    np.testing.assert_allclose(got, wanted, rtol=8e-3, atol=1e-6)


def test_special_values_of_bfloat16_are_told_apart():
    values = np.array([0, 1, -np.inf, np.inf, np.nan, 3e38], ml_dtypes.bfloat16)

    def result(x):
        return relax.Tuple([op.isnan(x), op.isinf(x), op.isfinite(x)])

    mod = module("bfloat16", [values.shape], result)
    compiled = tvm_fusion.compile(mod, "llvm", verify="report")
    wide = values.astype("float32")
    for got, wanted in zip(
        compiled(values), (np.isnan(wide), np.isinf(wide), np.isfinite(wide)), strict=True
    ):
        np.testing.assert_array_equal(got, wanted)


def test_wider_floats_are_legalized_as_ever():
    mod = module("float32", [SHAPE, SHAPE], op.power)
    with tvm.target.Target("llvm"):
        stock = relax.transform.LegalizeOps()(mod)
    low = lower(mod, tvm.target.Target("llvm"), decompose=False)
    (ours,) = [f for f in low.functions.values() if isinstance(f, tvm.tirx.PrimFunc)]
    (theirs,) = [f for f in stock.functions.values() if isinstance(f, tvm.tirx.PrimFunc)]
    tvm.ir.assert_structural_equal(ours, theirs)


# ---- means of more elements than float16 can count


@pytest.mark.one_in(12)
@pytest.mark.parametrize("name", ["mean", "variance", "std"])
@pytest.mark.parametrize(
    ("shape", "axis"),
    [((65_504,), None), ((65_505,), None), ((3, 70_001), [1]), ((300, 301), None)],
)
def test_means_of_many_halves_are_finite(name, shape, axis):
    mod = module("float16", [shape], lambda x: getattr(op, name)(x, axis))
    compiled = tvm_fusion.compile(mod, "llvm", verify="report")
    assert compiled.report.verify.passed
    x = (np.random.default_rng(0).standard_normal(shape) + 1).astype("float16")
    numpy = {"mean": np.mean, "variance": np.var, "std": np.std}[name]
    wanted = numpy(x.astype("float64"), axis=None if axis is None else tuple(axis))
    np.testing.assert_allclose(compiled(x), wanted, rtol=2e-3)


@pytest.mark.parametrize("rows", [65_503, 65_504, tirx.Var("n", "int64")])
def test_only_means_that_need_it_compute_in_float32(rows):
    mod = module("float16", [(rows, 2)], lambda x: op.mean(x, [0]))
    low = lower(mod, tvm.target.Target("llvm"), decompose=False)
    tvm.ir.assert_structural_equal(low["main"].ret_ty, mod["main"].ret_ty)
    assert ("float32" in low.script()) == (str(rows) != "65503")


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("scale", [None, 1.0])
def test_attention_that_is_left_whole_keeps_its_type(dtype, scale):
    def masked(q, k, v, bias):
        factor = None if scale is None else tirx.FloatImm("float32", scale)
        attention = op.nn.attention(q, k, v, bias, factor)
        return op.where(op.not_equal(q, v), attention, relax.const(0.0, dtype))

    mod = module(dtype, [(1, 4, 2, 8)] * 3 + [(1, 2, 4, 4)], masked)
    low = lower(mod, tvm.target.Target("llvm"), decompose=False)
    tvm.ir.assert_structural_equal(low["main"].ret_ty, mod["main"].ret_ty)


@pytest.mark.one_in(3)
@pytest.mark.parametrize("name", ["layer_norm", "instance_norm", "group_norm"])
def test_norms_of_float64_are_checked(name):
    """TVM has them in float32 and float16 only."""
    x = np.random.default_rng(0).standard_normal((2, 4, 9))
    size = 9 if name == "layer_norm" else 4
    weights = [relax.const(np.full(size, n), "float64") for n in (2.0, 1.0)]
    norm = {
        "layer_norm": lambda x: op.nn.layer_norm(x, *weights, axes=-1),
        "instance_norm": lambda x: op.nn.instance_norm(x, *weights, 1, [2]),
        "group_norm": lambda x: op.nn.group_norm(x, *weights, 2, 1, [2]),
    }[name]
    compiled = tvm_fusion.compile(module("float64", [x.shape], norm), "llvm", verify="report")
    assert compiled.report.verify.passed
    rows = x.reshape(2, 2, 18) if name == "group_norm" else x
    rows = (rows - rows.mean(-1, keepdims=True)) / np.sqrt(rows.var(-1, keepdims=True) + 1e-5)
    np.testing.assert_allclose(compiled(x), rows.reshape(x.shape) * 2 + 1, rtol=1e-10)


@pytest.mark.parametrize(("dtype", "least"), [("float16", 65520.0), ("bfloat16", 3.39615e38)])
def test_what_rounds_to_infinity_is_infinite_before_it_is_rounded(dtype, least):
    mod = module(dtype, [(4,)], lambda x: op.isinf(op.multiply(x, relax.const(2.0, dtype))))
    x = np.array([least / 4, 0.99 * least / 2, 1.01 * least / 2, np.nan], dtype)
    compiled = tvm_fusion.compile(mod, "llvm", verify=False)
    assert compiled.report.launches.fused == 1
    np.testing.assert_array_equal(compiled(x), [False, False, True, False])
    wanted = torch.isinf(torch.tensor(x.astype("float32")).to(getattr(torch, dtype)) * 2)
    np.testing.assert_array_equal(compiled(x), wanted)
