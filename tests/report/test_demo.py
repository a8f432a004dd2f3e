"""The demo block: it builds unfused and computes a transformer block."""

import numpy as np
import pytest
import tvm
from tvm import relax, tirx

from tests.support.helpers_tir import quick_executable
from tvm_fusion import demo
from tvm_fusion.errors import InputError
from tvm_fusion.transform.decompose import Decompose

TINY = {"batch": 2, "seq": 5, "hidden": 24, "heads": 3, "mlp": 20}
ERROR_LIMITS = {"float32": 1e-5, "float16": 1e-2}
"""Relative to the largest value: a tenth of the ceiling for float32, the ceiling for float16."""


def block_in_float64(x: np.ndarray, shape: demo.DemoShape) -> np.ndarray:
    """The block in NumPy, from the weights as they are stored."""
    w = {
        name: value.astype("float64")
        for name, value in demo.demo_weights(shape.hidden, shape.mlp, shape.dtype).items()
    }
    x = x.astype("float64")
    normal = rms_norm(x) * w["attention_norm"]
    q, k, v = (
        (normal @ w[name]).reshape(shape.batch, shape.seq, shape.heads, shape.width)
        for name in ("q", "k", "v")
    )
    q, k = rotate(q), rotate(k)
    scores = np.einsum("bqhd,bkhd->bhqk", q, k) / np.sqrt(shape.width)
    visible = np.tri(shape.seq, dtype=bool)
    weights = np.where(visible, np.exp(scores - scores.max(-1, keepdims=True)), 0)
    weights /= weights.sum(-1, keepdims=True)
    mixed = np.einsum("bhqk,bkhd->bqhd", weights, v).reshape(x.shape)
    x = x + mixed @ w["o"]
    normal = rms_norm(x) * w["mlp_norm"]
    gate = normal @ w["gate"]
    return x + (gate / (1 + np.exp(-gate)) * (normal @ w["up"])) @ w["down"]


def rms_norm(x: np.ndarray) -> np.ndarray:
    return x / np.sqrt((x * x).mean(-1, keepdims=True) + 1e-5)


def rotate(x: np.ndarray) -> np.ndarray:
    """RoPE as complex numbers: the pair (x[i], x[i + width / 2]) turns by position * rate[i]."""
    _, seq, _, width = x.shape
    pairs = x[..., : width // 2] + 1j * x[..., width // 2 :]
    rates = 10000.0 ** (-2 * np.arange(width // 2) / width)
    turned = pairs * np.exp(1j * np.arange(seq)[:, None, None] * rates)
    return np.concatenate([turned.real, turned.imag], -1)


def run(mod: tvm.IRModule, x: np.ndarray) -> np.ndarray:
    executable = quick_executable(mod)
    machine = relax.VirtualMachine(executable, tvm.cpu())
    return machine["main"](tvm.runtime.tensor(x)).numpy()


@pytest.mark.one_in(2)
@pytest.mark.parametrize("decompose", [False, True], ids=["composite", "decomposed"])
@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_a_tiny_block_agrees_with_numpy(dtype: str, decompose: bool):
    shape = demo.DemoShape(**TINY, dtype=dtype)
    mod = demo.demo_block(**TINY, dtype=dtype)
    if decompose:
        mod = Decompose()(mod)
    x = np.random.default_rng(0).standard_normal((2, 5, 24)).astype(dtype)

    got, expected = run(mod, x), block_in_float64(x, shape)
    assert got.dtype == dtype
    assert np.abs(got - expected).max() <= ERROR_LIMITS[dtype] * np.abs(expected).max()


def test_the_llvm_demo_agrees_with_numpy():
    shape = demo.DEMO_SHAPES["llvm"]
    x = np.random.default_rng(0).standard_normal((shape.batch, shape.seq, shape.hidden))
    x = x.astype(shape.dtype)
    got = run(demo.demo_module("llvm"), x)
    expected = block_in_float64(x, shape)

    assert np.abs(got - expected).max() <= 1e-5 * np.abs(expected).max()


def test_a_later_token_does_not_change_an_earlier_one():
    mod = Decompose()(demo.demo_block(**TINY, dtype="float32"))
    x = np.random.default_rng(0).standard_normal((2, 5, 24)).astype("float32")
    changed = x.copy()
    changed[:, 3:] += 1

    before, after = run(mod, x), run(mod, changed)
    np.testing.assert_array_equal(before[:, :3], after[:, :3])
    assert np.abs(before[:, 3:] - after[:, 3:]).max() > 0.1


def test_the_same_sizes_give_the_same_module():
    once, twice = (demo.demo_block(**TINY, dtype="float16") for _ in range(2))

    tvm.ir.assert_structural_equal(once, twice)


def test_the_block_is_40_operators_until_it_is_fused():
    """A change of the demo changes every launch count that is quoted for it."""
    legal = relax.transform.LegalizeOps()(demo.demo_block(**TINY, dtype="float32"))
    calls = [b for block in legal["main"].body.blocks for b in block.bindings]

    assert len(calls) == 40
    assert all(
        isinstance(f, tirx.PrimFunc) for g, f in legal.functions.items() if g.name_hint != "main"
    )


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"hidden": 25}, "multiple of twice the heads"),
        ({"seq": 0}, "at least 1"),
        ({"dtype": "int8"}, "int8"),
    ],
)
def test_sizes_that_do_not_fit_are_refused(change: dict, message: str):
    with pytest.raises(InputError, match=message):
        demo.demo_block(**{**TINY, "dtype": "float32", **change})


def test_an_unknown_kind_is_refused():
    with pytest.raises(InputError, match="'metal' is none of llvm, cuda"):
        demo.demo_module("metal")
