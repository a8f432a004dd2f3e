"""What training adds: statistics, gradients, dropout and an optimiser, in plain operators."""

import torch

from .instance import Apply, Made, Sizes, Workload, applied, wide

DROPPED = 0.1  # the fraction of elements
ROUND_KEYS = (0x3C6E, 0x7B97, 0x1DA2, 0x58C5)
MULTIPLIER = 0x6A7D
SEED = 0x51ED2C4F
ADAMW = {"rate": 1e-3, "decay": 0.01, "beta1": 0.9, "beta2": 0.999, "epsilon": 1e-8, "step": 10}
ADAMW_SHAPES = (
    (4096, 4096),
    (4096,),
    (11008, 1024),
    (11008,),
    (1024, 4096),
    (1024,),
    (2048, 2048),
    (257, 1023),
)


def _batch_norm(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Training-mode batch norm of [N, C, H, W]; gives the statistics, too."""
    y, axes = wide(x), (0, 2, 3)
    mean = y.mean(axes, keepdim=True)
    variance = (y - mean).pow(2).mean(axes, keepdim=True)
    weight, bias = (wide(v).reshape(1, -1, 1, 1) for v in (weight, bias))
    y = (y - mean) * torch.rsqrt(variance + 1e-5) * weight + bias
    return y.to(x.dtype), mean.flatten(), variance.flatten()


def _batch_norm_train(sizes: Sizes) -> Made:
    side, channels = sizes.count(56, 8), sizes.extent(256)
    x = sizes.normal(sizes.count(32), channels, side, side)
    return Apply(_batch_norm), (x, sizes.normal(channels), sizes.normal(channels))


def _layer_norm_backward(
    x: torch.Tensor, grad: torch.Tensor, weight: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Gradients of layer norm with respect to x, weight and bias."""
    y, g = wide(x), wide(grad)
    centred = y - y.mean(-1, keepdim=True)
    scale = torch.rsqrt(centred.pow(2).mean(-1, keepdim=True) + 1e-5)
    normal, h = centred * scale, g * wide(weight)
    along = (h * normal).mean(-1, keepdim=True)
    dx = (h - h.mean(-1, keepdim=True) - normal * along) * scale
    return dx.to(x.dtype), (g * normal).sum(0).to(x.dtype), g.sum(0).to(x.dtype)


def _rms_norm_backward(
    x: torch.Tensor, grad: torch.Tensor, weight: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Gradients of RMS norm with respect to x and weight."""
    y, g = wide(x), wide(grad)
    scale = torch.rsqrt(y.pow(2).mean(-1, keepdim=True) + 1e-6)
    normal, h = y * scale, g * wide(weight)
    dx = (h - normal * (h * normal).mean(-1, keepdim=True)) * scale
    return dx.to(x.dtype), (g * normal).sum(0).to(x.dtype)


def _cross_entropy_backward(x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """(softmax - onehot) / rows: the gradient of the mean cross-entropy."""
    classes = torch.arange(x.shape[1], device=x.device)
    hit = classes[None, :] == labels[:, None]
    probabilities = torch.softmax(wide(x), -1)
    return (torch.where(hit, probabilities - 1, probabilities) / x.shape[0]).to(x.dtype)


def _cross_entropy_gradient(sizes: Sizes) -> Made:
    inputs = sizes.large(4096, 32000), sizes.labels(4096, 32000)
    return Apply(_cross_entropy_backward), inputs


def _dropout(x: torch.Tensor, seed: torch.Tensor) -> torch.Tensor:
    """Drop elements by a 16-bit hash of row, column and seed.

    The hash is a Feistel network as in Philox, on halves of 16 bits: no product of int32 leaves 31
    bits, so that it means the same in every compiler.
    """
    rows, columns = x.shape
    left = torch.arange(rows, dtype=torch.int32, device=x.device)[:, None] ^ (seed & 0xFFFF)
    right = torch.arange(columns, dtype=torch.int32, device=x.device)[None, :] ^ (
        (seed >> 16) & 0xFFFF
    )
    for key in ROUND_KEYS:
        left, right = right, left ^ ((((right ^ key) * MULTIPLIER) >> 9) & 0xFFFF)
    return torch.where(right >= int(DROPPED * 0x10000), x * (1 / (1 - DROPPED)), 0.0)


def _counter_dropout(sizes: Sizes) -> Made:
    seed = torch.tensor([SEED], dtype=torch.int32, device=sizes.device)
    return Apply(_dropout), (sizes.large(8192, 8192), seed)


def _adamw(*tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """One step for parameters, gradients and two moments each, given and returned by kind."""
    count = len(tensors) // 4
    groups = (tensors[i * count : (i + 1) * count] for i in range(4))
    steps = [_adamw_step(*group) for group in zip(*groups, strict=True)]
    return tuple(tensor for kind in zip(*steps, strict=True) for tensor in kind)


def _adamw_step(
    p: torch.Tensor, g: torch.Tensor, m: torch.Tensor, v: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    beta1, beta2, step = ADAMW["beta1"], ADAMW["beta2"], ADAMW["step"]
    m = m * beta1 + g * (1 - beta1)
    v = v * beta2 + g * g * (1 - beta2)
    denominator = torch.sqrt(v * (1 / (1 - beta2**step))) + ADAMW["epsilon"]
    update = m * (1 / (1 - beta1**step)) / denominator
    return p * (1 - ADAMW["rate"] * ADAMW["decay"]) - update * ADAMW["rate"], m, v


def _adamw_tensors(sizes: Sizes) -> Made:
    kinds = [[sizes.large(*shape) for shape in ADAMW_SHAPES] for _ in range(4)]
    kinds[3] = [v.abs() for v in kinds[3]]  # squares
    return Apply(_adamw), tuple(tensor for kind in kinds for tensor in kind)


TRAINING: dict[str, Workload] = {
    "batch_norm_train": Workload(_batch_norm_train, "float16"),
    "bias_gradient": applied(lambda g: g.sum(0), (16384, 1024), dtype="float16"),
    "layernorm_backward": applied(
        _layer_norm_backward, (8192, 4096), (8192, 4096), (4096,), dtype="float16"
    ),
    "rmsnorm_backward_bf16": applied(
        _rms_norm_backward, (8192, 4096), (8192, 4096), (4096,), dtype="bfloat16"
    ),
    "cross_entropy_gradient_bf16": Workload(_cross_entropy_gradient, "bfloat16"),
    "dropout": Workload(_counter_dropout, "float16"),
    "adamw_fp32": Workload(_adamw_tensors, "float32"),
}
