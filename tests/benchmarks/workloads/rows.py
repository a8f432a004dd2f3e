"""Reductions over rows in shapes and dtypes that the twelve do not have, and quantisation."""

import torch
import torch.nn.functional as F

from .instance import Apply, Made, Sizes, Workload, applied, rms, wide

FP8_LARGEST, INT8_LARGEST = 448.0, 127.0


def _layer_norm(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    return F.layer_norm(x, x.shape[-1:], weight, bias)


def _quantise(
    x: torch.Tensor, largest: float, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    """Values in [-largest, largest] and the scale of each row."""
    y = wide(x)
    top = y.abs().amax(-1, keepdim=True).clamp_min(1e-12)
    scaled = (y * (largest / top)).clamp(-largest, largest)
    if not dtype.is_floating_point:
        scaled = torch.round(scaled)
    return scaled.to(dtype), (top / largest).squeeze(-1)


def _quantise_fp8(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return _quantise(x, FP8_LARGEST, torch.float8_e4m3fn)


def _quantise_int8(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return _quantise(x, INT8_LARGEST, torch.int8)


def _embedding_rmsnorm(sizes: Sizes) -> Made:
    """8192 rows of a table, RMS-normalised; rows that no index names stay unread."""
    table, weight = sizes.large(32000, 4096), sizes.large(4096)
    labels = sizes.labels(8192, 32000)
    unread = (table.shape[0] - labels.unique().numel()) * table[0].nbytes
    return Apply(lambda t, i, w: rms(F.embedding(i, t), w)), (table, labels, weight), unread


def _softmax(*shape: int, axis: int = -1, dtype: str = "float16") -> Workload:
    return applied(lambda x: torch.softmax(x, axis), shape, dtype=dtype)


def _layernorm(*shape: int, dtype: str = "float16") -> Workload:
    return applied(_layer_norm, shape, shape[-1:], shape[-1:], dtype=dtype)


def _rmsnorm(*shape: int, dtype: str = "float16") -> Workload:
    return applied(rms, shape, shape[-1:], dtype=dtype)


ROWS: dict[str, Workload] = {
    "softmax_63": _softmax(65536, 63),
    "softmax_1000_fp32": _softmax(8192, 1000, dtype="float32"),
    "softmax_5003": _softmax(8192, 5003),
    "softmax_65536": _softmax(4096, 65536),
    "softmax_128256_bf16": _softmax(4096, 128256, dtype="bfloat16"),
    "softmax_middle_axis": _softmax(64, 512, 513, axis=1),
    "log_softmax_32000_fp32": applied(
        lambda x: torch.log_softmax(x, -1), (1024, 32000), dtype="float32"
    ),
    "layernorm_768": _layernorm(32768, 768),
    "layernorm_12288_fp32": _layernorm(4096, 12288, dtype="float32"),
    "layernorm_one_row_768": _layernorm(1, 768),
    "layernorm_one_row_65536": _layernorm(1, 65536),
    "rmsnorm_5120_bf16": _rmsnorm(2048, 5120, dtype="bfloat16"),
    "rmsnorm_16_rows": _rmsnorm(16, 8192),
    "embedding_rmsnorm_bf16": Workload(_embedding_rmsnorm, "bfloat16"),
    "argmax_32000": applied(lambda x: torch.argmax(x, -1), (8192, 32000), dtype="float16"),
    "quantise_fp8": applied(_quantise_fp8, (8192, 4096), dtype="bfloat16"),
    "quantise_int8": applied(_quantise_int8, (8192, 5120), dtype="float16"),
}
