"""One tile of a group: what part of each axis it covers, and where its buffers live."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from tvm import tirx
from tvm.ir import Expr, PrimType, TensorLoad, Var
from tvm.ir.prim.expr import Let

from ..expr import bytes_of, constant, convert, dtype_of, number
from .loops import Keep, Loops
from .math import lower_call
from .rewrite import (
    BINARY,
    LEAVES,
    UNARY,
    branches,
    can_speculate,
    children,
    is_conditional,
    is_index,
    nodes,
    rebuild,
)
from .stages import Axis, Stage

# Temporaries up to this size live on the stack.
MOST_STACK_BYTES = 16 << 10

# Largest tree of bound values: TVM takes seconds for trees of a few thousand nodes.
MOST_TREE_NODES = 150

# What a selection counts as: TVM's simplifier looks at both cases of each.
CONDITION_NODES = 20


@dataclass(frozen=True, slots=True, eq=False)
class Region:
    """Part of an axis: `extent` elements from `base` on, at most `full`."""

    base: Expr
    extent: Expr
    full: Expr

    @property
    def is_dynamic(self) -> bool:
        """Whether the last tile may be shorter than the others."""
        return not self.extent.same_as(self.full) and number(self.extent) != number(self.full)


@dataclass(frozen=True, slots=True, eq=False)
class Place:
    """Where a buffer is kept: the element at `indices` is at ``buffer[index(indices)]``.

    `dtype` is the type that readers expect; what is kept may be wider.
    """

    buffer: Var
    index: Callable[[list[Expr]], list[Expr]]
    dtype: str


@dataclass(slots=True, eq=False)
class Scope:
    """State of emitting one tile."""

    loops: Loops
    regions: dict[Var, Region]
    places: dict[Var, Place] = field(default_factory=dict)
    allocated: list[tirx.Stmt] = field(default_factory=list)
    tree_sizes: dict[Var, int] = field(default_factory=dict)

    def region(self, axis: Axis) -> Region:
        """The part of an axis of a stage that belongs to the tile."""
        found = self.regions.get(axis.var)
        if found is None:
            extent = convert(axis.extent, self.loops.dtype)
            found = Region(self.loops.imm(0), extent, extent)
        return found

    def allocate(self, name: str, shape: list[Expr | int], dtype: str) -> Var:
        """A buffer of the tile's own."""
        extents = [self.loops.imm(s) if isinstance(s, int) else s for s in shape]
        buffer = new_buffer(name, extents, dtype)
        self.allocated.append(allocate(buffer))
        return buffer

    def keep_local(self, stage: Stage, buffer: Var) -> None:
        """Keep a stage's output for this tile only."""
        regions = [self.region(a) for a in stage.axes]
        local = self.allocate(buffer.name, [r.full for r in regions], dtype_of(buffer))

        def index(indices: list[Expr]) -> list[Expr]:
            return [
                self.loops.simplify(convert(i, self.loops.dtype) - r.base)
                for i, r in zip(indices, regions, strict=True)
            ]

        self.places[buffer] = Place(local, index, dtype_of(buffer))

    def place(self, buffer: Var) -> Place:
        """Where `buffer` is kept."""
        found = self.places.get(buffer)
        return found or Place(buffer, lambda indices: indices, dtype_of(buffer))

    def store(self, buffer: Var, value: Expr, indices: list[Expr]) -> tirx.Stmt:
        """Store an element of `buffer`."""
        place = self.place(buffer)
        value = convert(value, dtype_of(place.buffer))
        return tirx.BufferStore(place.buffer, value, place.index(indices))


def new_buffer(name: str, shape: list[Expr], dtype: str) -> Var:
    """A temporary buffer.

    Its scope is "global", not "local": TVM's lowering moves only "global" ones to the stack.
    """
    return tirx.decl_buffer(shape, dtype, name)


def allocate(buffer: Var) -> tirx.Stmt:
    """The allocation of a temporary: on the stack if it is small, else from TVM's pool."""
    size = bytes_of(dtype_of(buffer))
    for extent in buffer.ty.shape:
        value = number(extent)
        if value is None:
            return tirx.AllocBuffer(buffer)
        size *= int(value)
    if size > MOST_STACK_BYTES:
        return tirx.AllocBuffer(buffer)
    keep = constant(1, "int32")
    return tirx.AllocBuffer(buffer, annotations={"disable_lower_builtin": keep})


class Resolve:
    """Final form of a stage's expressions: loop variables, places, simple indices, no library calls.

    Shared parts and the steps of a function become bindings in `ops`, except under a condition.

    Parameters
    ----------
    env : dict
        Values of variables.
    known : dict
        Values of buffers at the same point.
    ops : list of Stmt
        Where bindings are appended.
    """

    def __init__(
        self,
        scope: Scope,
        env: dict[Var, Expr],
        known: dict[Var, Expr],
        ops: list[tirx.Stmt | Keep],
    ) -> None:
        self.scope = scope
        self.env = env
        self.known = known
        self.ops = ops
        self._done: dict[Expr, Expr] = {}
        self._guards = 0

    def __call__(self, expr: Expr) -> Expr:
        if self._guards:
            return self._visit(expr)
        if expr not in self._done:
            self._done[expr] = self._visit(expr)
        return self._done[expr]

    def bind(self, name: str, value: Expr) -> Expr:
        """A name for a value, unless it is one.

        TVM's simplifier puts what a variable was bound to in its place, except for loads, and so
        turns chains of bindings into their tree. A large tree is cut by a buffer of one element,
        which LLVM turns into a register.
        """
        if isinstance(value, LEAVES):
            return value
        size = self._tree_size(value)
        if size > MOST_TREE_NODES:
            buffer = new_buffer(name, [constant(1, "int32")], dtype_of(value))
            self.ops.append(Keep(buffer, allocate(buffer), value))
            return tirx.BufferLoad(buffer, [constant(0, "int32")])
        var = Var(name, PrimType(dtype_of(value)))
        self.scope.tree_sizes[var] = size
        self.ops.append(tirx.Bind(var, value))
        return var

    def _tree_size(self, value: Expr) -> int:
        """Nodes of `value` with its variables replaced by what they are bound to; 1 for loads."""
        if any(isinstance(e, TensorLoad) for e in nodes(value)):
            return 1
        total = CONDITION_NODES if is_conditional(value) else 1
        for child in children(value):
            total += self._tree_size(child) if children(child) else self.scope.tree_sizes.get(child, 1)
        return total

    def _visit(self, expr: Expr) -> Expr:
        if isinstance(expr, Var):
            return self.env.get(expr, expr)
        if isinstance(expr, TensorLoad):
            return self._load(expr)
        if isinstance(expr, Let):
            return self._let(expr)
        if isinstance(expr, tirx.Cast) and self._is_known(expr.value, dtype_of(expr)):
            return self.known[expr.value.source]
        if isinstance(expr, (*BINARY, *UNARY)) and is_index(expr):
            return self.scope.loops.simplify(rebuild(expr, self))
        if is_conditional(expr):
            return self._conditional(expr)
        plain = rebuild(expr, self)
        lowered = lower_call(plain)
        return lowered if self._guards or lowered is plain else self._flat(lowered)

    def _is_known(self, load: Expr, dtype: str) -> bool:
        """Whether `load` reads a value of this point that is held in type `dtype`: rounding it again changes nothing."""
        if not isinstance(load, TensorLoad) or load.source not in self.known:
            return False
        return dtype_of(self.known[load.source]) == dtype

    def _load(self, load: TensorLoad) -> Expr:
        if load.source in self.known:
            return convert(self.known[load.source], dtype_of(load.source))
        place = self.scope.place(load.source)
        indices = [self.scope.loops.simplify(self(i)) for i in load.indices]
        return convert(tirx.BufferLoad(place.buffer, place.index(indices)), place.dtype)

    def _let(self, expr: Let) -> Expr:
        value = self(expr.value)
        if not self._guards:
            self.env[expr.var] = self.bind(expr.var.name, value)
            return self(expr.body)
        var = self.env[expr.var] = Var(expr.var.name, PrimType(dtype_of(value)))
        return Let(var, value, self(expr.body))

    def _conditional(self, expr: Expr) -> Expr:
        condition, yes, no = branches(expr)
        condition = self(condition)
        known = number(condition)
        if known is not None:
            return self(yes if known else no)
        if can_speculate(yes) and can_speculate(no):
            return tirx.Select(condition, self(yes), self(no))
        self._guards += 1
        yes, no = self(yes), self(no)
        self._guards -= 1
        return tirx.if_then_else(condition, yes, no)

    def _flat(self, expr: Expr) -> Expr:
        """`expr` with its Let expressions turned into bindings."""
        if isinstance(expr, Let):
            self.env[expr.var] = self.bind(expr.var.name, self._flat(expr.value))
            return self._flat(expr.body)
        if isinstance(expr, Var):
            return self.env.get(expr, expr)
        if isinstance(expr, TensorLoad):
            return expr
        return rebuild(expr, self._flat)
