"""The mma.sync attention: numbers on the emulator against float64, registers, banks, ranking."""

import dataclasses
import re

import ml_dtypes
import numpy as np
import pytest
from tvm import tirx

from tvm_fusion.config import load_policy, load_profile
from tvm_fusion.errors import Unsupported
from tvm_fusion.kernels.attention.forms import WRITER
from tvm_fusion.kernels.attention.hopper.kernel import attention_hopper_ranked
from tvm_fusion.kernels.attention.mma.config import Layout, SharedRows
from tvm_fusion.kernels.attention.mma.kernel import (
    AttentionMmaConfig,
    attention_mma_ranked,
    emit_attention_mma,
)
from tvm_fusion.kernels.attention.read.program import analyze_attention
from tvm_fusion.kernels.contraction.model import Operand
from tvm_fusion.kernels.program.expr import constant

from ...support import attention_by_hand as forms
from ...support import decode_cases
from ...support.attention_by_hand import Form, Sizes, attention, heads_first, reference
from ...support.attention_cases import CASES
from ...support.cuda_on_cpu import compile_cubins, run_cuda_on_cpu
from ...support.kernel_cases import outputs_of
from ...support.ptx import ptx_of

A100, RTX4090, H200 = (load_profile(name) for name in ("nvidia_a100", "rtx4090", "nvidia_h200"))
NUMPY = {"float16": np.float16, "bfloat16": ml_dtypes.bfloat16, "float32": np.float32}
TOLERANCE = {"float16": 1e-3, "bfloat16": 8e-3, "float32": 3e-6}
SMALL = AttentionMmaConfig(1, 1, 16)


def config(warps, tiles, block_n, stages=2, lazy=8.0, shares=1):
    return AttentionMmaConfig(warps, tiles, block_n, stages, lazy, shares)


def seen(queries, keys, shift=0):
    """Keys up to that of the query and `shift` further."""
    return np.arange(keys)[None] <= np.arange(queries)[:, None] + shift


def check(sizes, form, config, inputs=None, **expected):
    """Runs a kernel on poisoned memory; its arrays by name, compared with float64."""
    made = attention(sizes, form)
    rng = np.random.default_rng(0)
    arrays = {}
    for param in made.params:
        if param.name in ("q", "k", "v"):
            arrays[param.name] = rng.standard_normal(param.shape).astype(NUMPY[param.dtype])
        elif inputs and param.name in inputs:
            arrays[param.name] = inputs[param.name]
        else:
            arrays[param.name] = np.full(param.shape, np.nan, NUMPY[param.dtype])
    assert run_cuda_on_cpu(emit_attention_mma(made, A100, config), list(arrays.values())) == 1
    result, lse = reference(sizes, *(arrays[name] for name in "qkv"), **expected)
    got = heads_first(sizes, arrays["o"], sizes.heads)
    assert np.abs(got - result).max() <= TOLERANCE[sizes.dtype] * np.abs(result).max()
    if "lse" in arrays:
        np.testing.assert_allclose(arrays["lse"], lse, atol=2e-6)
    return arrays


# ---- numbers

MASK = np.random.default_rng(1).standard_normal((1, 2, 40, 40)).astype(np.float16)
MASK[0, 0, 3] = -np.inf
MASK[0, 1, 5, :32] = -np.inf

NUMBERS = {
    "two tiles a warp, projections as they come, lse": (
        Sizes(heads=2, queries=75, keys=70, terms=64, layout="bshd"),
        Form(lse=True),
        config(2, 2, 32),
        {},
    ),
    "causal, shared keys, three stages": (
        Sizes(heads=2, queries=70, keys=70, terms=80, kv_heads=1),
        forms.causal(),
        config(2, 1, 16, 3),
        {"visible": seen(70, 70)},
    ),
    "bfloat16, other features than terms, aligned at the end": (
        Sizes(heads=1, queries=40, keys=70, terms=24, features=72, dtype="bfloat16"),
        forms.causal(30),
        config(2, 1, 32, lazy=0.0),
        {"visible": seen(40, 70, 30)},
    ),
    "window": (
        Sizes(heads=1, queries=100, keys=100, terms=16),
        forms.window(50),
        config(2, 1, 16),
        {"visible": seen(100, 100) & ~seen(100, 100, -50)},
    ),
    "queries in shared memory": (
        Sizes(heads=1, queries=32, keys=48, terms=256),
        None,
        config(1, 2, 16),
        {},
    ),
    "float32, two tiles a warp, lse": (
        Sizes(heads=2, queries=75, keys=70, terms=40, features=24, dtype="float32"),
        Form(lse=True),
        config(2, 2, 32, lazy=0.0),
        {},
    ),
    "float32, causal, queries in shared memory": (
        Sizes(heads=1, queries=32, keys=48, terms=128, dtype="float32", layout="bshd"),
        forms.causal(16),
        config(1, 2, 48, 3, lazy=0.0),
        {"visible": seen(32, 48, 16)},
    ),
    "float32, four warps share queries, lse": (
        Sizes(heads=2, queries=21, keys=150, terms=40, features=24, dtype="float32"),
        Form(lse=True),
        config(4, 1, 64, shares=4, lazy=0.0),
        {},
    ),
    "float32, causal, two warps share two tiles of queries, three stages": (
        Sizes(heads=1, queries=70, keys=90, terms=16, dtype="float32"),
        forms.causal(20),
        config(4, 2, 32, 3, shares=2, lazy=0.0),
        {"visible": seen(70, 90, 20)},
    ),
    "two warps share queries": (
        Sizes(heads=1, queries=20, keys=90, terms=40),
        forms.softcap(5.0),
        config(2, 1, 64, shares=2),
        {"logit": lambda s: 5 * np.tanh(s / 5)},
    ),
    "softcap": (
        Sizes(heads=1, queries=20, keys=30, terms=40),
        forms.softcap(5.0),
        config(2, 1, 32),
        {"logit": lambda s: 5 * np.tanh(s / 5)},
    ),
}


@pytest.mark.one_in(12)
@pytest.mark.parametrize("name", NUMBERS)
def test_results_are_close_to_float64(name):
    sizes, form, chosen, expected = NUMBERS[name]
    check(sizes, form, chosen, **expected)


@pytest.mark.parametrize(
    ("dtype", "chosen"),
    [
        ("float16", config(2, 1, 32)),
        ("float32", config(4, 1, 64, shares=4, lazy=0.0)),  # keys of some warps are all hidden
    ],
)
def test_added_masks_are_read_in_pairs_and_hide_rows(dtype, chosen):
    form = forms.additive((1, 2, 40, 40))
    form.lse = True
    sizes = Sizes(queries=40, keys=40, terms=16, dtype=dtype)
    wide = MASK.astype(np.float64)
    arrays = check(sizes, form, chosen, {"mask": MASK}, logit=lambda s: s + wide)
    assert not arrays["o"][0, 0, 3].any()
    assert np.isneginf(arrays["lse"][0, 0, 3])


def run_stored(sizes, values=None, mask=None, how=None, where=None, chosen=SMALL):
    """Runs a kernel of `decode_cases`, whose keys lie in memory in more ways."""
    how, where = how or {}, where or {}
    made = decode_cases.attention_of(sizes, **how, **where)
    arrays = decode_cases.arrays_of(made, values)
    inputs = {name: a.copy() for name, a in arrays.items()}
    assert run_cuda_on_cpu(emit_attention_mma(made, A100, chosen), list(arrays.values())) == 1
    where = {name: value for name, value in where.items() if name != "pad"}
    expected, _ = decode_cases.reference(inputs, sizes, mask=mask, **where)
    assert np.abs(arrays["y"] - expected).max() <= 1e-3 * np.abs(expected).max()
    return arrays


@pytest.mark.one_in(2)
@pytest.mark.parametrize("where", [{"layout": "packed"}, {"pad": 4}, {"pad": 2}], ids=str)
def test_keys_lie_in_memory_as_they_like(where):
    run_stored(decode_cases.Sizes(1, 2, 1, 20, 40, 24, 24), where=where)


def test_pages_of_keys_are_found_through_a_table():
    table = np.random.default_rng(1).permutation(6).reshape(2, 3).astype(np.int32)
    sizes = decode_cases.Sizes(2, 2, 2, 20, 45, 32, 32)
    run_stored(sizes, {"table": table}, where={"paged": 15})


@pytest.mark.parametrize("chosen", [SMALL, config(4, 1, 64, shares=4)], ids=["1", "4"])
def test_keys_beyond_a_length_are_not_read_and_no_key_gives_zero(chosen):
    values = {"lengths": np.array([0, 21], np.int32)}
    for name in "kv":
        values[name] = np.random.default_rng(2).standard_normal((2, 1, 50, 16)).astype(np.float16)
        values[name][1, :, 21:] = np.nan
    lengths = values["lengths"][:, None, None, None]
    arrays = run_stored(
        decode_cases.Sizes(2, 1, 1, 20, 50, 16, 16),
        values,
        lambda s, a: np.where(np.arange(50) < lengths, s * 0.125, -np.inf),
        {
            "extra": [("lengths", (2,), "int32")],
            "visible": lambda p: p.n < tirx.Cast("int64", p.load("lengths", p.b)),
        },
        chosen=chosen,
    )
    assert not arrays["y"][0].any()


def test_infinities_and_the_largest_numbers_of_float32_are_as_in_one_product():
    sizes = Sizes(heads=1, queries=20, keys=24, terms=16, dtype="float32", scale=1.0)
    made, largest = attention(sizes, Form()), np.finfo("float32").max
    rng = np.random.default_rng(0)
    arrays = {p.name: np.abs(rng.standard_normal(p.shape)).astype("float32") for p in made.params}
    q, k, v, o = (arrays[name] for name in "qkvo")
    k[0, 0, 3, 1] = -np.inf  # no query sees this key
    v[0, 0, 3, 4] = largest
    v[0, 0, 7, 2], v[0, 0, 9, 5], v[0, 0, 5, 6] = np.inf, -np.inf, np.nan
    o[:] = np.nan
    kernel = emit_attention_mma(made, A100, config(1, 1, 16))
    assert run_cuda_on_cpu(kernel, list(arrays.values())) == 1
    with np.errstate(invalid="ignore"):
        weights = np.exp(s := np.float64(q) @ np.float64(k).swapaxes(2, 3) - 20)
    weights /= weights.sum(-1, keepdims=True)
    kept = [n for n in range(16) if n not in (2, 4, 5, 6)]
    expected = weights @ np.float64(np.where(np.isfinite(v), v, 0))
    assert np.isneginf(s[..., 3]).all()
    assert np.isposinf(o[..., 2]).all()
    assert np.isneginf(o[..., 5]).all()
    assert np.isnan(o[..., 6]).all()
    assert np.abs(o - expected)[..., [4, *kept]].max() <= 3e-6 * np.abs(expected[..., kept]).max()


@pytest.mark.parametrize("name", ["gated, scaled, residual, float32", "packed QKV"])
def test_functions_of_real_models_are_close_to_float64(name):
    case = next(case for case in CASES if case.name == name)
    func, inputs = case.built()
    outputs = outputs_of(func, len(inputs))
    kernel = emit_attention_mma(analyze_attention(func), A100)
    assert run_cuda_on_cpu(kernel, [*inputs, *outputs]) == 1
    for got, expected in zip(outputs, case.expected(), strict=True):
        expected = expected.reshape(got.shape)
        assert np.abs(got - expected).max() <= 2e-3 * np.abs(expected).max()


def test_one_kernel_serves_all_values_of_symbolic_sizes():
    batch, M, N = (tirx.Var(name, "int64") for name in ("batch", "queries", "keys"))
    form = Form(visible=lambda p: p.n <= p.m + (N - M))
    symbolic = Sizes(batch=batch, heads=2, kv_heads=1, queries=M, keys=N, terms=16)
    kernel = emit_attention_mma(attention(symbolic, form), A100, config(2, 1, 16))
    rng = np.random.default_rng(0)
    for sizes in ((1, 40, 20), (2, 3, 50)):
        known = dataclasses.replace(symbolic, batch=sizes[0], queries=sizes[1], keys=sizes[2])
        shapes = [(known.batch, 2, known.queries, 16), *[(known.batch, 1, known.keys, 16)] * 2]
        q, k, v = (rng.standard_normal(shape).astype(np.float16) for shape in shapes)
        out = np.full(q.shape, np.nan, np.float16)
        assert run_cuda_on_cpu(kernel, [q, k, v, out]) == 1
        visible = seen(known.queries, known.keys, known.keys - known.queries)
        result, _ = reference(known, q, k, v, visible=visible)
        assert np.abs(out - result).max() <= 1e-3 * np.abs(result).max()


# ---- machine code


def real(terms):
    return Sizes(batch=2, heads=16, queries=2048, keys=2048, terms=terms)


@pytest.mark.one_in(5)
@pytest.mark.parametrize("hw", [A100, RTX4090, H200], ids=lambda hw: hw.arch)
def test_registers_suffice_for_the_first_choices(hw):
    kernels = {}
    for terms in (64, 80, 96, 128, 256):
        made = attention(real(terms), forms.causal())
        kernels[f"causal_{terms}"] = emit_attention_mma(made, hw)
    found = compile_cubins(kernels, hw.arch)
    assert len(found) == len(kernels)
    # On Hopper the form is a last resort, and one of these spills a few bytes.
    allowed = 48 if hw is H200 else 0
    assert not {k.kernel: k.spill_bytes for k in found if k.spill_bytes > allowed}
    assert all(k.registers <= 255 for k in found)


def test_masks_and_the_most_scores_fit_into_registers_too():
    masked = attention(real(128), forms.additive((2, 1, 2048, 2048)))
    plain = attention(real(128))
    kernels = {
        "masked": emit_attention_mma(masked, A100),
        "most": emit_attention_mma(plain, A100, config(4, 2, 64)),
    }
    assert not any(k.spill_bytes for k in compile_cubins(kernels, "sm_80"))


def test_what_a_warp_reads_of_keys_and_values_serves_both_of_its_tiles():
    made = attention(real(64))
    counts = []
    for tiles in (1, 2):
        text = ptx_of(emit_attention_mma(made, A100, config(4, tiles, 32)), "sm_80")
        body = text.split(".entry", 1)[1]
        names = (r"mma\.sync", r"ldmatrix\S*\.trans", r"ldmatrix\.sync\.aligned\.m8n8\.x4\.shared")
        counts.append([len(re.findall(name, body)) for name in names])
        assert len(re.findall(r"cp\.async\.cg", body)) >= 4
    # 2 x 4 fragments of values, 4 x 2 of keys, and the queries, before and in one loop.
    assert counts == [[32, 8, 8 + 4], [64, 8, 8 + 8]]


# ---- shared memory


@pytest.mark.parametrize("halves", range(16, 257, 16))
def test_eight_rows_of_a_matrix_lie_in_different_banks(halves):
    shared = SharedRows(halves // 8)
    columns = range(shared.chunks)
    places = [[shared.place(row, column) for row in range(8)] for column in columns]
    assert sorted(p for own in places for p in own) == list(range(0, 8 * shared.pitch, 16))
    for own in places:
        assert len({place // 16 % 8 for place in own}) == 8


def test_queries_kept_in_registers_take_the_place_of_the_last_stage():
    held = Layout(config(4, 1, 64), 128, 128)
    assert held.holds_queries
    assert held.smem_bytes == 2 * held.stage_bytes
    read = Layout(config(4, 2, 64), 128, 128)
    assert not read.holds_queries
    assert read.smem_bytes == 2 * read.stage_bytes + 128 * 256


# ---- configurations


@pytest.mark.parametrize("hw", [A100, RTX4090, H200], ids=lambda hw: hw.arch)
@pytest.mark.parametrize("terms", [8, 64, 256])
def test_ranked_configurations_are_in_order_and_fit(hw, terms):
    made = attention(real(terms))
    ranked = attention_mma_ranked(made, hw)
    seconds = [entry[0] for entry in ranked]
    assert seconds == sorted(seconds)
    assert len({c for _, c in ranked}) == len(ranked)
    sizes = [Layout(c, terms, terms).smem_bytes for _, c in ranked]
    assert max(sizes) <= hw.smem_per_block_bytes


def test_few_queries_take_the_smallest_tile():
    made = attention(Sizes(queries=7, keys=2048))
    assert {c.block_m for _, c in attention_mma_ranked(made, A100)} == {64}


def test_prediction_is_within_reach_of_the_device():
    made = attention(real(128))
    flops = 4 * 32 * 2048 * 2048 * 128
    for hw in (A100, RTX4090):
        share = flops / attention_mma_ranked(made, hw)[0][0] / hw.tensor_flop_per_s["float16"]
        assert 0.4 < share < 1


def test_devices_before_hopper_and_pitches_the_tma_cannot_address_take_this_form():
    policy = load_policy(None)
    made = attention(Sizes(queries=256, keys=256))
    assert {type(c) for _, c in WRITER.ranked(made, A100, policy)} == {AttentionMmaConfig}
    odd = decode_cases.attention_of(decode_cases.Sizes(1, 2, 1, 256, 256, 64, 64), pad=4)
    with pytest.raises(Unsupported):
        attention_hopper_ranked(odd, H200)
    assert {type(c) for _, c in WRITER.ranked(odd, H200, policy)} == {AttentionMmaConfig}
    assert WRITER.emit(odd, H200, policy).attrs["tirx.is_scheduled"]


# ---- refusals


@pytest.mark.parametrize(
    ("sizes", "reason"),
    [
        (Sizes(terms=12), "12 terms"),
        (Sizes(terms=264), "264 terms"),
        (Sizes(terms=64, features=20), "20 features"),
        (Sizes(dtype="float64"), "float64"),
        (Sizes(terms=tirx.Var("d", "int64"), features=64, scale=1.0), "symbolic number of terms"),
    ],
)
def test_operands_without_a_form_are_refused(sizes, reason):
    with pytest.raises(Unsupported, match=reason):
        emit_attention_mma(attention(sizes), A100)


@pytest.mark.parametrize(("name", "what"), [("q", "queries"), ("k", "keys"), ("v", "values")])
def test_computed_operands_are_refused(name, what):
    made = attention(Sizes())
    twice = Operand(getattr(made, name).value * constant(2.0, "float32"))
    with pytest.raises(Unsupported, match=f"{what} are computed"):
        emit_attention_mma(dataclasses.replace(made, **{name: twice}), A100)


def test_heads_that_are_not_contiguous_or_start_at_odd_addresses_are_refused():
    odd = decode_cases.attention_of(decode_cases.Sizes(1, 2, 1, 32, 32, 16, 16), pad=1)
    with pytest.raises(Unsupported, match="keys at odd addresses"):
        emit_attention_mma(odd, A100)
    made = attention(Sizes())
    load = made.v.value.value
    *outer, row, column = load.indices
    turned = Operand(tirx.Cast("float32", tirx.BufferLoad(load.source, [*outer, column, row])))
    with pytest.raises(Unsupported, match="values that are not contiguous"):
        emit_attention_mma(dataclasses.replace(made, v=turned), A100)


def test_other_architectures_are_refused():
    with pytest.raises(Unsupported, match="sm_75"):
        emit_attention_mma(attention(Sizes()), dataclasses.replace(A100, arch="sm_75"))


@pytest.mark.parametrize(
    ("chosen", "why"),
    [
        (config(8, 2, 128, 3), "bytes of shared memory"),
        (config(4, 1, 24), "16 i keys"),
        (config(4, 3, 16), "1 or 2 tiles"),
    ],
)
def test_configurations_that_do_not_fit_are_refused(chosen, why):
    made = attention(Sizes(queries=256, keys=256, terms=256))
    with pytest.raises(Unsupported, match=re.escape(why)):
        emit_attention_mma(made, RTX4090, chosen)
