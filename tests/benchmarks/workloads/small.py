"""Tensors so small that a call is bound by its launches, not by memory."""

import torch

from .instance import Apply, Workload


def _three_softmaxes(x: torch.Tensor) -> torch.Tensor:
    """Softmax along rows, columns, rows: three kernels, since each needs all of the one before."""
    return torch.softmax(torch.softmax(torch.softmax(x, 1), 0), 1)


SMALL: dict[str, Workload] = {
    "three_softmaxes_4kb": Workload(
        lambda s: (Apply(_three_softmaxes), (s.normal(32, 32),)), "float32"
    ),
}
