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
from ...cpu.contraction.panels import Panels, constants_of
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
    def of(cls, convolution: Convolution, lanes: int, order: list[Axis], func) -> Weights:
        """The panels whose terms are read in an order of the axes, the outermost one first.

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
        if len(columns) != 1:
            raise Unsupported("weights without filters")
        if (
            group is not None
            and any(a is group for a in convolution.weight_dims[columns[0]])
            and filters.extent % lanes
        ):
            raise Unsupported("groups that end inside of a vector")
        terms.sort(key=lambda t: t[:2])
        how = Panels(tuple(batch), tuple(d for _, d, _ in terms), tuple(columns), lanes)
        load = convolution.weights.load
        shape = how.shape([int(e) for e in load.source.ty.shape])
        constant = any(load.source.same_as(c) for c in constants_of(func))
        is_constant = constant and _reads(convolution, load.source) == 1
        dtype = dtype_of(load) if is_constant else convolution.product.dtype
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
        (column,) = (dims[d] for d in self.how.columns)
        if group is not None and any(a is group for a in column):
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
        source = self.source.ty.shape
        *batch, panels, terms, lanes = (int(e) for e in self.buffer.ty.shape)
        rows = prod(batch) * panels
        task = loops.new("task", rows, ForKind.PARALLEL)
        term, lane = loops.new("k", terms), loops.new("v", lanes)
        at = unflatten(task.value, [*batch, panels], loops.analyzer)
        column = at[-1] * loops.imm(lanes) + lane.value
        (d,) = self.how.columns
        where: dict[int, Expr] = {d: tirx.Min(column, loops.imm(int(source[d]) - 1))}
        where |= dict(zip(self.how.batch, at[:-1], strict=True))
        extents = [int(source[t]) for t in self.how.terms]
        where |= dict(
            zip(self.how.terms, unflatten(term.value, extents, loops.analyzer), strict=True)
        )
        dims = [loops.simplify(where.get(i, loops.imm(0))) for i in range(len(source))]
        env: dict[Var, Expr] = {}
        for at_dim, axes in zip(dims, self.convolution.weight_dims, strict=True):
            parts = unflatten(at_dim, [a.extent for a in axes], loops.analyzer)
            env |= {a.var: i for a, i in zip(axes, parts, strict=True)}
        value = Resolve(scope, env, Point())(self.convolution.weights.value)
        value = convert(value, self.convolution.product.dtype)
        store = tirx.BufferStore(self.buffer, value, [*at, term.value, lane.value])
        return nest([task, term, lane], [store])


def _reads(convolution: Convolution, source: Var) -> int:
    """In how many places a parameter is read."""
    segment = convolution.segment
    exprs = [o.value for o in segment.outputs] + [b.value for b in segment.bindings]
    found: list[TensorLoad] = []
    for expr in (*exprs, convolution.data, convolution.weights.value):
        tvm_ffi.structural_walk(expr, [(TensorLoad, found.append)])
    return sum(load.source.same_as(source) for load in found)
