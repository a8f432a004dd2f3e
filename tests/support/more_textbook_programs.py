"""Forty more textbook programs in PyTorch, of other sizes: activations, normalisations, losses,
attention, recurrent cells, optimizers, distances and embeddings as tutorials write them out.
"""

import math

import torch
import torch.nn.functional as F
from torch import nn

from tests.support.textbook_programs import Program

ROWS, WIDTH = 197, 500


def on(*shapes, **parts):
    """A program on tensors of these shapes; a shape that ends with a number of classes in a set
    stands for labels.
    """

    def with_function(function):
        inputs = tuple(
            torch.zeros(shape[:-1], dtype=torch.int64)
            if isinstance(shape[-1], set)
            else torch.zeros(shape)
            for shape in shapes
        )
        return lambda: (Program(function, **parts), inputs)

    return with_function


MATRIX = (ROWS, WIDTH)


def rms_norm(self, x):
    return x * torch.rsqrt((x * x).mean(-1, keepdim=True) + 1e-6) * self.scale.weight[0]


def layer_norm(self, x):
    mean = x.mean(-1, keepdim=True)
    variance = ((x - mean) ** 2).mean(-1, keepdim=True)
    return (x - mean) / torch.sqrt(variance + 1e-5)


def standardised(self, x):
    return (x - x.mean(0)) / (x.std(0) + 1e-5)


def gelu_tanh(self, x):
    return 0.5 * x * (1 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))


def logsumexp(self, x):
    most = x.amax(-1, keepdim=True)
    return torch.log(torch.exp(x - most).sum(-1)) + most.squeeze(-1)


def focal_loss(self, x, y):
    loss = F.binary_cross_entropy_with_logits(x, y, reduction="none")
    return ((1 - torch.exp(-loss)) ** 2 * loss).mean()


def adam(self, weight, gradient, first, second):
    first = 0.9 * first + 0.1 * gradient
    second = 0.999 * second + 0.001 * gradient * gradient
    return weight - 1e-3 * first / (torch.sqrt(second) + 1e-8), first, second


def momentum(self, weight, gradient, velocity):
    velocity = 0.9 * velocity + gradient
    return weight - 0.01 * velocity, velocity


def lstm_cell(self, x, hidden, cell):
    i, f, g, o = (self.x(x) + self.h(hidden)).chunk(4, -1)
    cell = torch.sigmoid(f) * cell + torch.sigmoid(i) * torch.tanh(g)
    return torch.sigmoid(o) * torch.tanh(cell), cell


def gru_cell(self, x, hidden):
    update = torch.sigmoid(self.x(x) + self.h(hidden))
    return update * hidden + (1 - update) * torch.tanh(self.n(x))


def rotary(self, x, cos, sin):
    left, right = x.chunk(2, -1)
    return torch.cat([left * cos - right * sin, left * sin + right * cos], -1)


def causal_attention(self, q, k, v):
    scores = q @ k.transpose(-1, -2) / math.sqrt(q.shape[-1])
    mask = torch.ones(q.shape[-2], k.shape[-2], dtype=torch.bool).tril()
    return torch.softmax(scores.masked_fill(~mask, float("-inf")), -1) @ v


def swiglu(self, x):
    return self.down(F.silu(self.gate(x)) * self.up(x))


def encoder_feed_forward(self, x):
    return self.norm(x + self.second(F.gelu(self.first(x))))


def residual_block(self, x):
    return F.relu(x + self.bn(self.conv(x)))


def squeeze_excite(self, x):
    gate = torch.sigmoid(self.second(F.relu(self.first(x.mean((2, 3))))))
    return x * gate[:, :, None, None]


def pairwise(self, x, y):
    return (x * x).sum(-1)[:, None] + (y * y).sum(-1)[None] - 2 * x @ y.T


def cosine(self, x, y):
    return (x * y).sum(-1) / (x.norm(dim=-1) * y.norm(dim=-1) + 1e-8)


def embedding_sum(self, x, labels):
    return self.norm(x + self.table(labels))


def kl_divergence(self, mean, log_variance):
    return -0.5 * (1 + log_variance - mean**2 - log_variance.exp()).sum(-1).mean()


def reparametrised(self, mean, log_variance, noise):
    return mean + torch.exp(0.5 * log_variance) * noise


def smooth_l1(self, x, y):
    distance = (x - y).abs()
    return torch.where(distance < 1, 0.5 * distance**2, distance - 0.5).mean()


def mish(self, x):
    return x * torch.tanh(F.softplus(x))


def temperature(self, x):
    return torch.softmax(self.linear(x) / 0.7, -1)


def gated(self, x):
    left, right = self.linear(x).chunk(2, -1)
    return left * torch.sigmoid(right)


def weighted_mean(self, x, weights):
    weights = torch.softmax(weights, 0)
    return (x * weights[:, None]).sum(0)


def low_rank(self, x):
    return self.linear(x) + self.second(self.first(x)) * 2


def contrastive(self, x, y):
    return F.normalize(x, dim=-1) @ F.normalize(y, dim=-1).T


def linears(**shapes):
    return {name: nn.Linear(*shape) for name, shape in shapes.items()}


IMAGES = (2, 24, 19, 19)
HEADS = (2, 3, 50, 40)

PROGRAMS = {
    "rms_norm": on(MATRIX, scale=nn.Linear(WIDTH, 1))(rms_norm),
    "layer_norm_written_out": on(MATRIX)(layer_norm),
    "standardised_columns": on(MATRIX)(standardised),
    "softmax_of_columns": on(MATRIX)(lambda s, x: torch.softmax(x, 0)),
    "exp_summed_in_the_middle": on((24, 31, 130))(lambda s, x: torch.exp(x).sum(1)),
    "gelu_tanh": on(MATRIX)(gelu_tanh),
    "mish": on(MATRIX)(mish),
    "hard_swish": on(MATRIX)(lambda s, x: x * F.relu6(x + 3) / 6),
    "leaky_relu_of_sum": on(MATRIX, (WIDTH,))(lambda s, x, b: F.leaky_relu(x + b, 0.1)),
    "logsumexp": on(MATRIX)(logsumexp),
    "mean_squared_error": on(MATRIX, MATRIX)(lambda s, x, y: ((x - y) ** 2).mean()),
    "mean_of_images": on((2, 4, 150, 150))(lambda s, x: x.mean((2, 3))),
    "smooth_l1": on(MATRIX, MATRIX)(smooth_l1),
    "binary_cross_entropy": on(MATRIX, MATRIX)(
        lambda s, x, y: F.binary_cross_entropy_with_logits(x, y)
    ),
    "focal_loss": on(MATRIX, MATRIX)(focal_loss),
    "kl_divergence": on(MATRIX, MATRIX)(kl_divergence),
    "reparametrised": on(MATRIX, MATRIX, MATRIX)(reparametrised),
    "adam": on(MATRIX, MATRIX, MATRIX, MATRIX)(adam),
    "momentum": on(MATRIX, MATRIX, MATRIX)(momentum),
    "lstm_cell": on((48, 96), (48, 120), (48, 120), **linears(x=(96, 480), h=(120, 480)))(
        lstm_cell
    ),
    "gru_cell": on((48, 96), (48, 120), **linears(x=(96, 120), h=(120, 120), n=(96, 120)))(
        gru_cell
    ),
    "rotary": on(HEADS, (50, 20), (50, 20))(rotary),
    "causal_attention": on(HEADS, HEADS, HEADS)(causal_attention),
    "swiglu": on((64, 128), **linears(gate=(128, 344), up=(128, 344), down=(344, 128)))(swiglu),
    "encoder_feed_forward": on(
        (100, 128), **linears(first=(128, 512), second=(512, 128)), norm=nn.LayerNorm(128)
    )(encoder_feed_forward),
    "perceptron": on((90, 64), **linears(first=(64, 200), second=(200, 10)))(
        lambda s, x: s.second(F.relu(s.first(x)))
    ),
    "residual_block": on(
        IMAGES, conv=nn.Conv2d(24, 24, 3, padding=1, bias=False), bn=nn.BatchNorm2d(24)
    )(residual_block),
    "conv_pool": on(IMAGES, conv=nn.Conv2d(24, 16, 3, padding=1))(
        lambda s, x: F.max_pool2d(F.relu(s.conv(x)), 2)
    ),
    "squeeze_excite": on(IMAGES, **linears(first=(24, 6), second=(6, 24)))(squeeze_excite),
    "group_norm_silu": on(IMAGES, norm=nn.GroupNorm(6, 24))(lambda s, x: F.silu(s.norm(x))),
    "instance_norm": on(IMAGES, norm=nn.InstanceNorm2d(24))(lambda s, x: s.norm(x)),
    "global_pool_linear": on(IMAGES, **linears(linear=(24, 10)))(
        lambda s, x: s.linear(F.relu(x).mean((2, 3)))
    ),
    "pairwise_distances": on((80, 60), (70, 60))(pairwise),
    "cosine_similarity": on(MATRIX, MATRIX)(cosine),
    "contrastive": on((80, 60), (70, 60))(contrastive),
    "embedding_sum": on(
        (ROWS, 128), (ROWS, {1000}), table=nn.Embedding(1000, 128), norm=nn.LayerNorm(128)
    )(embedding_sum),
    "temperature": on((ROWS, 128), **linears(linear=(128, 300)))(temperature),
    "gated_linear_unit": on((ROWS, 128), **linears(linear=(128, 256)))(gated),
    "weighted_mean": on(MATRIX, (ROWS,))(weighted_mean),
    "low_rank_update": on(
        (ROWS, 128), **linears(linear=(128, 128), first=(128, 8), second=(8, 128))
    )(low_rank),
}
"""Functions that make the module and its inputs, by name."""
