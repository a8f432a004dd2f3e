"""Random small graphs of operators, for comparing fused CPU kernels with unfused ones."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

from tvm import relax
from tvm.relax import op

EXTENTS = (1, 2, 3, 5, 7, 8, 16, 17, 33)
MOST_ELEMENTS = 20_000


@dataclass
class RandomGraph:
    """A recipe: the same seed builds the same graph, inputs first.

    Attributes
    ----------
    seed : int
    size : int
        Number of operators.
    dtype : str
    inputs : list of (shape, dtype)
        Filled in by the constructor.
    """

    seed: int
    size: int = 8
    dtype: str = "float32"
    inputs: list[tuple[tuple[int, ...], str]] = field(default_factory=list)

    def __post_init__(self) -> None:
        rng = random.Random(self.seed)
        for _ in range(rng.randint(1, 3)):
            self.inputs.append((_random_shape(rng), self.dtype))
        self.inputs.append(((rng.randint(1, 6),), "int64"))

    def emit(self, bb: relax.BlockBuilder, *params: relax.Var) -> relax.Expr:
        """Emit the operators; the result is a tuple of what nobody reads, and of one value more."""
        rng = random.Random(self.seed + 1)
        values: list[relax.Expr] = list(params[:-1])
        indices = params[-1]
        made: list[relax.Expr] = []
        read: set[int] = set()
        attempts = 0
        while len(made) < self.size and attempts < 20 * self.size:
            attempts += 1
            source = rng.randrange(len(values))
            built = _build(rng, bb, values, source, indices, self.dtype)
            if built is None:
                continue
            read.update({source, built[1]})
            values.append(bb.emit(built[0]))
            made.append(values[-1])
        first = len(params) - 1
        outputs = [v for i, v in enumerate(values) if i >= first and i not in read]
        extra = rng.choice(made)
        if not any(extra.same_as(o) for o in outputs):
            outputs.append(extra)
        return relax.Tuple(outputs)


def _random_shape(rng: random.Random) -> tuple[int, ...]:
    while True:
        shape = tuple(rng.choice(EXTENTS) for _ in range(rng.randint(1, 4)))
        if _elements(shape) <= MOST_ELEMENTS // 4:
            return shape


def _elements(shape: tuple[int, ...]) -> int:
    total = 1
    for n in shape:
        total *= n
    return total


def _shape(value: relax.Expr) -> tuple[int, ...]:
    return tuple(int(n) for n in value.ty.shape)


def _build(rng, bb, values, i, indices, dtype):
    """An operator on value `i`, and the number of another value it reads; None if it cannot be."""
    x = values[i]
    shape = _shape(x)
    kind = rng.choice(BUILDERS)
    j = rng.randrange(len(values))
    result = kind(rng, bb, x, shape, values[j], _shape(values[j]), indices, dtype)
    if result is None or _elements(_shape(bb.normalize(result))) > MOST_ELEMENTS:
        return None
    return result, j if kind in BINARY else i


def _unary(rng, bb, x, shape, y, other, indices, dtype):
    f = rng.choice(
        (op.tanh, op.sigmoid, op.nn.relu, op.negative, op.nn.gelu, op.exp, op.sqrt, op.tril)
    )
    if f is op.exp:
        x = bb.emit(op.tanh(x))
    if f is op.sqrt:
        x = bb.emit(op.abs(x))
    return None if f is op.tril and len(shape) < 2 else f(x)


def _arithmetic(rng, bb, x, shape, y, other, indices, dtype):
    longest = max(len(shape), len(other))
    a, b = ((1,) * (longest - len(s)) + s for s in (shape, other))
    if any(p != q and 1 not in (p, q) for p, q in zip(a, b, strict=True)):
        return None
    f = rng.choice((op.add, op.multiply, op.subtract, op.maximum))
    return op.tanh(bb.emit(f(x, y)))


def _reduce(rng, bb, x, shape, y, other, indices, dtype):
    axes = sorted(rng.sample(range(len(shape)), rng.randint(1, len(shape))))
    f = rng.choice((op.mean, op.max, op.min))
    return f(x, axis=axes, keepdims=len(axes) == len(shape) or rng.random() < 0.6)


def _softmax(rng, bb, x, shape, y, other, indices, dtype):
    return op.nn.softmax(x, axis=rng.randrange(len(shape)))


def _variance(rng, bb, x, shape, y, other, indices, dtype):
    return op.tanh(bb.emit(op.variance(x, axis=rng.randrange(len(shape)), keepdims=True)))


def _matmul(rng, bb, x, shape, y, other, indices, dtype):
    if len(shape) < 2 or len(other) < 2 or shape[-1] != other[-2]:
        return None
    if len(shape) > 2 and len(other) > 2 and shape[:-2] != other[:-2]:
        return None
    return op.tanh(bb.emit(op.matmul(x, y)))


def _gram(rng, bb, x, shape, y, other, indices, dtype):
    if len(shape) < 2:
        return None
    order = [*range(len(shape) - 2), len(shape) - 1, len(shape) - 2]
    turned = bb.emit(op.permute_dims(x, order))
    left, right = (x, turned) if rng.random() < 0.5 else (turned, x)
    return op.tanh(bb.emit(op.matmul(left, right)))


def _permute(rng, bb, x, shape, y, other, indices, dtype):
    order = list(range(len(shape)))
    rng.shuffle(order)
    return op.permute_dims(x, order) if len(shape) > 1 else None


def _reshape(rng, bb, x, shape, y, other, indices, dtype):
    total = _elements(shape)
    divisors = [d for d in range(1, total + 1) if total % d == 0 and d <= 64]
    first = rng.choice(divisors)
    return op.reshape(x, (first, total // first))


def _concat(rng, bb, x, shape, y, other, indices, dtype):
    if len(shape) != len(other):
        return None
    differ = [k for k, (p, q) in enumerate(zip(shape, other, strict=True)) if p != q]
    if len(differ) > 1:
        return None
    return op.concat([x, y], axis=differ[0] if differ else rng.randrange(len(shape)))


def _slice(rng, bb, x, shape, y, other, indices, dtype):
    axis = rng.randrange(len(shape))
    if shape[axis] < 3:
        return None
    return op.strided_slice(x, [axis], [1], [shape[axis]], [rng.randint(1, 2)])


def _take(rng, bb, x, shape, y, other, indices, dtype):
    axis = rng.randrange(len(shape))
    return op.take(x, indices, axis=axis) if shape[axis] >= 4 else None


def _where(rng, bb, x, shape, y, other, indices, dtype):
    if shape != other or not _is_parameter(x):
        return None
    return op.where(bb.emit(op.greater(x, relax.const(0.25, dtype))), x, bb.emit(op.negative(y)))


def _argmax(rng, bb, x, shape, y, other, indices, dtype):
    if not _is_parameter(x):
        return None
    found = bb.emit(op.argmax(x, axis=rng.randrange(len(shape)), keepdims=True))
    return op.multiply(bb.emit(op.astype(found, dtype)), relax.const(0.01, dtype))


def _is_parameter(x):
    """Whether `x` is the same everywhere: a rounding may flip what depends on it."""
    return not isinstance(x, relax.DataflowVar)


def _pool(rng, bb, x, shape, y, other, indices, dtype):
    if len(shape) != 4 or min(shape[2:]) < 3:
        return None
    f = rng.choice((op.nn.max_pool2d, op.nn.avg_pool2d))
    return f(x, (3, 3), (rng.randint(1, 2),) * 2, (1, 1))


def _pad(rng, bb, x, shape, y, other, indices, dtype):
    widths = [rng.randint(0, 2) for _ in range(2 * len(shape))]
    return op.nn.pad(x, widths)


BINARY = (_arithmetic, _matmul, _concat, _where)
BUILDERS = (
    _unary,
    _unary,
    _arithmetic,
    _arithmetic,
    _arithmetic,
    _reduce,
    _reduce,
    _softmax,
    _variance,
    _matmul,
    _gram,
    _permute,
    _reshape,
    _concat,
    _slice,
    _take,
    _where,
    _argmax,
    _pool,
    _pad,
)
