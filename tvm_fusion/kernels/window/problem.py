"""From a fused PrimFunc with one reduction over windows to what stands before and behind it."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import tvm
import tvm_ffi
from tvm import tirx
from tvm.ir import Expr, TensorLoad, Var

from ...errors import TooDeep, Unsupported
from ...ir.extents import Bounds, known_sizes, sizes_of
from ..program.definitions import Definition, read_definitions, read_params, shape_of
from ..program.expr import (
    HALF_DTYPES,
    constant,
    convert,
    dtype_of,
    flatten,
    is_integer,
    linear_form,
    number,
    substitute,
    uses_any,
    variables,
    widened,
)
from ..program.extents import equal_sizes, simplified, with_values
from ..program.narrow import narrow_indices
from ..program.program import COMBINE, Extent, Output, Param, Program, ReduceKind
from ..program.resolver import Placeholders, Resolver, is_neutral
from ..program.space import Space, index_dtype_of, make_space
from .sliding import Sliding, axes_of, paired


@dataclass(frozen=True, slots=True, eq=False)
class Windowed:
    """A reduction over windows between pointwise work.

    Attributes
    ----------
    axes : of the results.
    kind, dtype : of the reduction; `dtype` is that of the accumulator.
    initial : combined with the rest, unless it changes nothing.
    rounded : half precision to which what a window comes to is rounded; "" where it is not.
    body : what is reduced, its one output's value, over the places of each axis; the last are its
        columns.
    after : what becomes of it, over the results. What the windows came to is a tile of a parameter
        behind those of the function, which nobody passes.
    sizes : the symbolic sizes of the parameters, and which values they may have.
    """

    axes: tuple[Sliding, ...]
    kind: ReduceKind
    dtype: str
    initial: Expr | None
    rounded: str
    body: Program
    after: Program
    sizes: Mapping[Var, Bounds] = field(default_factory=dict)

    @property
    def results(self) -> Extent:
        """How many there are."""
        return math.prod(axis.extent for axis in self.axes)

    @property
    def is_static(self) -> bool:
        """Whether there is as much to compute at each call."""
        return all(isinstance(axis.extent, int) for axis in self.axes)

    def analyzer(self, program: Program) -> tvm.sym.Analyzer:
        """One that knows the coordinates of a program of this problem, and the sizes."""
        return program.analyzer(self.sizes)

    def narrowed(self, sizes: Mapping[Var, Var]) -> Windowed:
        """The same over int32 coordinates, and over these int32 `sizes` in the place of its own;
        itself where something may not fit.
        """
        programs = [narrow_indices(p, self.sizes, sizes) for p in (self.body, self.after)]
        if any(program.index_dtype != "int32" for program in programs):
            return self
        body, after = programs
        extents = (*after.rows, after.columns)
        axes = tuple(replace(a, extent=n) for a, n in zip(self.axes, extents, strict=True))
        bounds = {sizes[size]: known for size, known in self.sizes.items()}
        return replace(self, axes=axes, body=body, after=after, sizes=bounds)

    def at(self, values: Mapping[Var, int]) -> tuple[Sliding, ...]:
        """The axes where sizes have values."""
        known = dict(values)
        return tuple(replace(a, extent=with_values(a.extent, known)) for a in self.axes)

    @property
    def result(self) -> int:
        """Number of the parameter that stands for what the windows came to."""
        return len(self.body.params)


def read_windows(func: tirx.PrimFunc, exact: bool = False) -> Windowed:
    """The windows of a function, and what is around them.

    Raises
    ------
    Unsupported
        There is not one reduction over windows that slide, or something is computed over other
        points.
    """
    try:
        return _read(func, exact)
    except RecursionError:
        raise TooDeep("the chain of temporaries is too long") from None


def _read(func: tirx.PrimFunc, exact: bool) -> Windowed:
    params, blocks = read_params(func), read_definitions(func)
    reductions = [definition for definition in blocks if definition.kind is not None]
    if len(reductions) != 1 or reductions[0].kind not in COMBINE:
        raise Unsupported(f"{len(reductions)} reductions, of which one is to be over windows")
    window = reductions[0]
    axes, value = _slides(window)
    definitions = {definition.buffer: definition for definition in blocks}
    written = [n for n, param in enumerate(params) if param.var in definitions]
    dtype = index_dtype_of(blocks)
    name = func.attrs.get("global_symbol") if func.attrs else None
    name = None if name is None else str(name)

    runs = [simplified(axis.run(axis.extent)) for axis in axes]
    space = make_space(runs[:-1], runs[-1], dtype)
    resolver = Resolver(space, definitions, Placeholders(space, params), exact)
    places = zip(window.axes, (*space.row_vars, space.column_var), strict=True)
    env = {axis: convert(at, dtype_of(axis)) for axis, at in places if axis is not None}
    combined = resolver.resolve(value, env, None)
    accumulator = _accumulator(dtype_of(combined))
    value = convert(combined, accumulator)
    output = Output(written[0], value, constant(0, dtype), window.dtype, full=True, phase=0)
    body = resolver.placeholders.program(name, [output], exact)
    initial = resolver.resolve(window.initial, {}, None)
    neutral = is_neutral(window.kind, number(initial), window.dtype)
    return Windowed(
        axes,
        window.kind,
        accumulator,
        None if neutral else convert(initial, accumulator),
        window.dtype if exact and window.dtype in HALF_DTYPES else "",
        body,
        _after(name, params, definitions, window, written, dtype, exact),
        {size: Bounds() for size in sizes_of(func)} | known_sizes(func),
    )


def _accumulator(dtype: str) -> str:
    """Small integers are accumulated in 32 bits."""
    small = dtype == "bool" or (is_integer(dtype) and not dtype.endswith(("32", "64")))
    return "int32" if small else widened(dtype)


# ---- before


def _slides(window: Definition) -> tuple[tuple[Sliding, ...], Expr]:
    """The axes of a window, and what it reduces with the place of each axis in that axis' stead."""
    name = window.buffer.name
    kept = [Var("one", tvm.ir.PrimType("int64")) if a is None else a for a in window.axes]
    reduced = [(var, extent) for var, extent in window.reduced if extent != 1]
    taps = [extent for _, extent in reduced]
    if not all(isinstance(n, int) for n in taps):
        raise Unsupported(f"{name} has windows of symbolic size")
    sizes = [*window.shape, *taps]
    if any(isinstance(n, int) and n < 1 for n in sizes):
        raise Unsupported(f"{name} has none of its elements")
    alone = {var: constant(0, dtype_of(var)) for var, extent in window.reduced if extent == 1}
    value = substitute(window.value, alone)
    every = [*kept, *(var for var, _ in reduced)]
    numbers = list(range(len(every)))
    order, others = numbers[: len(kept)], numbers[len(kept) :]
    loads: list[TensorLoad] = []
    tvm_ffi.structural_walk(value, [(TensorLoad, loads.append)])
    forms, touched = [], []
    for index in (index for load in loads for index in load.indices):
        used = set(variables(index))
        touched.append(frozenset(n for n in numbers if every[n] in used))
        forms.append(_steps(index, every))
    pairs = paired(order, others, forms, touched)
    if pairs is None:
        raise Unsupported(f"{name} reduces no windows that slide")
    together = {every[axis]: every[pair[0]] for axis, pair in pairs.items()}
    axes = axes_of(window.shape, sizes, order, pairs)

    def placed(load: TensorLoad) -> Expr:
        indices = [_placed(index, every, together) for index in load.indices]
        return tirx.BufferLoad(load.source, indices)

    value = tvm_ffi.structural_map(value, [(TensorLoad, placed)])
    if uses_any(value, together.values()):
        raise Unsupported(f"{name} weighs the elements of a window by their place")
    return axes, value


def _steps(index: Expr, every: Sequence[Var]) -> list[int] | None:
    form = linear_form(index, every)
    if form is None:
        return None
    steps = [number(step) for step in form[0]]
    return None if None in steps else [int(step) for step in steps]


def _placed(index: Expr, every: Sequence[Var], together: dict[Var, Var]) -> Expr:
    """An index with ``stride * axis + dilation * tap`` as the place, which takes the axis' name."""
    for axis, tap in together.items():
        if uses_any(index, [tap]):
            _, rest = linear_form(index, [axis, tap])
            return axis + rest
    return index


# ---- behind


def _after(
    name: str | None,
    params: Sequence[Param],
    definitions: dict[Var, Definition],
    window: Definition,
    written: Sequence[int],
    dtype: str,
    exact: bool,
) -> Program:
    """What is computed of the windows, at their own points."""
    space = make_space(window.shape[:-1], window.shape[-1], dtype)
    given = Param("windows", window.shape, window.dtype, window.buffer)
    others = {var: d for var, d in definitions.items() if not var.same_as(window.buffer)}
    placeholders = Placeholders(space, [*params, given])
    resolver = Resolver(space, others, placeholders, exact)
    outputs = [_output(n, definitions[params[n].var], window, space, resolver) for n in written]
    program = placeholders.program(name, outputs, exact)
    at_own = [tile for tile in program.tiles if tile.param == len(params)]
    elsewhere = [x for x in (*program.scalars, *program.elements) if x.param == len(params)]
    if elsewhere or len(at_own) != 1 or not _is_own(at_own[0].offset, window, space):
        raise Unsupported(f"{window.buffer.name} is read at another point, or not at all")
    return program


def _is_own(offset: Expr, window: Definition, space: Space) -> bool:
    """Whether a row of what the windows come to lies there, in a buffer that may be larger."""
    first = constant(0, space.index_dtype)
    own = flatten((*space.row_vars, first), shape_of(window.buffer), space.index_dtype)
    return space.analyzer.can_prove_equal(offset, own)


def _output(
    param: int, definition: Definition, window: Definition, space: Space, resolver: Resolver
) -> Output:
    """What is written to a parameter, in the shape of the windows."""
    sizes = [n for n in window.shape if n != 1]
    own_sizes = [n for n in definition.shape if n != 1]
    if len(own_sizes) != len(sizes) or not all(map(equal_sizes, own_sizes, sizes)):
        raise Unsupported(f"{definition.buffer.name} has another shape than the windows")
    every = zip((*space.row_vars, space.column_var), window.shape, strict=True)
    own = iter([axis for axis, extent in every if extent != 1])
    zero = constant(0, space.index_dtype)
    axes = tuple(zero if n == 1 else next(own) for n in definition.shape)
    value = resolver.read(definition.buffer, axes, None)
    place = flatten(axes, shape_of(definition.buffer), space.index_dtype)
    place = space.analyzer.simplify(place)
    first = {space.column_var: constant(0, space.index_dtype)}
    offset = space.analyzer.simplify(substitute(place, first))
    return Output(param, value, offset, definition.dtype, full=True, phase=0)
