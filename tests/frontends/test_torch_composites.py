"""Operators that are written with others: compared with PyTorch, several in one module."""

import math

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from tests.support.frontend_tools import check

EDGES = torch.tensor([0.0, -0.0, 1.5, -2.0, 3e-39, math.inf, -math.inf, math.nan])
PAIRS = torch.meshgrid(EDGES, EDGES, indexing="ij")


def test_floats_are_taken_apart_and_ordered_as_their_bits_are():
    def function(*given):
        results = []
        for x, y in zip(given[::2], given[1::2], strict=True):
            results += [torch.fmax(x, y), torch.fmin(x, y), torch.signbit(x), torch.angle(x)]
            if x.dtype.itemsize > 2:
                results += [torch.nextafter(x, y), *torch.frexp(x)]
        return results

    types = (torch.float32, torch.float64, torch.float16, torch.bfloat16)
    check(function, *(x.to(dtype) for dtype in types for x in PAIRS))


def test_products_distances_and_moments():
    x, y = torch.randn(4, 5, 6), torch.randn(4, 6, 3)

    def function(x, y):
        return (
            torch.addbmm(x[0, :, :3], x, y, beta=0.5, alpha=2),
            torch.cdist(x, x + 1, 1.0),
            F.pdist(x[0]),
            F.bilinear(x[0], x[1], y[:, :, :1] @ x[:, :1, :]),
            *torch.var_mean(x, (0, -1), keepdim=True),
            *torch.native_layer_norm(x, (6,), None, None, 1e-5),
            *torch.native_group_norm(x, None, None, 4, 5, 6, 1, 1e-5),
            *torch.native_batch_norm(
                x, None, None, x[0, :, 0] + 1, x[1, :, 0].exp(), True, 0.1, 0.001
            ),
        )

    check(function, x, y)


def test_norms_of_halves_with_parameters_of_float32():
    def function(x, weight, bias, mean, variance):
        return (
            F.batch_norm(x, mean, variance, weight, bias),
            F.batch_norm(x, mean, variance),
        )

    channels = [torch.rand(3) + 0.5 for _ in range(4)]
    check(function, torch.randn(2, 3, 4, 4).half(), *channels)


def test_rms_norm_as_it_is_traced_on_a_gpu():
    def function(x, halves, weight):
        fused = torch.ops.aten._fused_rms_norm
        return (
            *fused(x, [5, 6], weight, None),
            *fused(halves, [6], None, 1e-3),
            fused(halves, [5, 6], weight, 1e-5)[0],
        )

    x = torch.randn(4, 5, 6)
    check(function, x, x.half(), torch.rand(5, 6) + 0.5)


def test_places_in_memory_and_windows_of_other_sizes():
    x = torch.randn(2, 3, 7, 5)

    def function(x):
        return (
            torch.as_strided(x, (3, 4), (1, 2), 5),
            torch.as_strided_scatter(x, x[0, 0, :3, :4], (3, 4), (5, 1), 2),
            *F.adaptive_max_pool2d(x, (3, 4), return_indices=True),
            *F.adaptive_max_pool1d(x[0], 2, return_indices=True),
            F.adaptive_avg_pool1d(x[0], 2),
        )

    check(function, x)


def test_views_that_are_written_and_sizes_that_are_given():
    def function(x):
        y = x.clone()
        return (
            torch._neg_view(x) + 1,
            F.rrelu(x),
            x.clone().resize_(3, 2),
            x.clone().resize_(()),
            x.clone().resize_as_(x[:2]),
            torch.ones_like(y.new_empty_strided((2, 3), (3, 1))),
            *torch.linalg.polar(x[:, :3]),
            torch.linalg.matrix_sqrth(x @ x.T + 3 * torch.eye(4)),
        )

    check(function, torch.randn(4, 5))


def test_integers_and_booleans_are_taken_for_floats_where_these_come_of_them():
    def function(x, y, b, index):
        return (
            x.log(), x.sigmoid(), y.tanh(), x.exp(), y.rsqrt(), x / 3, b.cos(),
            x.isinf(), b.isfinite(), torch.gcd(x, y), torch.lcm(x, y),
            b.scatter_add(0, index, ~b), b.scatter_reduce(0, index, ~b, "amin"),
            b.scatter_reduce(0, index, ~b, "sum", include_self=False),
        )  # fmt: skip

    x, y = torch.randint(-9, 9, (4, 5)), torch.randint(-9, 9, (4, 5)).int()
    check(function, x, y, x > 0, torch.randint(0, 4, (4, 5)))


def test_sums_and_products_of_halves_are_rounded_once():
    x = torch.rand(3, 400).bfloat16()
    check(lambda x: (x.cumsum(1), (x + 0.5).cumprod(0), torch.renorm(x, 2, 0, 1.0)), x)


def test_means_of_windows_of_integers():
    def function(x):
        return (
            F.avg_pool2d(x, 3, padding=1),
            F.avg_pool2d(x, 3, padding=1, count_include_pad=False),
            F.avg_pool2d(x, 3, ceil_mode=True, stride=2, padding=1),
            F.avg_pool3d(x, 2, divisor_override=5),
            F.avg_pool1d(x[0, 0], 2),
        )

    check(function, torch.randint(-9, 9, (2, 3, 7, 6)))


# Always: images are sampled (`test_torch_indexing`).
@pytest.mark.nightly
def test_volumes_are_sampled():
    def function(x, grid):
        return (
            F.grid_sample(x, grid, "bilinear", "zeros", align_corners=False),
            F.grid_sample(x, grid, "bilinear", "reflection", align_corners=True),
            F.grid_sample(x[:, :, :1], grid, "nearest", "reflection", align_corners=False),
            F.grid_sample(x[:, :, :1], grid, "nearest", "border", align_corners=True),
        )

    check(function, torch.randn(2, 3, 4, 5, 6), torch.randn(2, 3, 2, 4, 3))


def test_losses_of_logits_that_are_made_by_chunks():
    def function(x, weight, bias, target):
        given = {"linear_bias": bias, "options": nn.LinearCrossEntropyOptions()}
        return (
            F.linear_cross_entropy(x, weight, target, **given),
            F.linear_cross_entropy(x, weight, target, reduction="none", **given),
        )

    check(function, torch.randn(6, 4), torch.randn(5, 4), torch.randn(5), torch.arange(6) % 5)


def test_reductions_of_a_number_along_its_axis():
    def function(x, i):
        return (
            x.sum(0), x.mean(-1), x.amax(0, keepdim=True), x.any(-1), x.argmax(0), *x.max(0),
            x.logsumexp(0), x.index_select(0, i), x.new_zeros(0),
        )  # fmt: skip

    check(function, torch.tensor(1.5), torch.tensor(0))


def test_what_is_written_at_places_is_reduced():
    x, y = torch.rand(4, 5) + 0.5, torch.rand(3, 5) + 0.5
    index = torch.tensor([[0, 1, 3, 0, 1], [0, 2, 3, 0, 0], [0, 1, 3, 1, 0]])

    def function(x, y, index):
        reduced = [
            x.scatter_reduce(0, index, y, kind, include_self=own)
            for kind in ("sum", "prod", "mean", "amax", "amin")
            for own in (True, False)
        ]
        return (
            *reduced,
            x.index_reduce(0, index[:, 0], y, "mean"),
            x.scatter(0, index, y, reduce="multiply"),
            x.put(index[0], y[0]),
            x.masked_scatter(x > 1, x + 3),
            torch.histc(x, 4),
            torch.histc(x, 3, 0.6, 1.2),
        )

    check(function, x, y, index)
    kinds = ("mean", "amax", "prod")
    whole = [torch.arange(1, 21).reshape(4, 5), torch.arange(7, 22).reshape(3, 5), index]
    check(
        lambda x, y, i: [x.scatter_reduce(0, i, y, kind, include_self=False) for kind in kinds],
        *whole,
    )
    check(lambda x: (x.clamp(min=7), x.clamp(max=7), x.clamp(3, 9)), whole[0])


def test_cross_entropy_of_probabilities_and_of_smoothed_labels_with_weights():
    x, weight = torch.randn(4, 5, 3), torch.rand(5)
    labels = torch.randint(0, 5, (4, 3))

    def function(x, weight, labels):
        shares = x.exp().softmax(1)
        return [
            F.cross_entropy(x, target, w, reduction=reduction, label_smoothing=smoothing, **given)
            for target, smoothing, given in (
                (shares, 0.0, {}),
                (shares, 0.2, {}),
                (labels, 0.2, {"ignore_index": 2}),
            )
            for w in (None, weight)
            for reduction in ("none", "mean", "sum")
        ]

    check(function, x, weight, labels)


def test_orders_of_norms():
    orders = (0, 1, 2, 3.5, -1, math.inf, -math.inf)
    check(
        lambda x: [torch.linalg.vector_norm(x, order, (0, -1)) for order in orders],
        torch.randn(3, 4, 5),
    )


def test_attention_has_the_logarithms_of_its_sums():
    operator = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    q, k, v = (torch.randn(2, 3, n, 8) for n in (5, 7, 7))

    def function(q, k, v):
        return (*operator(q, k, v), *operator(q, k, v, is_causal=True, scale=0.5))

    check(function, q, k, v)


def test_orders_and_the_most_frequent():
    x = torch.randn(3, 7)
    x[0, 2] = math.nan
    whole = torch.randint(0, 4, (5, 6))

    def function(x, whole):
        return (
            *torch.kthvalue(x[1:], 3, 1), *torch.kthvalue(x[1:], 2, 0, keepdim=True),
            torch.nanmedian(x), *torch.nanmedian(x, 1), torch.mode(whole, 0)[0],
            *torch.mode(whole.float(), 1, keepdim=True),
            F.avg_pool2d(x[1:].reshape(1, 2, 7).expand(3, 2, 7), 3, 2, 1, True, True, 5),
        )  # fmt: skip

    check(function, x, whole)


def test_functions_of_booleans_are_those_of_0_and_1():
    check(lambda x: (x.acos(), x.exp(), x.sqrt(), x.erf(), x.tan(), x / 2), torch.arange(3) > 1)


def test_bits_of_all_elements_together_and_rows_of_places():
    def function(x):
        of_axes = torch.hash_tensor(x, [0, 2], keepdim=True), torch.hash_tensor(x.long(), [1])
        rows = [torch.combinations(x[0, 0], r) for r in (1, 2)]
        return torch.hash_tensor(x), *of_axes, *rows, torch.combinations(x[0, 0], 2, True)

    check(function, torch.randn(2, 3, 5))
