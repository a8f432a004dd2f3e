"""From a fused PrimFunc to the row program it computes.

The analysis walks backwards from the outputs. Reading a temporary substitutes its definition at the
indices it is read at, so nothing is recognised by the name of an operator: the label pick of a
cross-entropy, a slice or a transposed read are loads at other indices and no more. Loads become
placeholders (see `program`): vectors along the columns, row scalars, single elements. What stands
under a condition and is not provably in bounds everywhere stays under it.

Does not handle: reductions of more than one value (argmax), reductions over axes that differ in
extent or rows, buffers written in parts or by several blocks, data-dependent writes.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import tvm
import tvm_ffi
from tvm import tirx
from tvm.ir import Call, Expr, TensorLoad, Var

from ..errors import Unsupported
from .collapse import collapse_axes, drop_unused
from .definitions import Definition, read_definitions, read_params, shape_of
from .expr import (
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
    Element,
    Level,
    Output,
    Program,
    Reduction,
    ReduceKind,
    Scalar,
    Tile,
    Value,
)
from .space import Space, choose_space

PURE = 1
"""Largest `TCallEffectKind` of a call without side effects."""

IDENTITY = {ReduceKind.SUM: 0, ReduceKind.PROD: 1}


def analyze(func: tirx.PrimFunc, exact: bool = False) -> Program:
    """The row program that a fused PrimFunc computes.

    Parameters
    ----------
    func : s_tir PrimFunc of complete blocks, unscheduled; static or symbolic shapes.
    exact : keep every rounding of the unfused graph, instead of rounding only what is stored.

    Raises
    ------
    Unsupported
        Where the function is not one space of rows x columns; the message says why.
    """
    params = read_params(func)
    definitions = read_definitions(func)
    space = choose_space(definitions, params)
    reader = _Reader(space, params, definitions, exact)
    try:
        outputs = tuple(
            reader.output(index, definition)
            for index, param in enumerate(params)
            if (definition := reader.definitions.get(param.var)) is not None
        )
    except RecursionError:
        raise Unsupported("the chain of temporaries is too long") from None
    name = func.attrs.get("global_symbol") if func.attrs else None
    program = Program(
        name=None if name is None else str(name),
        params=params,
        rows=space.rows,
        columns=space.columns,
        row_vars=space.row_vars,
        column_var=space.column_var,
        tiles=tuple(reader.tiles),
        scalars=tuple(reader.scalars),
        elements=tuple(reader.elements),
        reductions=tuple(reader.reductions),
        values=tuple(reader.values),
        outputs=outputs,
        exact=exact,
    )
    return collapse_axes(drop_unused(program))


class _Memo:
    """Results by (what, index expressions, guard), compared structurally."""

    def __init__(self) -> None:
        self._buckets: dict[int, list[tuple[list[Expr], Expr]]] = {}

    @staticmethod
    def _hash(key: list[Expr]) -> int:
        return hash(tuple(tvm_ffi.structural_hash(part) for part in key))

    def get(self, key: list[Expr]) -> Expr | None:
        for known, result in self._buckets.get(self._hash(key), ()):
            if len(known) == len(key) and all(map(same, known, key)):
                return result
        return None

    def put(self, key: list[Expr], result: Expr) -> Expr:
        self._buckets.setdefault(self._hash(key), []).append((key, result))
        return result


@dataclass
class _Reader:
    """Resolves expressions over buffers into expressions over placeholders, and collects those."""

    space: Space
    params: tuple
    blocks: list[Definition]
    exact: bool
    tiles: list[Tile] = field(default_factory=list)
    scalars: list[Scalar] = field(default_factory=list)
    elements: list[Element] = field(default_factory=list)
    reductions: list[Reduction] = field(default_factory=list)
    values: list[Value] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.definitions = {definition.buffer: definition for definition in self.blocks}
        self.param_of = {param.var: index for index, param in enumerate(self.params)}
        self.memo = _Memo()
        self.true = tirx.const(True, "bool")
        self.phase_of: dict[Var, int] = {}
        self.level_of: dict[Var, Level] = dict.fromkeys(self.space.row_vars, Level.ROW)
        self.level_of[self.space.column_var] = Level.ELEMENT
        self.stored_as: dict[Var, str] = {}
        """Dtype in memory of what a placeholder holds."""

    # ---- expressions

    def resolve(self, expr: Expr, env: dict[Var, Expr], guard: Expr | None) -> Expr:
        """`expr` over placeholders; `guard` is the condition under which it is evaluated."""
        if isinstance(expr, Var):
            return env.get(expr, expr)
        if isinstance(expr, tirx.FloatImm):
            return self.immediate(expr)
        if isinstance(expr, TensorLoad):
            return self.load(expr, env, guard)
        if isinstance(expr, tirx.Cast):
            value = self.resolve(expr.value, env, guard)
            return self.rounded(convert(value, widened(dtype_of(expr))), dtype_of(expr))
        if isinstance(expr, tirx.Select) or is_if_then_else(expr):
            return self.conditional(expr, env, guard)
        if isinstance(expr, tirx.And | tirx.Or):
            return self.short_circuit(expr, env, guard)
        if isinstance(expr, Call):
            _check_call(expr)
        return rebuild(expr, lambda child: self.resolve(child, env, guard))

    def immediate(self, expr: tirx.FloatImm) -> Expr:
        """Half constants: as written, or (exact) rounded to half as the unfused kernel would."""
        dtype, value = dtype_of(expr), float(expr.value)
        if self.exact and dtype in HALF_DTYPES:
            value = float(np.asarray(value).astype(np.dtype(dtype)))
        return tirx.FloatImm(widened(dtype), value)

    def conditional(self, expr: Expr, env: dict[Var, Expr], guard: Expr | None) -> Expr:
        """Select and if_then_else; either becomes an if_then_else where a side reads under guard."""
        if isinstance(expr, tirx.Select):
            parts = (expr.condition, expr.true_value, expr.false_value)
        else:
            parts = tuple(expr.args)
        condition = self.space.analyzer.simplify(self.resolve(parts[0], env, guard))
        if number(condition) is not None:
            return self.resolve(parts[1] if number(condition) else parts[2], env, guard)
        yes = self.resolve(parts[1], env, conjunction(guard, condition))
        no = self.resolve(parts[2], env, conjunction(guard, tirx.Not(condition)))
        return tirx.if_then_else(condition, yes, no)

    def short_circuit(self, expr: Expr, env: dict[Var, Expr], guard: Expr | None) -> Expr:
        """And, Or: the right side is evaluated only where the left one does not decide."""
        left = self.resolve(expr.a, env, guard)
        decided = left if isinstance(expr, tirx.And) else tirx.Not(left)
        return type(expr)(left, self.resolve(expr.b, env, conjunction(guard, decided)))

    def rounded(self, value: Expr, dtype: str) -> Expr:
        """`value` as it reads back from memory of `dtype`, if roundings are kept."""
        if not self.exact or dtype not in HALF_DTYPES or dtype_of(value) != "float32":
            return value
        if isinstance(value, Var) and self.stored_as.get(value) == dtype:
            return value
        return tirx.Cast("float32", tirx.Cast(dtype, value))

    # ---- loads

    def load(self, expr: TensorLoad, env: dict[Var, Expr], guard: Expr | None) -> Expr:
        """The placeholder, or the substituted definition, behind ``source[indices]``."""
        dtype = self.space.index_dtype
        indices = tuple(
            self.space.analyzer.simplify(convert(self.resolve(i, env, guard), dtype))
            for i in expr.indices
        )
        return self.read(expr.source, indices, guard)

    def read(self, source: Var, indices: tuple[Expr, ...], guard: Expr | None) -> Expr:
        """``source[indices]``; memoised."""
        if guard is not None and self.in_bounds(indices, shape_of(source)):
            guard = None
        key = [source, *indices, self.true if guard is None else guard]
        known = self.memo.get(key)
        if known is not None:
            return known
        definition = self.definitions.get(source)
        if definition is None:
            result = self.external(source, indices, guard)
        elif definition.kind is not None:
            result = self.reduction(definition, indices)
        else:
            result = self.temporary(definition, indices, guard)
        return self.memo.put(key, result)

    def in_bounds(self, indices: tuple[Expr, ...], shape: tuple) -> bool:
        """Whether the indices are inside the buffer at every point of the space."""
        prove = self.space.analyzer.can_prove
        return all(
            prove(index >= 0) and prove(index < extent)
            for index, extent in zip(indices, shape, strict=True)
        )

    def external(self, source: Var, indices: tuple[Expr, ...], guard: Expr | None) -> Expr:
        """A load from a parameter: tile, row scalar, or single element."""
        if source not in self.param_of:
            raise Unsupported(f"{source.name} is read but never written")
        param, dtype = self.param_of[source], str(source.ty.dtype)
        offset = flatten(indices, shape_of(source), self.space.index_dtype)
        offset = self.space.analyzer.simplify(offset)
        late = self.phase(offset) > 0
        if guard is None and not late and self.level(offset) < Level.ELEMENT:
            var = self.placeholder("s", len(self.scalars), dtype, Level.ROW, 0)
            self.scalars.append(Scalar(var, param, offset, dtype))
            return var
        base = self.unit_stride(offset)
        if guard is None and not late and base is not None:
            var = self.placeholder("x", len(self.tiles), dtype, Level.ELEMENT, 0)
            per_row = self.level(base) == Level.ROW
            self.tiles.append(Tile(var, param, base, dtype, per_row))
            return var
        parts = [offset] if guard is None else [offset, guard]
        level = max(map(self.level, parts))
        phase = max(map(self.phase, parts))
        var = self.placeholder("e", len(self.elements), dtype, level, phase)
        self.elements.append(Element(var, param, offset, dtype, guard))
        return var

    def unit_stride(self, offset: Expr) -> Expr | None:
        """The row-level `base` of ``offset = base + column``, or None."""
        column = self.space.column_var
        form = linear_form(offset, [column])
        if form is None:
            return None
        (stride,), base = form
        if number(stride) != 1 or uses_any(base, [column]) or self.level(base) == Level.ELEMENT:
            return None
        return self.space.analyzer.simplify(base)

    def reduction(self, definition: Definition, indices: tuple[Expr, ...]) -> Expr:
        """A finished reduction, read at its own row."""
        space, name = self.space, definition.buffer.name
        place = flatten(indices, definition.shape, space.index_dtype)
        if not space.analyzer.can_prove_equal(place, space.row_index):
            raise Unsupported(f"reduction {name} is read at another row")
        extents = tuple(extent for _, extent in definition.reduced)
        columns = unflatten(space.column_var, extents, space.analyzer)
        env = definition.at(indices)
        for (axis, _), column in zip(definition.reduced, columns, strict=True):
            env[axis] = convert(column, dtype_of(axis))
        body = self.resolve(definition.value, env, None)
        dtype = dtype_of(body)
        if dtype == "bool" or (is_integer(dtype) and not dtype.endswith(("32", "64"))):
            dtype = "int32"
        body, phase = convert(body, dtype), self.phase(body)
        initial = self.initial(definition, dtype)
        var = self.placeholder("r", len(self.reductions), dtype, Level.ROW, phase + 1)
        self.reductions.append(Reduction(var, definition.kind, body, dtype, initial, phase))
        return self.rounded(convert(var, widened(definition.dtype)), definition.dtype)

    def initial(self, definition: Definition, dtype: str) -> Expr | None:
        """The initial value where it is not neutral."""
        initial = self.resolve(definition.initial, {}, None)
        if self.level(initial) != Level.CONSTANT:
            raise Unsupported(f"{definition.buffer.name} starts from {initial}")
        value, kind = number(initial), definition.kind
        if kind in IDENTITY:
            neutral = value == IDENTITY[kind]
        else:
            extreme = tvm.tirx.min_value if kind == ReduceKind.MAX else tvm.tirx.max_value
            limit = number(extreme(definition.dtype))
            neutral = value is not None and (value <= limit if limit < 0 else value >= limit)
            neutral = neutral or (kind == ReduceKind.MAX and value is not None and value <= limit)
        return None if neutral else convert(initial, dtype)

    def temporary(
        self, definition: Definition, indices: tuple[Expr, ...], guard: Expr | None
    ) -> Expr:
        """A pointwise temporary at `indices`: its definition there, as a value if it is worth one."""
        env = {}
        for axis, index in definition.at(indices).items():
            env[axis] = convert(index, dtype_of(axis))
        body = self.resolve(definition.value, env, guard)
        body = self.rounded(convert(body, widened(definition.dtype)), definition.dtype)
        trivial = isinstance(body, Var) or number(body) is not None
        if trivial or guard is not None or self.level(body) < Level.ELEMENT:
            return body
        phase = self.phase(body)
        var = Var(f"v{len(self.values)}", tvm.ir.PrimType(dtype_of(body)))
        self.level_of[var], self.phase_of[var] = Level.ELEMENT, phase
        self.stored_as[var] = definition.dtype if self.exact else ""
        self.values.append(Value(var, body, phase))
        return var

    # ---- bookkeeping

    def placeholder(self, letter: str, count: int, dtype: str, level: Level, phase: int) -> Var:
        var = Var(f"{letter}{count}", tvm.ir.PrimType(widened(dtype)))
        self.level_of[var], self.phase_of[var], self.stored_as[var] = level, phase, dtype
        return var

    def level(self, expr: Expr) -> Level:
        return max(
            (self.level_of.get(v, Level.CONSTANT) for v in variables(expr)), default=Level(0)
        )

    def phase(self, expr: Expr) -> int:
        return max((self.phase_of.get(v, 0) for v in variables(expr)), default=0)

    def output(self, param: int, definition: Definition) -> Output:
        """The output written to a parameter, one element a point or one a row."""
        space, shape = self.space, definition.shape
        full = space.is_element(shape)
        if not full and not space.is_row(shape):
            space_text = f"{list(space.rows)} x {space.columns}"
            raise Unsupported(f"{definition.buffer.name} {list(shape)} is no part of {space_text}")
        value = self.read(definition.buffer, space.indices(shape, full), None)
        offset = space.row_index
        if full:
            offset = offset * convert(_size(space.columns), space.index_dtype)
        offset = space.analyzer.simplify(offset)
        phase = self.phase(value)
        return Output(param, value, offset, definition.dtype, full, phase)


def _size(extent: int | Expr) -> Expr:
    return constant(extent, "int32") if isinstance(extent, int) else extent


def _check_call(call: Call) -> None:
    """Refuses calls with side effects, and bit casts of what is computed in another width."""
    if not isinstance(call.op, tvm.ir.Op):
        raise Unsupported(f"call of {call.op}")
    name = call.op.name
    effect = call.op.get_attr("TCallEffectKind")
    if effect is None or int(effect) > PURE or "extern" in name:
        raise Unsupported(f"call of {name}")
    halves = [e for e in (call, *call.args) if dtype_of(e) in HALF_DTYPES]
    if name == "tirx.reinterpret" and halves:
        raise Unsupported("bit cast of half precision")
