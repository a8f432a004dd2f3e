"""What a scheduled function does, read off its loops: launches, accesses and their strides.

Every store of every block is looked at once, below the loops around it. Strides are found by
evaluating an index at two neighbouring iterations, so that divisions and remainders of fused loops
need no algebra. Symbolic extents count as `ir.extents.ASSUMED_SYMBOLIC_EXTENT`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from tvm import s_tir, tirx
from tvm.ir import Call, Expr, TensorLoad, Var

from ...ir.access import Pipe
from ...ir.extents import assumed
from ...ir.reader import children, extent_of, op_name, pipe_of
from ...plan.group_view import dtype_bytes

UNROLL_STEPS = "pragma_auto_unroll_max_step"


@dataclass(frozen=True, slots=True)
class Loop:
    """A loop around a block: `role` is "grid", "thread", "parallel", "vector", "unrolled" or
    "serial".
    """

    var: Var
    extent: int
    role: str


@dataclass(frozen=True, slots=True)
class Access:
    """A load or store.

    Attributes
    ----------
    buffer : the tensor
    whole_bytes : of the tensor
    element_bytes : of its dtype
    scope : "global", "shared" or "local" (of a thread, or of a warp: operands of tensor cores)
    store : whether it writes
    runs : how often it is executed, over all threads
    thread_stride : elements between neighbouring threads; None where the index is data
    vector_stride : elements between neighbouring lanes of the vector loop, or iterations of the
        innermost one; None where the index is data
    """

    buffer: Var
    whole_bytes: float
    element_bytes: int
    scope: str
    store: bool
    runs: float
    thread_stride: int | None
    vector_stride: int | None


@dataclass
class Launch:
    """One nest under the root: a kernel on a GPU, a parallel loop on a CPU."""

    grid: int = 1
    threads: int = 1
    parallel: int = 1
    vector: int = 1
    scalar_runs: float = 0.0  # stores outside vector loops
    unrolled: float = 1.0  # most iterations of unrolled loops around one store
    steps: float = 0.0  # of one thread, over all blocks: iterations of loops that are not unrolled
    reduced_by_threads: int = 0  # blocks
    accesses: list[Access] = field(default_factory=list)
    operations: dict[Pipe, float] = field(default_factory=dict)
    local_bytes: float = 0.0  # of a thread
    shared_bytes: float = 0.0  # of a thread block


def launches_of(func: tirx.PrimFunc) -> list[Launch]:
    """The launches of a scheduled s_tir function, in order."""
    root = func.body.block
    tensors: dict[Var, _Tensor] = {}
    nests = list(root.body) if isinstance(root.body, tirx.SeqStmt) else [root.body]
    found = []
    for nest in nests:
        launch = Launch()
        _Walk(launch, tensors).visit(nest, (), {})
        found.append(launch)
    for launch in found:
        used = {a.buffer: a for a in launch.accesses}.values()
        threads = launch.grid * launch.threads * launch.parallel
        launch.local_bytes = sum(a.whole_bytes for a in used if a.scope == "local") / threads
        launch.shared_bytes = sum(a.whole_bytes for a in used if a.scope == "shared") / launch.grid
    return found


@dataclass(frozen=True, slots=True)
class _Tensor:
    """What the walk asks of a tensor again and again."""

    shape: tuple[int, ...]
    element_bytes: int
    scope: str

    @classmethod
    def of(cls, buffer) -> _Tensor:
        shape = tuple(max(1, assumed(extent_of(extent))) for extent in buffer.ty.shape)
        return cls(shape, dtype_bytes(str(buffer.ty.dtype)), _scope(buffer))


class _Walk:
    def __init__(self, launch: Launch, tensors: dict[Var, _Tensor]) -> None:
        self.launch, self.tensors = launch, tensors

    def visit(self, stmt, loops: tuple[Loop, ...], values: Mapping[Var, Expr]) -> None:
        if isinstance(stmt, tirx.SeqStmt):
            for part in stmt:
                self.visit(part, loops, values)
        elif isinstance(stmt, tirx.For):
            self.visit(stmt.body, (*loops, self._loop(stmt)), values)
        elif isinstance(stmt, s_tir.SBlockRealize):
            block = stmt.block
            bound = dict(values)
            bound.update(zip((iv.var for iv in block.iter_vars), stmt.iter_values, strict=True))
            if any(int(iv.iter_type) == 2 for iv in block.iter_vars):
                self._count_thread_reduction(block, stmt, loops)
            self.visit(block.body, loops, bound)
        elif isinstance(stmt, tirx.IfThenElse):
            self.visit(stmt.then_case, loops, values)
            if stmt.else_case is not None:
                self.visit(stmt.else_case, loops, values)
        elif isinstance(stmt, tirx.BufferStore):
            self._store(stmt, loops, values)

    def _loop(self, loop: tirx.For) -> Loop:
        extent = max(1, assumed(extent_of(loop.extent)))
        role = "serial"
        if loop.kind == tirx.ForKind.THREAD_BINDING:
            tag = loop.thread_binding.thread_tag
            role = "grid" if tag.startswith("blockIdx") else "thread"
        elif loop.kind == tirx.ForKind.PARALLEL:
            role = "parallel"
            self.launch.parallel = max(self.launch.parallel, extent)
        elif loop.kind == tirx.ForKind.VECTORIZED:
            role = "vector"
            self.launch.vector = max(self.launch.vector, extent)
        elif loop.kind == tirx.ForKind.UNROLLED:
            role = "unrolled"
        if UNROLL_STEPS in loop.annotations:
            self.launch.unrolled = max(self.launch.unrolled, float(loop.annotations[UNROLL_STEPS]))
        return Loop(loop.loop_var, extent, role)

    def _count_thread_reduction(self, block, realize, loops: tuple[Loop, ...]) -> None:
        threads = {loop.var for loop in loops if loop.role == "thread"}
        for iv, value in zip(block.iter_vars, realize.iter_values, strict=True):
            if int(iv.iter_type) == 2 and threads & _vars(value):
                self.launch.reduced_by_threads += 1
                return

    def _store(self, store, loops: tuple[Loop, ...], values: Mapping[Var, Expr]) -> None:
        launch = self.launch
        by_role = {role: 1.0 for role in ("grid", "thread", "parallel", "vector", "unrolled")}
        by_role["serial"] = 1.0
        for loop in loops:
            by_role[loop.role] *= loop.extent
        runs = 1.0
        for extent in by_role.values():
            runs *= extent
        launch.grid = max(launch.grid, int(by_role["grid"]))
        launch.threads = max(launch.threads, int(by_role["thread"]))
        launch.unrolled = max(launch.unrolled, by_role["unrolled"])
        launch.steps += by_role["serial"]
        if by_role["vector"] == 1:
            launch.scalar_runs += runs
        self._access(store.buffer, store.indices, True, runs, loops, values)
        self._expression(store.value, runs, loops, values)

    def _expression(self, e, runs: float, loops, values) -> None:
        if isinstance(e, TensorLoad):
            self._access(e.source, e.indices, False, runs, loops, values)
        pipe = pipe_of(e)
        if pipe is not None:
            self.launch.operations[pipe] = self.launch.operations.get(pipe, 0.0) + runs
        for child in children(e):
            self._expression(child, runs, loops, values)

    def _access(self, buffer, indices, store: bool, runs: float, loops, values) -> None:
        threads = [loop for loop in loops if loop.role == "thread"]
        inner = [loop for loop in loops if loop.extent > 1 and loop.role != "grid"]
        tensor = self.tensors.get(buffer)
        if tensor is None:
            tensor = self.tensors[buffer] = _Tensor.of(buffer)
        here = _flat(tensor, indices, values, {})
        access = Access(
            buffer,
            float(math.prod(tensor.shape) * tensor.element_bytes),
            tensor.element_bytes,
            tensor.scope,
            store,
            runs,
            _step(tensor, indices, threads[-1].var if threads else None, values, here),
            _step(tensor, indices, inner[-1].var if inner else None, values, here),
        )
        self.launch.accesses.append(access)


def _step(
    tensor: _Tensor, indices, var: Var | None, values: Mapping[Var, Expr], here: int | None
) -> int | None:
    """Elements between the first and the second iteration of a loop."""
    if var is None or here is None:
        return 0 if var is None else None
    there = _flat(tensor, indices, values, {var: 1})
    return None if there is None else there - here


def _flat(
    tensor: _Tensor, indices, values: Mapping[Var, Expr], at: Mapping[Var, int]
) -> int | None:
    position = 0
    for index, extent in zip(indices, tensor.shape, strict=True):
        value = evaluate(index, values, at)
        if value is None:
            return None
        position = position * extent + value
    return position


def evaluate(e, values: Mapping[Var, Expr], at: Mapping[Var, int]) -> int | None:
    """An integer expression with block variables bound to `values` and loops `at` these
    iterations, others at 0; None where it reads memory.
    """
    kind = type(e)
    operation = _OPERATIONS.get(kind)
    if operation is not None:
        a, b = evaluate(e.a, values, at), evaluate(e.b, values, at)
        return None if a is None or b is None else operation(a, b)
    if kind is tirx.IntImm:
        return int(e.value)
    if kind is Var:
        bound = values.get(e)
        return at.get(e, 0) if bound is None else evaluate(bound, values, at)
    if kind is tirx.Cast:
        return evaluate(e.value, values, at)
    if isinstance(e, Call) and op_name(e) == "if_then_else":
        return evaluate(e.args[1], values, at)
    return None


_OPERATIONS = {
    tirx.Add: lambda a, b: a + b,
    tirx.Sub: lambda a, b: a - b,
    tirx.Mul: lambda a, b: a * b,
    tirx.FloorDiv: lambda a, b: a // b if b else 0,
    tirx.FloorMod: lambda a, b: a % b if b else 0,
    tirx.Min: min,
    tirx.Max: max,
}


def _vars(e) -> set[Var]:
    if isinstance(e, Var):
        return {e}
    return set().union(*(_vars(child) for child in children(e)))


def _scope(buffer) -> str:
    scope = str(buffer.scope()) or "global"
    if scope == "global":
        return scope
    return "shared" if scope.startswith("shared") else "local"
