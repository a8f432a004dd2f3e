"""Resolves expressions over the buffers of a PrimFunc into expressions over placeholders.

Reading a temporary substitutes its definition at the indices it is read at:

    t[i, k] = exp(x[i, k]);  y[i, j] = t[i, j] + t[i, label[i]]
        y at (i0, j)  ->  v0 + exp(x[i0 * N + s0])     v0 = exp(x0), x0 a tile, s0 = label[i0]

`guard` is everywhere the condition under which the resolved expression is evaluated; None: always.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import ml_dtypes
import numpy as np
import tvm
import tvm_ffi
from tvm import tirx
from tvm.ir import Call, Expr, TensorLoad, Var

from ...errors import Unsupported
from .collapse import drop_unused
from .definitions import Definition, shape_of
from .expr import (
    FLOAT8_DTYPES,
    HALF_DTYPES,
    conjunction,
    constant,
    convert,
    dtype_of,
    flatten,
    is_if_then_else,
    is_integer,
    linear_form,
    number,
    rebuild,
    same,
    unflatten,
    uses_any,
    variables,
    widened,
)
from .program import (
    Accumulation,
    Element,
    Extent,
    Level,
    Output,
    Param,
    Program,
    ReduceKind,
    Reduction,
    Scalar,
    Scan,
    Tile,
    Value,
)
from .space import Space
from .window import combined, is_window, places

# Placeholders of a program under construction: which kind a load is, what depends on what.


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
        self.space, self.params = space, tuple(params)
        self.param_of = {param.var: index for index, param in enumerate(params)}
        self.tiles: list[Tile] = []
        self.scalars: list[Scalar] = []
        self.elements: list[Element] = []
        self.reductions: list[Reduction] = []
        self.scans: list[Scan] = []
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

    def scan(self, kind: ReduceKind, body: Expr, dtype: str, exclusive: bool) -> Var:
        """A scan along the columns."""
        var = self._new("c", self.scans, dtype, Level.ELEMENT, self.phase(body))
        self.scans.append(Scan(var, kind, body, dtype, exclusive))
        return var

    def program(
        self,
        name: str | None,
        outputs: Sequence[Output],
        exact: bool,
        accumulations: Sequence[Accumulation] = (),
    ) -> Program:
        """The program of the outputs that were resolved, without what none of them needs."""
        space = self.space
        program = Program(
            name=name,
            params=self.params,
            rows=space.rows,
            columns=space.columns,
            row_vars=space.row_vars,
            column_var=space.column_var,
            tiles=tuple(self.tiles),
            scalars=tuple(self.scalars),
            elements=tuple(self.elements),
            reductions=tuple(self.reductions),
            scans=tuple(self.scans),
            values=tuple(self.values),
            outputs=tuple(outputs),
            exact=exact,
            accumulations=tuple(accumulations),
        )
        return drop_unused(program)

    def _new(self, letter: str, group: list, dtype: str, level: Level, phase: int) -> Var:
        var = Var(f"{letter}{len(group)}", tvm.ir.PrimType(widened(dtype)))
        self._level[var], self._phase[var], self.stored_as[var] = level, phase, dtype
        return var


PURE = 1
"""Largest `TCallEffectKind` of a call without side effects."""

LARGEST_EXPRESSION = 4096
"""Nodes of an expression that cannot be split into values; beyond, compilers take minutes."""


class Resolver:
    """Resolves expressions at the points of a space; what it finds goes into `placeholders`."""

    def __init__(
        self,
        space: Space,
        definitions: dict[Var, Definition],
        placeholders: Placeholders,
        exact: bool,
    ) -> None:
        self.space, self.definitions, self.exact = space, definitions, exact
        self.placeholders = placeholders
        self._memo = Memo()

    # ---- expressions

    def resolve(self, expr: Expr, env: dict[Var, Expr], guard: Expr | None) -> Expr:
        """`expr` over placeholders, with the block axes of `env` put in."""
        if isinstance(expr, Var):
            return env.get(expr, expr)
        if isinstance(expr, tirx.FloatImm):
            return self._immediate(expr)
        if isinstance(expr, TensorLoad):
            return self._load(expr, env, guard)
        if isinstance(expr, tirx.Cast):
            value = self.resolve(expr.value, env, guard)
            return self._rounded(convert(value, widened(dtype_of(expr))), dtype_of(expr))
        if isinstance(expr, tirx.Select):
            return self._choice(expr.condition, expr.true_value, expr.false_value, env, guard)
        if is_if_then_else(expr):
            return self._choice(*expr.args, env, guard)
        if isinstance(expr, tirx.And | tirx.Or):
            return self._short_circuit(expr, env, guard)
        if isinstance(expr, Call):
            _check_call(expr)
        return rebuild(expr, lambda child: self.resolve(child, env, guard))

    def _immediate(self, expr: tirx.FloatImm) -> Expr:
        """Half constants: as written, or (exact) rounded to half as the unfused kernel would."""
        dtype, value = dtype_of(expr), float(expr.value)
        if self.exact and dtype in HALF_DTYPES:
            kind = np.float16 if dtype == "float16" else ml_dtypes.bfloat16
            value = float(kind(value))
        return tirx.FloatImm(widened(dtype), value)

    def _choice(
        self, condition: Expr, yes: Expr, no: Expr, env: dict[Var, Expr], guard: Expr | None
    ) -> Expr:
        """Select, or if_then_else where a side may only be evaluated when it is picked."""
        condition = self.space.analyzer.simplify(self.resolve(condition, env, guard))
        if number(condition) is not None:
            return self.resolve(yes if number(condition) else no, env, guard)
        yes = self.resolve(yes, env, conjunction(guard, condition))
        no = self.resolve(no, env, conjunction(guard, tirx.Not(condition)))
        if self._evaluates_anywhere(yes) and self._evaluates_anywhere(no):
            return tirx.Select(condition, yes, no)
        return tirx.if_then_else(condition, yes, no)

    def _evaluates_anywhere(self, expr: Expr) -> bool:
        """Whether `expr` is free of guarded loads and of integer divisions that may fault."""
        guarded = {e.var for e in self.placeholders.elements if e.guard is not None}
        if any(var in guarded for var in variables(expr)):
            return False
        divisions: list[Expr] = []
        kinds = (tirx.Div, tirx.Mod, tirx.FloorDiv, tirx.FloorMod)
        tvm_ffi.structural_walk(expr, [(kind, divisions.append) for kind in kinds])
        return all(dtype_of(d).startswith("float") or number(d.b) for d in divisions)

    def _short_circuit(self, expr: Expr, env: dict[Var, Expr], guard: Expr | None) -> Expr:
        """And, Or: the right side is evaluated only where the left one does not decide."""
        left = self.resolve(expr.a, env, guard)
        open_ = left if isinstance(expr, tirx.And) else tirx.Not(left)
        return type(expr)(left, self.resolve(expr.b, env, conjunction(guard, open_)))

    def _rounded(self, value: Expr, dtype: str) -> Expr:
        """`value` as it reads back from memory of `dtype`, if roundings are kept.

        Rounding to 8 bits is: it is the purpose of a quantisation.
        """
        kept = dtype in FLOAT8_DTYPES or (self.exact and dtype in HALF_DTYPES)
        if not kept or dtype_of(value) != "float32":
            return value
        if isinstance(value, Var) and self.placeholders.stored_as.get(value) == dtype:
            return value
        if isinstance(value, tirx.Cast) and dtype_of(value.value) == dtype:
            return value
        return tirx.Cast("float32", tirx.Cast(dtype, value))

    # ---- loads

    def _load(self, expr: TensorLoad, env: dict[Var, Expr], guard: Expr | None) -> Expr:
        indices = tuple(
            self.space.analyzer.simplify(
                convert(self.resolve(index, env, guard), self.space.index_dtype)
            )
            for index in expr.indices
        )
        return self.read(expr.source, indices, guard)

    def read(self, source: Var, indices: tuple[Expr, ...], guard: Expr | None) -> Expr:
        """``source[indices]``: a placeholder, or what the definition of `source` says."""
        if guard is not None and self._in_bounds(indices, shape_of(source)):
            # An index that is read itself, and clamped, is read under the guard.
            guard = None if all(map(self._evaluates_anywhere, indices)) else guard
        key = [source, *indices, tirx.const(True, "bool") if guard is None else guard]
        known = self._memo.get(key)
        if known is not None:
            return known
        definition = self.definitions.get(source)
        if definition is None:
            result = self.placeholders.load(source, indices, guard)
        elif definition.scan is not None:
            result = self._scan(definition, indices)
        elif is_window(definition):
            result = self._window(definition, indices, guard)
        elif definition.kind is not None:
            result = self._reduction(definition, indices)
        else:
            result = self._temporary(definition, indices, guard)
        return self._memo.put(key, result)

    def _in_bounds(self, indices: tuple[Expr, ...], shape: tuple[Extent, ...]) -> bool:
        """Whether the indices are inside the buffer at every point of the space."""
        prove = self.space.analyzer.can_prove
        return all(
            prove(index >= 0) and prove(index < extent)
            for index, extent in zip(indices, shape, strict=True)
        )

    def _temporary(
        self, definition: Definition, indices: tuple[Expr, ...], guard: Expr | None
    ) -> Expr:
        """A temporary: a value, or its expression where it is trivial, row-level or guarded."""
        env = {axis: convert(i, dtype_of(axis)) for axis, i in definition.at(indices).items()}
        body = self.resolve(definition.value, env, guard)
        return self._named(definition, body, guard)

    def _window(
        self, definition: Definition, indices: tuple[Expr, ...], guard: Expr | None
    ) -> Expr:
        """A reduction over a few neighbours: all of them, combined in place."""
        env = {axis: convert(i, dtype_of(axis)) for axis, i in definition.at(indices).items()}
        terms = []
        for place in places(definition):
            for (axis, _), at in zip(definition.reduced, place, strict=True):
                env[axis] = constant(at, dtype_of(axis))
            terms.append(self.resolve(definition.value, env, guard))
        initial = self.resolve(definition.initial, {}, None)
        if not is_neutral(definition.kind, number(initial), definition.dtype):
            terms.append(initial)
        dtype = _accumulator(dtype_of(terms[0]))
        body = combined(definition.kind, [convert(term, dtype) for term in terms])
        return self._named(definition, body, guard)

    def _named(self, definition: Definition, body: Expr, guard: Expr | None) -> Expr:
        """`body` as what the definition holds; a value where that saves repeating it."""
        body = self._rounded(convert(body, widened(definition.dtype)), definition.dtype)
        if isinstance(body, Var) or number(body) is not None:
            return body
        if guard is None and self.placeholders.level(body) == Level.ELEMENT:
            rounded = self.exact or definition.dtype in FLOAT8_DTYPES
            return self.placeholders.value(body, definition.dtype if rounded else "")
        if _size(body) > LARGEST_EXPRESSION:
            raise Unsupported(f"the expression of {definition.buffer.name} grows too large")
        return body

    def _scan(self, definition: Definition, indices: tuple[Expr, ...]) -> Expr:
        """A scan along the columns, read at its own point."""
        space, scan, name = self.space, definition.scan, definition.buffer.name
        place = next(n for n, axis in enumerate(definition.axes) if scan.axis.same_as(axis))
        others = [n for n in range(len(indices)) if n != place]
        row = flatten(
            [indices[n] for n in others], [definition.shape[n] for n in others], space.index_dtype
        )
        prove = space.analyzer.can_prove_equal
        if not prove(indices[place], space.column_var) or not prove(row, space.row_index):
            raise Unsupported(f"scan {name} is read at another point")
        env = {axis: convert(i, dtype_of(axis)) for axis, i in definition.at(indices).items()}
        body = self.resolve(definition.value, env, None)
        dtype = _accumulator(dtype_of(body))
        var = self.placeholders.scan(scan.kind, convert(body, dtype), dtype, scan.exclusive)
        return self._rounded(convert(var, widened(definition.dtype)), definition.dtype)

    def _reduction(self, definition: Definition, indices: tuple[Expr, ...]) -> Expr:
        """A finished reduction, read at its own row."""
        space, name = self.space, definition.buffer.name
        place = flatten(indices, definition.shape, space.index_dtype)
        if not space.analyzer.can_prove_equal(place, space.row_index):
            raise Unsupported(f"reduction {name} is read at another row")
        extents = [extent for _, extent in definition.reduced]
        columns = unflatten(space.column_var, extents, space.analyzer)
        env = {axis: convert(i, dtype_of(axis)) for axis, i in definition.at(indices).items()}
        for (axis, _), column in zip(definition.reduced, columns, strict=True):
            env[axis] = convert(column, dtype_of(axis))
        if definition.index is not None:
            body = self.resolve(definition.value, env, None)
            return self._index_of(definition, body, env)
        body, dtype, initial = self.terms(definition, env)
        var = self.placeholders.reduction(definition.kind, body, dtype, initial)
        return self._rounded(convert(var, widened(definition.dtype)), definition.dtype)

    def terms(self, definition: Definition, env: dict[Var, Expr]) -> tuple[Expr, str, Expr | None]:
        """What a reduction combines at the block axes of `env`: body, dtype of the accumulator, and
        the initial value unless that changes nothing.
        """
        body = self.resolve(definition.value, env, None)
        dtype = _accumulator(dtype_of(body))
        initial = self.resolve(definition.initial, {}, None)
        if self.placeholders.level(initial) != Level.CONSTANT:
            raise Unsupported(f"{definition.buffer.name} starts from {initial}")
        neutral = is_neutral(definition.kind, number(initial), definition.dtype)
        return convert(body, dtype), dtype, None if neutral else convert(initial, dtype)

    def _index_of(self, definition: Definition, body: Expr, env: dict[Var, Expr]) -> Expr:
        """The column of the extremum of `body`."""
        column = self.space.column_var
        index = convert(self.resolve(definition.index, env, None), dtype_of(column))
        if not self.space.analyzer.can_prove_equal(index, column):
            raise Unsupported(f"{definition.buffer.name} gives {index} instead of the column")
        dtype = definition.dtype
        return self.placeholders.reduction(definition.kind, body, dtype, None, column)


def _accumulator(dtype: str) -> str:
    """Small integers and bools are accumulated in 32 bits (equal modulo their width)."""
    small = dtype == "bool" or (is_integer(dtype) and not dtype.endswith(("32", "64")))
    return "int32" if small else dtype


def is_neutral(kind: ReduceKind, initial: float | None, dtype: str) -> bool:
    """Whether combining with `initial` changes nothing."""
    if initial is None:
        return False
    if kind in (ReduceKind.SUM, ReduceKind.PROD):
        return initial == (0 if kind == ReduceKind.SUM else 1)
    if dtype == "bool":
        return initial == (1 if kind == ReduceKind.MIN else 0)
    if kind == ReduceKind.MAX:
        return initial <= number(tvm.tirx.min_value(dtype)) or initial == -math.inf
    return initial >= number(tvm.tirx.max_value(dtype)) or initial == math.inf


def _size(expr: Expr) -> int:
    count = 0

    def see(_: Expr) -> None:
        nonlocal count
        count += 1

    tvm_ffi.structural_walk(expr, [(Expr, see)])
    return count


def _check_call(call: Call) -> None:
    """Refuses calls with side effects, and bit casts of what is computed in another width."""
    if not isinstance(call.op, tvm.ir.Op):
        raise Unsupported(f"call of {call.op}")
    name = call.op.name
    effect = call.op.get_attr("TCallEffectKind")
    if effect is None or int(effect) > PURE or "extern" in name:
        raise Unsupported(f"call of {name}")
    if name == "tirx.reinterpret":
        halves = [e for e in (call, *call.args) if dtype_of(e) in HALF_DTYPES]
        if halves:
            raise Unsupported("bit cast of half precision")
