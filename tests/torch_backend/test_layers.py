"""Layers that torch computes by operators of their own: encoders of `nn.Transformer`, attention of
a sequence to itself, and `flex_attention`.
"""

import math
import warnings

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

pytestmark = pytest.mark.usefixtures("fresh_dynamo")


def check(function, *inputs, rtol=1e-4, **options):
    """All of it is compiled, and the numbers are those of eager mode."""
    run = torch.compile(
        function, backend="tvm_fusion", options={"verify": False, "strict": True}, **options
    )
    wanted = function(*inputs)
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        given = run(*inputs)
    torch.testing.assert_close(given, wanted, rtol=rtol, atol=rtol, equal_nan=True)
    return run


def padding(batch=3, length=7):
    """True where a sequence has ended, after another number of places each."""
    return torch.arange(length) >= torch.tensor([[length], [4], [1]][:batch])


CAUSAL = torch.ones(7, 7, dtype=torch.bool).triu(1)
EACH_HEAD = torch.rand(12, 7, 7, generator=torch.Generator().manual_seed(0)) > 0.5
MASKS = {
    "padding": {"src_key_padding_mask": padding()},
    "both": {"src_mask": CAUSAL, "src_key_padding_mask": padding()},
    "each head": {"src_mask": EACH_HEAD.index_fill(2, torch.tensor([3]), False)},
}


def encoder(norm_first=False, activation="relu", width=16):
    layer = nn.TransformerEncoderLayer(
        width, 4, 24, batch_first=True, norm_first=norm_first, activation=activation
    )
    for parameter in layer.parameters():
        parameter.add_(0.2 * torch.randn_like(parameter))
    return layer.eval()


@pytest.mark.one_in(2)
@pytest.mark.parametrize(("norm_first", "activation"), [(False, "relu"), (True, "gelu")])
def test_encoders_in_evaluation_mode_are_compiled_whole(norm_first, activation, modules):
    model = nn.TransformerEncoder(
        encoder(norm_first, activation), 2, nn.LayerNorm(16), enable_nested_tensor=False
    )
    check(model.eval(), torch.randn(3, 7, 16))
    assert len(modules) == 1


# Always: encoders, above, and masks of trained ones (`frontends/test_torch_modules`).
@pytest.mark.nightly
@pytest.mark.one_in(3)
@pytest.mark.parametrize("masks", MASKS.values(), ids=MASKS)
def test_masks_of_encoders_hide_what_they_hide_in_eager_mode(masks):
    model = encoder()
    check(lambda x: model(x, **masks), torch.randn(3, 7, 16))


@pytest.mark.one_in(6)
@pytest.mark.parametrize(
    ("options", "read"),
    [
        ({}, 2),
        ({"key_padding_mask": padding(), "average_attn_weights": False}, 2),
        ({"attn_mask": CAUSAL, "key_padding_mask": padding()}, 2),
        ({"attn_mask": CAUSAL, "need_weights": False}, 1),
    ],
)
def test_attention_of_a_sequence_to_itself_is_compiled(options, read):
    model = nn.MultiheadAttention(16, 4, batch_first=True).eval()
    check(lambda x: model(x, x, x, **options)[:read], torch.randn(3, 7, 16))


# ---- flex_attention


def qkv(heads=4, of_keys=4, queries=40, keys=40, width=16, value_width=16, dtype=torch.float32):
    shapes = (2, heads, queries, width), (2, of_keys, keys, width), (2, of_keys, keys, value_width)
    return [torch.randn(shape, dtype=dtype) for shape in shapes]


SLOPES = torch.tensor([0.5, 0.25, 0.125, 0.0625])
OFFSETS = torch.randn(2, 79, generator=torch.Generator().manual_seed(0))
SCORES = {
    "alibi": lambda s, b, h, i, j: s + SLOPES[h] * (j - i),
    "relative": lambda s, b, h, i, j: s + OFFSETS[b, i - j + 39],
    "hides all of some": lambda s, b, h, i, j: torch.where((i % 3 == 0) | (j > 50), -math.inf, s),
    "of places alone": lambda s, b, h, i, j: (i - j) * 0.01,
}


@pytest.mark.one_in(4)
@pytest.mark.parametrize("name", SCORES)
def test_functions_of_scores_are_compiled(name, modules):
    check(lambda q, k, v: flex_attention(q, k, v, score_mod=SCORES[name]), *qkv())
    assert len(modules) == 1


DOCUMENTS = torch.tensor([0] * 10 + [1] * 17 + [2] * 13)
LENGTHS = torch.tensor([33, 0])  # of one sequence nothing is to be seen
MASK_FUNCTIONS = {
    "causal": lambda b, h, i, j: i >= j,
    "documents": lambda b, h, i, j: (DOCUMENTS[i] == DOCUMENTS[j]) & (i >= j),
    "lengths": lambda b, h, i, j: j < LENGTHS[b],
    "of heads": lambda b, h, i, j: (h % 2 == 0) | (i >= j),
}


@pytest.mark.one_in(6)
@pytest.mark.parametrize(
    ("name", "changed"),
    [
        ("causal", False),
        ("documents", True),
        ("lengths", False),
        ("lengths", True),
        ("of heads", True),
    ],
)
def test_functions_of_masks_are_compiled(name, changed, modules):
    mask = create_block_mask(MASK_FUNCTIONS[name], 2, 4, 40, 40, device="cpu")
    score = SCORES["alibi"] if changed else None

    def function(q, k, v, mask):
        return flex_attention(q, k, v, score_mod=score, block_mask=mask)

    check(function, *qkv(), mask)
    assert len(modules) == 1


def test_a_mask_that_is_made_within_the_graph_is_compiled():
    def function(q, k, v):
        mask = create_block_mask(MASK_FUNCTIONS["causal"], None, None, 40, 40, device="cpu")
        return flex_attention(q, k, v, block_mask=mask)

    inputs = qkv()
    run = torch.compile(function, backend="tvm_fusion", options={"verify": False})
    torch.testing.assert_close(run(*inputs), function(*inputs), rtol=1e-4, atol=1e-4)


@pytest.mark.one_in(4)
@pytest.mark.parametrize(
    ("dtype", "rtol"), [(torch.float64, 1e-10), (torch.float16, 4e-3), (torch.bfloat16, 3e-2)]
)
def test_types_of_flex_attention(dtype, rtol):
    score = SCORES["alibi"]
    inputs = qkv(dtype=dtype)
    check(lambda q, k, v: flex_attention(q, k, v, score_mod=score), *inputs, rtol=rtol)


@pytest.mark.parametrize("score", [None, lambda s, *_: 20 * torch.tanh(s / 20)])
def test_grouped_queries_and_other_widths_and_scales(score):
    def function(q, k, v):
        return flex_attention(q, k, v, score_mod=score, scale=0.3, enable_gqa=True)

    check(function, *qkv(of_keys=2, queries=5, value_width=8))


def test_logarithms_of_sums_are_returned():
    check(
        lambda q, k, v: flex_attention(q, k, v, score_mod=SCORES["alibi"], return_lse=True), *qkv()
    )


def test_results_of_flex_attention_lie_as_the_queries_do():
    def function(x):
        q, k, v = x.unflatten(-1, (3, 4, 16)).permute(2, 0, 3, 1, 4)
        y = flex_attention(q, k, v, score_mod=SCORES["alibi"])
        return y, y.transpose(1, 2).view(*x.shape[:2], 64)

    x = torch.randn(2, 9, 192)
    run = check(function, x)
    assert run(x)[0].stride() == function(x)[0].stride()


# Always: attention of a symbolic width, below, and of symbolic lengths (`kernels/attention`).
@pytest.mark.nightly
@pytest.mark.one_in(2)
@pytest.mark.parametrize("score", [None, "alibi"])
def test_flex_attention_of_symbolic_lengths_is_compiled(score):
    score = None if score is None else SCORES[score]

    def function(q, k, v):
        return flex_attention(q, k, v, score_mod=score)

    run = check(function, *qkv(), dynamic=True)
    inputs = qkv(queries=13, keys=29)
    torch.testing.assert_close(run(*inputs), function(*inputs), rtol=1e-4, atol=1e-4)


def test_a_module_with_flex_attention_is_exported_and_compiled():
    class Model(nn.Module):
        def forward(self, q, k, v):
            return flex_attention(q, k, v, score_mod=SCORES["alibi"])

    import tvm_fusion

    inputs = tuple(qkv())
    given = tvm_fusion.compile((Model(), inputs), "llvm", verify=False)(*inputs)
    torch.testing.assert_close(given, Model()(*inputs), rtol=1e-4, atol=1e-4)


def test_a_function_that_cannot_be_mapped_runs_in_torch():
    @torch.library.custom_op("tvm_fusion_tests::doubled", mutates_args=())
    def doubled(x: torch.Tensor) -> torch.Tensor:
        return x * 2

    doubled.register_fake(torch.empty_like)

    def function(q, k, v):
        return flex_attention(q, k, v, score_mod=lambda s, *_: doubled(s)) + 1

    inputs = qkv(queries=3, keys=4)
    run = torch.compile(function, backend="tvm_fusion", options={"verify": False})
    plain = functional.scaled_dot_product_attention(*inputs, scale=2 / 4) + 1
    with pytest.warns(UserWarning, match="flex_attention"):
        torch.testing.assert_close(run(*inputs), plain, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("scale", [None, 0.3])
def test_attention_of_a_symbolic_width_is_compiled(scale, modules):
    def function(q, k, v):
        return functional.scaled_dot_product_attention(q, k, v, scale=scale)

    run = check(function, *qkv(queries=5, keys=7), dynamic=True)
    for width in (8, 5):
        inputs = qkv(queries=5, keys=7, width=width, value_width=width)
        torch.testing.assert_close(run(*inputs), function(*inputs), rtol=1e-4, atol=1e-4)
    assert len(modules) == 1
