"""The graphs of five decisions that a planner has to get right, and the plans it has to reject.

=================  ===================================================================
name               what is decided
=================  ===================================================================
register_pressure  sixty values are live at once: one kernel would spill them
short_chain        few values are live at once: one kernel
code_chain         400 special functions in a chain: one kernel fills no cache
code_dag           the same as a graph of two strands
short_code         a chain of twenty: one kernel
coalescing         a row sum would take a transposing kernel's coalesced reads away
broadcast          a costly chain of one value a row is not computed again along the row
remat_all          a cheap producer is computed in both of its consumers
remat_some         what is stored anyway is computed again where reading it costs more
=================  ===================================================================
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import tvm
from tvm import relax
from tvm.relax import op

from tvm_fusion.ir.graph import FusionGraph, OpKind

F16, F32 = "float16", "float32"
LIVE = 60
SPECIAL = 400

Parts = list[list[int]]
"""A plan by hand: the operators of each launch. Of one that stands in several, the first writes it
if anybody reads it."""


@dataclass(frozen=True, slots=True)
class PlanCase:
    """A graph, and what may not be chosen for it.

    Attributes
    ----------
    name : str
    build : callable
        The module; its argument is the factor on extents.
    rejected : callable
        Plans by hand, by name, of the graph of that module.
    """

    name: str
    build: Callable[[float], tvm.IRModule]
    rejected: Callable[[FusionGraph], dict[str, Parts]]


def _module(emit: Callable, *inputs: tuple) -> tvm.IRModule:
    bb = relax.BlockBuilder()
    params = [relax.Var(f"x{i}", relax.TensorType(s, d)) for i, (s, d) in enumerate(inputs)]
    with bb.function("main", params):
        with bb.dataflow():
            result = emit(bb, *params)
            out = bb.emit_output(relax.Tuple(list(result)) if isinstance(result, tuple) else result)
        bb.emit_func_output(out)
    return bb.get()


def _extent(full: int, scale: float) -> int:
    return max(64, int(full * scale) // 64 * 64)


def _big(scale: float, rows: int = 8192, columns: int = 4096) -> tuple:
    return (_extent(rows, scale), _extent(columns, scale)), F16


def one_launch(graph: FusionGraph) -> dict[str, Parts]:
    """The whole graph as one launch."""
    return {"one kernel": [[op.id for op in graph.ops if op.kind is not OpKind.OPAQUE]]}


def apart(graph: FusionGraph) -> dict[str, Parts]:
    """Every operator by itself."""
    return {"apart": [[op.id] for op in graph.ops]}


def _both(graph: FusionGraph) -> dict[str, Parts]:
    return one_launch(graph) | apart(graph)


# ---- registers


def register_pressure(scale: float) -> tvm.IRModule:
    """A chain of sixty values, each a result of the function, and their sum in another order: an
    element of each is held until its vector is full.
    """

    def emit(bb, x):
        values = []
        for i in range(LIVE):
            x = bb.emit(op.tanh(x) if i % 2 else op.cos(x))
            values.append(x)
        total = values[0]
        for i in range(1, LIVE):
            total = bb.emit(op.add(total, values[i * 7 % LIVE]))
        return (*values, total)

    return _module(emit, _big(scale, 4096, 4096))


def short_chain(scale: float) -> tvm.IRModule:
    """Twenty operators in a row, one value at a time."""

    def emit(bb, x, y):
        for i in range(10):
            x = bb.emit(op.add(x, relax.const(0.5 + i, F16)))
            x = bb.emit(op.maximum(x, y) if i % 2 else op.multiply(x, y))
        return x

    return _module(emit, _big(scale), _big(scale))


# ---- code


def _special(bb, x, i: int):
    return bb.emit((op.exp, op.tanh, op.erf)[i % 3](x))


def code_chain(scale: float, length: int = SPECIAL) -> tvm.IRModule:
    """exp, tanh and erf in turn."""

    def emit(bb, x):
        for i in range(length):
            x = _special(bb, x, i)
        return x

    return _module(emit, _big(scale, 4096, 4096))


def code_dag(scale: float) -> tvm.IRModule:
    """Two strands of special functions that cross each other every four of them."""

    def emit(bb, a, b):
        for i in range(SPECIAL // 2):
            a, b = _special(bb, a, i), _special(bb, b, i + 1)
            if i % 4 == 3:
                a, b = bb.emit(op.subtract(a, b)), bb.emit(op.multiply(a, b))
        return bb.emit(op.add(a, b))

    shape = _big(scale, 4096, 4096)
    return _module(emit, shape, shape)


# ---- coalescing


def coalescing(scale: float) -> tvm.IRModule:
    """A pointwise group that reads one input transposed, and a sum over the rows of its result."""

    def emit(bb, x, z):
        y = bb.emit(op.add(x, bb.emit(op.permute_dims(z))))
        y = bb.emit(op.nn.relu(bb.emit(op.multiply(y, relax.const(0.5, F16)))))
        y = bb.emit(op.maximum(bb.emit(op.multiply(y, y)), x))
        return y, bb.emit(op.sum(y, axis=-1))

    square = _big(scale, 8192, 8192)
    return _module(emit, square, square)


# ---- broadcast


def broadcast(scale: float) -> tvm.IRModule:
    """Forty special functions on [M, 1], then a sum with [M, N] (as in tvm#20342)."""

    def emit(bb, x, y):
        for i in range(40):
            x = _special(bb, x, i)
        return bb.emit(op.add(x, y))

    shape, dtype = _big(scale, 8192, 8192)
    return _module(emit, ((shape[0], 1), dtype), (shape, dtype))


# ---- rematerialisation


def _scaled(bb, x, s, dtype: str):
    return bb.emit(op.multiply(bb.emit(op.astype(x, dtype)), s))


def _remat_inputs(scale: float, dtype: str) -> tuple[tuple, tuple]:
    shape, _ = _big(scale, 16384, 4096)
    return (shape, "int8"), ((shape[1],), dtype)


def remat_all(scale: float) -> tvm.IRModule:
    """Scaled int8 values, normalised along rows and along columns: two kernels, and reading the
    int8 values twice costs less than storing them as halves.
    """

    def emit(bb, x, s):
        y = _scaled(bb, x, s, F16)
        return bb.emit(op.nn.softmax(y, axis=-1)), bb.emit(op.nn.softmax(y, axis=0))

    return _module(emit, *_remat_inputs(scale, F16))


def remat_some(scale: float) -> tvm.IRModule:
    """As `remat_all` in float32, and the scaled values are a result of the function, too: they are
    stored with one of the consumers and computed again in the other.
    """

    def emit(bb, x, s):
        y = _scaled(bb, x, s, F32)
        return y, bb.emit(op.nn.softmax(y, axis=-1)), bb.emit(op.nn.softmax(y, axis=0))

    return _module(emit, *_remat_inputs(scale, F32))


def _stored(graph: FusionGraph) -> dict[str, Parts]:
    """The producer in a launch of its own, read by the others; each softmax one launch."""
    shared = [o.id for o in graph.ops if _feeds_both(graph, o.id)]
    rest = [o.id for o in graph.ops if o.id not in shared]
    parts: dict[int, list[int]] = {}
    for i in rest:  # what hangs together without the producer
        before = set(graph.producers(i))
        joined = [first for first, ops in parts.items() if before & set(ops)]
        together = [*sorted(op for first in joined for op in parts.pop(first)), i]
        parts[together[0]] = together
    return {"stored": [shared, *parts.values()]}


def _feeds_both(graph: FusionGraph, node: int) -> bool:
    """Whether both softmaxes are computed from an operator."""
    reached, stack = {node}, [node]
    while stack:
        for c in graph.consumers(stack.pop()):
            if c not in reached:
                reached.add(c)
                stack.append(c)
    ends = {i for i in reached if any(graph.tensors[t].is_output for t in graph.ops[i].outputs)}
    return len(ends - {node}) > 1


CASES: dict[str, PlanCase] = {
    case.name: case
    for case in (
        PlanCase("register_pressure", register_pressure, _both),
        PlanCase("short_chain", short_chain, apart),
        PlanCase("code_chain", code_chain, one_launch),
        PlanCase("code_dag", code_dag, one_launch),
        PlanCase("short_code", lambda scale: code_chain(scale, 20), apart),
        PlanCase("coalescing", coalescing, one_launch),
        PlanCase("broadcast", broadcast, one_launch),
        PlanCase("remat_all", remat_all, _stored),
        PlanCase("remat_some", remat_some, _stored),
    )
}
