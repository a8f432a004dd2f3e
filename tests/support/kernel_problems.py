"""Random problems of each kernel class, for `kernel_sweep`: PrimFuncs at odd sizes, of each dtype,
with what stands before and behind.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from tvm import relax, tirx
from tvm.relax import op

from tests.support import mixed_cases
from tests.support.attention_graphs import one_group
from tests.support.attention_random import Configuration, configuration
from tests.support.attention_random_graphs import module_of
from tests.support.attention_random_numbers import numbers
from tests.support.graphs import module
from tests.support.kernel_cases import fuse
from tvm_fusion.fuzz.verdict import as_array
from tvm_fusion.transform.lower.scans import SCANS, scanned

SIZES = sorted({*range(1, 12), 15, 16, 17, 19, 23, 31, 32, 33, 37, 47, 63, 64, 65, 67, 70})
ELEMENTS = 6000
DTYPES = ("float32", "float16", "bfloat16", "float32")
HEADS = 96  # columns of a head, at most: wgmma of 256 takes the emulator minutes

Made = tuple[Callable, list[tuple[tuple[int, ...], str]]]


@dataclass(frozen=True)
class Problem:
    """What a kernel is written for.

    Attributes
    ----------
    func : PrimFunc
    inputs : int
        How many of its first parameters it reads.
    given : list of numpy.ndarray or None
        Their values; drawn where there are none.
    """

    func: tirx.PrimFunc
    inputs: int
    given: list[np.ndarray] | None = None


CLASSES: dict[str, Callable[[random.Random, str], Problem]] = {}


def problem(make: Callable[[random.Random], Made]) -> Callable[[random.Random], Made]:
    """A class whose problems are graphs."""

    def made(rng: random.Random, _device: str) -> Problem:
        emit, inputs = make(rng)
        return Problem(fuse(emit, *inputs), len(inputs))

    CLASSES[make.__name__] = made
    return make


def _shape(rng: random.Random, axes: Sequence[int], most: int = ELEMENTS) -> tuple[int, ...]:
    while True:
        shape = tuple(rng.choice(SIZES) for _ in range(rng.choice(axes)))
        if np.prod(shape) <= most:
            return shape


def _reduced(rng: random.Random, x: Any, bb: Any, axes: list[int]) -> Any:
    """A reduction over axes, alone or with what stands around it; or two that depend."""
    reduce = rng.choice((op.sum, op.max, op.min, op.mean))
    kind = rng.choice(("plain", "before", "behind", "softmax", "variance", "centred"))
    if kind == "softmax" and len(axes) == 1:
        return op.nn.softmax(x, axes[0])
    if kind == "variance":
        mean = bb.emit(op.mean(x, axes, keepdims=True))
        centred = bb.emit(op.subtract(x, mean))
        return op.mean(bb.emit(op.multiply(centred, centred)), axes)
    if kind == "centred":
        return op.subtract(x, bb.emit(reduce(x, axes, keepdims=True)))
    x = bb.emit(op.exp(x)) if kind == "before" else x
    result = bb.emit(reduce(x, axes))
    return op.multiply(result, result) if kind == "behind" else result


@problem
def column(rng: random.Random) -> Made:
    shape = _shape(rng, (2, 2, 3))
    axes = rng.choice([[0], [0]] if len(shape) == 2 else [[0], [0, 1], [1]])
    return _wide(lambda bb, x: _reduced(rng, x, bb, axes)), [(shape, rng.choice(DTYPES))]


@problem
def row(rng: random.Random) -> Made:
    shape = _shape(rng, (1, 2, 2, 3))
    first = rng.randrange(len(shape))
    axes = list(range(first, len(shape)))
    return _wide(lambda bb, x: _reduced(rng, x, bb, axes)), [(shape, rng.choice(DTYPES))]


@problem
def pointwise(rng: random.Random) -> Made:
    shape = _shape(rng, (1, 2, 3))
    other = tuple(1 if rng.random() < 0.3 else e for e in shape)
    dtype = rng.choice((*DTYPES, "int32", "int8"))
    combine = rng.choice((op.add, op.multiply, op.maximum))

    def emit(bb, x, y):
        both = bb.emit(combine(x, y))
        return op.maximum(both, bb.emit(op.multiply(x, x))) if rng.random() < 0.5 else both

    return emit, [(shape, dtype), (other, dtype)]


@problem
def transpose(rng: random.Random) -> Made:
    shape = _shape(rng, (2, 2, 3))
    order = sorted(range(len(shape)), key=lambda a: (a != len(shape) - 1, a))
    turned = tuple(shape[a] for a in order)
    dtype = rng.choice((*DTYPES, "int8", "float64"))
    inputs = [(shape, dtype), (turned, dtype)]
    return lambda bb, x, y: op.add(bb.emit(op.permute_dims(x, order)), y), inputs


@problem
def gemm(rng: random.Random) -> Made:
    m, k, n = (rng.choice(SIZES) for _ in range(3))
    dtype, turned = rng.choice(DTYPES), rng.random() < 0.5
    kind = rng.choice(("plain", "bias", "relu", "residual", "tanh"))

    others = {"bias": [(n,)], "relu": [(n,)], "residual": [(m, n)], "tanh": [(m, n)]}

    def emit(bb, x, w, *more):
        w = bb.emit(op.permute_dims(w)) if turned else w
        y = bb.emit(op.matmul(x, w, out_dtype="float32"))
        y = bb.emit(op.astype(y, dtype)) if dtype != "float32" else y
        if kind == "plain":
            return op.multiply(y, relax.const(2, dtype))
        if kind == "tanh":
            return op.multiply(bb.emit(op.tanh(y)), *more)
        y = op.add(y, *more)
        return op.nn.relu(bb.emit(y)) if kind == "relu" else y

    shapes = [(m, k), (n, k) if turned else (k, n), *others.get(kind, [])]
    return emit, [(s, dtype) for s in shapes]


def _wide(emit: Callable) -> Callable:
    """The same in float32 for halves, as `Decompose` does it."""

    def emit_wide(bb: Any, x: Any) -> Any:
        dtype = str(x.ty.dtype)
        if dtype == "float32":
            return emit(bb, x)
        return op.astype(bb.emit(emit(bb, bb.emit(op.astype(x, "float32")))), dtype)

    return emit_wide


@problem
def mixed(rng: random.Random) -> Made:
    pieces, rows = rng.choice((1, 2, 3, 5, 7)), rng.choice((1, 2, 3, 4, 5, 8))
    columns, dtype = rng.choice((*SIZES[8:], 127, 129, 250, 256, 320)), rng.choice(DTYPES)
    if rng.random() < 0.4:
        inputs = mixed_cases.rms_norm_inputs(pieces * rows, columns, dtype)
        return mixed_cases.rms_norm_backward(pieces), list(inputs)
    given = rng.random() < 0.5
    inputs = mixed_cases.layer_norm_inputs(pieces * rows, columns, dtype, given)
    return mixed_cases.layer_norm_backward(pieces), list(inputs)


@problem
def scan(rng: random.Random) -> Made:
    """Work between two scans along one axis, or one alone; halves are scanned in float32."""
    shape, dtype = _shape(rng, (1, 2, 3)), rng.choice((*DTYPES, "int32", "int8"))
    axis, exclusive = rng.randrange(len(shape)), rng.random() < 0.3
    names = ["relax.cumsum"] if exclusive else ["relax.cumsum", "relax.cummax", "relax.cummin"]
    if not (exclusive or dtype.startswith("int")):
        names.append("relax.logcumsumexp")
    kind = SCANS[rng.choice(names)]

    def along(bb: Any, x: Any) -> Any:
        return bb.emit(bb.call_te(lambda x: scanned(x, axis, kind, exclusive), x))

    def emit(bb: Any, x: Any) -> Any:
        if dtype.startswith("int"):
            return op.multiply(along(bb, x), x)
        first = bb.emit(op.tanh(along(bb, bb.emit(op.negative(x)))))
        return along(bb, first) if rng.random() < 0.5 else op.multiply(first, x)

    return emit if dtype.startswith("int") else _wide(emit), [(shape, dtype)]


@problem
def window(rng: random.Random) -> Made:
    """A pool in one to three dimensions, between functions of an element."""
    dims, dtype = rng.randint(1, 3), rng.choice(DTYPES)
    taps = [rng.randint(2, (0, 11, 6, 3)[dims]) for _ in range(dims)]
    strides = [rng.randint(1, k) for k in taps]
    padding = [rng.randint(0, k // 2) for k in taps]
    shape = tuple(2 * k + rng.choice((0, 1, 2, 3, 8)) for k in taps)
    largest = rng.random() < 0.5
    pools = (op.nn.max_pool1d, op.nn.max_pool2d, op.nn.max_pool3d)
    if not largest:
        pools = (op.nn.avg_pool1d, op.nn.avg_pool2d, op.nn.avg_pool3d)
    more = {} if largest else {"count_include_pad": rng.random() < 0.5}

    def emit(bb, x):
        x = bb.emit(op.nn.relu(x)) if rng.random() < 0.5 else x
        y = bb.emit(pools[dims - 1](x, tuple(taps), tuple(strides), tuple(padding), **more))
        return op.tanh(y)

    return emit, [((rng.randint(1, 2), rng.randint(1, 3), *shape), dtype)]


@problem
def nest(rng: random.Random) -> Made:
    kind = rng.choice(("convolution", "pooling", "first axis", "place"))
    if kind == "convolution":
        return _convolution(rng)
    if kind == "pooling":
        pool = rng.choice((op.nn.max_pool2d, op.nn.avg_pool2d))
        window, stride = rng.choice((2, 3)), rng.choice((1, 2, 3))
        shape = (
            rng.choice((1, 2)),
            rng.choice(SIZES[:6]),
            *(rng.choice(SIZES[4:16]) for _ in "hw"),
        )
        emit = lambda bb, x: pool(x, (window,) * 2, (stride,) * 2, padding=(1, 1))  # noqa: E731
        return emit, [(shape, "float32")]
    shape, dtype = _shape(rng, (2, 3)), rng.choice(("float32", "int32", "int8"))
    if kind == "place":
        reduce = rng.choice((op.argmax, op.argmin))
        return lambda bb, x: reduce(x, rng.choice((0, -1))), [(shape, dtype)]
    reduce = rng.choice((op.max, op.min) if dtype == "int8" else (op.sum, op.max, op.min))

    def emit(bb, x):
        y = bb.emit(reduce(x, 0))
        return op.multiply(y, y)

    return emit, [(shape, dtype)]


def _convolution(rng: random.Random) -> Made:
    groups = rng.choice((1, 1, 1, 3))
    channels, filters = (groups * rng.choice((1, 2, 5, 7, 8)) for _ in "cf")
    window, stride, dilation = rng.choice((1, 2, 3)), rng.choice((1, 2)), rng.choice((1, 1, 2))
    image = [rng.choice((5, 6, 7, 9, 13, 16, 17)) for _ in "hw"]
    shapes = [(rng.choice((1, 2)), channels, *image), (filters, channels // groups, window, window)]

    def emit(bb, x, w):
        y = op.nn.conv2d(x, w, (stride,) * 2, (1, 1), (dilation,) * 2, groups)
        return op.nn.relu(bb.emit(y))

    return emit, [(s, "float32") for s in shapes]


def attention(rng: random.Random, device: str) -> Problem:
    """A configuration of `attention_random` at sizes that an emulator can run."""
    while True:
        c = replace(configuration(rng.randrange(1_000_000)).small(), symbolic="")
        if c.apart is None and max(c.D, c.E) <= HEADS:
            return _attention(c, device)


def _attention(c: Configuration, device: str) -> Problem:
    mod = module_of(c)
    group = one_group(mod, device)
    named = dict(zip((p.name for p in mod["main"].params), numbers(c).values(), strict=True))
    given = []
    for value in group.inputs:
        if isinstance(value, relax.Var):
            given.append(as_array(named[value.name]))
        elif not isinstance(value, relax.ShapeExpr):
            given.append(value.value.numpy())
    return Problem(group.func, len(given), given)


CLASSES["attention"] = attention


# ---- whole modules whose operators take several launches


MODULES: dict[str, Callable[[random.Random], Made]] = {}


def several(make: Callable[[random.Random], Made]) -> Callable[[random.Random], Made]:
    MODULES[make.__name__] = make
    return make


@several
def few_results(rng: random.Random) -> Made:
    """Sums that are cut into parts: to fill a device, or over inner and outer axes at once."""
    few, many = rng.choice((1, 1, 2, 3)), rng.randrange(40_001, 80_000)
    outer, middle, inner = rng.choice(SIZES[2:]), rng.choice(SIZES[:9]), rng.choice(SIZES[2:])
    shape, axes = rng.choice(
        (
            ((few, many), [1]),
            ((many, few), [0]),
            ((outer, middle, inner), [0, 2]),
            ((outer, middle, inner), [0, 1, 2]),
        )
    )
    return _wide(lambda bb, x: _reduced(rng, x, bb, axes)), [(shape, rng.choice(DTYPES))]


@several
def group_norm(rng: random.Random) -> Made:
    groups, channels = rng.choice((1, 2, 3, 4)), rng.choice((1, 2, 3, 5))
    shape = (rng.choice((1, 2, 3)), groups * channels, *(rng.choice(SIZES[3:17]) for _ in "hw"))
    dtype = rng.choice(("float32", "float16"))
    weights = [((groups * channels,), dtype)] * 2

    def emit(bb, x, gamma, beta):
        y = op.nn.group_norm(x, gamma, beta, groups, 1, [2, 3])
        return op.nn.relu(bb.emit(y)) if rng.random() < 0.5 else y

    return emit, [(shape, dtype), *weights]


@several
def norm_and_product(rng: random.Random) -> Made:
    rows, terms, columns = (rng.choice(SIZES[4:]) for _ in range(3))
    dtype = rng.choice(DTYPES)

    def emit(bb, x, gamma, beta, w):
        y = bb.emit(op.nn.layer_norm(x, gamma, beta, [-1]))
        return op.nn.relu(bb.emit(op.matmul(y, w)))

    return emit, [((rows, terms), dtype), *[((terms,), dtype)] * 2, ((terms, columns), dtype)]


@several
def both_ways(rng: random.Random) -> Made:
    """Reductions of one tensor over its rows and over its columns."""
    shape, dtype = _shape(rng, (2,)), rng.choice(DTYPES)

    def emit(bb, x):
        y = bb.emit(op.exp(x))
        return relax.Tuple([bb.emit(op.sum(y, axis)) for axis in (0, 1)] + [y])

    return emit, [(shape, dtype)]


def drawn_module(name: str, rng: random.Random) -> Any:
    """A Relax module of `MODULES`."""
    emit, inputs = MODULES[name](rng)
    return module(emit, *inputs)
