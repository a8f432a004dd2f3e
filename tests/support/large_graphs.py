"""Large graphs for the plan search: random DAGs of fixed shapes, and stacks of equal layers."""

from __future__ import annotations

import random
from collections.abc import Sequence

import tvm
from tvm import relax
from tvm.relax import op

from tvm_fusion.config import HardwareProfile
from tvm_fusion.ir.graph import FusionGraph, build_graph
from tvm_fusion.transform.pipeline import lower

UNARY = (op.exp, op.tanh, op.nn.relu, op.negative, op.sigmoid, op.abs)
BINARY = (op.add, op.multiply, op.subtract, op.maximum)
NEAR = 6  # operators read one of so many values before them


def graph_of(mod: tvm.IRModule, hw: HardwareProfile) -> FusionGraph:
    """The graph that the search plans."""
    return build_graph(lower(mod, hw.to_target(), hw=hw))


def random_dag(size: int, seed: int, shape: Sequence[int] = (512, 1024)) -> tvm.IRModule:
    """About `size` operators: unary and binary ones, reductions of rows that are added to a value
    anywhere before, transposes; three results.
    """
    rng = random.Random(seed)
    bb = relax.BlockBuilder()
    params = [relax.Var(name, relax.TensorType(shape, "float16")) for name in ("x", "y")]
    with bb.function("main", params):
        with bb.dataflow():
            values = list(params)
            while len(values) < size:
                values.append(bb.emit(_random_operator(rng, bb, values)))
            out = bb.emit_output(relax.Tuple(values[-3:]))
        bb.emit_func_output(out)
    return bb.get()


def _random_operator(rng: random.Random, bb: relax.BlockBuilder, values: list) -> relax.Expr:
    kind, value = rng.random(), rng.choice(values[-NEAR:])
    if kind < 0.4:
        return rng.choice(UNARY)(value)
    if kind < 0.85:
        return rng.choice(BINARY)(value, rng.choice(values[-NEAR:]))
    if kind < 0.95:
        total = bb.emit(rng.choice((op.sum, op.max))(value, axis=-1, keepdims=True))
        return op.add(rng.choice(values), total)
    turned = bb.emit(op.permute_dims(value, [1, 0]))
    return op.permute_dims(bb.emit(rng.choice(UNARY)(turned)), [1, 0])


def transformer(
    layers: int,
    tokens: int = 512,
    width: int = 1024,
    heads: int = 16,
    dtype: str = "float16",
    keep: bool = False,
    odd: int | None = None,
) -> tvm.IRModule:
    """Layers of attention and a gated MLP with norms before them, weights as parameters.

    `keep` makes the keys and values of all layers results; layer `odd` has another activation.
    """
    bb = relax.BlockBuilder()
    made: list[relax.Var] = []

    def param(*shape: int) -> relax.Var:
        made.append(relax.Var(f"p{len(made)}", relax.TensorType(shape, dtype)))
        return made[-1]

    x, mask = param(1, tokens, width), param(1, 1, tokens, tokens)
    square, wide = (width, width), (width, 4 * width)
    shapes = [(width,), (width,), square, square, square, square, wide, wide, wide[::-1]]
    weights = [[param(*shape) for shape in shapes] for _ in range(layers)]
    with bb.function("main", made):
        with bb.dataflow():
            results = []
            for number, layer in enumerate(weights):
                x, kept = _layer(bb, x, mask, layer, heads, number == odd)
                results += kept if keep else []
            out = bb.emit_output(relax.Tuple([bb.emit(op.nn.softmax(x)), *results]))
        bb.emit_func_output(out)
    return bb.get()


def _layer(bb: relax.BlockBuilder, x, mask, weights, heads: int, odd: bool):
    norm, norm2, q, k, v, o, gate, up, down = weights
    _, tokens, width = (int(n) for n in x.ty.shape)
    dtype = str(x.ty.dtype)
    normed = bb.emit(op.nn.rms_norm(x, norm, axes=[-1]))

    def split(weight):
        product = bb.emit(op.matmul(normed, weight))
        rows = bb.emit(op.reshape(product, (1, tokens, heads, width // heads)))
        return bb.emit(op.permute_dims(rows, [0, 2, 1, 3]))

    query, key, value = split(q), split(k), split(v)
    scores = bb.emit(op.matmul(query, bb.emit(op.permute_dims(key, [0, 1, 3, 2]))))
    scaled = bb.emit(op.multiply(scores, relax.const(0.125, dtype)))
    shares = bb.emit(op.nn.softmax(bb.emit(op.add(scaled, mask))))
    mixed = bb.emit(op.permute_dims(bb.emit(op.matmul(shares, value)), [0, 2, 1, 3]))
    joined = bb.emit(op.reshape(mixed, (1, tokens, width)))
    x = bb.emit(op.add(x, bb.emit(op.matmul(joined, o))))
    normed = bb.emit(op.nn.rms_norm(x, norm2, axes=[-1]))
    activation = op.nn.relu if odd else op.nn.silu
    opened = bb.emit(activation(bb.emit(op.matmul(normed, gate))))
    inner = bb.emit(op.multiply(opened, bb.emit(op.matmul(normed, up))))
    return bb.emit(op.add(x, bb.emit(op.matmul(inner, down)))), [key, value]
