"""Layers that torch computes by operators of their own: encoders of `nn.Transformer`, and attention
of a sequence to itself.
"""

import warnings

import pytest
import torch
from torch import nn
from torch.nn import functional

from tvm_fusion.compilation import compiler


@pytest.fixture(autouse=True)
def fresh_dynamo():
    torch._dynamo.reset()
    torch.manual_seed(0)
    with torch.no_grad():
        yield


@pytest.fixture
def modules(monkeypatch):
    """The compiled modules, in the order in which they were made."""
    made, compile_ = [], compiler.compile
    monkeypatch.setattr(
        compiler, "compile", lambda *a, **k: made.append(compile_(*a, **k)) or made[-1]
    )
    return made


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


@pytest.mark.parametrize(("norm_first", "activation"), [(False, "relu"), (True, "gelu")])
def test_encoders_in_evaluation_mode_are_compiled_whole(norm_first, activation, modules):
    model = nn.TransformerEncoder(
        encoder(norm_first, activation), 2, nn.LayerNorm(16), enable_nested_tensor=False
    )
    check(model.eval(), torch.randn(3, 7, 16))
    assert len(modules) == 1


@pytest.mark.parametrize("masks", MASKS.values(), ids=MASKS)
def test_masks_of_encoders_hide_what_they_hide_in_eager_mode(masks):
    model = encoder()
    check(lambda x: model(x, **masks), torch.randn(3, 7, 16))


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


def qkv(width=16):
    return [torch.randn(2, 4, length, width) for length in (5, 7, 7)]


@pytest.mark.parametrize("scale", [None, 0.3])
def test_attention_of_a_symbolic_width_is_compiled(scale, modules):
    def function(q, k, v):
        return functional.scaled_dot_product_attention(q, k, v, scale=scale)

    run = check(function, *qkv(), dynamic=True)
    for width in (8, 5):
        inputs = qkv(width)
        torch.testing.assert_close(run(*inputs), function(*inputs), rtol=1e-4, atol=1e-4)
    assert len(modules) == 1
