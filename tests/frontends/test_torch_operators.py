"""PyTorch operators that are converted here and not by TVM, and common layers."""

import functools
import itertools
import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

import tvm_fusion
from tests.support.frontend_tools import Function, check, operators
from tests.support.models import run_unfused
from tvm_fusion.frontends import load


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("bias", [True, False])
def test_linear_has_the_type_of_its_input(dtype, bias):
    check(nn.Linear(8, 4, bias=bias).to(dtype), torch.randn(2, 3, 8).to(dtype))


def test_half_products_are_accumulated_in_float32_and_rounded_once():
    mod = check(lambda a, b: a @ b, torch.randn(3, 8).half(), torch.randn(8, 5).half())
    assert operators(mod) == ["relax.matmul", "relax.astype"]
    assert 'out_dtype="float32"' in mod.script()


@pytest.mark.one_in(5)
@pytest.mark.parametrize(
    "function",
    [
        lambda x: x * 0.5,
        lambda x: 2.5 + x,
        lambda x: x / 2,
        lambda x: x // 2,
        lambda x: torch.div(x, 2, rounding_mode="trunc"),
        lambda x: x % 3,
        lambda x: 1.5 - x,
        lambda x: x > 0.5,
        lambda x: torch.where(x > 0, x, 0.5),
        lambda x: x**2,
        lambda x: x.float() ** 3,
        lambda x: x.abs() ** 0.5,
        lambda x: 2.0**x,
        lambda x: torch.sub(x, x, alpha=2),
        lambda x: x.cumsum(0),
        lambda x: x.amax(),
        lambda x: x + torch.ones(7),
        lambda x: (x >> 1, x << 2, x & 5, x | 1, x ^ 3),
        lambda x: ((x.int() & 3) ^ (x.int() >> x.int().abs()), 1 << x.abs()),
    ],
)
def test_integers_are_promoted_as_pytorch_does(function):
    check(function, torch.arange(-3, 4))


@pytest.mark.one_in(6)
@pytest.mark.parametrize(
    "function",
    [
        lambda a, b: (a + b, a * b, a & b, a | b, ~a),
        lambda a, b: (a == b, a != b, a < b, a <= b),
        lambda a, b: (a.any(), a.all(), b.any(0), a.sum()),
        lambda a, b: (a.cumsum(0), a.cumprod(0)),
        lambda a, b: (a * 2.0, a + 1, torch.maximum(a, b)),
    ],
)
def test_booleans_are_computed_as_pytorch_does(function):
    check(function, torch.tensor([0, 0, 1, 1]) > 0, torch.tensor([0, 1, 0, 1]) > 0)


def test_8_bit_floats_are_stored_and_read():
    check(lambda x: (x * 2).to(torch.float8_e4m3fn).float(), torch.randn(64))
    mod = load(Function(lambda x: x.to(torch.float8_e5m2)), (torch.randn(4),))
    assert mod["main"].ret_ty.dtype == "float8_e5m2"


def test_half_and_float32_give_float32():
    check(lambda a, b: (a + b, a < b, 1.0 - a), torch.randn(6).half(), torch.randn(6))


def test_a_number_that_changes_nothing_leaves_no_operator():
    mod = check(lambda x: (x * 1.0 / 1 + 0 - 0).expand(3, 3).float() @ x, torch.randn(3, 3))
    assert operators(mod) == ["relax.matmul"]


@pytest.mark.one_in(6)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize(
    ("module", "shape"),
    [
        (lambda: nn.Conv1d(3, 4, 3, padding=2, dilation=2), (1, 3, 8)),
        (lambda: nn.Conv2d(4, 4, 3, stride=2, padding=1, groups=2), (1, 4, 8, 9)),
        (lambda: nn.Conv3d(3, 4, 2), (1, 3, 4, 5, 6)),
        (lambda: nn.ConvTranspose2d(3, 4, 3, 2, padding=1, output_padding=1), (1, 3, 5, 5)),
        (lambda: nn.Conv2d(3, 4, 1, bias=False), (2, 3, 5, 7)),
    ],
)
def test_convolutions_have_the_type_of_their_input(module, shape, dtype):
    check(module().to(dtype), torch.randn(shape).to(dtype))


@pytest.mark.one_in(6)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("affine", [True, False])
@pytest.mark.parametrize("shape", [(2, 8, 3, 5), (2, 8, 6)])
def test_groups_of_channels_are_normalized(dtype, affine, shape):
    norm = nn.GroupNorm(4, 8, eps=1e-3, affine=affine)
    if affine:
        nn.init.normal_(norm.weight)
        nn.init.normal_(norm.bias)
    check(norm.to(dtype), torch.randn(shape).to(dtype))


@pytest.mark.one_in(2)
@pytest.mark.parametrize(
    "function",
    [
        lambda c, a, b: torch.addmm(c, a, b),
        lambda c, a, b: torch.addmm(c, a, b, alpha=0.5, beta=2),
        lambda c, a, b: torch.addmm(c, a, b, beta=0),
    ],
)
def test_addmm_scales_and_rounds(function):
    check(function, torch.randn(5).half(), torch.randn(3, 8).half(), torch.randn(8, 5).half())


@pytest.mark.one_in(2)
@pytest.mark.parametrize(
    "function",
    [
        lambda x: (x[:, 0], x[..., -1], x[1, 2]),
        lambda x: (x[:, 1:3], x[-2:], x[..., ::2], x[:, :-1]),
        lambda x: x.transpose(0, 1).transpose(0, 1) + 1,
    ],
)
def test_indexing(function):
    mod = check(function, torch.randn(3, 4, 5))
    assert not {"relax.take", "relax.permute_dims"} & set(operators(mod))


@pytest.mark.parametrize(
    ("loss", "shape"),
    [
        (lambda: nn.CrossEntropyLoss(), (5, 8)),
        (lambda: nn.CrossEntropyLoss(reduction="sum", ignore_index=2), (5, 8)),
        (lambda: nn.CrossEntropyLoss(torch.rand(8), reduction="none"), (5, 8, 3)),
    ],
)
def test_cross_entropy(loss, shape):
    check(loss(), torch.randn(shape), torch.randint(0, 8, (shape[0], *shape[2:])))


@pytest.mark.one_in(3)
@pytest.mark.parametrize(
    ("module", "shape"),
    [
        (lambda: nn.LayerNorm(8), (2, 8)),
        (lambda: nn.RMSNorm(8), (2, 8)),
        (lambda: nn.GroupNorm(2, 4), (2, 4, 8)),
        (lambda: nn.BatchNorm2d(4), (2, 4, 5, 5)),
        (lambda: nn.Softmax(-1), (2, 8)),
        (lambda: nn.GELU(), (8,)),
        (lambda: nn.GELU("tanh"), (8,)),
        (lambda: nn.SiLU(), (8,)),
        (lambda: nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), (2, 5, 8)),
        (lambda: nn.Sequential(nn.Dropout(0.5), nn.Linear(8, 8)), (2, 8)),
    ],
)
def test_common_layers(module, shape):
    check(module(), torch.randn(shape))


@pytest.mark.one_in(12)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16, torch.bfloat16])
@pytest.mark.parametrize(
    ("shapes", "dim"), [(((5, 7), (5, 7)), -1), (((3, 1, 6), (4, 6)), 2), (((3, 1), (3, 5)), 1)]
)
def test_cosines_are_right(dtype, shapes, dim):
    x, y = (torch.randn(shape).to(dtype) for shape in shapes)

    def function(x, y):
        return F.cosine_similarity(x, y, dim), F.cosine_similarity(x, y, dim, eps=2.0)

    check(function, x, y)


def test_the_cosine_of_a_short_vector_of_halves_is_finite():
    """Its norm is computed in float32, and its least norm is no half."""
    x = torch.tensor([[2.0**-24], [0.0], [-3.0]]).half()
    mod = load(Function(lambda x: F.cosine_similarity(x, torch.ones_like(x), -1)), (x,))
    (given,) = run_unfused(mod, x.numpy())
    assert given.tolist() == [1, 0, -1]


FLOATS = (torch.float32, torch.float16, torch.bfloat16, torch.float64)
SPECIAL = (0.0, -0.0, math.inf, -math.inf, math.nan, 3.0, -4.0, 1e-30, -1e30)


@pytest.mark.one_in(4)
@pytest.mark.parametrize("dtype", FLOATS)
def test_hypotenuses_neither_overflow_nor_vanish(dtype):
    largest = torch.finfo(dtype).max / 4
    x, y = torch.tensor([3.0, 0.0]).to(dtype), torch.ones(2).to(dtype)
    pairs = [(x * scale, y * scale) for scale in (largest, 1 / largest, 0.0)]
    pairs.append((torch.randn(5, 7).to(dtype), torch.randn(7).to(dtype)))
    check(lambda *given: list(map(torch.hypot, given[::2], given[1::2])), *itertools.chain(*pairs))


@pytest.mark.one_in(3)
@pytest.mark.parametrize("dtype", [*FLOATS, torch.int32])
def test_signs_are_copied_from_zeros_too(dtype):
    def signs(x, y):
        return 1 / torch.copysign(x, y), torch.copysign(x, -2.0), torch.copysign(x, 0)

    given = torch.tensor(SPECIAL).clamp(-9, 9)
    x, y = torch.meshgrid(given + 1, given, indexing="ij")
    check(signs, x.to(dtype), y.to(dtype))


def test_signs_and_hypotenuses_of_infinities_and_nan():
    mod = load(Function(lambda x, y: (torch.hypot(x, y), torch.copysign(x, y))), GRID)
    given = run_unfused(mod, *(x.numpy() for x in GRID))
    for x, wanted in zip(given, (torch.hypot(*GRID), torch.copysign(*GRID)), strict=True):
        np.testing.assert_allclose(x, wanted.numpy(), rtol=1e-6)


GRID = tuple(torch.meshgrid(torch.tensor(SPECIAL), torch.tensor(SPECIAL), indexing="ij"))


@pytest.mark.one_in(8)
@pytest.mark.parametrize("dtype", [*FLOATS, torch.int8, torch.int32, torch.uint8, torch.bool])
def test_products_along_an_axis(dtype):
    x = (torch.rand(5, 7, 3) * 3).to(dtype)
    check(lambda x: (x.prod(1), x.prod(-1, keepdim=True), x[:, :2, 0].prod()), x)
    check(lambda x: x.prod(0, dtype=torch.float32), x)


@pytest.mark.one_in(4)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.int32])
def test_the_product_of_a_number_along_its_axis_is_itself(dtype):
    x = torch.tensor(3).to(dtype)
    check(lambda x: (torch.prod(x, 0) + 1, x.prod(-1, keepdim=True), x.prod() * 2), x)
    check(lambda x: torch.prod(x, 0, dtype=torch.float64), x)


def test_products_of_halves_are_rounded_once():
    x = torch.tensor([[300.0, 300.0, 1 / 300, 1.0009765625, 1.0009765625]]).half()
    (given,) = run_unfused(load(Function(lambda x: x.prod(1)), (x,)), x.numpy())
    np.testing.assert_array_equal(given, x.double().prod(1).half().numpy())


def compiled(function, *inputs):
    """What the compiled function computes: the compiler mends TVM's argmax (FirstExtrema)."""
    model = Function(function)
    results = tvm_fusion.compile(model, "llvm", example_inputs=inputs, verify=False)(*inputs)
    return torch.utils._pytree.tree_leaves(results)


@pytest.mark.one_in(16)
@pytest.mark.parametrize("dtype", [*FLOATS, torch.int8, torch.int64, torch.uint8, torch.bool])
@pytest.mark.parametrize("extremum", [torch.max, torch.min])
def test_of_equal_extrema_along_an_axis_the_first_is_found(extremum, dtype):
    def function(x):
        number = extremum(x[0, 0, 0], 0)
        return extremum(x, 1), extremum(x, -1, keepdim=True), extremum(x, 0)[1], number

    x = torch.randint(0 if dtype in (torch.uint8, torch.bool) else -2, 3, (5, 31, 3)).to(dtype)
    mod = load(Function(function), (x,))
    assert "relax.topk" not in operators(mod)
    wanted = torch.utils._pytree.tree_leaves(function(x))
    for given, right in zip(tvm_fusion.compile(mod, "llvm", verify=False)(x), wanted, strict=True):
        assert torch.equal(torch.as_tensor(given), right)


@pytest.mark.one_in(2)
@pytest.mark.parametrize("extremum", [torch.max, torch.min])
def test_extrema_of_infinities_are_they_and_have_a_place(extremum):
    x = torch.tensor([[math.inf] * 3, [-math.inf] * 3, [-math.inf, 1.0, math.inf]])
    for keepdim in (False, True):
        given = compiled(lambda x, keepdim=keepdim: extremum(x, 1, keepdim=keepdim), x)
        for one, right in zip(given, extremum(x, 1, keepdim=keepdim), strict=True):
            assert torch.equal(torch.as_tensor(one), right)


@pytest.mark.one_in(6)
@pytest.mark.parametrize("dtype", [torch.float32, torch.int64, torch.bool])
@pytest.mark.parametrize("turn", [lambda x: x, lambda x: x.transpose(0, 2), lambda x: x[0, 0, 0]])
def test_indices_are_filled_in_turned_tensors_too(turn, dtype):
    index = torch.tensor([0, -1])
    x = torch.randint(0, 2, (3, 5, 7)).to(dtype)
    if turn(x).ndim:
        check(lambda x: turn(x).index_fill(1, index, 1), x)
        check(lambda x, v: turn(x).index_fill(-1, index, v), x, torch.tensor(True))
    else:
        check(lambda x: turn(x).index_fill(0, index, 1), x)


@pytest.mark.one_in(6)
@pytest.mark.parametrize("order", [1, 2, 3.0, math.inf])
@pytest.mark.parametrize("axis", [-1, (-2, 2), 0])
def test_norms_over_axes_of_one_element_have_no_such_axis(order, axis):
    """Those of PyTorch 2.11 have one, and so has what is made of them (`prelu` of a number)."""

    def function(x, w):
        norm = torch.linalg.vector_norm(x, order, axis)
        number = torch.linalg.vector_norm(x.flatten()[:1], order, -1)
        return norm, norm.unsqueeze(-1) * w, F.prelu(number, w)

    check(function, torch.randn(3, 1, 1)[:, :, 0] if axis == -1 else torch.randn(1, 1, 1), W)


W = torch.tensor([0.25])


@pytest.mark.one_in(6)
@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("shape", [(), (7,), (3, 5), (2, 5, 7)])
def test_prelu_has_the_shape_of_its_input(dtype, shape):
    x, weights = torch.randn(shape).to(dtype), [W.to(dtype)]
    if len(shape) > 1:
        weights.append(torch.randn(5).to(dtype))
    check(lambda x, *given: [F.prelu(x, w) for w in given], x, *weights)


NEAREST = functools.partial(F.interpolate, scale_factor=41.0, mode="nearest")


@pytest.mark.one_in(8)
@pytest.mark.parametrize(
    ("function", "x"),
    [
        (NEAREST, torch.arange(64.0)[None, None]),
        (NEAREST, torch.arange(64.0).reshape(1, 1, 8, 8)),
        (
            functools.partial(F.interpolate, scale_factor=3.1, mode="nearest"),
            torch.arange(16.0).reshape(1, 1, 4, 4),
        ),
        (lambda x: torch.cov(input=x), torch.arange(24.0).reshape(3, 8) ** 2),
        (
            lambda x: (torch.quantile(x, 0.3), torch.searchsorted(x.sort()[0], input=x[:3])),
            torch.arange(8.0) ** 2,
        ),
        (lambda x: torch.quantile(x, 0.5, dim=0, keepdim=True), torch.tensor(3.0)),
        (lambda x: torch.histc(x[:0], 4), torch.ones(8)),
        (torch.linalg.pinv, torch.diag(torch.tensor([1.0, 3.5e-7])).to(torch.complex64)),
    ],
    ids=["line", "image", "factor", "by name", "others by name", "scalar", "nothing", "threshold"],
)
def test_edges_are_those_of_pytorch(function, x):
    check(function, x)
