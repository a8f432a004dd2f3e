"""Values read at indices, and images: as PyTorch has them, or refused with the operator's name."""

import pytest

import tvm_fusion
from tvm_fusion.errors import FrontendError
from tvm_fusion.frontends import load

from ..support.frontend_tools import Function, check

torch = pytest.importorskip("torch")
F = torch.nn.functional
X = torch.randn(3, 5, 4, 6, generator=torch.Generator().manual_seed(0))
ROWS, PLACES = torch.tensor([[0, -1], [2, -3]]), torch.tensor([-4, 1])


@pytest.mark.one_in(5)
@pytest.mark.parametrize(
    "function",
    [
        lambda x, i, j: x[i],
        lambda x, i, j: x[:, i],
        lambda x, i, j: x[..., i],
        lambda x, i, j: x[:, [-2]],
        lambda x, i, j: x[:, i, j],
        lambda x, i, j: x[i, :, j],
        lambda x, i, j: x[:, [0, 1], :, [0, -1]],
        lambda x, i, j: x[i, j, j, i],
        lambda x, i, j: x[:, i.int(), :, None],
        lambda x, i, j: torch.take(x, i),
        lambda x, i, j: x.unfold(1, 3, 2),
        lambda x, i, j: x.unfold(-1, 6, 1),
        lambda x, i, j: x[:, -100:3],
        lambda x, i, j: x[:, 1:100],
    ],
)
def test_elements_are_those_of_torch(function):
    check(lambda *inputs: function(*inputs), X, ROWS, PLACES)


@pytest.mark.parametrize(
    ("function", "wrong"),
    [
        (lambda x, i: x[i], [3, 12]),
        (lambda x, i: x[i], [-13, 3]),
        (lambda x, i: x.reshape(3, 4)[0 * i, i], [1, 4]),  # 4 is in range of all twelve
        (lambda x, i: F.embedding(i, x[:, None]), [-1, 3]),
        (lambda x, i: x.index_put((i,), x[:2]), [12, 1]),
    ],
)
def test_an_index_out_of_range_is_an_error_as_in_torch(function, wrong):
    x, i = torch.arange(12.0), torch.tensor([1, 2])
    compiled = tvm_fusion.compile((Function(function), (x, i)), "llvm", verify=False)
    assert compiled(x, i).equal(function(x, i))
    with pytest.raises(IndexError, match="an index along axis 0, which has"):
        compiled(x, torch.tensor(wrong))


IMAGE = torch.randn(2, 3, 7, 9, generator=torch.Generator().manual_seed(1))
GRID = torch.rand(2, 4, 5, 2, generator=torch.Generator().manual_seed(2)) * 2.2 - 1.1


@pytest.mark.one_in(12)
@pytest.mark.parametrize(
    "function",
    [
        lambda x, g: F.interpolate(x, size=(10, 4)),
        lambda x, g: F.interpolate(x, scale_factor=2),
        lambda x, g: F.interpolate(x, size=(14, 27), mode="nearest-exact"),
        lambda x, g: F.interpolate(x[0], scale_factor=3),
        lambda x, g: F.interpolate(x[0], scale_factor=2.05),
        lambda x, g: F.interpolate(x[None], scale_factor=(2, 1, 3)),
        lambda x, g: F.interpolate(x, scale_factor=1.7),
        lambda x, g: F.interpolate(x, scale_factor=1.7, mode="bilinear"),
        lambda x, g: F.interpolate(x, size=(10, 4), mode="bilinear"),
        lambda x, g: F.interpolate(x, size=(4, 5), mode="bilinear", antialias=True),
        lambda x, g: F.interpolate(x, size=(9, 5), mode="bicubic", antialias=True),
        lambda x, g: F.grid_sample(x, g, align_corners=False),
        lambda x, g: F.max_pool2d(x, 3, 2, 1, return_indices=True),
        lambda x, g: F.max_pool2d(x, (2, 3), dilation=2, return_indices=True),
        lambda x, g: F.max_pool2d(x[0], 3, return_indices=True),
        lambda x, g: F.max_pool2d(x, 3, padding=1),
        lambda x, g: F.max_pool2d(x - 9, 3, 1, 1, return_indices=True),
        lambda x, g: F.avg_pool2d(x, 3, 2, 1, divisor_override=5),
    ],
)
def test_images_are_those_of_torch(function):
    check(lambda *inputs: function(*inputs), IMAGE, GRID)


NAN = torch.tensor([[1.0, float("nan"), -3.0], [float("inf"), -0.5, 2.0]])


@pytest.mark.one_in(14)
@pytest.mark.parametrize(
    "function",
    [
        lambda x: x != x,
        lambda x: x == x,
        lambda x: x < x,
        lambda x: torch.nanmean(x, 0),
        lambda x: torch.reciprocal(x.nan_to_num(1).clamp(1, 9).long()),
        lambda x: 1.0 / x.nan_to_num(1).clamp(1, 9).long(),
        lambda x: 2 ** x.nan_to_num(1).clamp(0, 9).long(),
        lambda x: torch.argmax(x[0, 0]),
        lambda x: torch.cat([torch.empty(0), x], 0),
        lambda x: torch.block_diag(x[:, :2], torch.empty(0, 0)),
        lambda x: torch.addcmul(x, x, x, value=2),
        lambda x: x.scatter_add(1, torch.tensor([[0, 2], [1, 1]]), x),
        lambda x: x.scatter_reduce(1, torch.tensor([[0, 2], [1, 1]]), x[:, :2], "amin"),
        lambda x: F.cross_entropy(x.nan_to_num(0, 1), torch.tensor([0, 2]), label_smoothing=0.2),
    ],
)
def test_numbers_are_those_of_torch(function):
    check(lambda x: function(x), NAN)


def test_nothing_of_what_is_no_number_is_none_in_kernels_too():
    def function(x):
        return torch.addcmul(x, x, x, value=0), (x - x) * x, (x - x) + x

    module = tvm_fusion.compile(Function(function), "llvm", example_inputs=(NAN,), verify=False)
    for found, expected in zip(module(NAN), function(NAN), strict=True):
        torch.testing.assert_close(found, expected, equal_nan=True)


@pytest.mark.parametrize(
    ("function", "said"),
    [
        (lambda x: x + torch.randn(4), "aten.randn.default .*random numbers"),
        (lambda x: F.dropout(x, training=True), "native_dropout.* random numbers"),
    ],
)
def test_what_would_be_another_value_is_refused_by_name(function, said):
    with pytest.raises(FrontendError, match=said):
        load(Function(function), (torch.ones(3, 4),))


def test_random_numbers_that_nobody_reads_are_no_obstacle():
    check(lambda x: (torch.rand(3), x + 1)[1], torch.ones(3))


def test_what_stands_for_a_place_outside_of_a_window_may_be_infinite():
    x = torch.arange(36.0).reshape(1, 1, 6, 6)
    x[0, 0, 0, 0], x[0, 0, 5, 5] = torch.inf, -torch.inf
    options = {"ceil_mode": True, "divisor_override": 5}

    def function(x):
        return F.avg_pool2d(x, 3, 2, **options), F.avg_pool2d(x, 3, 2, 1, **options)

    check(function, x)
