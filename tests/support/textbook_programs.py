"""Textbook programs in PyTorch: the small things that a newcomer fuses first."""

import torch
import torch.nn.functional as F
from torch import nn

ROWS, WIDTH, CLASSES = 256, 768, 100


class Program(nn.Module):
    """A function of inputs, and of parts that hold weights, as a module."""

    def __init__(self, function, **parts) -> None:
        super().__init__()
        self.function = function
        for name, part in parts.items():
            setattr(self, name, part)

    def forward(self, *inputs):
        return self.function(self, *inputs)


def on_rows(function, operands=1, **parts):
    """A program on matrices of ROWS x WIDTH."""
    inputs = tuple(torch.zeros(ROWS, WIDTH) for _ in range(operands))
    return lambda: (Program(function, **parts), inputs)


def on_images(function, **parts):
    return lambda: (Program(function, **parts), (torch.zeros(2, 16, 28, 28),))


def on_labels(function, width, **parts):
    inputs = torch.zeros(ROWS, width), torch.zeros(ROWS, dtype=torch.int64)
    return lambda: (Program(function, **parts), inputs)


def softmax(self, x):
    return torch.exp(x) / torch.exp(x).sum(-1, keepdim=True)


def two_consumers(self, x):
    gate = torch.sigmoid(x)
    return gate * x, gate + 1


def log_softmax_loss(self, x, labels):
    return F.nll_loss(F.log_softmax(self.linear(x), -1), labels)


def attention(self, q, k, v):
    scores = q @ k.transpose(-1, -2) / q.shape[-1] ** 0.5
    weights = torch.exp(scores - scores.amax(-1, keepdim=True))
    return weights / weights.sum(-1, keepdim=True) @ v


def attention_program():
    return Program(attention), tuple(torch.zeros(2, 4, 64, 32) for _ in range(3))


def broadcast_exp():
    def function(self, x, y):
        return torch.exp(x) * y + torch.exp(x)

    return Program(function), (torch.zeros(WIDTH), torch.zeros(ROWS, WIDTH))


LINEAR, SQUARE = nn.Linear(WIDTH, CLASSES), nn.Linear(WIDTH, WIDTH)
CONV, BATCH_NORM = nn.Conv2d(16, 32, 3, padding=1), nn.BatchNorm2d(32)
NORM, DROPOUT = nn.LayerNorm(WIDTH), nn.Dropout(0.5)

PROGRAMS = {
    "linear_relu": on_rows(lambda s, x: F.relu(s.linear(x)), linear=LINEAR),
    "add_relu": on_rows(lambda s, x, y: F.relu(x + y), 2),
    "sum_of_squares": on_rows(lambda s, x: (x * x).sum(-1)),
    "softmax": on_rows(softmax),
    "conv_bias_relu": on_images(lambda s, x: F.relu(s.conv(x)), conv=CONV),
    "conv_bn_relu": on_images(lambda s, x: F.relu(s.bn(s.conv(x))), conv=CONV, bn=BATCH_NORM),
    "two_consumers": on_rows(two_consumers),
    "three_operands": on_rows(lambda s, x, y, z: x * y + z, 3),
    "shared_input": on_rows(lambda s, x: (torch.exp(x), torch.tanh(x))),
    "sigmoid_tanh": on_rows(lambda s, x: torch.sigmoid(x) * torch.tanh(x + 1)),
    "cross_entropy": on_labels(lambda s, x, labels: F.cross_entropy(x, labels), CLASSES),
    "layer_norm": on_rows(lambda s, x: s.norm(x), norm=NORM),
    "linear_relu_dropout": on_rows(
        lambda s, x: s.dropout(F.relu(s.linear(x))), linear=SQUARE, dropout=DROPOUT
    ),
    "attention_tail": on_rows(lambda s, x, y: s.norm(s.linear(x) + y), 2, linear=SQUARE, norm=NORM),
    "chain_of_four": on_rows(lambda s, x: torch.sqrt(torch.exp(torch.sin(x)) + 1)),
    "attention": attention_program,
    "broadcast_exp": broadcast_exp,
    "gelu": on_rows(lambda s, x: F.gelu(x)),
    "silu_times": on_rows(lambda s, x, y: F.silu(x) * y, 2),
    "log_softmax_loss": on_labels(log_softmax_loss, WIDTH, linear=LINEAR),
}
"""Functions that make the module and its inputs, by name."""
