"""The final form of a stage's expressions, and what has been computed at one point of a nest."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, field

import numpy as np
from tvm import tirx
from tvm.ir import Expr, PrimType, TensorLoad, Var
from tvm.ir.prim.expr import Let

from ....errors import Unsupported
from ...program.expr import HALF_DTYPES, constant, convert, dtype_of, number, widened
from ..loops import Keep, Loop
from ..math import bfloat16_to_float32, lower_call, round_to_bfloat16
from ..nests.scope import Scope, allocate, new_buffer
from .rewrite import (
    BINARY,
    LEAVES,
    UNARY,
    Rewriter,
    branches,
    call_name,
    can_speculate,
    children,
    free_variables,
    is_conditional,
    is_index,
    key_of,
    loads,
    nodes,
    rebuild,
    with_children,
)

# 16-bit floats: what is computed in float32, and where it is rounded.
#
# After lowering, an expression of type float16 or bfloat16 occurs only directly under a cast to
# float32: a load, or (exact mode) a value that is rounded and widened again.


def round_constant(value: float, dtype: str) -> float:
    """`value` as the nearest number that `dtype` can hold."""
    if dtype == "float16":
        return float(np.float32(value).astype(np.float16))
    bits = int(np.float32(value).view(np.uint32))
    if not np.isfinite(value):
        return value
    rounded = (bits + 0x7FFF + (bits >> 16 & 1)) >> 16 << 16 & 0xFFFFFFFF
    return float(np.uint32(rounded).view(np.float32))


def rounded(value: Expr, dtype: str) -> Expr:
    """`value` rounded to `dtype`, as float32 again if `dtype` is a 16-bit float."""
    return convert(convert(value, dtype), widened(dtype))


def rounded_by_bits(value: Expr, dtype: str | None) -> Expr:
    """`rounded` for an expression that is final: a variable or a load. None rounds nothing."""
    if dtype is None:
        return value
    return round_to_bfloat16(value) if dtype == "bfloat16" else rounded(value, dtype)


class Widen(Rewriter):
    """Moves arithmetic on 16-bit floats to float32.

    Parameters
    ----------
    exact : bool
        Round after every operation, as the operations on 16-bit floats do.
    stored : dict
        Buffers that are kept in another type here: the new buffer.
    """

    def __init__(self, exact: bool, stored: dict[Var, Var]) -> None:
        super().__init__()
        self.exact = exact
        self.stored = stored

    def visit(self, expr: Expr) -> Expr:
        dtype = dtype_of(expr)
        if isinstance(expr, TensorLoad):
            source = self.stored.get(expr.source, expr.source)
            load = tirx.BufferLoad(source, [self(i) for i in expr.indices])
            return convert(load, widened(dtype_of(load)))
        if isinstance(expr, tirx.Cast):
            value = self(expr.value)
            if dtype not in HALF_DTYPES:
                return convert(value, dtype)
            return rounded(value, dtype) if self.exact else convert(value, "float32")
        if dtype not in HALF_DTYPES:
            return rebuild(expr, self)
        if isinstance(expr, tirx.FloatImm):
            return constant(round_constant(float(expr.value), dtype), "float32")
        if isinstance(expr, LEAVES) or call_name(expr) == "reinterpret":
            raise Unsupported(f"{expr} of type {dtype}")
        return self._operation(expr, dtype)

    def _operation(self, expr: Expr, dtype: str) -> Expr:
        """An operation with a 16-bit result, in float32."""
        operands = [self(x) for x in children(expr)]
        if call_name(expr):
            result = tirx.call_intrin("float32", expr.op, *operands)
        else:
            result = with_children(expr, operands)
        picks = is_conditional(expr) or isinstance(expr, tirx.Max | tirx.Min)
        return result if picks or not self.exact else rounded(result, dtype)


# Largest tree of bound values: TVM takes seconds for trees of a few thousand nodes.
MOST_TREE_NODES = 150

# What a selection counts as: TVM's simplifier looks at both cases of each.
CONDITION_NODES = 20


@dataclass(slots=True, eq=False)
class Point:
    """What has been computed so far at one point of a nest.

    Attributes
    ----------
    known : dict
        Values of buffers at this point.
    ops : list
        Bindings and stores, in order.
    lane : Loop or None
        The loop whose iterations may become the lanes of vectors.
    varying : set of Var
        What differs from lane to lane.
    """

    lane: Loop | None = None
    known: dict[Var, Expr] = field(default_factory=dict)
    ops: list[tirx.Stmt | Keep] = field(default_factory=list)
    varying: set[Var] = field(default_factory=set)

    def __post_init__(self) -> None:
        if self.lane is not None:
            self.varying.add(self.lane.var)

    def varies(self, value: Expr) -> bool:
        """Whether a value differs from lane to lane."""
        used = [*free_variables(value), *(load.source for load in loads(value))]
        return any(v in self.varying for v in used)


class Resolve:
    """Final form of a stage's expressions: loop variables, places, no library calls.

    Shared parts and the steps of a function become bindings of `point`, except under a condition.

    Parameters
    ----------
    env : dict
        Values of variables.
    point : Point
    """

    def __init__(self, scope: Scope, env: dict[Var, Expr], point: Point) -> None:
        self.scope = scope
        self.env = env
        self.point = point
        self.known = point.known
        self._done: dict[Hashable, Expr] = {}
        self._guards = 0

    def __call__(self, expr: Expr) -> Expr:
        if self._guards:
            return self._visit(expr)
        key = key_of(expr)
        if key not in self._done:
            self._done[key] = self._visit(expr)
        return self._done[key]

    def bind(self, name: str, value: Expr, in_memory: bool = False) -> Expr:
        """A name for a value, unless it is one; with `in_memory` in a buffer of its own.

        TVM's simplifier puts what a variable was bound to in its place, except for loads, and so
        turns chains of bindings into their tree. A large tree is cut by a buffer of one element,
        which LLVM turns into a register. The simplifier fails on names for vectors of bools: they
        become names for 1 and 0, which LLVM turns back.
        """
        if isinstance(value, LEAVES):
            return value
        if self._is_mask(value):
            return tirx.NE(self.bind(name, _flag(value, "float32")), constant(0, "float32"))
        size = self._tree_size(value)
        varies = self.point.varies(value)
        if size > MOST_TREE_NODES or in_memory:
            return self._keep(name, value, varies)
        var = Var(name, PrimType(dtype_of(value)))
        if varies:
            self.point.varying.add(var)
        self.scope.tree_sizes[var] = size
        self.point.ops.append(tirx.Bind(var, value))
        return var

    def _is_mask(self, value: Expr) -> bool:
        """Whether a value may become a vector of bools that is in no memory."""
        is_load = isinstance(value, TensorLoad)
        return self.point.lane is not None and dtype_of(value) == "bool" and not is_load

    def _keep(self, name: str, value: Expr, varies: bool) -> Expr:
        """Put a value in a buffer, with an element for each lane if it differs."""
        length, index = constant(1, "int32"), constant(0, "int32")
        if varies:
            length, index = self.point.lane.extent, self.point.lane.value
        buffer = new_buffer(name, [length], dtype_of(value))
        if varies:
            self.point.varying.add(buffer)
        self.point.ops.append(Keep(buffer, allocate(buffer), value, index))
        return tirx.BufferLoad(buffer, [index])

    def _tree_size(self, value: Expr) -> int:
        """Nodes of `value` with its variables replaced by what they are bound to; 1 for loads."""
        if any(isinstance(e, TensorLoad) for e in nodes(value)):
            return 1
        total = CONDITION_NODES if is_conditional(value) else 1
        for child in children(value):
            total += (
                self._tree_size(child) if children(child) else self.scope.tree_sizes.get(child, 1)
            )
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
        if isinstance(expr, tirx.Cast) and dtype_of(expr.value) == "bfloat16":
            return convert(self._from_bfloat16(expr.value), dtype_of(expr))
        plain = rebuild(expr, self)
        if isinstance(plain, tirx.Cast) and self._is_mask(plain.value):
            return _flag(plain.value, dtype_of(plain))
        lowered = lower_call(plain, self.scope.scales)
        return lowered if self._guards or lowered is plain else self._flat(lowered)

    def _from_bfloat16(self, expr: Expr) -> Expr:
        """A bfloat16 value as float32, by its bits.

        TVM's legalisation of bfloat16 overlooks what is bound to a variable: the bits would be read
        as an integer.
        """
        value = self(expr)
        if not isinstance(value, tirx.Cast):
            return bfloat16_to_float32(value)
        wide = convert(value.value, "float32")
        if not self._guards:
            return round_to_bfloat16(self.bind("wide", wide))
        var = Var("wide", PrimType("float32"))
        return Let(var, wide, round_to_bfloat16(var))

    def _is_known(self, load: Expr, dtype: str) -> bool:
        """Whether `load` reads a value of this point held as `dtype`: no need to round it again."""
        if not isinstance(load, TensorLoad) or load.source not in self.known:
            return False
        return dtype_of(self.known[load.source]) == dtype

    def _load(self, load: TensorLoad) -> Expr:
        if load.source in self.known:
            return convert(self.known[load.source], dtype_of(load.source))
        place = self.scope.place(load.source)
        indices = [self.scope.loops.simplify(self(i)) for i in load.indices]
        return rounded_by_bits(tirx.BufferLoad(place.buffer, place.index(indices)), place.rounding)

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


def is_choice(value: Expr) -> bool:
    """Whether a value is `select(a > b, a, b)`: it reads what it is bound to twice, so that TVM's
    simplifier, which puts it in its place, would write out a tree of hundreds of comparisons.
    """
    if not isinstance(value, tirx.Select) or not isinstance(value.condition, tirx.GT | tirx.LT):
        return False
    return value.condition.a.same_as(value.true_value)


def _flag(condition: Expr, dtype: str) -> Expr:
    """1 where the condition holds, else 0."""
    return tirx.Select(condition, constant(1, dtype), constant(0, dtype))
