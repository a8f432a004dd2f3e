"""Reductions of runs of rows whose lengths are data, beside PyTorch."""

import pytest
import torch
from torch.nn import functional as F

from tests.support.frontend_tools import check

INDICES = torch.tensor([1, 2, 4, 5, 4, 3, 9])


# Always: segments of rows, and places of the greatest rows of bags.
@pytest.mark.nightly
def test_bags_of_rows_without_their_padding():
    def function(weight, indices, offsets, ends, shares, rows):
        results = []
        for mode in ("sum", "mean", "max"):
            for padding in (None, 4):
                given = {"mode": mode, "padding_idx": padding}
                results.append(F.embedding_bag(indices, weight, offsets, **given))
            results.append(
                F.embedding_bag(indices, weight, ends, mode=mode, include_last_offset=True)
            )
            results.append(F.embedding_bag(rows, weight, mode=mode))
        shared = {"mode": "sum", "per_sample_weights": shares}
        return [*results, F.embedding_bag(indices, weight, offsets, **shared)]

    offsets, ends = torch.tensor([0, 2, 2, 5]), torch.tensor([0, 3, 3, 7])
    shares, rows = torch.rand(7), torch.randint(0, 10, (3, 4))
    check(function, torch.randn(10, 3), INDICES, offsets, ends, shares, rows)


def test_the_places_of_the_greatest_rows_of_bags():
    def function(weight, indices, offsets):
        return torch._embedding_bag_forward_only(weight, indices, offsets, False, 2)

    check(function, torch.randn(10, 3).half(), INDICES, torch.tensor([0, 2, 2, 5]))


def test_segments_of_rows():
    def function(x, lengths, offsets, batch, of_batch):
        results = []
        for reduce in ("sum", "mean", "max", "min", "prod"):
            results += [
                torch.segment_reduce(x, reduce, lengths=lengths, unsafe=True),
                torch.segment_reduce(x, reduce, offsets=offsets, initial=2.0),
                torch.segment_reduce(batch, reduce, lengths=of_batch, axis=1, unsafe=True),
            ]
        return results

    lengths, offsets = torch.tensor([2, 0, 3, 1]), torch.tensor([0, 2, 2, 5, 6])
    of_batch = torch.tensor([[2, 0, 3, 1], [1, 1, 1, 3]])
    check(function, torch.randn(6, 4), lengths, offsets, torch.randn(2, 6, 3), of_batch)
