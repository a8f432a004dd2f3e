"""The order of numbers with NaN and infinities among them, and arithmetic that would lose them."""

import pytest

import tvm_fusion

from ..support.frontend_tools import check

torch = pytest.importorskip("torch")
INF, NAN = float("inf"), float("nan")
X = torch.tensor(
    [
        [1.0, NAN, -3.0, NAN, INF],
        [INF, -0.5, 2.0, -INF, 2.0],
        [NAN, NAN, NAN, NAN, NAN],
        [4.0, 3.0, -1.0, 0.0, 2.5],
    ]
)
A = torch.tensor([5.0, -5, INF, 1, NAN, 0, -1, 1, -3.5, 3.5, 1e8, -6])
B = torch.tensor([0.0, 3, 2, INF, 1, -0.0, INF, -INF, 2, -2, 0.3, 3])


def orders(x):
    """All results that are the order of a row."""
    return (
        (x.argmax(1), x.argmin(0), x.argmax(), x.argmin(1, keepdim=True)),
        (x.max(1), x.min(0, keepdim=True), x.sort(1), x.sort(dim=0, descending=True, stable=True)),
        (x.argsort(dim=1, stable=True), x.topk(2, 1).values, x.topk(2, 0, largest=False).values),
        (x.topk(1, 1).values, x.topk(1, 0).values),
        (x.median(1), x.median()),
    )


OTHERS = [pytest.param(t, marks=pytest.mark.nightly) for t in (torch.float32, torch.float16)]


@pytest.mark.parametrize("dtype", [torch.bfloat16, *OTHERS])
def test_nan_is_the_largest_number(dtype):
    check(orders, X.to(dtype))


def test_nothing_that_is_no_number_vanishes():
    check(
        lambda x: (
            (x * 0, 0.0 * x, x - x, x / x, torch.sub(x, x, alpha=1), torch.add(x, x, alpha=0)),
            (torch.addcmul(x, x, x, value=0), torch.addcdiv(x, x, x, value=0)),
        ),
        X,
    )


def test_divisions_are_rounded_as_in_torch():
    check(
        lambda a, b: (a % b, a // b, torch.fmod(a, b), torch.div(a, b, rounding_mode="trunc")), A, B
    )
    check(lambda a, b: (a % b, a // b), torch.tensor([7, -7, 7, -7]), torch.tensor([2, 2, -3, -3]))


def test_places_along_an_axis_of_symbolic_size():
    class Places(torch.nn.Module):
        def forward(self, x):
            return torch.argmax(x, 1), torch.argmin(x), *torch.max(x, 1)

    columns = {1: torch.export.Dim("columns", min=1, max=100)}
    compiled = tvm_fusion.compile(
        Places(), "llvm", example_inputs=(torch.randn(3, 7),), dynamic_shapes=(columns,)
    )
    for size in (1, 6, 100):
        x = torch.randn(3, size)
        x[1, size // 2] = x[2, size - 1] = NAN
        for found, wanted in zip(compiled(x), Places()(x), strict=True):
            torch.testing.assert_close(found, wanted, equal_nan=True, rtol=0, atol=0)
