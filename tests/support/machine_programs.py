"""Random programs of all kinds that kernels for a CPU are written for, judged against float64.

    python -m tests.support.machine_programs --target haswell --programs 300 --seed 0

Each is compiled for the target and run on this machine; `--build` only builds, for targets whose
instructions this machine lacks. Wrong numbers, errors, and groups that fell back are printed.
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
import tvm

from tests.right_programs import FunctionModule, _near
from tvm_fusion.check.reference import run_built
from tvm_fusion.flow.functions import planned_function

FLOATS = ("float32", "float32", "float16", "bfloat16")
INTEGERS = ("int32", "int64", "int8", "uint8")

X86 = {"kind": "llvm", "num-cores": 2}
TARGETS = {
    "x86-64": {**X86, "mcpu": "x86-64"},
    "nehalem": {**X86, "mcpu": "nehalem"},
    "sandybridge": {**X86, "mcpu": "sandybridge"},
    "haswell": {**X86, "mcpu": "haswell"},
    "skylake-avx512": {**X86, "mcpu": "skylake-avx512"},
    "sapphirerapids": {**X86, "mcpu": "sapphirerapids"},
    "neoverse-n1": {
        "kind": "llvm",
        "num-cores": 4,
        "mtriple": "aarch64-linux-gnu",
        "mcpu": "neoverse-n1",
    },
}

# Extents: one, primes, powers of two and their neighbours.
EXTENTS = (
    1,
    1,
    2,
    3,
    4,
    5,
    7,
    8,
    9,
    13,
    15,
    16,
    17,
    31,
    32,
    33,
    37,
    63,
    64,
    65,
    101,
    127,
    128,
    129,
)

Made = tuple[Callable[..., object], tuple[torch.Tensor, ...]]


class Draw:
    """Draws sizes, choices and tensors; the same seed draws the same."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)
        self._numbers = torch.Generator().manual_seed(seed)
        self.dtype = self.pick(*FLOATS)

    def pick(self, *of):
        return self._random.choice(of)

    def some(self, most: int, *of) -> list:
        """One to `most` of them, each once."""
        return self._random.sample(of, self._random.randint(1, min(most, len(of))))

    def order(self, rank: int) -> list[int]:
        return self._random.sample(range(rank), rank)

    def extent(self, most: int = 129, least: int = 1) -> int:
        return self.pick(*(n for n in EXTENTS if least <= n <= most))

    def shape(self, rank: int, most: int = 40_000) -> tuple[int, ...]:
        while True:
            shape = tuple(self.extent() for _ in range(rank))
            if np.prod(shape) <= most:
                return shape

    def floats(self, *shape: int, dtype: str = "") -> torch.Tensor:
        drawn = torch.randn(shape, generator=self._numbers)
        return drawn.to(getattr(torch, dtype or self.dtype))

    def integers(self, low: int, high: int, *shape: int, dtype: str = "int64") -> torch.Tensor:
        drawn = torch.randint(low, high, shape, generator=self._numbers)
        return drawn.to(getattr(torch, dtype))

    def bools(self, *shape: int) -> torch.Tensor:
        return torch.rand(shape, generator=self._numbers) < 0.5

    def broadcast(self, shape: Sequence[int]) -> tuple[int, ...]:
        """A shape that broadcasts to this one."""
        cut = self._random.randint(0, max(0, len(shape) - 1))
        return tuple(1 if self._random.random() < 0.3 else n for n in shape[cut:])


KINDS: dict[str, Callable[[Draw], Made]] = {}


def kind(make: Callable[[Draw], Made]) -> Callable[[Draw], Made]:
    KINDS[make.__name__] = make
    return make


UNARY = {
    "exp": torch.exp,
    "log": lambda x: torch.log(x.abs() + 0.1),
    "sqrt": lambda x: torch.sqrt(x.abs()),
    "rsqrt": lambda x: torch.rsqrt(x.abs() + 0.5),
    "erf": torch.erf,
    "tanh": torch.tanh,
    "sigmoid": torch.sigmoid,
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "silu": F.silu,
    "softplus": F.softplus,
    "elu": F.elu,
    "hardswish": F.hardswish,
    "leaky": F.leaky_relu,
    "relu": torch.relu,
    "sin": torch.sin,
    "cos": torch.cos,
    "log1p": lambda x: torch.log1p(x.abs()),
    "square": lambda x: x * x,
    "cube": lambda x: x**3,
    "abs": torch.abs,
    "neg": torch.neg,
    "clamp": lambda x: x.clamp(-0.5, 0.7),
    "reciprocal": lambda x: 1 / (x.abs() + 0.5),
    "masked": lambda x: torch.where(x > 0.25, x, x * 0.5 + 0.125),
}
BINARY = {
    "add": torch.add,
    "sub": torch.sub,
    "mul": torch.mul,
    "div": lambda x, y: x / (y.abs() + 0.5),
    "maximum": torch.maximum,
    "minimum": torch.minimum,
    "where": lambda x, y: torch.where(x > y, 2 * x - y, y),
}
# Exact in every type: what follows may depend on single bits.
EXACT = {"same": lambda x: x, "neg": torch.neg, "relu": torch.relu, "abs": torch.abs}


def _chain(d: Draw, most: int) -> Callable[[torch.Tensor], torch.Tensor]:
    """Functions of one tensor, one after the other."""
    functions = [UNARY[n] for n in d.some(most, *UNARY)]

    def apply(x):
        for f in functions:
            x = f(x)
            x = torch.tanh(x) if f is torch.exp else x
        return x

    return apply


# ---- pointwise -----------------------------------------------------------------------------------


@kind
def broadcast_chain(d: Draw) -> Made:
    shape = d.shape(d.pick(1, 2, 2, 3, 4))
    f, g, first, second = (
        _chain(d, 3),
        _chain(d, 2),
        BINARY[d.pick(*BINARY)],
        BINARY[d.pick(*BINARY)],
    )
    return (
        lambda x, y, z: second(f(first(x, y)), g(z)),
        (d.floats(*shape), d.floats(*d.broadcast(shape)), d.floats(*d.broadcast(shape))),
    )


@kind
def slices(d: Draw) -> Made:
    shape = d.shape(d.pick(2, 3))
    step, start = d.pick(1, 2, 3), d.pick(0, 1)
    f = _chain(d, 2)
    index = (Ellipsis, slice(start if shape[-1] > 1 else 0, None, step))
    return lambda x, y: f(x[index]) + y[index].flip(-1), (d.floats(*shape), d.floats(*shape))


@kind
def flips_and_rolls(d: Draw) -> Made:
    shape = d.shape(d.pick(1, 2, 3))
    axes = d.some(2, *range(len(shape)))
    f, by = _chain(d, 2), d.pick(1, 2, -1)
    return lambda x: f(x.flip(axes)) - x.roll(by, axes[0]), (d.floats(*shape),)


@kind
def permuted(d: Draw) -> Made:
    shape = d.shape(d.pick(2, 3, 4))
    order = d.order(len(shape))
    f, g, join = _chain(d, 2), _chain(d, 1), BINARY[d.pick(*BINARY)]
    turned = [shape[i] for i in order]
    return lambda x, y: join(f(x.permute(order)), g(y)), (d.floats(*shape), d.floats(*turned))


@kind
def permuted_twice(d: Draw) -> Made:
    a, b, c = d.shape(3)
    f = _chain(d, 2)
    return (
        lambda x: f(x.transpose(0, 1).reshape(b, a * c).t()).contiguous() * 2,
        (d.floats(a, b, c),),
    )


@kind
def gathered(d: Draw) -> Made:
    rows, n, taken = d.extent(), d.extent(), d.extent()
    f = _chain(d, 2)
    axis = d.pick(0, 1)
    return (
        lambda x, i: f(torch.index_select(x, axis, i)) + 1,
        (d.floats(rows, n), d.integers(0, (rows, n)[axis], taken)),
    )


@kind
def gathered_by_element(d: Draw) -> Made:
    rows, n, taken = d.extent(), d.extent(), d.extent()
    return (
        lambda x, i: torch.gather(torch.tanh(x), 1, i) * 2,
        (d.floats(rows, n), d.integers(0, n, rows, taken)),
    )


@kind
def joined(d: Draw) -> Made:
    rows, a, b, c = d.extent(), d.extent(), d.extent(), d.extent()
    f, axis = _chain(d, 2), d.pick(0, 1)
    shapes = [(rows, n) if axis else (n, rows) for n in (a, b, c)]
    return (
        lambda x, y, z: f(torch.cat([x, torch.tanh(y), z], axis)),
        tuple(d.floats(*s) for s in shapes),
    )


@kind
def padded(d: Draw) -> Made:
    shape = d.shape(d.pick(2, 3))
    widths, fill = [d.pick(0, 1, 2, 3) for _ in range(4)], d.pick(0.0, 1.5)
    f = _chain(d, 2)
    return lambda x: f(F.pad(torch.tanh(x), widths, value=fill)), (d.floats(*shape),)


@kind
def triangles(d: Draw) -> Made:
    rows, n = d.extent(), d.extent()
    k, f, take = d.pick(-1, 0, 2), _chain(d, 1), d.pick(torch.tril, torch.triu)
    return lambda x: take(f(x), k) + 1, (d.floats(rows, n),)


@kind
def casts(d: Draw) -> Made:
    shape = d.shape(2)
    to, back = d.pick(*INTEGERS[:3]), d.pick("float32", "float16", "bfloat16")
    a, b = getattr(torch, to), getattr(torch, back)
    return lambda x: (x * 8).to(a).to(b) + 1, (d.integers(-9, 9, *shape).to(torch.float32),)


@kind
def selected(d: Draw) -> Made:
    shape = d.shape(d.pick(1, 2, 3))
    f, g = _chain(d, 2), _chain(d, 2)
    return (
        lambda c, x, y: torch.where(c & (x > 0) | (y < 0.5), f(x), g(y)),
        (d.bools(*d.broadcast(shape)), d.floats(*shape), d.floats(*shape)),
    )


# ---- integers and bools --------------------------------------------------------------------------


@kind
def integer_arithmetic(d: Draw) -> Made:
    shape, dtype = d.shape(d.pick(1, 2, 3)), d.pick(*INTEGERS)
    functions = {
        "products": lambda x, y: x * y + x,
        "bits": lambda x, y: (x & y) ^ (x | 3),
        "shifts": lambda x, y: (x << 2) - (y >> 1),
        "divisions": lambda x, y: torch.div(x, y * 2 + 1, rounding_mode="floor") + y % 3,
        "extremes": lambda x, y: torch.maximum(x, y) - torch.minimum(x, y).clamp(1, 9),
        "selections": lambda x, y: torch.where(x > y, x, y * 3),
        "equality": lambda x, y: (x == y) | (x + 1 < y),
    }
    f = functions[d.pick(*functions)]
    low = 0 if dtype == "uint8" else -100
    shapes = (shape, d.broadcast(shape))
    return f, tuple(d.integers(low, 100, *s, dtype=dtype) for s in shapes)


@kind
def integer_reductions(d: Draw) -> Made:
    shape, dtype = d.shape(d.pick(1, 2, 3)), d.pick(*INTEGERS)
    axis, keep = d.pick(*range(len(shape))), d.pick(True, False)
    low = 0 if dtype == "uint8" else -9
    name = d.pick("sum", "amax", "amin", "argmax", "argmin", "any", "all")
    f = getattr(torch, name)
    if name in ("argmax", "argmin"):  # torch's choice among equals is unspecified: there are none
        x = torch.argsort(torch.rand(shape, generator=d._numbers), axis)
        return lambda x: f(x * 2, axis, keep), (x.to(torch.int32),)
    return lambda x: f(x * 2, axis, keepdim=keep), (d.integers(low, 9, *shape, dtype=dtype),)


@kind
def logic(d: Draw) -> Made:
    shape = d.shape(2)
    axis, f = d.pick(0, 1), d.pick(torch.any, torch.all)
    return lambda x, b: f((x > 1.5) ^ b, axis), (d.floats(*shape), d.bools(*d.broadcast(shape)))


@kind
def counts(d: Draw) -> Made:
    shape, axis = d.shape(2), d.pick(0, 1)
    return lambda x: ((x > 0).to(torch.int32).sum(axis), (x > 1).sum()), (d.floats(*shape),)


@kind
def integer_scan(d: Draw) -> Made:
    shape, axis = d.shape(2), d.pick(0, 1)
    return lambda x: x.cumsum(axis) * 2, (
        d.integers(-9, 9, *shape, dtype=d.pick("int32", "int64")),
    )


# ---- reductions ----------------------------------------------------------------------------------


@kind
def reductions(d: Draw) -> Made:
    shape = d.shape(d.pick(1, 2, 3, 4))
    axes, keep = d.some(len(shape), *range(len(shape))), d.pick(True, False)
    f, g = _chain(d, 2), _chain(d, 1)
    reduce = d.pick(torch.sum, torch.mean, torch.amax, torch.amin)
    return lambda x: g(reduce(f(x), axes, keepdim=keep)), (d.floats(*shape),)


@kind
def reductions_of_two(d: Draw) -> Made:
    shape = d.shape(d.pick(2, 3))
    axis = d.pick(*range(len(shape)))
    f, reduce = _chain(d, 1), d.pick(torch.sum, torch.mean, torch.amax)
    return (
        lambda x, y: f(x) - reduce(f(x) * y, axis, keepdim=True),
        (d.floats(*shape), d.floats(*d.broadcast(shape))),
    )


@kind
def variances(d: Draw) -> Made:
    shape = d.shape(d.pick(2, 3))
    axes = d.some(2, *range(len(shape)))
    return (
        lambda x: (x - x.mean(axes, True)) / (x.var(axes, correction=0, keepdim=True) + 0.1).sqrt(),
        (d.floats(*shape),),
    )


@kind
def largest(d: Draw) -> Made:
    shape = d.shape(d.pick(1, 2, 3))
    axis, keep = d.pick(*range(len(shape))), d.pick(True, False)
    f, pick = EXACT[d.pick("same", "neg")], d.pick(torch.argmax, torch.argmin)
    order = torch.argsort(torch.rand(shape, generator=d._numbers), axis)
    return lambda x: pick(f(x), axis, keep), ((order - 40).to(d.floats(1).dtype),)


@kind
def extremes_of_both_axes(d: Draw) -> Made:
    shape = d.shape(2)
    return lambda x: (x.amax(0), x.amin(1), x.sum(0) + 1), (d.floats(*shape),)


@kind
def logs_of_sums(d: Draw) -> Made:
    shape = d.shape(d.pick(1, 2, 3))
    axis, f = d.pick(*range(len(shape))), _chain(d, 1)
    return lambda x: f(torch.logsumexp(x * 2, axis)), (d.floats(*shape),)


@kind
def lengths(d: Draw) -> Made:
    shape = d.shape(d.pick(2, 3))
    axis = d.pick(*range(len(shape)))
    return lambda x: F.normalize(x, dim=axis) + x.norm(dim=axis, keepdim=True), (d.floats(*shape),)


@kind
def scans(d: Draw) -> Made:
    shape = d.shape(d.pick(1, 2, 3))
    axis = d.pick(*range(len(shape)))
    return lambda x: torch.tanh(x).cumsum(axis) * 0.5, (d.floats(*shape),)


@kind
def long_row(d: Draw) -> Made:
    n = d.pick(1000, 4097, 10_007, 65_535)
    f = d.pick(lambda x: torch.softmax(x, -1), lambda x: F.layer_norm(x, (n,)), lambda x: x.sum(-1))
    return f, (d.floats(d.pick(1, 2, 3), n),)


# ---- norms, softmaxes, losses --------------------------------------------------------------------


@kind
def norms(d: Draw) -> Made:
    rows, n = d.extent(), d.extent(least=2)
    f, how = _chain(d, 1), d.pick("layer", "rms", "add")
    if how == "rms":
        return lambda x, w, b: f(F.rms_norm(x, (n,), w, 1e-5)) + b, (
            d.floats(rows, n),
            d.floats(n),
            d.floats(n),
        )
    add = 1.0 if how == "add" else 0.0
    return (
        lambda x, w, b: f(F.layer_norm(x + add * x.flip(0), (n,), w, b)),
        (d.floats(rows, n), d.floats(n), d.floats(n)),
    )


@kind
def channel_norms(d: Draw) -> Made:
    groups, size = d.pick(1, 2, 3), d.pick(1, 2, 5)
    c = groups * size
    shape = (d.pick(1, 2, 3), c, d.extent(17, 2), d.extent(17, 2))
    inputs = (d.floats(*shape), d.floats(c), d.floats(c))
    if d.pick(True, False):
        return lambda x, w, b: torch.relu(F.group_norm(x, groups, w, b)), inputs
    return lambda x, w, b: F.batch_norm(x, w, b.abs() + 0.5, w, b), inputs


@kind
def softmaxes(d: Draw) -> Made:
    shape = d.shape(d.pick(1, 2, 3, 4))
    axis, f = d.pick(*range(len(shape))), d.pick(torch.softmax, torch.log_softmax)
    g = _chain(d, 1)
    return lambda x, m: f(g(x) + m, axis), (d.floats(*shape), d.floats(*d.broadcast(shape)))


@kind
def masked_softmaxes(d: Draw) -> Made:
    shape = d.shape(2)
    lower = float("-inf")
    keep = d.bools(*shape)
    keep[:, 0] = True
    return lambda x, k: torch.softmax(x.masked_fill(~k, lower), -1), (d.floats(*shape), keep)


@kind
def losses(d: Draw) -> Made:
    rows, n = d.extent(), d.extent(least=2)
    how = d.pick("cross", "nll", "mse", "huber", "bce", "divergence", "none")
    x, y, t = d.floats(rows, n), d.floats(rows, n), d.integers(0, n, rows)
    if how in ("cross", "none"):
        over = "mean" if how == "cross" else "none"
        return lambda x, t: F.cross_entropy(x, t, reduction=over), (x, t)
    if how == "nll":
        return lambda x, t: -torch.log_softmax(x, -1).gather(1, t[:, None]).mean(), (x, t)
    if how == "divergence":
        return (
            lambda x, y: (y.softmax(-1) * (y.log_softmax(-1) - x.log_softmax(-1))).sum(-1).mean(),
            (x, y),
        )
    if how == "bce":
        return (
            lambda x, y: (x.clamp(min=0) - x * y + torch.log1p(torch.exp(-x.abs()))).mean(0),
            (x, y),
        )
    return (F.mse_loss if how == "mse" else F.smooth_l1_loss), (x, y)


# ---- windows, products, attention ----------------------------------------------------------------


@kind
def pools(d: Draw) -> Made:
    size, stride = d.pick(2, 3), d.pick(1, 2, 3)
    padding = d.pick(0, size // 2)
    shape = (d.pick(1, 2), d.extent(9), d.extent(37, 4), d.extent(37, 4))
    f, pool = _chain(d, 1), d.pick(F.max_pool2d, F.avg_pool2d)
    return lambda x: f(pool(f(x), size, stride, padding)), (d.floats(*shape),)


@kind
def pools_of_lines(d: Draw) -> Made:
    size, stride = d.pick(2, 3, 5), d.pick(1, 2)
    pool = d.pick(F.max_pool1d, F.avg_pool1d)
    return lambda x: pool(x, size, stride), (d.floats(d.pick(1, 2), d.extent(9), d.extent(129, 7)),)


@kind
def convolutions(d: Draw) -> Made:
    groups = d.pick(1, 1, 2, 3)
    c, o = groups * d.pick(1, 2, 3, 5), groups * d.pick(1, 3, 7)
    stride, dilation, padding = d.pick(1, 2), d.pick(1, 2), d.pick(0, 1, 2)
    size, f = d.pick(1, 3), _chain(d, 1)
    return (
        lambda x, w, b: f(F.conv2d(x, w, b, stride, padding, dilation, groups)),
        (
            d.floats(d.pick(1, 2), c, d.extent(33, 5), d.extent(33, 5)),
            d.floats(o, c // groups, size, size),
            d.floats(o),
        ),
    )


@kind
def convolutions_of_lines(d: Draw) -> Made:
    c, o, n = d.pick(1, 2, 5), d.pick(1, 3, 8), d.extent(129, 7)
    f = d.pick(F.conv1d, F.conv_transpose1d)
    shape = (o, c, 3) if f is F.conv1d else (c, o, 3)
    stride = d.pick(1, 2)
    return lambda x, w: torch.tanh(f(x, w, stride=stride)), (d.floats(2, c, n), d.floats(*shape))


@kind
def products(d: Draw) -> Made:
    m, k, n = d.extent(), d.extent(), d.extent()
    f, g = _chain(d, 1), _chain(d, 2)
    left, right = d.pick(True, False), d.pick(True, False)
    return (
        lambda x, y, b: g(torch.matmul(f(x).t() if left else x, y.t() if right else y) * 0.1 + b),
        (
            d.floats(*((k, m) if left else (m, k))),
            d.floats(*((n, k) if right else (k, n))),
            d.floats(n),
        ),
    )


@kind
def batched_products(d: Draw) -> Made:
    b, m, k, n = d.extent(9), d.extent(65), d.extent(65), d.extent(65)
    f, shared = _chain(d, 1), d.pick(True, False)
    return (
        lambda x, y: torch.softmax(f(torch.matmul(x, y) * 0.1), -1),
        (d.floats(b, m, k), d.floats(*((k, n) if shared else (b, k, n)))),
    )


@kind
def integer_products(d: Draw) -> Made:
    m, k, n = d.extent(65), d.extent(65), d.extent(65)
    dtype = d.pick("int32", "int64")
    return (
        lambda x, y: torch.matmul(x, y) * 2 + 1,
        (d.integers(-9, 9, m, k, dtype=dtype), d.integers(-9, 9, k, n, dtype=dtype)),
    )


@kind
def statistics_of_a_product(d: Draw) -> Made:
    m, k, n = d.extent(), d.extent(), d.extent(least=2)
    axis = d.pick(0, 1)
    return (
        lambda x, y: (torch.matmul(x, y) * 0.1, (torch.matmul(x, y) * 0.1).mean(axis)),
        (d.floats(m, k), d.floats(k, n)),
    )


@kind
def gated_units(d: Draw) -> Made:
    rows, k, n = d.extent(), d.extent(65), d.extent(65)
    return (
        lambda x, u, v: F.silu(F.linear(x, u)) * F.linear(x, v),
        (d.floats(rows, k), d.floats(n, k), d.floats(n, k)),
    )


@kind
def attention(d: Draw) -> Made:
    b, h, rows, keys, width = (
        d.pick(1, 2),
        d.pick(1, 3),
        d.extent(65),
        d.extent(65),
        d.pick(8, 15, 16, 33),
    )
    q, k, v = (d.floats(b, h, n, width) for n in (rows, keys, keys))
    how = d.pick("plain", "causal", "masked", "written")
    if how == "causal":
        return lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=True), (q, q, q)
    if how == "masked":
        return F.scaled_dot_product_attention, (q, k, v, d.floats(b, 1, rows, keys))
    if how == "written":
        return lambda q, k, v: torch.softmax(q @ k.mT * width**-0.5, -1) @ v, (q, k, v)
    return F.scaled_dot_product_attention, (q, k, v)


# ---- judging -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Outcome:
    """What came of a program.

    Attributes
    ----------
    near : float
        The error against float64 over what is allowed there: above 1 is wrong.
    fell_back : str
        Why groups were taken apart, if they were.
    """

    near: float
    fell_back: str


def judged(name: str, seed: int, target: str, runs: bool = True) -> Outcome:
    """Compile a program for a target, and compare it with torch in float64 on the same inputs."""
    function, inputs = KINDS[name](Draw(seed))
    made = tvm.target.Target(TARGETS[target]) if target in TARGETS else target
    planned = planned_function((FunctionModule(function), inputs), made)
    made = planned.build()
    near = 0.0
    if runs:
        given = run_built(made.built, [_array(x) for x in inputs])
        eager, exact = _flat(function(*inputs)), _flat(function(*map(_double, inputs)))
        near = max(_distance(*x) for x in zip(given, eager, exact, strict=True))
    return Outcome(near, "; ".join(made.planned.cuts.values()))


def _distance(given: np.ndarray, eager: torch.Tensor, exact: torch.Tensor) -> float:
    if not eager.is_floating_point():
        same = given.shape == tuple(eager.shape) and np.array_equal(given, eager.numpy())
        return 0.0 if same else float("inf")
    given = torch.from_numpy(given.astype("float64"))
    return _near(given, eager, exact.double(), str(eager.dtype).removeprefix("torch."))


def _array(x: torch.Tensor) -> np.ndarray:
    if x.dtype is torch.bfloat16:
        import ml_dtypes

        return x.contiguous().view(torch.int16).numpy().view(ml_dtypes.bfloat16)
    return x.contiguous().numpy()


def _double(x: torch.Tensor) -> torch.Tensor:
    return x.double() if x.is_floating_point() else x


def _flat(value: object) -> list[torch.Tensor]:
    return list(value) if isinstance(value, tuple | list) else [value]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--target", default="llvm", help=f"llvm, or one of {', '.join(TARGETS)}")
    parser.add_argument("--programs", type=int, default=300)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--kinds", nargs="+", default=sorted(KINDS), metavar="KIND")
    parser.add_argument("--build", action="store_true", help="build without running")
    options = parser.parse_args()
    bad = 0
    for n in range(options.programs):
        name, seed = options.kinds[n % len(options.kinds)], options.seed + n
        try:
            found = judged(name, seed, options.target, not options.build)
        except Exception as error:  # one program of many: printed, the others go on
            found = f"{type(error).__name__}: {str(error).strip().splitlines()[-1:]}"
        if isinstance(found, str) or found.fell_back or not found.near <= 1:
            bad += 1
            print(options.target, name, seed, found, flush=True)
    print(f"{options.target}: {options.programs} programs, {bad} printed")


if __name__ == "__main__":
    main()
