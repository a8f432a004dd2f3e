"""The Hopper attention of operands whose neighbours in memory are of different queries or keys."""

import dataclasses

import ml_dtypes
import numpy as np
import pytest

from tvm_fusion.config import load_profile
from tvm_fusion.errors import Unsupported
from tvm_fusion.kernels.attention.hopper.config import AttentionConfig
from tvm_fusion.kernels.attention.hopper.kernel import (
    attention_hopper_ranked,
    emit_attention_hopper,
)

from ...support import attention_by_hand as forms
from ...support.attention_by_hand import Form, Sizes, attention, heads_first, reference
from ...support.hopper_on_cpu import compile_hopper, run_hopper_on_cpu

H200 = load_profile("nvidia_h200")
TINY_H200 = dataclasses.replace(H200, num_sms=2)
NUMPY = {"float16": np.float16, "bfloat16": ml_dtypes.bfloat16, "float32": np.float32}
TOLERANCE = {"float16": 1e-3, "bfloat16": 8e-3}


def config(block_m, block_n, stages=2):
    return AttentionConfig(block_m, block_n, stages, lazy=8.0)


CASES = {
    "keys": (
        Sizes(queries=70, keys=200, terms=64, kv_heads=1, turned="k"),
        None,
        config(64, 64),
    ),
    "keys, terms that fill no instruction": (
        Sizes(heads=1, queries=33, keys=136, terms=72, features=40, turned="k"),
        Form(lse=True),
        config(64, 128),
    ),
    "keys, tiles of less than a box": (
        Sizes(heads=1, queries=64, keys=40, terms=80, turned="k"),
        None,
        config(64, 16),
    ),
    "values": (
        Sizes(heads=1, queries=65, keys=200, terms=64, features=72, turned="v"),
        forms.causal(135),
        config(64, 64),
    ),
    "queries of two consumers": (
        Sizes(heads=1, queries=200, keys=72, terms=96, turned="q"),
        None,
        config(128, 64),
    ),
    "all, causal, bfloat16": (
        Sizes(heads=2, queries=136, keys=136, terms=128, dtype="bfloat16", turned="qkv"),
        forms.causal(),
        config(128, 128),
    ),
}


@pytest.mark.one_in(6)
@pytest.mark.parametrize("name", CASES)
def test_turned_operands_are_read_where_they_lie(name):
    sizes, form, chosen = CASES[name]
    made = attention(sizes, form)
    rng = np.random.default_rng(0)
    arrays = {}
    for param in made.params:
        x = np.full(param.shape, np.nan)
        if param.name in ("q", "k", "v"):
            x = rng.standard_normal(param.shape)
        arrays[param.name] = x.astype(NUMPY[param.dtype])
    kernel = emit_attention_hopper(made, TINY_H200, chosen)
    assert run_hopper_on_cpu(kernel, list(arrays.values())) == 1
    plain = [
        np.swapaxes(arrays[name], 2, 3) if name in sizes.turned else arrays[name] for name in "qkv"
    ]
    visible = None
    if form is not None and form.visible:
        shift = sizes.keys - sizes.queries
        visible = np.arange(sizes.keys)[None] <= np.arange(sizes.queries)[:, None] + shift
    result, lse = reference(sizes, *plain, visible=visible)
    got = heads_first(sizes, arrays["o"], sizes.heads)
    assert np.abs(got - result).max() <= TOLERANCE[sizes.dtype] * np.abs(result).max()
    if "lse" in arrays:
        np.testing.assert_allclose(arrays["lse"], lse, atol=2e-6)


@pytest.mark.one_in(5)
@pytest.mark.parametrize("turned", ["k", "v", "qkv"])
def test_the_best_of_them_does_not_spill(turned):
    sizes = Sizes(batch=2, heads=16, queries=2048, keys=2048, terms=128, turned=turned)
    made = attention(sizes)
    chosen = attention_hopper_ranked(made, H200)[0][1]
    assert chosen.block_n % 64 == 0
    found = compile_hopper(emit_attention_hopper(made, H200, chosen))
    assert found.spill_bytes == 0
    assert not found.remarks


@pytest.mark.parametrize(
    ("sizes", "chosen", "why"),
    [
        (Sizes(keys=65, turned="k"), None, "not contiguous|16 bytes"),
        (Sizes(keys=200, turned="k"), config(64, 80), "whole boxes"),
        (Sizes(keys=200, terms=256, turned="kv"), config(192, 48, 3), "shared memory"),
    ],
    ids=["a pitch that the TMA cannot address", "a tile of parts of boxes", "boxes too large"],
)
def test_what_no_box_can_bring_is_refused(sizes, chosen, why):
    with pytest.raises(Unsupported, match=why):
        emit_attention_hopper(attention(sizes), H200, chosen)
