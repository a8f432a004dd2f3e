"""The steps that random graphs are made of: operators of models, one or a few at a time.

Values stay moderate (N(0, 1) in, factors where they would grow), so that numbers of two plans can
be compared in half precision.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field
from math import prod

from tvm import relax
from tvm.relax import op

Shape = tuple[int, ...]
MAX_FLOP = 2e11  # of one matrix product
CHAIN = 0.65  # how often a step goes on where the last one ended
ANYTHING = 0.3  # of the other steps, those that may start from a small tensor (a statistic)


@dataclass(eq=False)
class Value:
    """A tensor of the graph; `made` unless it is a parameter."""

    expr: relax.Expr
    shape: Shape
    dtype: str
    made: bool
    uses: int = 0


@dataclass
class Draft:
    """A graph while it is drawn.

    Attributes
    ----------
    left : operators still to be drawn
    limit : largest number of bytes of a tensor
    params : the parameters asked for so far
    """

    builder: relax.BlockBuilder
    rng: random.Random
    left: int
    limit: int
    values: list[Value] = field(default_factory=list)
    params: list[relax.Var] = field(default_factory=list)

    def parameter(self, shape: Shape, dtype: str) -> Value:
        """A new parameter, as a value."""
        var = relax.Var(f"x{len(self.params)}", relax.TensorType(shape, dtype))
        self.params.append(var)
        value = Value(var, shape, dtype, made=False)
        self.values.append(value)
        return value

    def emit(self, call: relax.Expr, *read: Value) -> Value:
        """One operator that reads these values."""
        expr = self.builder.emit(call)
        shape = tuple(int(e) for e in expr.ty.shape.values)
        value = Value(expr, shape, str(expr.ty.dtype), made=True)
        for v in read:
            v.uses += 1
        self.values.append(value)
        self.left -= 1
        return value

    def sum(self, x: Value, axes: int | list[int], keep: bool) -> Value:
        """A sum; in half precision it is lowered with a conversion on each side."""
        if x.dtype in ("float16", "bfloat16"):
            self.left -= 2
        return self.emit(op.sum(x.expr, axes, keepdims=keep), x)

    def pick(self) -> Value:
        """The value that the next step starts from."""
        wide = [v for v in self.values if v.dtype.startswith(("float", "bfloat"))]
        most = max(prod(v.shape) for v in wide)
        large = [v for v in wide if prod(v.shape) * 16 >= most]
        made = [v for v in large if v.made]
        if made and self.rng.random() < CHAIN:
            return made[-1]
        anything = [v for v in wide if prod(v.shape) > 1]
        return self.rng.choice(anything if self.rng.random() < ANYTHING else large)

    def fits(self, shape: Shape, dtype: str) -> bool:
        """Whether a tensor is within the limit."""
        return prod(shape) * (4 if dtype == "float32" else 2) <= self.limit

    def same(self, x: Value) -> Value:
        """Another value of the same shape and dtype, or a new parameter (a residual)."""
        others = [v for v in self.values if v is not x and (v.shape, v.dtype) == (x.shape, x.dtype)]
        if others and self.rng.random() < 0.75:
            return self.rng.choice(others)
        return self.parameter(x.shape, x.dtype)


@dataclass(frozen=True)
class Step:
    """One kind of step: how often, how many operators at least, and what it does to a value."""

    weight: float
    least: int
    take: Callable[[Draft, Value], object]


def _light(d: Draft, x: Value) -> Value:
    kind = d.rng.choice(("relu", "negative", "abs", "scale", "shift", "square"))
    if kind == "scale":
        return d.emit(op.multiply(x.expr, relax.const(d.rng.choice((0.5, 0.125)), x.dtype)), x)
    if kind == "shift":
        return d.emit(op.add(x.expr, relax.const(0.25, x.dtype)), x)
    if kind == "square":
        bounded = d.emit(op.clip(x.expr, -4, 4), x) if d.left > 1 else x
        return d.emit(op.multiply(bounded.expr, bounded.expr), bounded) if d.left else bounded
    return d.emit({"relu": op.nn.relu, "negative": op.negative, "abs": op.abs}[kind](x.expr), x)


def _special(d: Draft, x: Value) -> Value:
    kinds = (op.tanh, op.sigmoid, op.erf)
    return d.emit(d.rng.choice(kinds)(x.expr), x)


def _gate(d: Draft, x: Value) -> Value:
    """x * sigmoid(x), or times a gate of another value."""
    gate = d.emit(op.sigmoid(x.expr), x)
    other = x if d.rng.random() < 0.5 else d.same(x)
    return d.emit(op.multiply(other.expr, gate.expr), other, gate)


def _binary(d: Draft, x: Value) -> Value:
    other = d.same(x)
    kind = d.rng.choice((op.add, op.add, op.multiply, op.subtract, op.maximum))
    return d.emit(kind(x.expr, other.expr), x, other)


def _bias(d: Draft, x: Value) -> Value:
    """A vector along the last axis, or of the channels of an image."""
    if len(x.shape) == 4 and x.shape[2] == x.shape[3]:
        shape: Shape = (1, x.shape[1], 1, 1)
    else:
        shape = x.shape[-1:]
    vector = d.parameter(shape, x.dtype)
    return d.emit(d.rng.choice((op.add, op.multiply))(x.expr, vector.expr), x, vector)


def _rows(d: Draft, x: Value) -> Value:
    """Statistics of the last axis, and what is done with them."""
    kind = d.rng.choice(("max", "sum", "mean"))
    if kind == "max":
        top = d.emit(op.max(x.expr, -1, keepdims=True), x)
        return d.emit(op.subtract(x.expr, top.expr), x, top)
    if kind == "sum" or d.left < 5:
        total = d.sum(x, -1, d.rng.random() < 0.7)
        return d.emit(op.tanh(total.expr), total)
    total = d.sum(x, -1, True)
    mean = d.emit(op.multiply(total.expr, relax.const(1 / x.shape[-1], x.dtype)), total)
    return d.emit(op.subtract(x.expr, mean.expr), x, mean)


def _softmax(d: Draft, x: Value) -> Value:
    top = d.emit(op.max(x.expr, -1, keepdims=True), x)
    less = d.emit(op.subtract(x.expr, top.expr), x, top)
    power = d.emit(op.exp(less.expr), less)
    total = d.sum(power, -1, True)
    return d.emit(op.divide(power.expr, total.expr), power, total)


def _rms(d: Draft, x: Value) -> Value:
    square = d.emit(op.multiply(x.expr, x.expr), x)
    factor = relax.const(1 / x.shape[-1], x.dtype)
    total = d.sum(square, -1, True)
    mean = d.emit(op.multiply(total.expr, factor), total)
    root = d.emit(op.rsqrt(mean.expr), mean)
    return d.emit(op.multiply(x.expr, root.expr), x, root)


def _columns(d: Draft, x: Value) -> Value:
    """A sum over all but the last axis (or the channels): a gradient of a bias."""
    if len(x.shape) == 4 and x.shape[2] == x.shape[3]:
        axes = [0, 2, 3]
    else:
        axes = list(range(len(x.shape) - 1))
    kept = d.rng.random() < 0.4
    if prod(x.shape[a] for a in axes) < 2:
        return _special(d, x)
    if d.rng.random() < 0.3:
        found = d.emit(op.max(x.expr, axes, keepdims=kept), x)
    else:
        found = d.sum(x, axes, kept)
    if d.left < 2 or not kept:
        return found
    bounded = d.emit(op.tanh(found.expr), found)
    return d.emit(op.subtract(x.expr, bounded.expr), x, bounded)


def _permute(d: Draft, x: Value) -> Value:
    rank = len(x.shape)
    if rank < 2:
        return _light(d, x)
    choices = {2: ((1, 0),), 3: ((0, 2, 1), (1, 0, 2))}
    axes = d.rng.choice(choices.get(rank, ((0, 2, 1, 3), (0, 1, 3, 2), (0, 2, 3, 1))))
    return d.emit(op.permute_dims(x.expr, axes), x)


def _cast(d: Draft, x: Value) -> Value:
    dtype = d.rng.choice(("float16", "bfloat16")) if x.dtype == "float32" else "float32"
    if not d.fits(x.shape, dtype):
        return _light(d, x)
    return d.emit(op.astype(x.expr, dtype), x)


def _product(d: Draft, x: Value) -> Value:
    """A linear layer: weights as they come, or transposed as torch keeps them."""
    *outer, depth = x.shape
    rows = prod(outer)
    widths = [n for n in (64, 256, 768, 1024, 3072, 4096, 8192) if depth * n * 2 <= d.limit]
    widths = [n for n in widths if 2.0 * rows * depth * n <= MAX_FLOP]
    widths = [n for n in widths if d.fits((*outer, n), x.dtype)]
    if d.limit < 1 << 20:
        widths = [n for n in (8, 16, 24) if d.fits((*outer, n), x.dtype)]
    if not widths or len(x.shape) < 2 or depth % 8 or depth < 8:
        return _special(d, x)
    width = d.rng.choice(widths)
    small = d.emit(op.multiply(x.expr, relax.const(depth**-0.5, x.dtype)), x) if d.left > 2 else x
    if d.left > 1 and d.rng.random() < 0.5:
        weight = d.parameter((width, depth), x.dtype)
        turned = d.emit(op.permute_dims(weight.expr), weight)
    else:
        turned = d.parameter((depth, width), x.dtype)
    return d.emit(op.matmul(small.expr, turned.expr), small, turned)


def _attention(d: Draft, x: Value) -> Value:
    """Scores of heads, or those times values: one batched product."""
    if len(x.shape) < 3:
        return _product(d, x)
    *outer, rows, depth = x.shape
    if not d.fits((*outer, rows, rows), x.dtype) or 2.0 * prod(x.shape) * rows > MAX_FLOP:
        return _product(d, x)
    other = d.parameter((*outer, depth, rows), x.dtype)
    return d.emit(op.matmul(x.expr, other.expr), x, other)


def _half(d: Draft, x: Value) -> Value:
    """A half of the last axis (of a gate and its input), or a concatenation."""
    last = len(x.shape) - 1
    width = x.shape[-1]
    if width % 2 == 0 and width >= 8 and d.rng.random() < 0.6:
        low = d.rng.choice((0, width // 2))
        return d.emit(op.strided_slice(x.expr, [last], [low], [low + width // 2]), x)
    if not d.fits((*x.shape[:-1], 2 * width), x.dtype):
        return _light(d, x)
    other = d.same(x)
    return d.emit(op.concat([x.expr, other.expr], last), x, other)


def _where(d: Draft, x: Value) -> Value:
    mask = d.parameter(x.shape[-2:], "bool")
    return d.emit(op.where(mask.expr, x.expr, relax.const(-2.0, x.dtype)), x, mask)


def _take(d: Draft, x: Value) -> Value:
    """Rows of a table."""
    if len(x.shape) != 2 or x.shape[0] < 8:
        return _bias(d, x)
    rows = d.parameter((max(4, x.shape[0] // 2),), "int32")
    return d.emit(op.take(x.expr, rows.expr, axis=0), x, rows)


def _backward(d: Draft, x: Value) -> Value:
    """Sums along rows and along columns of one product, as in the gradient of a norm."""
    grad = d.parameter(x.shape, x.dtype)
    both = d.emit(op.multiply(x.expr, grad.expr), x, grad)
    along = d.sum(both, -1, True)
    less = d.emit(op.subtract(grad.expr, along.expr), grad, along)
    if len(x.shape) > 1 and x.shape[0] > 1:
        d.sum(both, list(range(len(x.shape) - 1)), False)
    return less


def _window(d: Draft, x: Value) -> Value:
    """Pooling of an image."""
    if len(x.shape) != 4 or x.shape[2] != x.shape[3] or x.shape[2] < 3:
        return _binary(d, x)
    kind = d.rng.choice((op.nn.max_pool2d, op.nn.avg_pool2d))
    return d.emit(kind(x.expr, (3, 3), (d.rng.choice((1, 2)),) * 2, (1, 1)), x)


STEPS: tuple[Step, ...] = (
    Step(2.0, 1, _light),
    Step(1.5, 1, _special),
    Step(1.0, 2, _gate),
    Step(2.0, 1, _binary),
    Step(1.3, 1, _bias),
    Step(3.0, 4, _rows),
    Step(2.0, 7, _softmax),
    Step(2.0, 7, _rms),
    Step(2.2, 3, _columns),
    Step(1.5, 1, _permute),
    Step(0.8, 1, _cast),
    Step(2.4, 1, _product),
    Step(0.6, 1, _attention),
    Step(0.6, 1, _half),
    Step(0.4, 1, _where),
    Step(0.3, 1, _take),
    Step(5.0, 8, _backward),
    Step(0.4, 1, _window),
)
