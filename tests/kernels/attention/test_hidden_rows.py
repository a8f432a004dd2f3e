"""Rows whose keys are all masked: -inf hides them, a number far below zero leaves them weights."""

import math

import numpy as np
import pytest
import tvm
from tvm import te, tirx

from tvm_fusion.config import load_profile
from tvm_fusion.kernels.attention.decode.kernel import emit_attention_decode
from tvm_fusion.kernels.attention.hopper.kernel import emit_attention_hopper
from tvm_fusion.kernels.attention.mma.kernel import emit_attention_mma
from tvm_fusion.kernels.attention.read.bounds import key_range
from tvm_fusion.kernels.attention.read.program import analyze_attention
from tvm_fusion.kernels.attention.read.witness import every_row_sees_a_key
from tvm_fusion.kernels.contraction.model import Axis

from ...support.attention_graphs import (
    FLOAT,
    AttentionCase,
    Graph,
    Sizes,
    attend,
    bhsd,
    constant,
    one_group,
    scale_of,
    scores_of,
    softmaxed,
)
from ...support.attention_interpreter import evaluate
from ...support.attention_masks import case, hidden, masked, where
from ...support.cuda_on_cpu import run_cuda_on_cpu
from ...support.graphs import module
from ...support.hopper_on_cpu import run_hopper_on_cpu

LEAST = float(np.finfo(np.float32).min)
H200, A100 = load_profile("nvidia_h200"), load_profile("nvidia_a100")


def rows_of_nothing(rng, s):
    """A mask that hides all keys of two rows, and some of the others."""
    seen = rng.random((s.B, 1, s.M, s.N)) < 0.6
    seen[..., 0] = True
    seen[0, 0, 1], seen[-1, 0, -1] = False, False
    return seen


def added(value):
    """``scores + where(mask, 0, value)``."""

    def emit(g, s, x, m):
        zeros = g.compute((s.B, 1, s.M, s.N), lambda *_: tirx.const(0, x.ty.dtype.dtype))
        return g.add(x, where(g, m, zeros, value))

    return emit


def multiplied(value):
    """``scores + (1 - mask) * value``."""

    def emit(g, s, x, m):
        return g.add(x, g.scaled(g.subtract(constant(1, FLOAT), g.astype(m, FLOAT)), value))

    return emit


def hidden_rows(name, emit, reference, dtype=FLOAT):
    sizes = Sizes(dtype=dtype)
    mask = lambda s: [((s.B, 1, s.M, s.N), "bool")]  # noqa: E731
    return case(name, emit, reference, mask, {0: rows_of_nothing}, sizes)


FILLED = {
    str(value): hidden_rows(
        f"filled with {value}",
        lambda g, s, x, m, value=value: where(g, m, x, value),
        lambda s, x, m, value=value: np.where(m, x, value),
    )
    for value in (-3e4, -65504.0, -1e9, LEAST)
}
ADDED = {
    f"{how.__name__} {value}": hidden_rows(
        f"{how.__name__} {value}", how(value), lambda s, x, m, value=value: x + ~m * value
    )
    for how in (added, multiplied)
    for value in (-65504.0, -1e9, LEAST)
}
FAINT = FILLED | ADDED


@pytest.mark.one_in(6)
@pytest.mark.parametrize("name", FAINT)
def test_finite_numbers_leave_a_row_of_nothing_else_its_weights(name):
    func, arrays = FAINT[name].built()
    attention = analyze_attention(func)
    for got, wanted in zip(evaluate(attention, arrays), FAINT[name].expected(), strict=True):
        assert np.abs(wanted[0, :, 1]).min() > 0
        np.testing.assert_allclose(got, wanted, rtol=0, atol=1e-6 * np.abs(wanted).max())


def test_rows_of_minus_infinity_are_0():
    both = hidden_rows(
        "-inf", lambda g, s, x, m: where(g, m, x, -math.inf), lambda s, x, m: masked(x, m)
    )
    func, arrays = both.built()
    (got,) = evaluate(analyze_attention(func), arrays)
    assert not got[0, :, 1].any()
    np.testing.assert_allclose(got, both.expected()[0], rtol=0, atol=1e-6)


def test_a_row_of_both_keeps_the_weights_of_the_finite_ones():
    """-inf hides the first key of all rows; -1e9 those that the mask hides."""

    def emit(g, s, x, m):
        return hidden(-math.inf)(lambda s, i, j: j > 0)(g, s, where(g, m, x, -1e9))

    def reference(s, x, m):
        return masked(np.where(m, x, -1e9), np.arange(s.N) > 0)

    func, arrays = hidden_rows("both", emit, reference).built()
    (got,) = evaluate(analyze_attention(func), arrays)
    wanted = hidden_rows("both", emit, reference).expected()[0]
    np.testing.assert_allclose(got, wanted, rtol=0, atol=1e-6 * np.abs(wanted).max())


def test_the_logarithm_of_a_row_of_finite_numbers_is_as_far_below_zero():
    def emit(bb, q, k, v, m):
        g = Graph(bb)
        x = where(g, m, g.scores(q, k), -1e9)
        top = g.max(x, axis=-1, keepdims=True)
        e = g.exp(g.subtract(x, top))
        total = g.sum(e, axis=-1, keepdims=True)
        return [g.matmul(g.divide(e, total), v), g.add(top, g.log(total))]

    s = Sizes(dtype=FLOAT)
    inputs = [*bhsd(s), ((s.B, 1, s.M, s.N), "bool")]
    attention = analyze_attention(one_group(module(emit, *inputs)).func)
    rng = np.random.default_rng(0)
    q, k, v = (rng.standard_normal(shape).astype(np.float32) for shape, _ in inputs[:3])
    seen = rows_of_nothing(rng, s)
    arrays = dict(zip(("x0", "x1", "x2", "x3"), (q, k, v, seen), strict=True))
    params = [p.name for p in attention.params if p.name in arrays]
    found = evaluate(attention, [arrays[name] for name in params])
    lse = next(x for x in found if x.size == s.B * s.H * s.M).reshape(s.B, s.H, s.M)
    np.testing.assert_allclose(lse[0, :, 1], -1e9 + math.log(s.N), rtol=1e-7)
    assert np.abs(lse[0, :, 0]).max() < 100


# ---- kernels

WRITERS = {
    "hopper": (lambda a: emit_attention_hopper(a, H200), run_hopper_on_cpu),
    "mma": (lambda a: emit_attention_mma(a, A100), run_cuda_on_cpu),
    "decode": (lambda a: emit_attention_decode(a, A100), run_cuda_on_cpu),
}


def wide(how, value):
    """Scores of float16 operands in float32, masked there."""

    def emit(s):
        def build(bb, q, k, v, m):
            g = Graph(bb)
            x = g.astype(g.scaled(g.scores(q, k), scale_of(s)), FLOAT)
            x = where(g, m, x, value) if how == "filled" else added(value)(g, s, x, m)
            return g.matmul(g.astype(g.softmax(x, axis=-1), s.dtype), v)

        return build

    def expected(s):
        def attended(q, k, v, m):
            x = scores_of(q, k, scale_of(s)).astype(np.float32)
            hidden = np.float32(value)
            x = np.where(m, x, hidden) if how == "filled" else np.where(m, x, x + hidden)
            return [attend(x.astype(np.float64), v)]

        return attended

    def shapes(s):
        return [*bhsd(s), ((s.B, 1, s.M, s.N), "bool")]

    sizes = Sizes(B=2, M=5, N=39)
    return AttentionCase("wide scores", emit, shapes, expected, {3: rows_of_nothing}, sizes)


@pytest.mark.one_in(10)
@pytest.mark.parametrize("value", [-65504.0, -1e9, LEAST])
@pytest.mark.parametrize("how", ["filled", "added"])
@pytest.mark.parametrize("writer", WRITERS)
def test_kernels_keep_the_weights_of_rows_of_finite_numbers(writer, how, value):
    graph = wide(how, value)
    func, inputs = graph.built()
    (wanted,) = graph.expected()
    out = np.full(wanted.shape, np.nan, np.float16)
    emit, run = WRITERS[writer]
    assert run(emit(analyze_attention(func)), [*inputs, out]) == 1
    assert np.abs(out - wanted).max() <= 2e-3 * np.abs(wanted).max()


# ---- what is left out


def by_least(condition):
    return hidden(LEAST)(condition)


@pytest.mark.parametrize(
    ("condition", "sizes"),
    [
        (lambda s, i, j: j <= i, Sizes(dtype=FLOAT)),
        (lambda s, i, j: j <= i, Sizes(dtype=FLOAT, M=9, N=4)),
        (lambda s, i, j: j <= i + (s.N - s.M), Sizes(dtype=FLOAT, M=6, N=9)),
        (lambda s, i, j: tirx.And(j <= i, i - j < 3), Sizes(dtype=FLOAT, M=6, N=9)),
    ],
    ids=["causal", "more queries", "aligned at the end", "window"],
)
def test_finite_numbers_hide_where_every_row_sees_a_key(condition, sizes):
    graph = case("", by_least(condition), None, sizes=sizes)
    attention = analyze_attention(graph.func())
    found = key_range(attention)
    assert any(bound.upper for bound in found.bounds)
    assert not found.rest
    assert "score" in str(attention.logit)
    assert "Select" not in str(attention.logit)


@pytest.mark.parametrize(
    ("condition", "sizes"),
    [
        (lambda s, i, j: j <= i - 1, Sizes(dtype=FLOAT)),
        (lambda s, i, j: j <= i + (s.N - s.M), Sizes(dtype=FLOAT, M=9, N=6)),
        (lambda s, i, j: tirx.And(j <= i, i - j < 3), Sizes(dtype=FLOAT, M=12, N=6)),
    ],
    ids=["before", "more queries, aligned at the end", "window beyond the keys"],
)
def test_finite_numbers_hide_nothing_where_a_row_may_see_no_key(condition, sizes):
    graph = case(
        "",
        hidden(-1e9)(condition),
        lambda s, x: np.where(
            np.array([[_holds(condition, s, i, j) for j in range(s.N)] for i in range(s.M)]),
            x,
            -1e9,
        ),
        sizes=sizes,
    )
    func, arrays = graph.built()
    attention = analyze_attention(func)
    assert attention.visible is None
    (wanted,) = graph.expected()
    (got,) = evaluate(attention, arrays)
    np.testing.assert_allclose(got, wanted, rtol=0, atol=1e-6 * np.abs(wanted).max())


def _holds(condition, s, i, j):
    value = condition(s, tirx.const(i, "int64"), tirx.const(j, "int64"))
    return bool(int(tvm.sym.Analyzer().simplify(value)))


def test_a_guard_of_rows_lets_finite_numbers_hide():
    """``where(any visible, softmax(where(visible, s, -1e9)) v, 0)``."""

    def emit(bb, q, k, v, m):
        g = Graph(bb)
        out = softmaxed(g, where(g, m, g.scores(q, k), -1e9), v)
        seen = g.max(g.astype(m, FLOAT), axis=-1, keepdims=True)
        return where_row(g, seen, out)

    def where_row(g, seen, out):
        def select(seen: te.Tensor, out: te.Tensor) -> te.Tensor:
            return te.compute(
                out.shape,
                lambda b, h, i, e: tirx.Select(
                    seen(b, 0, i, 0) > 0, out(b, h, i, e), tirx.const(0, out.dtype)
                ),
                name="select",
            )

        return g.te(select, seen, out)

    s = Sizes(dtype=FLOAT)
    inputs = [*bhsd(s), ((s.B, 1, s.M, s.N), "bool")]
    attention = analyze_attention(one_group(module(emit, *inputs)).func)
    assert attention.visible is not None
    assert "Select" not in str(attention.logit)


# ---- the proof

B, M, N = (tirx.Var(name, "int64") for name in "bmn")


def sees(condition, queries, keys):
    return every_row_sees_a_key([condition], [Axis(B, 2), Axis(M, queries)], [Axis(N, keys)])


def ids(*shape):
    return tirx.decl_buffer(shape, "int32", "ids")


def test_proofs_of_a_visible_key():
    table = ids(2, 8)
    same = tirx.EQ(tirx.BufferLoad(table, [B, M]), tirx.BufferLoad(table, [B, N]))
    window = tirx.And(N <= M, M - N < 3)
    size = tirx.Var("size", "int64")
    assert sees(N <= M, 8, 8)
    assert sees(N <= M, size, size)
    assert sees(N >= M, 8, 8)
    assert sees(window, 8, 8)
    assert sees(tirx.And(window, same), 8, 8)
    assert sees(tirx.Or(tirx.Cast("int64", tirx.BufferLoad(table, [B, 0])) > N, N <= M), 8, 8)


def test_what_no_key_is_proven_for():
    table = ids(2, 8)
    other = ids(2, 8)
    length = tirx.Cast("int64", tirx.BufferLoad(table, [B, 0]))
    assert not sees(length > N, 8, 8)
    assert not sees(M > N, 8, 8)
    assert not sees(tirx.And(N <= M, M - N < 3), 8, 4)
    assert not sees(tirx.EQ(tirx.BufferLoad(table, [B, M]), tirx.BufferLoad(other, [B, N])), 8, 8)
    assert not sees(tirx.NE(tirx.BufferLoad(table, [B, N]), tirx.const(0, "int32")), 8, 8)
