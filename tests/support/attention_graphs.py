"""What cases of attention are made of: graphs, sizes, one fused PrimFunc each, references.

The graph of a case goes through the package's own lowering and becomes one group, as the planner
hands it to a kernel class.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import tvm
from tvm import relax, te, tirx
from tvm.relax import op

from tests.support.graphs import module
from tests.support.kernel_cases import numpy_dtype
from tvm_fusion.config import load_profile
from tvm_fusion.ir.graph import OpKind, build_graph
from tvm_fusion.plan.plan import FusionPlan, PlannedGroup
from tvm_fusion.transform.apply.materialize import group_views
from tvm_fusion.transform.apply.region_module import group_modules
from tvm_fusion.transform.pipeline import lower

HALF, FLOAT = "float16", "float32"


@dataclass(frozen=True)
class Sizes:
    """Batch, query heads, key heads, queries, keys, width of q and k, width of v, dtype."""

    B: int = 2
    H: int = 4
    G: int = 2
    M: int = 5
    N: int = 7
    D: int = 16
    E: int = 16
    dtype: str = HALF


@dataclass(frozen=True)
class Group:
    """A module as one PrimFunc: what its inputs are in `main`, and which output of `main` each of
    its outputs is.
    """

    func: tirx.PrimFunc
    inputs: tuple
    outputs: tuple[int, ...]


def one_group(mod: tvm.IRModule, device: str = "h200") -> Group:
    """All of `main` as one PrimFunc, lowered for a device."""
    hw = load_profile(device)
    low = lower(mod, hw.to_target(), hw=hw)
    graph = build_graph(low)
    names = tuple(o.name for o in graph.ops if o.kind != OpKind.OPAQUE)
    group = PlannedGroup(names, "attention")
    plan = FusionPlan("main", graph.fingerprint(), device, "default", (group,))
    taken = group_modules(low, graph, plan, group)
    (view,) = group_views(graph, plan)
    results = _results(low["main"])
    outputs = tuple(results.index(graph.tensors[t].name) for t in view.outputs)
    return Group(taken.fused[taken.kernel], taken.inputs, outputs)


def _results(main: relax.Function) -> list[str]:
    """The names of what a function gives back."""
    values = {b.var: b.value for block in main.body.blocks for b in block.bindings}
    result = main.body.body
    while isinstance(result, relax.Var) and isinstance(values[result], relax.Var | relax.Tuple):
        result = values[result]
    return [f.name for f in (result.fields if isinstance(result, relax.Tuple) else [result])]


@dataclass(frozen=True)
class AttentionCase:
    """One attention.

    Attributes
    ----------
    emit : ``emit(sizes)(block_builder, *vars)`` is the graph's result, one Expr or a tuple.
    shapes : ``shapes(sizes)`` are shape and dtype of each input.
    reference : ``reference(sizes)(*inputs)`` are the outputs; floats come in float64.
    make : inputs that are not plain random numbers, by number: ``make[i](rng, sizes)``.
    sizes : small ones; `with_sizes` gives the same case with others.
    """

    name: str
    emit: Callable[[Sizes], Callable[..., Any]]
    shapes: Callable[[Sizes], Sequence[tuple[tuple[int, ...], str]]]
    reference: Callable[[Sizes], Callable[..., Sequence[np.ndarray]]]
    make: dict[int, Callable[[np.random.Generator, Sizes], np.ndarray]] = field(
        default_factory=dict
    )
    sizes: Sizes = Sizes()

    def with_sizes(self, **sizes: Any) -> AttentionCase:
        """The same graph at other sizes."""
        return replace(self, sizes=replace(self.sizes, **sizes))

    def module(self) -> tvm.IRModule:
        """The graph as a Relax module."""
        return module(self.emit(self.sizes), *self.shapes(self.sizes))

    def func(self) -> tirx.PrimFunc:
        """The fused PrimFunc; its parameters are the inputs that are used, then the outputs."""
        return one_group(self.module()).func

    def arrays(self) -> list[np.ndarray]:
        """Inputs of the graph, equal in every run."""
        rng = np.random.default_rng(0)
        found = []
        for i, (shape, dtype) in enumerate(self.shapes(self.sizes)):
            if i in self.make:
                found.append(self.make[i](rng, self.sizes).astype(numpy_dtype(dtype)))
            elif dtype == "bool":
                found.append(rng.integers(0, 3, shape) > 0)
            else:
                found.append(rng.standard_normal(shape).astype(numpy_dtype(dtype)))
        return found

    def built(self) -> tuple[tirx.PrimFunc, list[np.ndarray]]:
        """The fused PrimFunc with the arrays of its inputs, in the order of its parameters."""
        mod = self.module()
        group = one_group(mod)
        named = dict(zip((p.name for p in mod["main"].params), self.arrays(), strict=True))
        return group.func, [
            named[i.name] if isinstance(i, relax.Var) else i.value.numpy()
            for i in group.inputs
            if not isinstance(i, relax.ShapeExpr)
        ]

    def expected(self) -> list[np.ndarray]:
        """Outputs in float64, in the order of the PrimFunc's parameters."""
        floats = ("float16", "bfloat16", "float32")
        wide = [a.astype(np.float64) if str(a.dtype) in floats else a for a in self.arrays()]
        results = [np.asarray(x) for x in self.reference(self.sizes)(*wide)]
        return [results[i] for i in one_group(self.module()).outputs]


# ---- graphs


def constant(value: float, like: relax.Expr | str) -> relax.Expr:
    """A 0-d constant of a dtype."""
    return relax.const(value, like if isinstance(like, str) else str(like.ty.dtype))


class Graph:
    """Emits operators one a line: ``g = Graph(bb); g.matmul(x, w)``."""

    def __init__(self, bb: relax.BlockBuilder) -> None:
        self.bb = bb

    def __getattr__(self, name: str) -> Callable[..., relax.Expr]:
        function = getattr(op, name, None) or getattr(op.nn, name)
        return lambda *args, **options: self.bb.emit(function(*args, **options))

    def wide(self, x: relax.Expr) -> relax.Expr:
        """`x` as float32."""
        return self.astype(x, FLOAT)

    def scaled(self, x: relax.Expr, factor: float) -> relax.Expr:
        """``x * factor``."""
        return self.multiply(x, constant(factor, x))

    def te(self, function: Callable[..., te.Tensor], *args: Any) -> relax.Expr:
        """The result of a `te` function."""
        return self.bb.emit(self.bb.call_te(function, *args))

    def compute(self, shape: Sequence[int], function: Callable[..., Any]) -> relax.Expr:
        """A tensor computed from its indices alone."""
        return self.te(lambda: te.compute(tuple(shape), function, name="made"))

    def heads(self, x: relax.Expr, heads: int) -> relax.Expr:
        """[B, S, H * D] -> [B, H, S, D]."""
        b, s, w = x.ty.shape
        split = self.reshape(x, (b, s, heads, int(w) // heads))
        return self.permute_dims(split, (0, 2, 1, 3))

    def merged(self, x: relax.Expr) -> relax.Expr:
        """[B, H, S, D] -> [B, S, H * D]."""
        b, h, s, d = x.ty.shape
        return self.reshape(self.permute_dims(x, (0, 2, 1, 3)), (b, s, int(h) * int(d)))

    def scores(self, q: relax.Expr, k: relax.Expr) -> relax.Expr:
        """``q k^T`` over the last two axes."""
        n = len(k.ty.shape)
        return self.matmul(q, self.permute_dims(k, (*range(n - 2), n - 1, n - 2)))

    def nn_relu(self, x: relax.Expr) -> relax.Expr:
        """``max(x, 0)``."""
        return self.bb.emit(op.nn.relu(x))


def softmaxed(g: Graph, logits: relax.Expr, v: relax.Expr) -> relax.Expr:
    """``softmax(logits) v``."""
    return g.matmul(g.softmax(logits, axis=-1), v)


# ---- inputs


def bhsd(s: Sizes, k_heads: int | None = None) -> list:
    """q, k and v as [B, H, S, D]."""
    heads = s.H if k_heads is None else k_heads
    return [
        ((s.B, s.H, s.M, s.D), s.dtype),
        ((s.B, heads, s.N, s.D), s.dtype),
        ((s.B, heads, s.N, s.E), s.dtype),
    ]


def packed(s: Sizes) -> list:
    """q, k and v as [B, S, H * D]."""
    return [
        ((s.B, s.M, s.H * s.D), s.dtype),
        ((s.B, s.N, s.H * s.D), s.dtype),
        ((s.B, s.N, s.H * s.E), s.dtype),
    ]


def scale_of(s: Sizes) -> float:
    """``1 / sqrt(D)``, exact in half precision for D of 4, 16, 64 and 256."""
    return s.D**-0.5


# ---- float64 references


def split(x: np.ndarray, heads: int) -> np.ndarray:
    """[B, S, H * D] -> [B, H, S, D]."""
    b, s, w = x.shape
    return x.reshape(b, s, heads, w // heads).transpose(0, 2, 1, 3)


def joined(x: np.ndarray) -> np.ndarray:
    """[B, H, S, D] -> [B, S, H * D]."""
    b, h, s, d = x.shape
    return x.transpose(0, 2, 1, 3).reshape(b, s, h * d)


def scores_of(q: np.ndarray, k: np.ndarray, scale: float) -> np.ndarray:
    """Scaled ``q k^T``."""
    return q @ np.swapaxes(k, -1, -2) * scale


def attend(logits: np.ndarray, v: np.ndarray) -> np.ndarray:
    """Softmax of the logits times `v`; rows of -inf give 0."""
    top = logits.max(-1, keepdims=True)
    e = np.exp(logits - np.where(np.isinf(top), 0, top))
    total = e.sum(-1, keepdims=True)
    return e @ v / np.where(total == 0, 1, total)


def lse_of(logits: np.ndarray) -> np.ndarray:
    """Logarithm of the sum of exponentials of each row."""
    top = logits.max(-1)
    return top + np.log(np.exp(logits - top[..., None]).sum(-1))


def causal(m: int, n: int, offset: int = 0) -> np.ndarray:
    """Whether query i sees key j: ``j <= i + offset``."""
    return np.tri(m, n, offset, dtype=bool)


def masked(logits: np.ndarray, visible: np.ndarray) -> np.ndarray:
    """-inf where a key is not visible."""
    return np.where(visible, logits, -np.inf)
