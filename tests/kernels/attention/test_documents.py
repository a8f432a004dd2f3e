"""Documents in the Hopper attention on the emulator: tiles left out, runs of keys, any order."""

import numpy as np
import pytest
from tvm import tirx

from tvm_fusion.kernels.program.expr import constant

from ...support import attention_by_hand as forms
from ...support.attention_by_hand import Sizes, reference
from .test_hopper import check, one, run, seen, several


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
