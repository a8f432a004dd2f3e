"""Decode attention on CUDA: numbers on the emulator against float64."""

import dataclasses
import math

import numpy as np
import pytest
from tvm import tirx

from tvm_fusion.config import load_profile
from tvm_fusion.kernels.attention.decode.kernel import DecodeConfig, emit_attention_decode
from tvm_fusion.kernels.attention.decode.problem import read_decode
from tvm_fusion.kernels.attention.read.program import analyze_attention
from tvm_fusion.kernels.contraction.model import Operand, fresh_var
from tvm_fusion.kernels.program.expr import constant

from ...support import attention_masks as masks
from ...support.attention_graphs import Sizes as GraphSizes
from ...support.attention_graphs import masked
from ...support.cuda_on_cpu import run_cuda_on_cpu
from ...support.decode_cases import Sizes, arrays_of, attention_of, int64, reference
from ...support.kernel_cases import assert_close, outputs_of

H200 = load_profile("nvidia_h200")
HIDDEN = -np.inf
SMALL = Sizes(2, 4, 2, 3, 70, 64, 64)
ONE_QUERY = Sizes(3, 4, 2, 1, 70, 64, 64)
SPLIT = DecodeConfig(2, 2, 16, 2)
LENGTHS = np.array([0, 37, 70], np.int32)
KEYS = np.arange(70)
LAST = LENGTHS[:, None, None, None]


def run(sizes, config, values=None, mask=None, layout="bhsd", paged=0, hw=H200, **how):
    """Runs one kernel; its outputs and those of float64."""
    attention = attention_of(sizes, layout=layout, paged=paged, lse=True, **how)
    arrays = arrays_of(attention, values)
    inputs = {name: a.copy() for name, a in arrays.items()}
    kernel = emit_attention_decode(attention, hw, config)
    assert run_cuda_on_cpu(kernel, list(arrays.values())) == 1
    return arrays, reference(inputs, sizes, layout, mask=mask, paged=paged)


def assert_right(sizes, config, **how):
    arrays, (y, lse) = run(sizes, config, **how)
    assert_close(arrays["y"], y, how.get("dtype", "float16"))
    empty = np.isneginf(lse)
    assert np.array_equal(np.isneginf(arrays["lse"]), empty)
    np.testing.assert_allclose(arrays["lse"][~empty], lse[~empty], atol=1e-4)
    return arrays


def length_of(p):
    return tirx.Cast("int64", p.load("lengths", p.b))


# ---- numbers

CONFIGS = {
    "one warp": (Sizes(1, 1, 1, 1, 16, 16, 16), DecodeConfig(1, 1, 16, 2)),
    "one key": (Sizes(1, 2, 2, 1, 1, 64, 64), DecodeConfig(1, 2, 16, 2)),
    "fewer keys than warps": (Sizes(2, 2, 1, 1, 20, 64, 64), DecodeConfig(2, 4, 16, 3)),
    "three blocks, deep ring": (Sizes(1, 4, 4, 1, 300, 64, 64), DecodeConfig(3, 2, 16, 4)),
    "steps of 32 keys": (Sizes(1, 4, 2, 5, 131, 64, 32), DecodeConfig(2, 2, 32, 3)),
    "16 rows, head of 40": (Sizes(1, 4, 4, 4, 70, 40, 24), DecodeConfig(2, 1, 32, 2)),
    "two tiles, queries in memory": (Sizes(1, 2, 2, 13, 70, 128, 128), DecodeConfig(2, 1, 32, 2)),
    "chunks of rows": (Sizes(1, 2, 1, 50, 70, 64, 64), DecodeConfig(2, 2, 16, 2)),
    "many queries of shared heads": (Sizes(1, 6, 2, 49, 70, 64, 64), DecodeConfig(2, 2, 16, 2)),
    "head of 256": (Sizes(1, 2, 2, 10, 70, 256, 256), SPLIT),
    "head of 34": (Sizes(1, 2, 2, 1, 70, 34, 22), SPLIT),
    "heads of 192 and 96": (Sizes(1, 2, 2, 10, 70, 192, 96), SPLIT),
    "heads of 80 and 112": (Sizes(1, 2, 2, 10, 70, 80, 112), DecodeConfig(2, 2, 32, 2)),
    "whole steps": (Sizes(1, 4, 4, 1, 256, 128, 128), DecodeConfig(2, 2, 64, 3)),
}


@pytest.mark.one_in(8)
@pytest.mark.parametrize("name", CONFIGS)
def test_result_and_lse_are_those_of_float64(name):
    sizes, config = CONFIGS[name]
    assert_right(sizes, config)


@pytest.mark.parametrize(
    "how",
    [
        {"layout": "bshd"},
        {"layout": "packed"},
        {"dtype": "bfloat16"},
        {"pad": 4},
        {"pad": 2},
    ],
    ids=str,
)
def test_keys_lie_in_memory_as_they_like(how):
    assert_right(SMALL, SPLIT, **how)


@pytest.mark.parametrize("page", [16, 15])
def test_pages_of_keys_are_found_through_a_table(page):
    sizes = Sizes(2, 4, 2, 1, 6 * page, 64, 64)
    table = np.random.default_rng(1).permutation(12).reshape(2, 6).astype(np.int32)
    assert_right(sizes, DecodeConfig(2, 2, 32, 2), paged=page, values={"table": table})


def test_keys_beyond_a_length_are_not_read_and_no_key_gives_zero():
    values = {"lengths": LENGTHS}
    for name in "kv":
        values[name] = np.random.default_rng(2).standard_normal((3, 2, 70, 64)).astype(np.float16)
        values[name][1, :, 37:] = np.nan
    arrays = assert_right(
        ONE_QUERY,
        SPLIT,
        values=values,
        extra=[("lengths", (3,), "int32")],
        visible=lambda p: p.n < length_of(p),
        mask=lambda s, a: np.where(KEYS < LAST, s * 0.125, HIDDEN),
    )
    assert not arrays["y"][0].any()


QUERY = np.arange(3)[:, None]
MASKS = {
    "window": (
        ONE_QUERY,
        {
            "values": {"lengths": LENGTHS},
            "extra": [("lengths", (3,), "int32")],
            "visible": lambda p: tirx.And(p.n < length_of(p), p.n > length_of(p) - int64(20)),
            "mask": lambda s, a: np.where((KEYS < LAST) & (KEYS > LAST - 20), s * 0.125, HIDDEN),
        },
    ),
    "causal": (
        SMALL,
        {
            "visible": lambda p: p.n <= p.m + int64(60),
            "mask": lambda s, a: np.where(KEYS <= QUERY + 60, s * 0.125, HIDDEN),
        },
    ),
    "additive": (
        SMALL,
        {
            "extra": [("mask", (2, 1, 3, 70), "float16")],
            "logit": lambda p: (
                p.score * constant(0.125, "float32") + p.load("mask", p.b, int64(0), p.m, p.n)
            ),
            "mask": lambda s, a: s * 0.125 + a["mask"].astype(float),
        },
    ),
    "padding": (
        SMALL,
        {
            "values": {"keep": np.random.default_rng(3).random((2, 70)) < 0.5},
            "extra": [("keep", (2, 70), "bool")],
            "visible": lambda p: p.load("keep", p.b, p.n),
            "mask": lambda s, a: np.where(a["keep"][:, None, None], s * 0.125, HIDDEN),
        },
    ),
    "softcap": (
        SMALL,
        {
            "logit": lambda p: (
                tirx.call_intrin("float32", "tirx.tanh", p.score * constant(0.025, "float32"))
                * constant(5, "float32")
            ),
            "mask": lambda s, a: 5 * np.tanh(s * 0.025),
        },
    ),
    "slopes": (
        SMALL,
        {
            "extra": [("slopes", (4,), "float32")],
            "logit": lambda p: (
                p.score * constant(0.125, "float32")
                - p.load("slopes", p.h) * tirx.Cast("float32", int64(69) - p.n)
            ),
            "mask": lambda s, a: s * 0.125 - a["slopes"][:, None, None] * (69 - KEYS),
        },
    ),
}


@pytest.mark.one_in(3)
@pytest.mark.parametrize("name", MASKS)
def test_logits_and_masks_are_computed_at_each_point(name):
    sizes, how = MASKS[name]
    assert_right(sizes, SPLIT, **how)


def test_symbolic_contexts_and_batches_are_measured_at_run_time():
    n, b = fresh_var("n", "int64"), fresh_var("b", "int64")
    attention = attention_of(Sizes(b, 4, 2, 1, n, 64, 64), lse=True)
    kernel = emit_attention_decode(attention, H200, SPLIT)
    for keys in (5, 70):
        sizes = Sizes(2, 4, 2, 1, keys, 64, 64)
        arrays = arrays_of(attention_of(sizes, lse=True))
        inputs = {name: a.copy() for name, a in arrays.items()}
        assert run_cuda_on_cpu(kernel, list(arrays.values())) == 1
        assert_close(arrays["y"], reference(inputs, sizes)[0], "float16")


def test_queries_and_outputs_may_be_computed():
    attention = attention_of(SMALL)
    doubled = Operand(attention.q.value * constant(2, "float32"))
    y = attention.outputs[0]
    y = dataclasses.replace(y, value=y.value + constant(1, "float32"))
    changed = dataclasses.replace(attention, q=doubled, outputs=(y,))
    arrays = arrays_of(changed)
    inputs = {name: a.copy() for name, a in arrays.items()}
    assert run_cuda_on_cpu(emit_attention_decode(changed, H200, SPLIT), list(arrays.values())) == 1
    assert_close(arrays["y"], reference(inputs, SMALL, scale=0.25)[0] + 1, "float16")


def test_weights_of_float32_are_multiplied_as_two_halves():
    attention = attention_of(SMALL)
    y = dataclasses.replace(attention.outputs[0], dtype="float32")
    params = tuple(
        dataclasses.replace(p, dtype="float32", var=tirx.decl_buffer(p.shape, "float32", p.name))
        if p.name == "y"
        else p
        for p in attention.params
    )
    wide = dataclasses.replace(attention, outputs=(y,), params=params, weight_dtype="float32")
    errors = {}
    for name, each in (("two", wide), ("one", dataclasses.replace(wide, weight_dtype="float16"))):
        arrays = arrays_of(each)
        inputs = {key: a.copy() for key, a in arrays.items()}
        run_cuda_on_cpu(emit_attention_decode(each, H200, SPLIT), list(arrays.values()))
        errors[name] = np.abs(arrays["y"] - reference(inputs, SMALL)[0]).max()
    assert errors["two"] < 2e-6
    assert errors["one"] > 1e-5


def up_to_length(g, s, x, lengths):
    """Keys below the length of a batch entry, as models write it."""
    keys = g.compute((1, 1, 1, s.N), lambda a, b, c, j: tirx.Cast("int32", j))
    inside = g.less(keys, g.reshape(lengths, (s.B, 1, 1, 1)))
    return masks.where(g, inside, x, -math.inf)


def test_lengths_of_a_model_become_the_bound_of_the_loop():
    case = masks.case(
        "lengths",
        up_to_length,
        lambda s, x, lengths: masked(x, np.arange(s.N) < lengths[:, None, None, None]),
        lambda s: [((s.B,), "int32")],
        {0: lambda rng, s: rng.integers(1, s.N, s.B)},
        GraphSizes(B=2, H=8, G=2, M=1, N=100, D=64, E=64),
    )
    func, inputs = case.built()
    attention = analyze_attention(func)
    bounds = read_decode(attention, H200).range
    assert len(bounds.below) == 1
    assert bounds.rest is None
    (y,) = outputs_of(func, len(inputs))
    run_cuda_on_cpu(emit_attention_decode(attention, H200, SPLIT), [*inputs, y])
    assert_close(y, case.expected()[0], "float16")
