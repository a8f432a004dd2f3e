"""Histograms and the places of what is not zero, beside PyTorch."""

import pytest
import torch

from ..support.frontend_tools import check

X = torch.linspace(-2, 3, 24)[torch.randperm(24, generator=torch.Generator().manual_seed(0))]
EDGES = torch.tensor([-1.0, 0.0, 0.125, 2.0])


@pytest.mark.one_in(2)
@pytest.mark.parametrize("density", [False, True])
def test_values_are_counted_between_edges(density):
    def function(x, edges, weight):
        options = {"density": density}
        return (
            *torch.histogram(x, 7, **options),
            *torch.histogram(x, 7, range=(-1.0, 3.0), weight=weight, **options),
            torch.histogram(x, edges, weight=weight, **options)[0],
            *torch.histogram(x[:1], 3),
        )

    weight = torch.rand(24)
    check(function, X.where(X[5] != X, torch.nan)[6:], EDGES, weight[6:])


def test_points_are_counted_between_edges_along_each_axis():
    def function(x, edges):
        points = torch.histogramdd(x, [3, 4], density=True)
        given = torch.histogramdd(x, [3, 4], range=[-1.0, 1.0, 0.0, 2.0])
        of_edges = torch.histogramdd(x, [edges, edges])
        return points.hist, *points.bin_edges, given.hist, of_edges.hist

    check(function, X.reshape(12, 2), EDGES)


def test_places_that_are_not_zero_are_filled_up():
    def function(x, mask):
        return (
            torch.nonzero_static(x, size=5),
            torch.nonzero_static(mask, size=40, fill_value=-7),
            torch.nonzero_static(mask[0, 0], size=2),
        )

    check(function, X.round().int().reshape(4, 6), X.reshape(4, 6) > 0)
