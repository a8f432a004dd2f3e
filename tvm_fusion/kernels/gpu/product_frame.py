"""What all GEMM writers share: the PrimFunc around a kernel, and expressions in its terms."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

from tvm import tirx
from tvm.ir import Call, Expr, StringImm, TensorLoad, Var
from tvm.ir.prim.expr import BinaryOpExpr, CmpExpr
from tvm.script import tirx as T
from tvm.script.ir_builder import IRBuilder
from tvm.tirx.script.builder import ir as builder

from ..contraction.model import Binding
from ..contraction.reader import Axis, Contraction
from ..program.expr import constant, convert, dtype_of, is_if_then_else, is_integer, number, rebuild
from ..program.program import Extent
from . import math_functions as functions
from .ahead import READS_AHEAD
from .arithmetic import lower_call
from .math_functions import factors_of, match_affine, product_of, split_constant, take_gelu

# How the epilogue of a GEMM is computed on the device: exact formulas -> fast forms.
#
#     x * (0.5 + 0.5 * erf(x / sqrt 2))   ->  gelu(x) = x / (1 + 2^(-x R(x^2))), R of degree 6
#     0.5 + 0.5 * tanh(u)                 ->  sigmoid(2 u)
#     sigmoid(x)                          ->  1 / (1 + 2^(-x log2 e))
#     exp(x)                              ->  2^(x log2 e)
#
# gelu has no branch and a relative error of 6e-5 (see `functions.gelu`; below -5.8 it goes to zero
# too fast for bfloat16, by 1e-8 at most), so it serves outputs in half precision only. So do
# sigmoid
# and exp in one step of the exponent; for others they are off by a few units in the last place.


def f32(value: float) -> Expr:
    """A float32 immediate."""
    return constant(value, "float32")


def evaluate(
    frame: Frame,
    bindings: Sequence[Binding],
    values: Sequence[Expr],
    env: Mapping[Var, Expr],
    half: bool,
) -> list[Expr]:
    """Emits the temporaries of some expressions; their values, in the frame's terms.

    With exact rounding the formulas stay as they are.
    """
    env = dict(env)

    def value(expr: Expr) -> Expr:
        found = frame.rewrite(expr, env)
        return found if frame.contraction.exact else lower(found, half)

    for binding in bindings:
        env[binding.var] = T.Bind(value(binding.value))
    return [value(v) for v in values]


def lower(expr: Expr, half: bool) -> Expr:
    """`expr` with its functions in the fast forms; `half`: the result is rounded to half precision.

    Emits the temporaries of the fast forms; none in front of what is evaluated under a condition.
    """
    if isinstance(expr, Var | TensorLoad | StringImm) or number(expr) is not None:
        return expr
    if is_if_then_else(expr):
        branches = [lower(branch, False) for branch in expr.args[1:]]
        return tirx.if_then_else(lower(expr.args[0], half), *branches)
    if dtype_of(expr) != "float32":
        return rebuild(expr, lambda e: lower(e, half))
    if half and isinstance(expr, tirx.Mul):
        found = take_gelu(factors_of(expr))
        if found is not None:
            x, scale, rest = found
            value = functions.gelu(lower(x, half), "float16")
            constants, rest = split_constant(rest)
            if abs(scale * constants - 1) > 1e-6:
                rest.append(f32(scale * constants))
            return value * lower(product_of(rest), half) if rest else value
    if isinstance(expr, tirx.Add):
        found = match_affine(expr, "tirx.tanh")
        if found is not None:
            scale, u = found
            gate = tirx.call_intrin("float32", "tirx.sigmoid", u * f32(2.0))
            return lower(gate, half) * f32(2.0 * scale)
    if isinstance(expr, Call):
        return lower_call(expr, lambda e: lower(e, half), half)
    return rebuild(expr, lambda e: lower(e, half))


# Tiles of a grid: which batch, segment, row tile and column tile a block works on.


@dataclass(frozen=True, slots=True)
class Tile:
    """Coordinates of a tile: batch, row tile, column tile (over all segments, or one's own).

    `segment` is its segment's number where the coordinates do not tell.
    """

    batch: Expr
    m: Expr
    n: Expr
    segment: Expr | None = None

    def in_registers(self) -> Tile:
        """The same, its coordinates in registers (`in_register`)."""
        batch, m, n = map(in_register, (self.batch, self.m, self.n))
        return replace(self, batch=batch, m=m, n=n)


def in_register(value: Expr) -> Expr:
    """Emits a register that holds a value: a temporary's expression stands at each use in generated
    code, and no compiler takes a division by a variable, which might be zero, out of a loop, nor
    what stands in a branch in front of it.
    """
    cell = T.alloc_local((1,), dtype_of(value))
    T.buffer_store(cell, value, [0])
    return cell[0]


def divided(number: Expr, size: Expr | int) -> tuple[Expr, Expr]:
    """Quotient and rest of a number that is not below 0. By a size that is not known it is no
    floored division: each of these is lowered to one for either sign, and holds those before it.
    """
    if isinstance(size, int):
        return number // size, number % size
    return T.truncdiv(number, size), T.truncmod(number, size)


class Grid:
    """All tiles of a contraction, in the order in which blocks take them.

    Parameters
    ----------
    dtype : integer dtype of the coordinates.
    batch, rows, columns : sizes of the batch, of M, and of N of each segment.
    block_m, block_n : a tile's rows and columns.
    group_m : row tiles that neighbouring blocks share a column tile over: what is in flight
        together then reads about as many rows of A as columns of B, and both stay in the L2.
    """

    def __init__(
        self,
        dtype: str,
        batch: Extent,
        rows: Extent,
        columns: Sequence[Extent],
        block_m: int,
        block_n: int,
        group_m: int = 8,
    ):
        self.dtype, self.group_m = dtype, group_m
        self.rows = ceil_div(rows, block_m)
        self.columns = [ceil_div(n, block_n) for n in columns]
        self.all_columns = sum(self.columns[1:], self.columns[0])
        self.per_batch = self.rows * self.all_columns
        self.tiles = self.per_batch * batch
        self.batched = not (isinstance(batch, int) and batch == 1)

    def tile(self, number: Expr) -> Tile:
        """The tile with this number, its `n` over all segments.

        Sizes that are known divide as constants: generated code repeats the expressions of
        temporaries at each use, and no compiler takes a division by a variable, which might be
        zero, out of the loop over the terms. Of 1568 x 512 x 2048 it took 2.8 of 11.3 us (H200,
        2026-11-27).
        """
        size = self._size
        number = convert(number, self.dtype)
        batch, rest = constant(0, self.dtype), number
        if self.batched:
            batch, rest = map(T.Bind, divided(number, size(self.per_batch)))
        stripe = size(self.all_columns) * self.group_m
        group, place = map(T.Bind, divided(rest, stripe))
        across, down = self._within(group, place)
        return Tile(batch, T.Bind(group * self.group_m + down), T.Bind(across))

    def _within(self, group: Expr, place: Expr) -> tuple[Expr, Expr]:
        """Column tile, and row tile within a stripe; the last stripe may be lower."""
        high = self.group_m
        if not isinstance(self.rows, int):
            left = self._size(self.rows) - group * high
            return divided(place, T.Bind(tirx.Min(left, constant(high, self.dtype))))
        whole, left = divmod(self.rows, high)
        if not whole or not left:
            return divided(place, high if whole else left)
        is_whole = group < whole
        across, down = zip(divided(place, high), divided(place, left), strict=True)
        return tirx.Select(is_whole, *across), tirx.Select(is_whole, *down)

    def _size(self, extent: Extent) -> Expr | int:
        return extent if isinstance(extent, int) else convert(extent, self.dtype)

    def each_segment(self, tile: Tile) -> Iterator[tuple[int, Tile]]:
        """Number and own tile of each segment; what is emitted runs where the tile is its own."""
        yield from self._branch(tile, tile.n, 0)

    def _branch(self, tile: Tile, n: Expr, number: int) -> Iterator[tuple[int, Tile]]:
        own = Tile(tile.batch, tile.m, n)
        if number == len(self.columns) - 1:
            yield number, own
            return
        width = self._size(self.columns[number])
        with T.If(n < width):
            with T.Then():
                yield number, own
            with T.Else():
                yield from self._branch(tile, n - width, number + 1)


# Largest number of elements that 32-bit indices reach.
INT32_ELEMENTS = 2**31 - 1

# What a symbolic size is taken for when configurations are ranked.
ASSUMED_EXTENT = 1024


@dataclass(slots=True, eq=False)
class Frame:
    """A kernel under construction.

    Attributes
    ----------
    buffers : the new function's buffer for each parameter of the old one.
    index : dtype of indices, int32 where the sizes are known to allow it.
    read_ahead : parameters that are read in front of the kernel's wait (see `ahead`).
    func : the finished PrimFunc, once the `with` block of `open_kernel` has ended.
    """

    contraction: Contraction
    buffers: dict[Var, Expr]
    index: str
    read_ahead: set[Var] = field(default_factory=set)
    func: tirx.PrimFunc | None = None

    def size(self, extent: Extent) -> Expr | int:
        """A size as an int, or as an expression of the index dtype."""
        return extent if isinstance(extent, int) else convert(extent, self.index)

    def output(self, param: int) -> Expr:
        """The buffer of parameter number `param`."""
        return self.buffers[self.contraction.params[param].var]

    def rewrite(self, expr: Expr, env: Mapping[Var, Expr]) -> Expr:
        """`expr` over this function's buffers, with the variables of `env` replaced."""
        return _Rewriter(self, env).visit(expr)

    def place(self, indices: Sequence[Expr], env: Mapping[Var, Expr]) -> list[Expr]:
        """Indices of the index dtype, with the variables of `env` replaced."""
        rewriter = _Rewriter(self, env)
        return [rewriter.place(i) for i in indices]


@dataclass(slots=True, eq=False)
class _Rewriter:
    """Axes become expressions of the kernel's own; the integer operands of an operation agree."""

    frame: Frame
    env: Mapping[Var, Expr]

    def visit(self, expr: Expr) -> Expr:
        if isinstance(expr, Var):
            return self.env.get(expr, expr)
        if isinstance(expr, TensorLoad):
            indices = [self.place(index) for index in expr.indices]
            return tirx.BufferLoad(self.frame.buffers[expr.source], indices)
        if isinstance(expr, BinaryOpExpr | CmpExpr):
            return type(expr)(*_agree(self.visit(expr.a), self.visit(expr.b)))
        if isinstance(expr, tirx.Select):
            branches = _agree(self.visit(expr.true_value), self.visit(expr.false_value))
            return tirx.Select(self.visit(expr.condition), *branches)
        if isinstance(expr, Call):
            args = [self._argument(arg) for arg in expr.args]
            return tirx.call_intrin(dtype_of(expr), expr.op, *args)
        return rebuild(expr, self.visit)

    def _argument(self, arg: Expr) -> Expr:
        """An argument of a call, in the dtype it had."""
        return arg if isinstance(arg, StringImm) else convert(self.visit(arg), dtype_of(arg))

    def place(self, index: Expr) -> Expr:
        return convert(self.visit(index), self.frame.index)


def _agree(a: Expr, b: Expr) -> tuple[Expr, Expr]:
    """Two operands in one dtype: immediates take the other's, else the wider one's."""
    left, right = dtype_of(a), dtype_of(b)
    if left == right or not (is_integer(left) and is_integer(right)):
        return a, b
    if isinstance(a, tirx.IntImm):
        return convert(a, right), b
    if isinstance(b, tirx.IntImm):
        return a, convert(b, left)
    return convert(a, "int64"), convert(b, "int64")


@contextmanager
def open_kernel(contraction: Contraction) -> Iterator[Frame]:
    """Opens a TIRx PrimFunc with the contraction's parameters; its body is the `with` block."""
    sizes = [p.most for p in contraction.params if p.shape is not None]
    small = all(most is not None and most <= INT32_ELEMENTS for most in sizes)
    with IRBuilder() as ir, builder.prim_func():
        T.func_name(contraction.name or "main")
        frame = Frame(contraction, {}, "int32" if small and contraction.is_static else "int64")
        for param in contraction.params:
            if param.shape is None:
                frame.buffers[param.var] = T.arg(param.name, param.var)
                continue
            # The product of extents of 32 bits is taken in 32 bits.
            shape = [constant(n, frame.index) if isinstance(n, int) else n for n in param.shape]
            buffer = T.buffer(shape, param.dtype)
            frame.buffers[param.var] = T.arg(param.name, buffer)
        attrs = {"tirx.noalias": True, "tirx.is_scheduled": True, "op_pattern": 8}
        T.func_attr({**attrs, "tvm_fusion.tirx": True})
        yield frame
    func = ir.get()
    if frame.read_ahead:
        numbers = [i for i, p in enumerate(contraction.params) if p.var in frame.read_ahead]
        func = func.with_attr(READS_AHEAD, numbers)
    if contraction.name is None:
        func = func.without_attr("global_symbol")
    frame.func = func


def coordinates(axes: Sequence[Axis], flat: Expr, frame: Frame) -> dict[Var, Expr]:
    """What each axis is at the point number `flat` of all of them (the last axis runs fastest)."""
    env: dict[Var, Expr] = {}
    for position in range(len(axes) - 1, -1, -1):
        size = frame.size(axes[position].extent)
        env[axes[position].var] = flat if position == 0 else tirx.FloorMod(flat, _imm(size, flat))
        flat = tirx.FloorDiv(flat, _imm(size, flat))
    return env


def _imm(value: Expr | int, like: Expr) -> Expr:
    return (
        constant(value, dtype_of(like))
        if isinstance(value, int)
        else convert(value, dtype_of(like))
    )


def ceil_div(a: Extent, b: int) -> Extent:
    """a / b rounded up."""
    return (a + b - 1) // b


def assumed(extent: Extent) -> int:
    """A size to plan with."""
    return extent if isinstance(extent, int) else ASSUMED_EXTENT
