"""The twelve memory-bound workloads of the project's figures."""

import torch
import torch.nn.functional as F
from torch import nn

from .instance import Apply, RMSNorm, Workload, applied, rms, wide


def _fanout(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    a = torch.sigmoid(x) * 1.5
    return torch.tanh(a) + x, torch.relu(a) * x


def _remat(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    a = torch.exp(x * 0.1)
    return a.sum(-1), a * x


def _add_rmsnorm(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    total = x + residual
    return total, rms(total, weight)


_SQUARE, _ROWS, _ROW = (8192, 8192), (8192, 4096), (4096,)

MEMORY: dict[str, Workload] = {
    "chain4": applied(lambda x: torch.relu((x + 1) * 2) ** 2, _SQUARE),
    "sigmoid_tanh": applied(lambda x: torch.sigmoid(x) * torch.tanh(x + 1), _SQUARE),
    "fanout2": applied(_fanout, _SQUARE),
    "remat_reduce": applied(_remat, _SQUARE),
    "softmax": applied(lambda x: torch.softmax(x, -1), _ROWS),
    "layernorm": Workload(lambda s: (nn.LayerNorm(s.extent(4096)), (s.large(*_ROWS),))),
    "rmsnorm": Workload(lambda s: (RMSNorm(s.extent(4096)), (s.large(*_ROWS),))),
    "add_rmsnorm": applied(_add_rmsnorm, _ROWS, _ROWS, _ROW),
    "bias_gelu": applied(lambda x, b: F.gelu(x + b), _ROWS, _ROW),
    "swiglu_act": applied(lambda a, b: F.silu(a) * b, _SQUARE, _SQUARE),
    "cross_entropy": Workload(
        lambda s: (
            Apply(lambda x, t: F.cross_entropy(wide(x), t)),
            (s.large(4096, 32000), s.labels(4096, 32000)),
        )
    ),
    "transpose_add": applied(lambda x, y: torch.relu(x.permute(1, 0) + y), _SQUARE, _SQUARE),
}
