"""Placeholders of a program under construction: which kind a load is, what depends on what."""

from __future__ import annotations

from collections.abc import Sequence

import tvm
import tvm_ffi
from tvm.ir import Expr, Var

from ...errors import Unsupported
from .definitions import shape_of
from .expr import flatten, linear_form, number, same, uses_any, variables, widened
from .program import Element, Level, Param, ReduceKind, Reduction, Scalar, Tile, Value
from .space import Space


class Memo:
    """Results by a list of expressions, compared by structure and variable identity."""

    def __init__(self) -> None:
        self._buckets: dict[int, list[tuple[list[Expr], Expr]]] = {}

    @staticmethod
    def _hash(key: list[Expr]) -> int:
        return hash(tuple(tvm_ffi.structural_hash(part) for part in key))

    def get(self, key: list[Expr]) -> Expr | None:
        """The result stored under an equal key."""
        for known, result in self._buckets.get(self._hash(key), ()):
            if len(known) == len(key) and all(map(same, known, key)):
                return result
        return None

    def put(self, key: list[Expr], result: Expr) -> Expr:
        """Stores and returns `result`."""
        self._buckets.setdefault(self._hash(key), []).append((key, result))
        return result


class Placeholders:
    """Collects tiles, scalars, elements, reductions and values.

    `level` says how often an expression over them changes, `phase` how many phases of reductions
    it waits for, `stored_as` the dtype in memory of what a placeholder holds.
    """

    def __init__(self, space: Space, params: Sequence[Param]) -> None:
        self.space = space
        self.param_of = {param.var: index for index, param in enumerate(params)}
        self.tiles: list[Tile] = []
        self.scalars: list[Scalar] = []
        self.elements: list[Element] = []
        self.reductions: list[Reduction] = []
        self.values: list[Value] = []
        self.stored_as: dict[Var, str] = {}
        self._phase: dict[Var, int] = {}
        self._level: dict[Var, Level] = dict.fromkeys(space.row_vars, Level.ROW)
        self._level[space.column_var] = Level.ELEMENT

    def level(self, *exprs: Expr) -> Level:
        """How often the expressions change."""
        levels = (self._level.get(var, Level.CONSTANT) for var in variables(*exprs))
        return max(levels, default=Level.CONSTANT)

    def phase(self, *exprs: Expr) -> int:
        """How many phases of reductions must be finished before the expressions are known."""
        return max((self._phase.get(var, 0) for var in variables(*exprs)), default=0)

    def load(self, source: Var, indices: Sequence[Expr], guard: Expr | None) -> Var:
        """A load from a parameter: tile, row scalar, or single element."""
        if source not in self.param_of:
            raise Unsupported(f"{source.name} is read but never written")
        param, dtype = self.param_of[source], str(source.ty.dtype)
        offset = flatten(indices, shape_of(source), self.space.index_dtype)
        offset = self.space.analyzer.simplify(offset)
        ahead = guard is None and self.phase(offset) == 0
        if ahead and self.level(offset) < Level.ELEMENT:
            var = self._new("s", self.scalars, dtype, Level.ROW, 0)
            self.scalars.append(Scalar(var, param, offset, dtype))
            return var
        base = self._unit_stride(offset) if ahead else None
        if base is not None:
            var = self._new("x", self.tiles, dtype, Level.ELEMENT, 0)
            per_row = self.level(base) == Level.ROW
            self.tiles.append(Tile(var, param, base, dtype, per_row))
            return var
        parts = [offset] if guard is None else [offset, guard]
        var = self._new("e", self.elements, dtype, self.level(*parts), self.phase(*parts))
        self.elements.append(Element(var, param, offset, dtype, guard))
        return var

    def _unit_stride(self, offset: Expr) -> Expr | None:
        """The row-level `base` of ``offset = base + column``, or None."""
        column = self.space.column_var
        form = linear_form(offset, [column])
        if form is None:
            return None
        (stride,), base = form
        if number(stride) != 1 or uses_any(base, [column]) or self.level(base) == Level.ELEMENT:
            return None
        return self.space.analyzer.simplify(base)

    def value(self, body: Expr, stored_as: str) -> Var:
        """A temporary that changes within the row."""
        var = self._new("v", self.values, str(body.ty.dtype), Level.ELEMENT, self.phase(body))
        self.stored_as[var] = stored_as
        self.values.append(Value(var, body, self.phase(body)))
        return var

    def reduction(
        self,
        kind: ReduceKind,
        body: Expr,
        dtype: str,
        initial: Expr | None,
        index: Expr | None = None,
    ) -> Var:
        """A reduction over the columns; equal ones are one (an `index` is always the column)."""
        phase = self.phase(body)
        for known in self.reductions:
            if (known.kind, known.dtype) == (kind, dtype) and same(known.body, body):
                none = known.initial is None and initial is None
                if none or (
                    known.initial is not None
                    and initial is not None
                    and same(known.initial, initial)
                ):
                    return known.var
        var = self._new("r", self.reductions, dtype, Level.ROW, phase + 1)
        self.reductions.append(Reduction(var, kind, body, dtype, initial, phase, index=index))
        return var

    def _new(self, letter: str, group: list, dtype: str, level: Level, phase: int) -> Var:
        var = Var(f"{letter}{len(group)}", tvm.ir.PrimType(widened(dtype)))
        self._level[var], self._phase[var], self.stored_as[var] = level, phase, dtype
        return var
