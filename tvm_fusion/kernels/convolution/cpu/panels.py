"""The weights of a convolution in panels of filters: each is read from end to end.

    panels[p, term, lane] = w[16 p + lane, c, r, s]       term: c, r, s in the order of the loops

Constants of the module become panels when it is compiled (see `kernels.cpu.contraction.panels`);
others are packed first by the kernel.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import prod

import tvm_ffi
from tvm import tirx
from tvm.ir import Expr, TensorLoad, Var
from tvm.tirx import ForKind

from ....errors import Unsupported
from ...contraction.model import Axis
from ...cpu.contraction.packing import squares
from ...cpu.contraction.panels import WINOGRAD_POINTS, Panels, constants_of
from ...cpu.loops import Loops, nest
from ...cpu.math import bfloat16_to_float32
from ...cpu.nests.scope import Scope, new_buffer
from ...cpu.stages.resolve import Point, Resolve
from ...program.expr import convert, dtype_of, unflatten
from ..geometry import Convolution


@dataclass(frozen=True, slots=True, eq=False)
class Weights:
    """The panels of a convolution's weights.

    Attributes
    ----------
    convolution : Convolution
    lanes : int
        Filters of a panel.
    terms : tuple of tuple of Axis
        The axes of each dimension that terms run along, in the order of the terms.
    how : Panels
        Which dimensions of the weights are panels and terms.
    buffer : Var
    is_constant : bool
        Whether the kernel takes the panels in place of the weights.
    """

    convolution: Convolution
    lanes: int
    terms: tuple[tuple[Axis, ...], ...]
    how: Panels
    buffer: Var
    is_constant: bool

    @classmethod
    def of(
        cls, convolution: Convolution, lanes: int, order: list[Axis], func, transformed: bool
    ) -> Weights:
        """The panels whose terms are read in an order of the axes, the outermost one first; with
        three taps of the last two windows `transformed` to four points.

        Raises
        ------
        Unsupported
            A dimension of the weights holds both, or groups end inside of a panel.
        """
        filters, group = convolution.filters, convolution.group
        rank = {axis.var: i for i, axis in enumerate(order)}
        batch, columns, terms = [], [], []
        for d, axes in enumerate(convolution.weight_dims):
            reduced = [a for a in axes if a.var in rank]
            others = [a for a in axes if a.var not in rank]
            if reduced:
                if any(a is not group for a in others) or len(reduced) > 1:
                    raise Unsupported("weights with filters and channels in one dimension")
                terms.append((rank[reduced[0].var], d, axes))
            elif filters is not None and any(a is filters for a in others):
                columns.append(d)
            elif axes:
                batch.append(d)
        joined = [a for d in columns for a in convolution.weight_dims[d] if a is group]
        if joined and filters.extent % lanes:
            raise Unsupported("groups that end inside of a vector")
        terms.sort(key=lambda t: t[:2])
        widened: list[int] = []
        if transformed:
            taps = [w.tap for w in convolution.windows[-2:]]
            widened = [d for _, d, axes in terms if any(a is tap for a in axes for tap in taps)]
            wide = {tap.var: Axis(tap.var, WINOGRAD_POINTS) for tap in taps}
            terms = [(n, d, tuple(wide.get(a.var, a) for a in axes)) for n, d, axes in terms]
        dims = tuple(d for _, d, _ in terms)
        how = Panels(tuple(batch), dims, tuple(columns), lanes, widened=tuple(widened))
        load = convolution.weights.load
        shape = how.shape([int(e) for e in load.source.ty.shape])
        constant = any(load.source.same_as(c) for c in constants_of(func))
        is_constant = constant and _reads(convolution, load.source) == 1
        dtype = how.dtype(dtype_of(load)) if is_constant else convolution.product.dtype
        buffer = new_buffer(f"{load.source.name}_panels", [*shape], dtype)
        return cls(convolution, lanes, tuple(t[2] for t in terms), how, buffer, is_constant)

    @property
    def source(self) -> Var:
        """The weights as they are given."""
        return self.convolution.weights.load.source

    def load(
        self, vector: Expr, env: Mapping[Var, Expr], lane: Expr, loops: Loops, dtype: str
    ) -> Expr:
        """Lanes of the weights of a vector of a group's filters; `env` has the terms' axes."""
        group = self.convolution.group
        zero = loops.imm(0)
        dims = self.convolution.weight_dims
        at: list[Expr] = [env[dims[d][0].var] for d in self.how.batch]
        if any(a is group for d in self.how.columns for a in dims[d]):
            panels = self.convolution.filters.extent // self.lanes
            vector = env[group.var] * loops.imm(panels) + vector
        term = zero
        for axis in (a for axes in self.terms for a in axes):
            term = term * loops.imm(axis.extent) + env[axis.var]
        load = tirx.BufferLoad(
            self.buffer, [*at, loops.simplify(vector), loops.simplify(term), lane]
        )
        if dtype_of(load) == "bfloat16":
            return convert(bfloat16_to_float32(load), dtype)
        return convert(load, dtype)

    def pack(self, scope: Scope) -> tirx.Stmt:
        """Fill the panels; those of filters beyond the last one repeat it."""
        loops = scope.loops
        *batch, panels, terms, lanes = (int(e) for e in self.buffer.ty.shape)
        task = loops.new("task", prod(batch) * panels, ForKind.PARALLEL)
        *at, panel = unflatten(task.value, [*batch, panels], loops.analyzer)
        if self._turns(terms):
            return task.around(self._pack_squares(scope, panel, terms))
        term, lane = loops.new("k", terms), loops.new("v", lanes)
        where = dict(zip(self.how.batch, at, strict=True))
        where |= {d: self._filter(d, panel, lane.value, loops) for d in self.how.columns}
        extents = [self._extent(d) for d in self.how.terms]
        parts = unflatten(term.value, extents, loops.analyzer)
        where |= dict(zip(self.how.terms, parts, strict=True))
        value = self._value(scope, where)
        store = tirx.BufferStore(self.buffer, value, [*at, panel, term.value, lane.value])
        return nest([task, term, lane], [store])

    def _extent(self, dim: int) -> int:
        return int(self.source.ty.shape[dim])

    def _filter(self, dim: int, panel: Expr, lane: Expr, loops: Loops) -> Expr:
        """Where the filter of a lane lies in the weights; the last one where there is none."""
        at = panel * loops.imm(self.lanes) + lane
        if self._extent(dim) % self.lanes:
            at = tirx.Min(at, loops.imm(self._extent(dim) - 1))
        return loops.simplify(at)

    def _value(self, scope: Scope, where: Mapping[int, Expr]) -> Expr:
        """An element of the weights; dimensions that are left out have length 1."""
        loops = scope.loops
        env: dict[Var, Expr] = {}
        for dim, axes in enumerate(self.convolution.weight_dims):
            at = where.get(dim, loops.imm(0))
            parts = unflatten(at, [a.extent for a in axes], loops.analyzer)
            env |= {a.var: i for a, i in zip(axes, parts, strict=True)}
        value = Resolve(scope, env, Point())(self.convolution.weights.value)
        return convert(value, self.convolution.product.dtype)

    def _turns(self, terms: int) -> bool:
        """Whether filters are rows of terms, so that squares of them are transposed."""
        is_plain = dtype_of(self.convolution.weights.load) == self.convolution.product.dtype
        inner = tuple(range(1, len(self.source.ty.shape)))
        rest = {d for d in inner if self._extent(d) > 1}
        rows = self.how.columns == (0,) and rest <= set(self.how.terms) and not self.how.batch
        is_square = self.lanes > 1 and self.lanes & (self.lanes - 1) == 0 and terms >= self.lanes
        return is_plain and rows and is_square

    def _pack_squares(self, scope: Scope, panel: Expr, terms: int) -> tirx.Stmt:
        loops = scope.loops
        inner = range(1, len(self.source.ty.shape))
        extents = [self._extent(d) for d in inner]

        def parts(term: Expr) -> dict[int, Expr]:
            return dict(zip(inner, unflatten(term, extents, loops.analyzer), strict=True))

        def load(r: int, start: Expr, row: Var) -> tirx.Stmt:
            lane = loops.new("v", self.lanes, ForKind.VECTORIZED)
            filters = self._filter(0, panel, loops.imm(r), loops)
            value = self._value(scope, {0: filters, **parts(loops.simplify(start + lane.value))})
            return lane.around(tirx.BufferStore(row, value, [lane.value]))

        def store(r: int, lane: Expr, value: Expr, start: Expr) -> tirx.Stmt:
            at = parts(loops.simplify(start + loops.imm(r)))
            term = loops.imm(0)
            for d in self.how.terms:
                term = term * loops.imm(self._extent(d)) + at[d]
            return tirx.BufferStore(self.buffer, value, [panel, loops.simplify(term), lane])

        dtype = self.convolution.product.dtype
        return squares(loops, self.lanes, loops.imm(terms), dtype, load, store)


def _reads(convolution: Convolution, source: Var) -> int:
    """In how many places a parameter is read."""
    segment = convolution.segment
    exprs = [o.value for o in segment.outputs] + [b.value for b in segment.bindings]
    found: list[TensorLoad] = []
    for expr in (*exprs, convolution.data, convolution.weights.value):
        tvm_ffi.structural_walk(expr, [(TensorLoad, found.append)])
    return sum(load.source.same_as(source) for load in found)
