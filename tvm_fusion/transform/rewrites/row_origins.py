"""Which reductions over rows are of what a matrix product computes, and may stand in its epilogue.

    T = matmul(x, W)    h = T + r    s = sum(h * h, axis=-1)        s is of T's rows
    y = h * rsqrt(s)                                                s comes back to them

So may a reduction over all rows, whose result no kernel has before all others have ended: its
readers are kernels of their own in any case.

A statistic that comes back to the elements it was made of, before the next product, is left to a
kernel that reads whole rows: it reads the elements anyway. So are those of a softmax and of a
layer norm, and those of what is also reduced over columns.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import tvm_ffi
from tvm import relax, tirx
from tvm.ir import Call
from tvm.relax import Expr, Var

from ..decompose.opening import HALF_DTYPES, dtype_of, shape_of

POINTWISE = frozenset(
    f"relax.{name}"
    for names in (
        ("abs", "add", "astype", "ceil", "clip", "cos", "divide", "erf", "exp", "floor", "log"),
        ("isfinite", "isinf", "isnan", "logical_not", "maximum", "minimum", "multiply"),
        ("negative", "power", "round", "rsqrt", "sigmoid"),
        ("sign", "sin", "sqrt", "square", "subtract", "tanh", "where", "nn.gelu", "nn.gelu_tanh"),
        ("nn.leakyrelu", "nn.relu", "nn.relu6", "nn.silu", "nn.softplus"),
    )
    for name in names
)
REDUCTIONS = ("relax.sum", "relax.max")

TERMS = 8
"""The terms of a product come in multiples of this: 16 bytes, which the TMA asks for."""


@dataclass(frozen=True, slots=True)
class _Value:
    """What a tensor comes of: the product it is pointwise in, and the products whose statistics it
    holds, since the last product.
    """

    origin: int | None = None
    statistics: frozenset[int] = frozenset()


_NOTHING = _Value()


def row_reductions(func: relax.Function, returning: bool) -> set[Var]:
    """The variables bound to reductions over the rows of a product's result.

    `returning`: also of the rows whose statistics come back to them.
    """
    reader = _Reader()
    for var, value in _bindings(func):
        reader.read(var, value)
    rows = reader.reductions.items()
    return reader.whole | {var for var, origin in rows if returning or origin not in reader.back}


def _bindings(func: relax.Function) -> Iterator[tuple[Var, Expr]]:
    for block in func.body.blocks if isinstance(func.body, relax.SeqExpr) else ():
        for binding in block.bindings:
            if isinstance(binding, relax.VarBinding):
                yield binding.var, binding.value


class _Reader:
    """Follows tensors from product to product, in the order of the bindings."""

    def __init__(self) -> None:
        self.values: dict[Var, _Value] = {}
        self.spaces: list[list] = []  # the shape of each product
        self.reductions: dict[Var, int] = {}
        self.whole: set[Var] = set()  # reductions over all rows
        self.back: set[int] = set()

    def read(self, var: Var, value: Expr) -> None:
        """Takes in a binding."""
        if isinstance(value, Var):
            self.values[var] = self.values.get(value, _NOTHING)
            return
        if not isinstance(value, Call):
            return
        name = getattr(value.op, "name", "")
        args = [self.values.get(a, _NOTHING) for a in value.args if isinstance(a, Var)]
        if name == "relax.matmul":
            self.values[var] = self._product(value)
        elif name in POINTWISE:
            self.values[var] = self._pointwise(var, args)
        else:
            statistics = _together(args)
            origin = args[0].origin if args else None
            axes = _reduced_axes(value) if origin is not None else None
            if axes is not None:
                if len(axes) == 1:
                    self.reductions[var] = origin
                else:
                    self.whole.add(var)
                statistics |= {origin}
                origin = None
            elif origin is not None and name in REDUCTIONS:
                self.back.add(origin)  # whoever walks over columns reads the elements as well
                origin = None
            elif name != "relax.reshape" or not self._keeps_rows(var, origin):
                origin = None
            self.values[var] = _Value(origin, statistics)

    def _product(self, call: Call) -> _Value:
        shape, (left, right) = shape_of(call), (shape_of(arg) for arg in call.args)
        halves = all(dtype_of(arg) in HALF_DTYPES for arg in call.args)
        if not halves or not shape or not left or not right or min(len(left), len(right)) < 2:
            return _NOTHING
        if _columns(shape) is None or (_columns(left) or 1) % TERMS:
            return _NOTHING
        self.spaces.append(shape)
        return _Value(len(self.spaces) - 1)

    def _pointwise(self, var: Var, args: list[_Value]) -> _Value:
        """The latest product among the arguments stays, if the result runs over its elements."""
        statistics = _together(args)
        latest = max((a.origin for a in args if a.origin is not None), default=None)
        if latest is None:
            return _Value(None, statistics)
        others = _together([a for a in args if a.origin != latest])
        if latest in others or latest in statistics:
            self.back.add(latest)
            return _Value(None, statistics)
        return _Value(latest if self._keeps_rows(var, latest) else None, statistics)

    def _keeps_rows(self, var: Var, origin: int | None) -> bool:
        """Whether a tensor has as many elements as a product, in rows of the same length."""
        shape = shape_of(var)
        if origin is None or not shape:
            return False
        space = self.spaces[origin]
        if tvm_ffi.structural_equal(shape, space):
            return True
        return _columns(shape) == _columns(space) and _same_size(shape[:-1], space[:-1])


def _together(values: list[_Value]) -> frozenset[int]:
    return frozenset().union(*(value.statistics for value in values))


def _reduced_axes(call: Call) -> list[int] | None:
    """The axes of a reduction over the last axis alone, or over all, in a dtype that partial
    results keep their precision in; None for others.
    """
    name = getattr(call.op, "name", "")
    shape = shape_of(call.args[0]) if name in REDUCTIONS else None
    dtypes = ("float32",) if name == "relax.sum" else ("float32", "int8", *HALF_DTYPES)
    if not shape or dtype_of(call.args[0]) not in dtypes:
        return None
    every = list(range(len(shape)))
    axes = (
        every if call.attrs.axis is None else sorted(int(a) % len(shape) for a in call.attrs.axis)
    )
    return axes if axes in (every, every[-1:]) else None


def _columns(shape: list) -> int | None:
    return int(shape[-1]) if isinstance(shape[-1], tirx.IntImm) else None


def _same_size(a: list, b: list) -> bool:
    """Whether two lists of extents have equal products, as far as it shows."""
    numbers, symbols = [], []
    for extents in (a, b):
        product, others = 1, []
        for extent in extents:
            if isinstance(extent, tirx.IntImm):
                product *= int(extent)
            else:
                others.append(str(extent))
        numbers.append(product)
        symbols.append(sorted(others))
    return numbers[0] == numbers[1] and symbols[0] == symbols[1]


def columns_of(tensor: Expr) -> int | None:
    """Length of the rows of a tensor, if it is known."""
    shape = shape_of(tensor)
    return _columns(shape) if shape else None
