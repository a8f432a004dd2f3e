"""Affine accesses: how far apart in memory the points of the batch, M, N and K axes lie.

x[b, s, h, d] with batch (b, h), rows (s), columns (d):    offset = f(batch) + f(m) + f(n)
  batch: digits (B, S*H*D) (H, D)       point 7 is number 7 // H of the first, 7 % H of the second
  m:     digits (S, H*D)
  n:     digits (D, 1)
"""

from __future__ import annotations

import functools
import math
import operator
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from tvm import tirx
from tvm.ir import Expr, Var
from tvm.script import tirx as T

from ..contraction.model import INDEX, Operand, Simplifier
from ..contraction.reader import Axis, equal_sizes, size_of
from ..contraction.windows import Window, Windows
from ..program.expr import (
    FLOAT8_DTYPES,
    constant,
    flatten,
    linear_form,
    number,
    substitute,
    variables,
)
from ..program.extents import is_multiple, multiplied_out, simplified
from ..program.program import Extent
from .arithmetic import pack_float8
from .intrinsics import device_call, pack_halves

# Pairs of halves in 32-bit words: taking apart, loading, storing.

_TAKE_APART = {
    ("float16", 0): "return __low2float(*reinterpret_cast<__half2*>(&u));",
    ("float16", 1): "return __high2float(*reinterpret_cast<__half2*>(&u));",
    ("bfloat16", 0): "return __uint_as_float(u << 16);",
    ("bfloat16", 1): "return __uint_as_float(u & 0xffff0000u);",
}


def half_of(dtype: str, word: Expr, v: int) -> Expr:
    """Half number `v` of a pair, as a float32."""
    name = f"{'high' if v else 'low'}_{dtype}"
    return device_call("float32", name, "unsigned u", _TAKE_APART[dtype, v], word)


def load_word(place: Expr) -> Expr:
    """The aligned 32-bit word at `place`, which nothing writes during the kernel.

    It is read where it stands: what is known to be constant ptxas reads for a whole tile at once,
    and keeps it, and all that follows from it, in registers that there are not.
    """
    body = 'unsigned u; asm volatile("ld.global.b32 %0, [%1];" : "=r"(u) : "l"(p)); return u;'
    return device_call("uint32", "load_word", "const void* p", body, place)


def store_pair(dtype: str, place: Expr, low: Expr, high: Expr) -> Expr:
    """Stores two neighbours at the aligned `place`: halves, float32, or 8-bit floats."""
    if dtype == "float32":
        body = "*(float2*)p = make_float2(low, high);"
        return device_call(
            "void", "store_floats", "void* p, float low, float high", body, place, low, high
        )
    if dtype in FLOAT8_DTYPES:
        zero = T.float32(0)
        word = pack_float8(dtype, (low, high, zero, zero))
        body = "*(unsigned short*)p = (unsigned short)v;"
        return device_call("void", "store_bytes", "void* p, unsigned v", body, place, word)
    word = pack_halves(dtype, low, high)
    return device_call(
        "void", "store_word", "void* p, unsigned v", "*(unsigned*)p = v;", place, word
    )


# Points of one group of axes that are walked through to find its digits.
MAX_POINTS = 1 << 24

Groups = Mapping[str, Sequence[Axis]]


@dataclass(frozen=True, slots=True)
class Digit:
    """A run of `extent` points, each `stride` elements after the one before."""

    extent: Extent
    stride: Extent


@dataclass(frozen=True, slots=True)
class AffineAccess:
    """``offset = base + sum over groups of (digits of the group's flat coordinate) * strides``.

    `digits` are outermost first, merged where possible; a group that the access does not read has
    none, or one of stride 0.
    """

    base: int
    digits: Mapping[str, tuple[Digit, ...]]

    def inner(self, group: str) -> Digit:
        """The innermost digit of a group."""
        return self.digits[group][-1] if self.digits[group] else Digit(1, 0)

    def contiguous(self, group: str) -> bool:
        """Whether neighbours along the group are neighbours in memory."""
        stride = self.inner(group).stride
        return isinstance(stride, int) and stride == 1

    def aligned(self, elements: int, along: str) -> bool:
        """Whether runs of `elements` points of a group are contiguous, at multiples of that."""
        if not self.contiguous(along) or self.base % elements:
            return False
        inner = self.inner(along)
        steps = [d.stride for group in self.digits.values() for d in group if d is not inner]
        return all(is_multiple(size, elements) for size in (inner.extent, *steps))

    def same_as(self, other: AffineAccess) -> bool:
        """Whether both walk through memory alike."""
        if self.base != other.base or self.digits.keys() != other.digits.keys():
            return False
        return all(
            len(mine) == len(theirs)
            and all(
                equal_sizes(a.extent, b.extent) and equal_sizes(a.stride, b.stride)
                for a, b in zip(mine, theirs, strict=True)
            )
            for mine, theirs in zip(self.digits.values(), other.digits.values(), strict=True)
        )


def affine_access(
    indices: Sequence[Expr], shape: Sequence[Extent], groups: Groups, symbolic_strides: bool = False
) -> AffineAccess | None:
    """The access ``buffer[indices]`` over groups of axes; None where it is not affine in them.

    With `symbolic_strides` groups may lie a symbolic distance apart.
    """
    axes = [axis for group in groups.values() for axis in group]
    offset = Simplifier(axes)(flatten(indices, shape, INDEX))
    if symbolic_strides:
        offset = multiplied_out(offset)
    owner = {axis.var: name for name, group in groups.items() for axis in group}
    parts: dict[str, Expr] = {}
    base = 0
    for term in _terms(offset, 1):
        used = {owner.get(var) for var in variables(term) if var in owner}
        if not used and number(term) is not None:
            base += int(number(term))
        elif len(used) == 1:
            name = used.pop()
            parts[name] = parts[name] + term if name in parts else term
        else:
            return None
    digits: dict[str, tuple[Digit, ...]] = {}
    for name, group in groups.items():
        found = _digits(parts[name], group) if name in parts else _unread(group)
        if found is None and symbolic_strides:
            found = _scaled_walk(parts[name], group)
        if found is None:
            return None
        start, digits[name] = found
        base += start
    return AffineAccess(base, digits)


@dataclass(frozen=True, slots=True, eq=False)
class WindowAccess:
    """``offset = base + sum of strides * places`` of data that is read at windows, in elements.
    Where a window repeats elements, its place is that of the one in memory.

    `strides` has a size for each dimension of the data; `channel` is that of the channels, 0
    where there are none.
    """

    base: int
    strides: tuple[Extent, ...]
    channel: Extent

    def aligned(self, elements: int, windows: Windows) -> bool:
        """Whether runs of `elements` channels are contiguous, at multiples of that."""
        if windows.channels is None or windows.channel_dim is None:
            return False
        if not isinstance(self.channel, int) or self.channel != 1:
            return False
        others = (s for d, s in enumerate(self.strides) if d != windows.channel_dim)
        sizes = (windows.channels.extent, self.base, *others)
        return all(is_multiple(n, elements) for n in sizes)


def window_access(windows: Windows) -> WindowAccess | None:
    """How plain data that is read at windows lies in memory; None where it is no plain data, or
    is not affine in its coordinates.
    """
    load = Operand(windows.data).load
    if load is None:
        return None
    known = ((extent, number(extent)) for extent in load.source.ty.shape)
    shape = [extent if size is None else int(size) for extent, size in known]
    ends = {w.dim: _elements_below(w) for w in windows.dims}
    sizes = (1 if a is None else a.extent for a in (windows.group, windows.channels))
    ends[windows.channel_dim] = math.prod(sizes)
    axes = [Axis(var, ends[d]) for d, var in enumerate(windows.coordinates)]
    repeated = {
        axes[w.dim].var: axes[w.dim].var * constant(w.repeats, INDEX)
        for w in windows.dims
        if w.repeats > 1
    }
    indices = [substitute(index, repeated) for index in load.indices]
    groups = {str(d): (a,) for d, a in enumerate(axes)}
    found = affine_access(indices, shape, groups, symbolic_strides=True)
    if found is None or any(len(digits) > 1 for digits in found.digits.values()):
        return None
    strides = tuple(found.inner(str(d)).stride for d in range(len(axes)))
    channel = 0 if windows.channel_dim is None else strides[windows.channel_dim]
    return WindowAccess(found.base, strides, channel)


def _elements_below(window: Window) -> Extent:
    """Elements in memory that lie before the end of a window's data."""
    if isinstance(window.high, int):
        return max(1, window.high // window.repeats)
    return simplified(window.high // window.repeats)


def _terms(expr: Expr, sign: int) -> Iterator[Expr]:
    """The summands of a sum."""
    if isinstance(expr, tirx.Add):
        yield from _terms(expr.a, sign)
        yield from _terms(expr.b, sign)
    elif isinstance(expr, tirx.Sub):
        yield from _terms(expr.a, sign)
        yield from _terms(expr.b, -sign)
    else:
        yield expr if sign == 1 else expr * constant(-1, INDEX)


def _unread(group: Sequence[Axis]) -> tuple[int, tuple[Digit, ...]]:
    return 0, (Digit(size_of(group), 0),) if group else ()


def _digits(offset: Expr, group: Sequence[Axis]) -> tuple[int, tuple[Digit, ...]] | None:
    """(offset of the first point, digits) of a function of one group's axes."""
    if all(isinstance(axis.extent, int) for axis in group):
        size = size_of(group)
        return _walk(offset, group) if size <= MAX_POINTS else None
    form = linear_form(offset, [axis.var for axis in group])
    if form is None or number(form[1]) is None:
        return None
    digits: list[Digit] = []
    for axis, factor in zip(group, form[0], strict=True):
        stride = number(factor)
        digit = Digit(axis.extent, factor if stride is None else stride)
        if digits and equal_sizes(digits[-1].stride, digit.extent * digit.stride):
            digit = Digit(digits.pop().extent * digit.extent, digit.stride)
        digits.append(digit)
    return int(number(form[1])), tuple(digits)


def _walk(offset: Expr, group: Sequence[Axis]) -> tuple[int, tuple[Digit, ...]] | None:
    """The digits of a function with known extents, by evaluating it everywhere."""
    points = np.meshgrid(*(np.arange(axis.extent) for axis in group), indexing="ij")
    env = {axis.var: p.reshape(-1) for axis, p in zip(group, points, strict=True)}
    values = _evaluate(offset, env)
    if values is None:
        return None
    rest = values - values[0]
    digits: list[Digit] = []
    while len(rest) > 1:
        step = int(rest[1])
        breaks = np.flatnonzero(rest != step * np.arange(len(rest)))
        run = int(breaks[0]) if len(breaks) else len(rest)
        if len(rest) % run:
            return None
        table = rest.reshape(-1, run)
        if not np.array_equal(table, table[:, :1] + step * np.arange(run)):
            return None
        digits.append(Digit(run, step))
        rest = table[:, 0]
    return int(values[0]), tuple(reversed(digits))


def _scaled_walk(offset: Expr, group: Sequence[Axis]) -> tuple[int, tuple[Digit, ...]] | None:
    """The digits of a function with known extents times a symbol, or a sum of such functions that
    walk alike: ``i * (past + new)``.
    """
    if not all(isinstance(axis.extent, int) for axis in group) or size_of(group) > MAX_POINTS:
        return None
    own = frozenset(axis.var for axis in group)
    parts: list[tuple[Expr, Expr]] = []
    for term in _terms(offset, 1):
        inside, outside = _factors(term, own)
        known = next((n for n, (_, o) in enumerate(parts) if equal_sizes(o, outside)), None)
        if known is None:
            parts.append((inside, outside))
        else:
            parts[known] = parts[known][0] + inside, outside
    walks = [_walk(inside, group) for inside, _ in parts]
    if any(found is None or found[0] for found in walks):
        return None
    runs = [tuple(digit.extent for digit in digits) for _, digits in walks]
    if any(other != runs[0] for other in runs):
        return None
    found = []
    for own_digits in zip(*(digits for _, digits in walks), strict=True):
        strides = [d.stride * o for d, (_, o) in zip(own_digits, parts, strict=True) if d.stride]
        found.append(Digit(own_digits[0].extent, functools.reduce(operator.add, strides or [0])))
    return 0, tuple(found)


def _factors(expr: Expr, own: frozenset[Var]) -> tuple[Expr, Expr]:
    """A product as what axes and numbers make, and what other variables do."""
    one = constant(1, INDEX)
    if isinstance(expr, tirx.Mul):
        (a, b), (c, d) = _factors(expr.a, own), _factors(expr.b, own)
        return a * c, b * d
    foreign = variables(expr)
    return (one, expr) if foreign and not own & set(foreign) else (expr, one)


_ARITHMETIC = {
    tirx.Add: np.add,
    tirx.Sub: np.subtract,
    tirx.Mul: np.multiply,
    tirx.FloorDiv: np.floor_divide,
    tirx.FloorMod: np.mod,
    tirx.Max: np.maximum,
    tirx.Min: np.minimum,
}


def _evaluate(expr: Expr, env: Mapping[Var, np.ndarray]) -> np.ndarray | None:
    """An index at many points at once; None where it is more than arithmetic on axes."""
    if isinstance(expr, Var):
        return env.get(expr)
    if isinstance(expr, tirx.IntImm):
        return np.asarray(int(expr.value))
    if isinstance(expr, tirx.Cast):
        return _evaluate(expr.value, env)
    operation = _ARITHMETIC.get(type(expr))
    if operation is None:
        return None
    a, b = _evaluate(expr.a, env), _evaluate(expr.b, env)
    return None if a is None or b is None else operation(a, b)
