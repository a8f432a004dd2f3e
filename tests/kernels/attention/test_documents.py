"""Documents in the attentions for tensor cores on the emulator: tiles left out, runs of keys, any
order.
"""

import numpy as np
import pytest
from tvm import tirx

from tvm_fusion.kernels.attention.mma.kernel import emit_attention_mma
from tvm_fusion.kernels.program.expr import constant

from ...support import attention_by_hand as forms
from ...support.attention_by_hand import Sizes, attention, reference
from ...support.cuda_on_cpu import run_cuda_on_cpu
from . import test_mma as mma
from .test_hopper import check, one, run, seen, several


@pytest.mark.one_in(2)
@pytest.mark.parametrize("is_causal", [False, True])
def test_tiles_of_keys_of_other_documents_are_left_out(is_causal):
    sizes = Sizes(batch=1, heads=1, queries=150, keys=150, terms=16)
    form = forms.documents(1, 150)
    same, config = form.visible, one(16)
    if is_causal:
        form.visible = lambda p: tirx.And(p.n <= p.m, same(p))
    # The second tile of queries lies in the third document: values of others would show as NaN.
    ids = np.repeat([1, 4, 9], [20, 30, 100]).astype(np.int32)[None]
    visible = (ids[:, :, None] == ids[:, None])[:, None]
    visible = visible & seen(150, 150) if is_causal else visible
    values = np.random.default_rng(2).standard_normal((1, 1, 150, 16)).astype(np.float16)
    inputs = {"ids": ids, "v": values.copy()}
    arrays = run(sizes, form, config, inputs)
    expected, _ = reference(sizes, arrays["q"], arrays["k"], values, visible=visible)
    assert np.abs(arrays["o"] - expected).max() <= 1e-3 * np.abs(expected).max()
    inputs["v"][:, :, :32] = np.nan
    arrays = run(sizes, form, config, inputs)
    own = (slice(None), slice(None), slice(64, None))
    assert np.abs(arrays["o"][own] - expected[own]).max() <= 1e-3 * np.abs(expected).max()


# Always: documents beside bounds and other conditions, below.
@pytest.mark.nightly
@pytest.mark.one_in(4)
@pytest.mark.parametrize("dtype", ["int32", "int64"])
def test_ranges_of_documents_in_any_order_hold_all_that_match(dtype):
    # Blocks take ten tiles each: all scouts search several times, over more tiles than a look has.
    sizes = Sizes(batch=2, heads=2, queries=300, keys=300, terms=16)
    form = forms.documents(2, 300)
    form.extra = {"ids": ((2, 300), dtype)}
    ids = np.repeat(np.array([[7, 2, 5, 2, 9], [-3, 8, 8, 1, -3]]), 60, axis=1).astype(dtype)
    ids[1, 170] = 8
    visible = (ids[:, :, None] == ids[:, None])[:, None]
    check(sizes, form, one(16), {"ids": ids}, visible=visible)


KINDS_OF_IDS = {
    "in order": np.repeat(np.arange(6), 25),
    "padded": np.repeat([3, 8, 9, -1], [20, 70, 30, 30]),
    "a document comes back": np.repeat([3, 1, 3, 2], [40, 40, 40, 30]),
    "short": np.arange(150) // 2,
    "at random": np.random.default_rng(4).integers(0, 4, 150),
}


@pytest.mark.one_in(5)
@pytest.mark.parametrize("kind", KINDS_OF_IDS)
def test_documents_beside_bounds_are_close_to_float64(kind):
    ids = KINDS_OF_IDS[kind].astype(np.int64)[None]
    sizes = Sizes(batch=1, heads=1, queries=150, keys=150, terms=16)
    form = forms.documents(1, 150)
    form.extra = {"ids": ((1, 150), "int64")}
    same = form.visible
    form.visible = lambda p: tirx.And(tirx.And(p.n <= p.m, same(p)), p.n >= p.m - 60)
    visible = (ids[:, :, None] == ids[:, None])[:, None] & seen(150, 150) & ~seen(150, 150, -61)
    check(sizes, form, several(128, 16), {"ids": ids}, visible=visible)


def test_documents_beside_another_condition_on_points():
    ids = np.repeat(np.arange(3, dtype=np.int32), 30)[None]
    sizes = Sizes(batch=1, heads=1, queries=90, keys=90, terms=16)
    form = forms.documents(1, 90)
    same, seven = form.visible, constant(7, "int64")
    form.visible = lambda p: tirx.And(tirx.NE(p.n % seven, p.m % seven), same(p))
    places = np.arange(90)
    visible = (ids[:, :, None] == ids[:, None]) & (places[:, None] % 7 != places % 7)
    check(sizes, form, one(16), {"ids": ids}, visible=visible[:, None])


# ---- mma.sync: blocks look before they begin


@pytest.mark.one_in(10)
@pytest.mark.parametrize("dtype", ["int32", "int64"])
@pytest.mark.parametrize("kind", KINDS_OF_IDS)
def test_blocks_of_mma_leave_out_what_does_not_match(kind, dtype):
    ids = KINDS_OF_IDS[kind].astype(dtype)[None]
    sizes = Sizes(batch=1, heads=2, queries=150, keys=150, terms=16)
    form = forms.documents(1, 150)
    form.extra = {"ids": ((1, 150), dtype)}
    visible = (ids[:, :, None] == ids[:, None])[:, None]
    mma.check(sizes, form, mma.config(2, 1, 16, 3), {"ids": ids}, visible=visible)


@pytest.mark.one_in(4)
@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("chosen", [(1, 1, 16), (4, 2, 16)])
def test_tiles_that_blocks_of_mma_leave_out_are_not_read(is_causal, chosen):
    """Values of other documents would show as NaN."""
    chosen = mma.config(*chosen)
    sizes = Sizes(batch=1, heads=1, queries=300, keys=300, terms=16)
    form = forms.documents(1, 300)
    same = form.visible
    if is_causal:
        form.visible = lambda p: tirx.And(p.n <= p.m, same(p))
    ids = np.repeat([5, 1, 9, 12], [20, 108, 140, 32]).astype(np.int32)[None]
    visible = (ids[:, :, None] == ids[:, None])[:, None]
    visible = visible & seen(300, 300) if is_causal else visible
    rng = np.random.default_rng(2)
    q, k, v = (rng.standard_normal((1, 1, 300, 16)).astype(np.float16) for _ in "qkv")
    expected, _ = reference(sizes, q, k, v, visible=visible)
    v[:, :, :112] = np.nan
    out, made = np.full(q.shape, np.nan, np.float16), attention(sizes, form)
    given = {"q": q, "k": k, "v": v, "ids": ids, "o": out}
    kernel = emit_attention_mma(made, mma.A100, chosen)
    assert run_cuda_on_cpu(kernel, [given[param.name] for param in made.params]) == 1
    own = (slice(None), slice(None), slice(128, None))
    assert np.abs(out[own] - expected[own]).max() <= 1e-3 * np.abs(expected).max()


def test_queries_of_which_no_key_has_the_value_meet_one_tile():
    """Of a second tensor of values, so that there are such; their rows are 0 or as torch's are."""
    sizes = Sizes(batch=1, heads=1, queries=40, keys=200, terms=16)
    form = forms.documents(1, 200)
    form.visible = lambda p: tirx.EQ(p.load("own", p.b, p.m), p.load("ids", p.b, p.n))
    form.extra = {"own": ((1, 40), "int32"), "ids": ((1, 200), "int32")}
    ids = np.repeat(np.arange(4, dtype=np.int32), 50)[None]
    own = np.repeat(np.array([7, 2], np.int32), [16, 24])[None]
    visible = (own[:, :, None] == ids[:, None])[:, None]
    made = attention(sizes, form)
    rng = np.random.default_rng(0)
    given = {p.name: rng.standard_normal(p.shape).astype(np.float16) for p in made.params}
    given |= {"ids": ids, "own": own}
    whole = {name: value.copy() for name, value in given.items()}
    for arrays, chosen in ((given, mma.config(1, 1, 16)), (whole, mma.config(1, 1, 48))):
        kernel = emit_attention_mma(made, mma.A100, chosen)
        assert run_cuda_on_cpu(kernel, [arrays[p.name] for p in made.params]) == 1
    expected, _ = reference(sizes, *(given[n] for n in "qkv"), visible=visible)
    rows = (slice(None), slice(None), slice(16, None))
    assert np.abs(given["o"][rows] - expected[rows]).max() <= 1e-3 * np.abs(expected[rows]).max()
    np.testing.assert_array_equal(given["o"][:, :, :16], whole["o"][:, :, :16])


def test_a_symbolic_number_of_keys_is_looked_through():
    M = tirx.Var("tokens", "int64")
    form = forms.documents(1, M)
    kernel = emit_attention_mma(
        attention(Sizes(batch=1, heads=1, queries=M, keys=M, terms=16), form),
        mma.A100,
        mma.config(2, 1, 16),
    )
    for length in (1, 33, 150):
        rng = np.random.default_rng(length)
        q, k, v = (rng.standard_normal((1, 1, length, 16)).astype(np.float16) for _ in "qkv")
        ids = np.sort(rng.integers(0, 4, length)).astype(np.int32)[None]
        out = np.full(q.shape, np.nan, np.float16)
        assert run_cuda_on_cpu(kernel, [q, k, v, ids, out]) == 1
        visible = (ids[:, :, None] == ids[:, None])[:, None]
        sizes = Sizes(batch=1, heads=1, queries=length, keys=length, terms=16)
        expected, _ = reference(sizes, q, k, v, visible=visible)
        assert np.abs(out - expected).max() <= 1e-3 * np.abs(expected).max()
