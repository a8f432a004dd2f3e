"""Operators of PyTorch that no converter is written for, whatever else gets one."""

import torch

Tensor = torch.Tensor


@torch.library.custom_op("tests::unknown", mutates_args=())
def unknown(x: Tensor) -> Tensor:
    """Airy's function."""
    return torch.special.airy_ai(x)


@torch.library.custom_op("tests::other_unknown", mutates_args=())
def other_unknown(x: Tensor) -> Tensor:
    """Of a matrix in one of its shape."""
    return torch.linalg.ldl_factor_ex(x)[0].contiguous()


for _operator in (unknown, other_unknown):
    _operator.register_fake(torch.empty_like)
