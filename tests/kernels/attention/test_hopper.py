"""The Hopper attention: numbers on the emulator against float64, ptxas, ranking, refusals."""

import dataclasses
import itertools

import ml_dtypes
import numpy as np
import pytest
from tvm import tirx

from tvm_fusion.config import load_profile
from tvm_fusion.errors import Unsupported
from tvm_fusion.kernels.attention.hopper.config import AttentionConfig, smem_bytes
from tvm_fusion.kernels.attention.hopper.kernel import (
    attention_hopper_ranked,
    emit_attention_hopper,
)
from tvm_fusion.kernels.attention.read.bounds import key_range, split_match
from tvm_fusion.kernels.attention.read.program import analyze_attention
from tvm_fusion.kernels.attention.tiled.tiles import static_tiles
from tvm_fusion.kernels.contraction.model import Axis, Operand
from tvm_fusion.kernels.program.expr import constant

from ...support import attention_by_hand as forms
from ...support.attention_by_hand import Form, Sizes, attention, heads_first, reference
from ...support.attention_cases import CASES
from ...support.hopper_on_cpu import compile_hopper, run_hopper_on_cpu
from ...support.kernel_cases import outputs_of

H200 = load_profile("nvidia_h200")
# Blocks take several tiles each, one after the other.
TINY_H200 = dataclasses.replace(H200, num_sms=2)
NUMPY = {"float16": np.float16, "bfloat16": ml_dtypes.bfloat16, "float32": np.float32}
TOLERANCE = {"float16": 1e-3, "bfloat16": 8e-3}


def one(block_n, **fields):
    """One consumer warpgroup."""
    return AttentionConfig(64, block_n, **{"lazy": 8.0, **fields})


def several(block_m, block_n, **fields):
    """Consumers that take turns."""
    return AttentionConfig(block_m, block_n, **{"lazy": 8.0, **fields})


def seen(queries, keys, shift=0):
    """Keys up to that of the query and `shift` further."""
    return np.arange(keys)[None] <= np.arange(queries)[:, None] + shift


def run(sizes, form, config, inputs=None, hw=TINY_H200):
    """Inputs and outputs by name of a kernel that runs on poisoned memory."""
    made = attention(sizes, form)
    rng = np.random.default_rng(0)
    arrays = {}
    for param in made.params:
        if inputs and param.name in inputs:
            arrays[param.name] = inputs[param.name]
        elif param.name in ("q", "k", "v"):
            arrays[param.name] = rng.standard_normal(param.shape).astype(NUMPY[param.dtype])
        else:
            arrays[param.name] = np.full(param.shape, np.nan, NUMPY[param.dtype])
    kernel = emit_attention_hopper(made, hw, config)
    assert run_hopper_on_cpu(kernel, list(arrays.values())) == 1
    return arrays


def check(sizes, form, config, inputs=None, **expected):
    arrays = run(sizes, form, config, inputs)
    result, lse = reference(sizes, *(arrays[name] for name in "qkv"), **expected)
    got = heads_first(sizes, arrays["o"], sizes.heads)
    assert np.abs(got - result).max() <= TOLERANCE[sizes.dtype] * np.abs(result).max()
    if "lse" in arrays:
        np.testing.assert_allclose(arrays["lse"], lse, atol=2e-6)
    return arrays


# ---- numbers


MASK = np.random.default_rng(1).standard_normal((1, 2, 70, 40)).astype(np.float16)
MASK[0, 0, 3] = -np.inf
MASK[0, 1, 5, :32] = -np.inf
SLOPES = np.array([0.5, 0.25], np.float32)

NUMBERS = {
    "two consumers, queries in two tiles": (
        Sizes(heads=1, queries=130, keys=70, terms=64),
        None,
        several(128, 32),
        {},
    ),
    "three consumers": (
        Sizes(heads=1, queries=192, keys=40, terms=16),
        None,
        several(192, 16),
        {},
    ),
    "projections as they come, lse": (
        Sizes(queries=33, keys=45, terms=80, layout="bshd"),
        Form(lse=True),
        one(16),
        {},
    ),
    "causal, shared keys": (
        Sizes(queries=130, keys=130, terms=32, kv_heads=1),
        forms.causal(),
        one(32),
        {"visible": seen(130, 130)},
    ),
    "bfloat16, other features than terms, aligned at the end": (
        Sizes(heads=1, queries=40, keys=70, terms=24, features=72, dtype="bfloat16"),
        forms.causal(30),
        one(32, lazy=0.0),
        {"visible": seen(40, 70, 30)},
    ),
    "window": (
        Sizes(heads=1, queries=140, keys=140, terms=16),
        forms.window(50),
        one(16),
        {"visible": seen(140, 140) & ~seen(140, 140, -50)},
    ),
    "results take the place of the queries": (
        Sizes(heads=1, batch=2, queries=128, keys=72, terms=256),
        None,
        several(128, 64),
        {},
    ),
    "softcap": (
        Sizes(heads=1, queries=20, keys=30, terms=16),
        forms.softcap(5.0),
        one(16),
        {"logit": lambda s: 5 * np.tanh(s / 5)},
    ),
}


@pytest.mark.one_in(8)
@pytest.mark.parametrize("name", NUMBERS)
def test_results_are_close_to_float64(name):
    sizes, form, config, expected = NUMBERS[name]
    check(sizes, form, config, **expected)


@pytest.mark.one_in(8)
@pytest.mark.parametrize("name", NUMBERS)
def test_rows_of_any_scores_are_close_to_float64(name):
    # Keys are walked through from the last: scores of a row grow on the way, or fall, or lie all
    # below zero (down to -40), or change their sign.
    sizes, form, config, expected = NUMBERS[name]
    rng = np.random.default_rng(3)
    made = {}
    for param in attention(sizes, form).params:
        if param.name in ("q", "k"):
            heads, width = sizes.heads if param.name == "q" else sizes.kv_heads, sizes.terms
            rows = sizes.queries if param.name == "q" else sizes.keys
            noise = rng.standard_normal((sizes.batch, heads, rows, width))
            along = np.zeros(noise.shape)
            if param.name == "q":
                along[..., :2] = (
                    20 * np.array([[1, 0], [-1, 0], [0, -1], [0, 1], [0, 0]])[np.arange(rows) % 5]
                )
            else:
                along[..., 0] = np.linspace(1, -1, rows)
                along[..., 1] = np.linspace(2, 1, rows)
            value = noise / 8 + along * sizes.terms**0.25
            if sizes.layout == "bshd":
                value = value.transpose(0, 2, 1, 3)
            made[param.name] = value.reshape(param.shape).astype(NUMPY[param.dtype])
    check(sizes, form, config, made, **expected)


def test_rows_of_nothing_but_low_masks_keep_their_weights():
    sizes = Sizes(heads=1, queries=40, keys=72, terms=16)
    mask = np.random.default_rng(1).standard_normal((1, 1, 40, 72)).astype(np.float32)
    mask[..., 3, :], mask[..., 4, :] = -np.inf, np.finfo(np.float32).min
    mask[..., 5, :], mask[..., 6, 32:], mask[..., 7, :32] = -1.0e9, -np.inf, -np.inf
    mask[..., 6, :32], mask[..., 7, 32:] = -1.0e9, np.finfo(np.float32).min
    mask[..., 8, :], mask[..., 8, 40] = -1.0e9, -3.0e5
    form = forms.additive(mask.shape, "float32")
    form.lse = True
    # Low numbers swallow the scores, as they do in the unfused graph.
    arrays = check(
        sizes, form, one(32), {"mask": mask}, logit=lambda s: s.astype(np.float32) + mask
    )
    assert not arrays["o"][0, 0, 3].any()
    mean = arrays["v"][0, 0].astype(np.float64).mean(axis=0)
    assert np.abs(arrays["o"][0, 0, 4] - mean).max() <= 1e-3


def test_added_masks_are_read_in_pairs_and_hide_rows():
    sizes = Sizes(queries=70, keys=40, terms=16)
    form = forms.additive((1, 2, 70, 40))
    form.lse = True
    arrays = check(
        sizes, form, one(32), {"mask": MASK}, logit=lambda s: s + MASK.astype(np.float64)
    )
    assert not arrays["o"][0, 0, 3].any()
    assert np.isneginf(arrays["lse"][0, 0, 3])


@pytest.mark.one_in(2)
@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_added_masks_of_whole_tiles_are_exchanged_between_threads(dtype):
    # 48 columns: 32 that come by eight, 16 that come in pairs.
    sizes = Sizes(batch=2, queries=70, keys=96, terms=16)
    mask = np.random.default_rng(1).standard_normal((2, 1, 70, 96)).astype(dtype)
    form = forms.additive(mask.shape, dtype)
    expected = {"logit": lambda s: s + mask.astype(np.float64)}
    check(sizes, form, one(48), {"mask": mask}, **expected)


def test_distances_along_the_keys_are_added():
    distance = np.arange(37)[None] - np.arange(20)[:, None]
    check(
        Sizes(queries=20, keys=37, terms=16),
        forms.alibi(2),
        one(16),
        {"slope": SLOPES},
        logit=lambda s: s + SLOPES[None, :, None, None].astype(np.float64) * distance,
    )


@pytest.mark.one_in(4)
@pytest.mark.parametrize(
    "name", ["gated, scaled, residual, float32", "packed QKV", "causal and added mask"]
)
def test_functions_of_real_models_are_close_to_float64(name):
    case = next(case for case in CASES if case.name == name)
    func, inputs = case.built()
    outputs = outputs_of(func, len(inputs))
    kernel = emit_attention_hopper(analyze_attention(func), TINY_H200)
    assert run_hopper_on_cpu(kernel, [*inputs, *outputs]) == 1
    for got, expected in zip(outputs, case.expected(), strict=True):
        expected = expected.reshape(got.shape)
        assert np.abs(got - expected).max() <= 2e-3 * np.abs(expected).max()


def test_one_kernel_serves_all_values_of_symbolic_sizes():
    batch, M, N = (tirx.Var(name, "int64") for name in ("batch", "queries", "keys"))
    form = Form(visible=lambda p: p.n <= p.m + (N - M))
    symbolic = Sizes(batch=batch, heads=2, kv_heads=1, queries=M, keys=N, terms=16)
    kernel = emit_attention_hopper(attention(symbolic, form), TINY_H200, one(16))
    rng = np.random.default_rng(0)
    for sizes in ((1, 70, 20), (2, 3, 50)):
        known = dataclasses.replace(symbolic, batch=sizes[0], queries=sizes[1], keys=sizes[2])
        shapes = [(known.batch, 2, known.queries, 16), *[(known.batch, 1, known.keys, 16)] * 2]
        q, k, v = (rng.standard_normal(shape).astype(np.float16) for shape in shapes)
        out = np.full(q.shape, np.nan, np.float16)
        assert run_hopper_on_cpu(kernel, [q, k, v, out]) == 1
        visible = seen(known.queries, known.keys, known.keys - known.queries)
        result, _ = reference(known, q, k, v, visible=visible)
        assert np.abs(out - result).max() <= 1e-3 * np.abs(result).max()


# ---- machine code


def causal_documents(dtype):
    form = forms.documents(2, 2048)
    same, form.extra = form.visible, {"ids": ((2, 2048), dtype)}
    form.visible = lambda p: tirx.And(p.n <= p.m, same(p))
    return form


LARGE = [(D, form) for D in (64, 80, 96, 128, 256) for form in (None, "causal")]
LARGE += [(64, "documents"), (128, "documents"), (128, "long documents")]
LARGE += [(128, "mask"), (128, "softcap"), (64, "three consumers")]


@pytest.mark.one_in(16)
@pytest.mark.parametrize(("terms", "form"), LARGE)
def test_kernels_compile_without_spills_or_serialised_wgmma(terms, form):
    made = {
        "causal": forms.causal(),
        "mask": forms.additive((2, 1, 2048, 2048)),
        "softcap": forms.softcap(30.0),
        "documents": forms.documents(2, 2048),
        "long documents": causal_documents("int64"),
    }.get(form)
    config = {"three consumers": several(192, 128)}
    sizes = Sizes(batch=2, heads=16, queries=2048, keys=2048, terms=terms)
    kernel = emit_attention_hopper(attention(sizes, made), H200, config.get(form))
    compiled = compile_hopper(kernel)
    assert (compiled.spill_bytes, compiled.remarks) == (0, ())


# ---- tiles of keys


@pytest.mark.parametrize("form", ["causal", "shifted", "window", "ahead"])
def test_tiles_hold_all_visible_keys_and_whole_ones_nothing_else(form):
    made = {
        "causal": forms.causal(),
        "shifted": forms.causal(-20),
        "window": forms.window(37, 5),
        "ahead": Form(visible=lambda p: p.n >= p.m + constant(3, "int64")),
    }[form]
    queries, keys, block_n = 90, 100, 16
    kept = key_range(attention(Sizes(queries=queries, keys=keys), made))
    assert kept.bounds
    assert not kept.rest
    table = {
        "causal": seen(queries, keys),
        "shifted": seen(queries, keys, -20),
        "window": seen(queries, keys, 5) & ~seen(queries, keys, 5 - 37),
        "ahead": ~seen(queries, keys, 2),
    }[form]
    for top, size in itertools.product(range(0, queries, 32), (1, 32)):
        rows = slice(top, min(top + size, queries))
        found = static_tiles(kept, (top, rows.stop - 1), keys, block_n)
        first, whole_first, whole_end, end = found
        assert 0 <= first <= whole_first <= whole_end < end <= -(-keys // block_n)
        columns = np.flatnonzero(table[rows].any(axis=0))
        if len(columns):
            assert first * block_n <= columns[0]
            assert columns[-1] < end * block_n
        assert table[rows, whole_first * block_n : whole_end * block_n].all()


def test_conditions_that_are_no_bounds_are_looked_at_by_point():
    made = attention(Sizes(batch=2, queries=64, keys=64), forms.documents(2, 64))
    kept = key_range(made)
    assert (len(kept.bounds), len(kept.rest)) == (0, 1)
    first, whole_first, whole_end, end = static_tiles(kept, (0, 63), 64, 16)
    assert (first, end) == (0, 4)
    assert whole_first == whole_end
    match, rest = split_match(made, kept)
    assert match is not None
    assert (rest.bounds, rest.rest) == ((), ())


# ---- configurations


@pytest.mark.parametrize("terms", [8, 64, 80, 128, 256])
def test_ranked_configurations_are_in_order_and_fit(terms):
    made = attention(Sizes(batch=2, heads=16, queries=2048, keys=2048, terms=terms))
    ranked = attention_hopper_ranked(made, H200)
    seconds = [entry[0] for entry in ranked]
    assert seconds == sorted(seconds)
    assert len({config for _, config in ranked}) == len(ranked)
    limit = H200.smem_per_block_bytes
    assert all(smem_bytes(config, terms, terms, False) <= limit for _, config in ranked)


def test_few_queries_take_one_warpgroup():
    made = attention(Sizes(queries=7, keys=2048))
    assert {config.block_m for _, config in attention_hopper_ranked(made, H200)} == {64}


def test_results_that_the_tma_cannot_store_leave_from_registers():
    outputs = Form(outputs=lambda p: {"o": (p.result, "float32")})
    made = attention(Sizes(), outputs)
    assert not any(config.staged for _, config in attention_hopper_ranked(made, H200))
    with pytest.raises(Unsupported, match="cannot store"):
        emit_attention_hopper(made, H200, several(128, 64))


@pytest.mark.parametrize(
    ("sizes", "reason"),
    [
        (Sizes(terms=12), "12 terms"),
        (Sizes(terms=264), "264 terms"),
        (Sizes(terms=64, features=20), "20 features"),
        (Sizes(dtype="float32"), "float32"),
        (Sizes(terms=tirx.Var("d", "int64"), features=64, scale=1.0), "symbolic number of terms"),
    ],
)
def test_operands_without_a_form_are_refused(sizes, reason):
    with pytest.raises(Unsupported, match=reason):
        emit_attention_hopper(attention(sizes), H200)


def test_computed_operands_are_refused():
    made = attention(Sizes())
    made = dataclasses.replace(made, q=Operand(made.q.value * constant(2.0, "float32")))
    with pytest.raises(Unsupported, match="computed"):
        emit_attention_hopper(made, H200)


def test_other_architectures_are_refused():
    with pytest.raises(Unsupported, match="no wgmma"):
        emit_attention_hopper(attention(Sizes()), dataclasses.replace(H200, arch="sm_80"))


def test_tiles_beyond_shared_memory_are_refused():
    made = attention(Sizes(queries=256, keys=256, terms=256))
    with pytest.raises(Unsupported, match="shared memory"):
        emit_attention_hopper(made, H200, several(128, 128))


def test_axes_of_the_batch_may_lie_apart():
    made = attention(Sizes(batch=3, heads=4, kv_heads=2, layout="bshd"))
    assert all(isinstance(axis, Axis) for axis in made.batch)
    assert attention_hopper_ranked(made, H200)
