"""A PrimFunc that disturbs what it computes as the roundings of a kernel would.

    Before                               After
    total[i] += x[i, k]                  x_in[i, k] = x[i, k] * (1 + before * r(i, k))
                                         total_exact[i] += x_in[i, k]
                                         total[i] = total_exact[i] * (1 + after * r(i))

r is uniform in (-1, 1), a hash of the element, the loop nest, the call and the draw. How large
`before` and `after` are is said in `roundings`. A draw of amplitude 0 changes nothing. What only
moves or picks values is left alone.

No disturbance makes two floats equal, while roundings do: a kernel's value falls on one of the few
of its type. So floats are equal where they differ by no more than a rounding of a draw's amplitude;
by a draw that is turned around, where they are the same.

Does not handle: scheduled functions; buffers that are read between two nests that write them, which
stay as they are.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
import tvm
import tvm_ffi
from tvm import s_tir, tirx
from tvm.ir import Expr, TensorLoad, Var

from ...kernels.program.expr import dtype_of
from .rounded_products import operands_in
from .roundings import UNIT_ROUNDOFF, Roundings, roundings_of

# Words of 32 bits are computed in int64, where nothing overflows: TVM simplifies as if nothing did.
_MASK = 0xFFFFFFFF
_LARGEST = tirx.FloatImm("float64", sys.float_info.max)
_FACTORS = (0x7FEB352D, 0x6A09E667)
_SHIFT = 15
_CALLS, _SALTS = 1 << 24, 1 << 28  # so that draws, calls and nests have no numbers in common


@dataclass(frozen=True, slots=True)
class Draw:
    """One disturbance: a seed, and a factor of all of it; a negative one turns it around."""

    seed: int
    amplitude: int

    def array(self) -> np.ndarray:
        """As a disturbed function takes it."""
        return np.array([_hash(self.seed), self.amplitude], "int64")


NONE = Draw(0, 0)


def disturbed(func: tirx.PrimFunc, inputs: int) -> tirx.PrimFunc | None:
    """Make the function that disturbs what `func` computes.

    Parameters
    ----------
    func : tirx.PrimFunc
    inputs : int
        How many of its parameters come before the outputs.

    Returns
    -------
    PrimFunc or None
        With two more parameters before the outputs: a draw (`Draw.array`) and the number
        of the call (`call_number`). None for a scheduled function.
    """
    body = func.body
    if not isinstance(body, s_tir.SBlockRealize) or "tirx.is_scheduled" in (func.attrs or {}):
        return None
    root = body.block
    if root.name_hint != "root":  # one opaque block
        root = s_tir.SBlock([], [], [], "root", body)
    nests = list(root.body.seq) if isinstance(root.body, tirx.SeqStmt) else [root.body]
    disturber = _Disturber(nests, operands_in(func))
    made = disturber.nests()
    block = s_tir.SBlock(
        [],
        [],
        [],
        "root",
        made[0] if len(made) == 1 else tirx.SeqStmt(made),
        alloc_buffers=[*root.alloc_buffers, *disturber.buffers],
    )
    params = [
        *func.params[:inputs],
        disturber.noise.draw,
        disturber.noise.call,
        *func.params[inputs:],
    ]
    realize = s_tir.SBlockRealize([], True, block)
    return tirx.PrimFunc(params, realize, func.ret_type, attrs=func.attrs)


@dataclass
class _Noise:
    """Writes the factors 1 + relative * amplitude * r."""

    draw: Var = field(default_factory=lambda: tirx.decl_buffer((2,), "int64", "draw"))
    call: Var = field(default_factory=lambda: tirx.decl_buffer((1,), "int64", "call"))

    @property
    def amplitude(self) -> Expr:
        return tirx.Cast("float64", _load(self.draw, 1))

    def equal(self, a: Expr, b: Expr) -> Expr:
        """Whether two floats are equal after roundings of their type, which leave an infinite one
        apart from all others.
        """
        unit = UNIT_ROUNDOFF[dtype_of(a)]
        x, y = tirx.Cast("float64", a), tirx.Cast("float64", b)
        size = tirx.max(tirx.abs(x), tirx.abs(y))
        near = tirx.abs(x - y) <= self.amplitude * unit * size
        return tirx.Or(tirx.EQ(a, b), tirx.And(near, size <= _LARGEST))

    def times(self, value: Expr, relative: Expr | float, element: Expr, salt: int) -> Expr:
        """`value` disturbed, by a number of its own for each element."""
        key = _load(self.draw, 0) ^ _load(self.call, 0) ^ _word(_hash(_SALTS + salt))
        h = _mixed((element & _word(_MASK)) ^ key)
        r = tirx.Cast("float64", h) * tirx.FloatImm("float64", 2.0**-31) - 1.0
        factor = 1.0 + r * (self.amplitude * relative)
        return tirx.Cast(dtype_of(value), tirx.Cast("float64", value) * factor)


def call_number(number: int) -> np.ndarray:
    """The number of a call as a disturbed function takes it."""
    return np.array([_hash(_CALLS + number)], "int64")


def _hash(number: int) -> int:
    """32 bits that a seed, a call or a nest has of its own."""
    for _ in range(2):
        number = number * _FACTORS[0] & _MASK
        number = (number ^ number >> _SHIFT) * _FACTORS[1] & _MASK
    return number


def _mixed(word: Expr) -> Expr:
    """One round of the same. The expression is no larger, since schedules copy it: a Let would bind
    its variable twice.
    """
    h = (word * _word(_FACTORS[0])) & _word(_MASK)
    return ((h ^ (h >> _word(_SHIFT))) * _word(_FACTORS[1])) & _word(_MASK)


def _word(value: int) -> Expr:
    return tirx.IntImm("int64", value)


def _load(buffer: Var, index: int) -> Expr:
    return tirx.BufferLoad(buffer, [tirx.IntImm("int64", index)])


class _Disturber:
    """Rewrites the loop nests of one function."""

    def __init__(self, nests: Sequence[tirx.Stmt], operands_in: str | None) -> None:
        self._operands_in = operands_in
        self.noise = _Noise()
        self.buffers: list[Var] = []
        self._nests = list(nests)
        self._reads = [_sources(n) for n in nests]
        self._writes = [_targets(n) for n in nests]
        self._salt = 0

    def nests(self) -> list[tirx.Stmt]:
        """The nests, disturbed, and those that disturb what sums read and write."""
        found = [roundings_of(nest, self._operands_in) for nest in self._nests]
        exact = {b: _like(b, "exact") for b in self._sums(found)}
        self.buffers += exact.values()
        relative: dict[Var, Expr | float] = {}
        made: list[tirx.Stmt] = []
        for number, (nest, rounds) in enumerate(zip(self._nests, found, strict=True)):
            if rounds.is_sum:
                before, nest = self._sum_inputs(nest, rounds, number)
                made += before
            elif rounds:
                nest = self._point(nest, rounds, number)
            nest = self._equalities(nest)
            own = {b: exact[b] for b in self._writes[number] if b in exact}
            made.append(_replaced(nest, own) if own else nest)
            for buffer in own:
                if rounds.is_sum:
                    relative[buffer] = rounds.after(dtype_of(buffer))
                if number == self._last_write(buffer):
                    made.append(self._copy(exact[buffer], buffer, relative[buffer]))
        return made

    def _sums(self, found: Sequence[Roundings]) -> list[Var]:
        """The float buffers that sums are written to, but for those that are read in between."""
        chosen: dict[Var, None] = {}
        for rounds, written in zip(found, self._writes, strict=True):
            if rounds.is_sum:
                chosen |= {b: None for b in written if "float" in dtype_of(b)}
        return [b for b in chosen if not self._is_read_between_writes(b)]

    def _last_write(self, buffer: Var) -> int:
        return max(n for n, written in enumerate(self._writes) if buffer in written)

    def _is_read_between_writes(self, buffer: Var) -> bool:
        last = self._last_write(buffer)
        return any(buffer in self._reads[n] and buffer not in self._writes[n] for n in range(last))

    def _sum_inputs(
        self, nest: tirx.Stmt, rounds: Roundings, number: int
    ) -> tuple[list[tirx.Stmt], tirx.Stmt]:
        """Nests that disturb copies of what a sum reads, and the sum of these."""
        copies = {b: _like(b, "in") for b in self._inputs(number)}
        self.buffers += copies.values()
        before = [self._copy(b, c, rounds.before) for b, c in copies.items()]
        return before, _replaced(nest, copies)

    def _inputs(self, number: int) -> list[Var]:
        """Float buffers that a nest reads and does not write."""
        own = self._writes[number]
        return [b for b in self._reads[number] if b not in own and "float" in dtype_of(b)]

    def _point(self, nest: tirx.Stmt, rounds: Roundings, number: int) -> tirx.Stmt:
        """A pointwise nest with its results disturbed, and its operands where it needs several
        operations, or a comparison.
        """
        integers = any("float" not in dtype_of(b) for b in self._writes[number])
        salts = {b: self._next_salt() for b in self._writes[number]}
        if integers or rounds.count > 1:
            salts |= {b: self._next_salt() for b in self._inputs(number)}

        def load(e: TensorLoad) -> Expr:
            if e.source not in salts or e.source in self._writes[number]:
                return e
            element = _element(e.source, e.indices)
            return self.noise.times(e, rounds.before, element, salts[e.source])

        def store(s: tirx.BufferStore) -> tirx.BufferStore:
            dtype = dtype_of(s.buffer)
            if "float" not in dtype:
                return s
            element = _element(s.buffer, s.indices)
            value = self.noise.times(s.value, rounds.after(dtype), element, salts[s.buffer])
            return tirx.BufferStore(s.buffer, value, s.indices)

        return tvm_ffi.structural_map(nest, [(TensorLoad, load), (tirx.BufferStore, store)])

    def _equalities(self, nest: tirx.Stmt) -> tirx.Stmt:
        """The nest with its comparisons of floats for equality disturbed."""

        def equal(e: tirx.EQ) -> Expr:
            return self.noise.equal(e.a, e.b) if dtype_of(e.a) in UNIT_ROUNDOFF else e

        def unequal(e: tirx.NE) -> Expr:
            return tirx.Not(self.noise.equal(e.a, e.b)) if dtype_of(e.a) in UNIT_ROUNDOFF else e

        return tvm_ffi.structural_map(nest, [(tirx.EQ, equal), (tirx.NE, unequal)])

    def _next_salt(self) -> int:
        self._salt += 1
        return self._salt

    def _copy(self, source: Var, target: Var, relative: Expr | float) -> tirx.Stmt:
        """The nest target[...] = source[...] * (1 + relative * amplitude * r)."""
        salt = self._next_salt()

        def value(at: list[Expr]) -> Expr:
            return self.noise.times(
                tirx.BufferLoad(source, at), relative, _element(source, at), salt
            )

        return _pointwise(target, value, source)


def _pointwise(target: Var, value: Callable[[list[Expr]], Expr], source: Var) -> tirx.Stmt:
    shape = list(target.ty.shape)
    loops = [tirx.Var(f"i{d}", dtype_of(e)) for d, e in enumerate(shape)]
    points = [tirx.Var(f"v{d}", dtype_of(e)) for d, e in enumerate(shape)]
    zero = [tirx.IntImm(dtype_of(e), 0) for e in shape]
    iters = [
        tirx.IterVar(tvm.ir.Range(z, e), v, tirx.IterVar.DataPar)
        for z, e, v in zip(zero, shape, points, strict=True)
    ]
    regions = [
        tirx.BufferRegion(b, [tvm.ir.Range.from_min_extent(v, 1) for v in points])
        for b in (source, target)
    ]
    store = tirx.BufferStore(target, value(points), points)
    block = s_tir.SBlock(iters, regions[:1], regions[1:], f"{target.name}_disturbed", store)
    nest: tirx.Stmt = s_tir.SBlockRealize(loops, True, block)
    for loop, low, extent in reversed(list(zip(loops, zero, shape, strict=True))):
        nest = tirx.For(loop, low, extent, tirx.ForKind.SERIAL, nest)
    return nest


def _element(buffer: Var, indices: Sequence[Expr]) -> Expr:
    """The number of an element in row-major order."""
    number: Expr = tirx.IntImm("int64", 0)
    for index, extent in zip(indices, buffer.ty.shape, strict=True):
        number = number * tirx.Cast("int64", extent) + tirx.Cast("int64", index)
    return number


def _like(buffer: Var, suffix: str) -> Var:
    return tirx.decl_buffer(list(buffer.ty.shape), dtype_of(buffer), f"{buffer.name}_{suffix}")


def _replaced(nest: tirx.Stmt, buffers: dict[Var, Var]) -> tirx.Stmt:
    return tvm_ffi.structural_map(nest, [(Var, lambda v: buffers.get(v, v))])


def _sources(nest: tirx.Stmt) -> list[Var]:
    found: dict[Var, None] = {}
    tvm_ffi.structural_walk(nest, [(TensorLoad, lambda e: found.setdefault(e.source))])
    return list(found)


def _targets(nest: tirx.Stmt) -> list[Var]:
    found: dict[Var, None] = {}
    tvm_ffi.structural_walk(nest, [(tirx.BufferStore, lambda s: found.setdefault(s.buffer))])
    return list(found)
