"""Runs an `Attention` in NumPy float64, straight from the expressions of the model."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from tvm import tirx
from tvm.ir import Call, Expr, TensorLoad, Var
from tvm.ir.prim.expr import BitwiseNot

from tvm_fusion.kernels.attention.read.model import Attention
from tvm_fusion.kernels.program.expr import dtype_of, number

_BINARY = {
    tirx.Add: np.add,
    tirx.Sub: np.subtract,
    tirx.Mul: np.multiply,
    tirx.Div: np.divide,
    tirx.FloorDiv: np.floor_divide,
    tirx.FloorMod: np.mod,
    tirx.Max: np.maximum,
    tirx.Min: np.minimum,
    tirx.LT: np.less,
    tirx.LE: np.less_equal,
    tirx.GT: np.greater,
    tirx.GE: np.greater_equal,
    tirx.EQ: np.equal,
    tirx.NE: np.not_equal,
    tirx.And: np.logical_and,
    tirx.Or: np.logical_or,
}
_CALLS = {
    "tirx.exp": np.exp,
    "tirx.exp2": np.exp2,
    "tirx.log": np.log,
    "prim.log2": np.log2,
    "tirx.tanh": np.tanh,
    "tirx.sqrt": np.sqrt,
    "tirx.rsqrt": lambda x: 1 / np.sqrt(x),
    "tirx.pow": np.power,
    "tirx.fabs": np.abs,
    "tirx.sigmoid": lambda x: 1 / (1 + np.exp(-x)),
    "prim.if_then_else": np.where,
}


class Evaluator:
    """Evaluates expressions at all points of an attention at once, each axis a dimension."""

    def __init__(self, attention: Attention, arrays: Sequence[np.ndarray]) -> None:
        self.env: dict[Var, np.ndarray] = {}
        self.arrays = dict(zip((p.var for p in attention.params), arrays, strict=False))
        for param, array in zip(attention.params, arrays, strict=False):
            if param.shape is None:
                self.env[param.var] = np.asarray(array)
                continue
            for extent, size in zip(param.shape, array.shape, strict=True):
                if isinstance(extent, Var):
                    self.env[extent] = np.asarray(size)
        axes = [axis for group in attention.groups.values() for axis in group]
        self.dimension = {axis.var: i for i, axis in enumerate(axes)}
        self.shape = [self.size(axis.extent) for axis in axes]
        for axis, (i, extent) in zip(axes, enumerate(self.shape), strict=True):
            along = [extent if i == j else 1 for j in range(len(axes))]
            self.env[axis.var] = np.arange(extent).reshape(along)

    def size(self, extent: int | Expr) -> int:
        """A size, with the sizes of the arrays for symbolic ones."""
        return extent if isinstance(extent, int) else int(self(extent))

    def dimensions(self, axes: Sequence) -> tuple[int, ...]:
        """The dimensions that axes lie along."""
        return tuple(self.dimension[axis.var] for axis in axes)

    def bind(self, bindings: Sequence) -> None:
        """Computes temporaries."""
        for binding in bindings:
            self.env[binding.var] = self(binding.value)

    def __call__(self, expr: Expr) -> np.ndarray:
        """The values of an expression, of extent 1 along axes that it does not depend on."""
        if number(expr) is not None:
            return np.asarray(number(expr))
        if isinstance(expr, Var):
            return self.env[expr]
        if isinstance(expr, TensorLoad):
            return self.load(expr)
        if isinstance(expr, tirx.Cast):
            return _converted(self(expr.value), dtype_of(expr))
        if isinstance(expr, tirx.Not | BitwiseNot):
            return np.logical_not(self(expr.a))
        if isinstance(expr, tirx.Select):
            parts = (expr.condition, expr.true_value, expr.false_value)
            return np.where(*map(self, parts))
        if isinstance(expr, Call):
            return _CALLS[expr.op.name](*map(self, expr.args))
        return _BINARY[type(expr)](self(expr.a), self(expr.b))

    def load(self, load: TensorLoad) -> np.ndarray:
        """Elements of a parameter; where a condition forbids the read, any element."""
        array = self.arrays[load.source]
        indices = [
            np.clip(self(i), 0, n - 1) for i, n in zip(load.indices, array.shape, strict=True)
        ]
        return _converted(np.asarray(array[tuple(indices)]), str(load.source.ty.dtype))


def _converted(values: np.ndarray, dtype: str) -> np.ndarray:
    if dtype == "bool":
        return values.astype(bool)
    return values.astype(np.float64 if "float" in dtype else np.int64)


def evaluate(attention: Attention, arrays: Sequence[np.ndarray]) -> list[np.ndarray]:
    """The outputs of an attention in the order of its parameters, in float64.

    `arrays` are the inputs in the order of the parameters, which come before the outputs.
    """
    with np.errstate(all="ignore"):
        return _evaluate(attention, arrays)


def _evaluate(attention: Attention, arrays: Sequence[np.ndarray]) -> list[np.ndarray]:
    run = Evaluator(attention, arrays)
    for operand in (attention.q, attention.k, attention.v):
        run.bind(operand.bindings)
    q, k, v = (run(operand.value) for operand in (attention.q, attention.k, attention.v))
    terms, keys = run.dimensions(attention.terms), run.dimensions(attention.keys)
    features = run.dimensions(attention.features)
    assert all(q.ndim == 0 or q.shape[d] == 1 for d in (*keys, *features)), "q has keys"
    queries = run.dimensions(attention.queries)
    assert all(k.ndim == 0 or k.shape[d] == 1 for d in (*queries, *features)), "k has queries"
    assert all(v.ndim == 0 or v.shape[d] == 1 for d in (*queries, *terms)), "v has queries"
    run.env[attention.score] = (q * k).sum(terms, keepdims=True)
    run.bind(attention.bindings)
    logit = run(attention.logit)
    visible = np.asarray(True) if attention.visible is None else run(attention.visible)
    # broadcast over the keys, since a logit need not depend on all of them
    full = [n if i in keys else 1 for i, n in enumerate(run.shape)]
    logit = np.where(visible, logit, -np.inf) + np.zeros(full)
    top = logit.max(keys, keepdims=True)
    weights = np.exp(logit - np.where(np.isinf(top), 0, top))
    total = weights.sum(keys, keepdims=True)
    run.env[attention.lse] = np.where(np.isinf(top), 0, top) + np.log(total)
    weighted = (weights * v).sum(keys, keepdims=True)
    run.env[attention.result] = np.where(total == 0, 0, weighted / np.where(total == 0, 1, total))
    run.bind(attention.output_bindings)
    found = []
    for output in (*attention.outputs, *attention.row_outputs):
        param = attention.params[output.param]
        array = np.full([run.size(n) for n in param.shape], np.nan)
        axes = (*attention.batch, *attention.queries)
        if output in attention.outputs:
            axes = (*axes, *attention.features)
        shape = [1] * len(run.shape)
        for d in run.dimensions(axes):
            shape[d] = run.shape[d]
        indices = [np.broadcast_to(run(i), shape) for i in output.indices]
        array[tuple(indices)] = np.broadcast_to(run(output.value), shape)
        found.append((output.param, array))
    return [array for _, array in sorted(found, key=lambda pair: pair[0])]
