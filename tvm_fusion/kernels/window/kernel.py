"""Kernels of windows: each thread loads a run of places once for all its results.

    for each row of places that the thread's results look at:
        x[e] = f(loads at place e)                  as vectors, where they are aligned
        for each of its rows of results: s[t][e] = combine(s[t][e], x[e])
    y[t][l] = g(combine over k of s[t][stride * l + dilation * k])

Conditions (padding) are decided when the kernel is written for all places of which the ranges of
the coordinates tell.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from typing import TYPE_CHECKING

import tvm
from tvm import tirx
from tvm.ir import Expr, Var
from tvm.script import tirx as T

from ...errors import Unsupported
from ...ir.extents import ASSUMED_SYMBOLIC_EXTENT
from ..forms import Ranked
from ..gpu.closed_forms import closed_forms
from ..gpu.frame import Frame, held, kernel_frame, then
from ..gpu.scope import Local, Point, RowScope
from ..gpu.transfer import load_tile, load_values, store_vector
from ..gpu.vectors import below, piece_bytes
from ..program.expr import (
    bytes_of,
    conjunction,
    conjuncts,
    constant,
    convert,
    dtype_of,
    is_if_then_else,
    known_factor,
    linear_form,
    number,
    rebuild,
    same,
    substitute,
    uses_any,
    widened,
)
from ..program.extents import divided_up, larger, simplified, sized
from ..program.program import (
    COMBINE,
    Element,
    Extent,
    Level,
    Output,
    Program,
    ReduceKind,
    Tile,
)
from .config import (
    WIDEST_ACCESS,
    Operations,
    WindowConfig,
    Work,
    fits,
    is_straight,
    least_results,
    pieces_of,
    ranked,
    tall_axis,
    widest_piece,
)
from .problem import Windowed

if TYPE_CHECKING:
    from ...config import HardwareProfile, Policy

LOADED_AHEAD = 256
"""Bytes of rows that a thread loads before it computes the first of them."""


def emit_windows(
    problem: Windowed, hw: HardwareProfile, config: WindowConfig | None = None
) -> tirx.PrimFunc:
    """The TIRx kernel of windows; None: of the best configuration.

    Raises
    ------
    Unsupported
        The configuration does not suit the windows, at some of their sizes, or the device.
    """
    config = config or rank_windows(problem, hw)[0][1]
    if next(unproven(problem, config), None) is not None:
        raise Unsupported(f"{config} for windows along {problem.axes}")
    return write_windows(problem, hw, config)


def unproven(problem: Windowed, config: WindowConfig) -> Iterator[tuple[int, int]]:
    """Axes that may have too few results for a configuration, and how many it takes."""
    analyzer = problem.analyzer(problem.body)
    for axis, least in least_results(problem.axes, config):
        extent = problem.axes[axis].extent
        if least > 1 and not isinstance(extent, int) and not analyzer.can_prove(extent >= least):
            yield axis, least


def write_windows(problem: Windowed, hw: HardwareProfile, config: WindowConfig) -> tirx.PrimFunc:
    """The kernel of a configuration, for sizes at which there are results enough."""
    if config.threads > hw.max_threads_per_block or not fits(problem.axes, config):
        raise Unsupported(f"{config} for windows along {problem.axes}")
    blocks = divided_up(math.prod(_counts(problem, config)), config.threads)
    grid = blocks if isinstance(blocks, int) else larger(blocks, 1)
    sizes = {size: Var(size.name, tvm.ir.PrimType("int32")) for size in problem.sizes}
    own = problem.narrowed(sizes)
    narrow = own.body.index_dtype == "int32"
    with kernel_frame(problem.body, grid, config.threads, narrow=narrow) as frame:
        for size, renamed in sizes.items():
            if renamed in own.sizes:
                T.Bind(convert(size, "int32"), var=renamed)
        _Kernel(own, closed_forms(own.body), closed_forms(own.after), config, frame).emit()
    return frame.func


def _counts(problem: Windowed, config: WindowConfig) -> list[Extent]:
    """Threads along each axis of the results."""
    tall = tall_axis(problem.axes)
    each = [config.tall if n == tall else 1 for n in range(len(problem.axes))]
    each[-1] = config.width
    return [divided_up(axis.extent, n) for axis, n in zip(problem.axes, each, strict=True)]


class _Kernel:
    """Writes the body of a kernel."""

    def __init__(
        self, problem: Windowed, body: Program, after: Program, config: WindowConfig, frame: Frame
    ) -> None:
        self.problem, self.body, self.after = problem, body, after
        self.config, self.frame = config, frame
        self.axes, self.columns, self.tall = (
            problem.axes,
            problem.axes[-1],
            tall_axis(problem.axes),
        )
        self.index = body.index_dtype
        self.analyzer = problem.analyzer(body)
        self.multiple = columns_multiple(problem)
        self.last: dict[Var, Expr] = {}  # of coordinates whose number is symbolic, the largest
        self.needed = self.columns.needed(config.width)
        self.runs = self._runs()

    def emit(self) -> None:
        """All of it; the last block may have threads left over."""
        config, threads = self.config, math.prod(_counts(self.problem, self.config))
        block, thread = (convert(x, self.index) for x in (self.frame.block, self.frame.thread))
        number = T.Bind(block * config.threads + thread)
        whole = isinstance(threads, int) and threads % config.threads == 0
        with nullcontext() if whole else then(number < self._sized(threads)):
            self._results(number)

    def _sized(self, extent: Extent) -> int | Expr:
        return extent if isinstance(extent, int) else sized(extent, self.index)

    def _bound(self, coordinate: Expr) -> Var:
        """A variable with a coordinate; where sizes are symbolic, no pass looks through it."""
        static = self.problem.is_static
        return T.Bind(coordinate if static else held(coordinate))

    def _within(self, coordinate: Expr, count: int | Expr) -> None:
        """Notes how many values a coordinate has."""
        self.analyzer.bind(coordinate, tvm.ir.Range(0, count))
        if not isinstance(count, int):
            self.last[coordinate] = count - constant(1, self.index)

    def _results(self, number: Expr) -> None:
        starts, owned = self._starts(number)
        partial = self._reduced(starts)
        for row in range(self.config.tall):
            at = list(starts)
            if self.tall is not None:
                at[self.tall] = starts[self.tall] + row
            self._finish(at, partial[row], owned)

    def _starts(self, number: Expr) -> tuple[list[Expr], dict[int, Expr]]:
        """The first result of a thread along each axis. The last threads along an axis begin where
        they end at its end, and compute again what those before them store: by such axes, the first
        result that a thread stores itself.
        """
        found: list[Expr] = []
        owned: dict[int, Expr] = {}
        counts = [self._sized(count) for count in _counts(self.problem, self.config)]
        for n in reversed(range(len(counts))):
            own = number if n == 0 else self._bound(T.truncmod(number, counts[n]))
            number = number if n == 0 else self._bound(T.truncdiv(number, counts[n]))
            each = self.config.width if n == len(counts) - 1 else self.config.tall
            if each > 1 and (n == len(counts) - 1 or n == self.tall):
                last = self.axes[n].extent - each
                self._within(own, counts[n])
                if known_factor(self.axes[n].extent, self.analyzer) % each:
                    owned[n] = self._bound(own * each)
                    own = self._bound(tirx.Min(owned[n], sized(last, self.index)))
                    self._within(own, self._sized(simplified(last + 1)))
                else:
                    own = own * each
            else:
                self._within(own, counts[n])
            found.insert(0, own)
        return found, owned

    # ---- rows of places

    def _reduced(self, starts: Sequence[Expr]) -> list[dict[int, Expr]]:
        """What each row of results of a thread comes to, place by place of its columns."""
        size = len(self.needed)
        slots = {place: n for n, place in enumerate(self.needed)}
        buffer = T.alloc_local((self.config.tall * size,), self.problem.dtype)
        combine = COMBINE[self.problem.kind]
        first = [True] * self.config.tall

        def take(row: int, place: int, value: Expr, fresh: bool) -> None:
            slot = row * size + slots[place]
            known = value if fresh else combine(buffer[slot], value)
            T.buffer_store(buffer, known, [slot])

        if is_straight(self.axes, self.config):
            for rows in _batches(list(self._straight_rows(starts)), self._row_bytes()):
                loaded = [_Row(self, at, starts[-1]) for at, _ in rows]
                for row, (_, receivers) in zip(loaded, rows, strict=True):
                    for place, value in row.values():
                        for t in receivers:
                            take(t, place, value, first[t])
                    for t in receivers:
                        first[t] = False
        else:
            least = _identity(self.problem.kind, self.problem.dtype)
            for slot in range(size):
                T.buffer_store(buffer, least, [slot])
            self._loops(
                starts,
                [n for n, axis in enumerate(self.axes[:-1]) if axis.slides],
                lambda at: [
                    take(0, place, value, False)
                    for place, value in _Row(self, at, starts[-1]).values()
                ],
            )
        return [
            {place: buffer[row * size + slot] for place, slot in slots.items()}
            for row in range(self.config.tall)
        ]

    def _row_bytes(self) -> int:
        sizes = [bytes_of(item.dtype) for item in (*self.body.tiles, *self.body.elements)]
        return len(self.needed) * max(sizes, default=1)

    def _straight_rows(self, starts: Sequence[Expr]) -> Iterator[tuple[list[Expr], list[int]]]:
        """The place of each row along all axes but the columns, and the rows of results that look
        at it.
        """
        outer = [n for n, a in enumerate(self.axes[:-1]) if a.slides and n != self.tall]
        for taps in itertools.product(*(range(self.axes[n].taps) for n in outer)):
            at = [start * a.stride for start, a in zip(starts[:-1], self.axes[:-1], strict=True)]
            for n, tap in zip(outer, taps, strict=True):
                at[n] = at[n] + tap * self.axes[n].dilation
            if self.tall is None:
                yield at, [0]
                continue
            axis = self.axes[self.tall]
            seen = [{axis.place(t, k) for k in range(axis.taps)} for t in range(self.config.tall)]
            for place in axis.needed(self.config.tall):
                here = list(at)
                here[self.tall] = at[self.tall] + place
                yield here, [t for t, places in enumerate(seen) if place in places]

    def _loops(
        self, starts: Sequence[Expr], open_: Sequence[int], run: Callable[[list[Expr]], object]
    ) -> None:
        """Runs over the taps of some axes, one loop in the other."""
        at = [start * a.stride for start, a in zip(starts[:-1], self.axes[:-1], strict=True)]

        def nest(left: Sequence[int], at: list[Expr]) -> None:
            if not left:
                run(at)
                return
            axis = self.axes[left[0]]
            with T.serial(axis.taps, unroll=False) as tap:
                here = list(at)
                here[left[0]] = at[left[0]] + convert(tap, self.index) * axis.dilation
                nest(left[1:], here)

        nest(open_, at)

    def decided(self, condition: Expr) -> Expr:
        """A condition, simplified; a number where it is the same for all coordinates."""
        found = below(condition, self.analyzer)
        if self.last and number(found) is None:
            holds = self._holds(found)
            return found if holds is None else constant(int(holds), "bool")
        return found

    def _holds(self, condition: Expr) -> bool | None:
        """Whether a comparison holds for all coordinates of which the number is symbolic; None
        where it may for some.
        """
        if isinstance(condition, tirx.Not):
            holds = self._holds(condition.a)
            return None if holds is None else not holds
        if not isinstance(condition, tirx.LT | tirx.LE):
            return None
        known, slack = list(self.last), int(isinstance(condition, tirx.LE))
        form = linear_form(condition.b - condition.a + slack, known)
        steps = None if form is None else [number(step) for step in form[0]]
        if steps is None or None in steps:
            return None
        least = most = form[1]
        for var, step in zip(known, steps, strict=True):
            far = self.last[var] * constant(int(step), self.index)
            least, most = (least, most + far) if step > 0 else (least + far, most)
        if self.analyzer.can_prove(least > 0):
            return True
        return False if self.analyzer.can_prove(most <= 0) else None

    # ---- loads

    def _runs(self) -> dict[Var, list[tuple[int, int]]]:
        """The pieces in which each input that lies along the columns is loaded."""
        found = {}
        known = self.problem.analyzer(self.body)
        for item in (*self.body.tiles, *self.body.elements):
            aligned = alignment(self.body, item, known)
            if aligned is None or self.body.level(item.var) != Level.ELEMENT:
                continue
            pitch, first = aligned
            size = bytes_of(item.dtype)
            widest = widest_piece(self.columns, self.multiple, self.config, size, pitch)
            found[item.var] = pieces_of(self.needed, first, widest)
        return found

    # ---- results

    def _finish(self, at: Sequence[Expr], partial: dict[int, Expr], owned: dict[int, Expr]) -> None:
        """What a row of results comes to, and what is stored of it."""
        problem, after, width = self.problem, self.after, self.config.width
        spans = _Spans(problem.kind, self.columns.dilation, partial)
        windows = [self._window(spans, lane) for lane in range(width)]
        scope = RowScope(after, self.frame)
        for var, coordinate in zip(after.row_vars, at[:-1], strict=True):
            scope.env[var] = convert(coordinate, after.index_dtype)
        column = convert(at[-1], after.index_dtype)
        scope.load_scalars()
        loaded = self._beside(scope, column)
        values = [output.value for output in after.outputs]
        scope.prepare_values(values)
        prepared = [scope.prepare(value) for value in values]
        results: list[list[Expr]] = [[] for _ in prepared]
        own = {tile.var for tile in after.tiles if tile.param == problem.result}
        for lane, window in enumerate(windows):

            def local(var: Var, lane: int = lane, window: Expr = window) -> Expr | None:
                if var in own:
                    return window
                return loaded[var][lane] if var in loaded else None

            point = Point(scope, column + lane, local)
            for found, expr in zip(results, prepared, strict=True):
                found.append(T.Bind(point.evaluate(expr)))
        own_row = self.tall not in owned
        with nullcontext() if own_row else then(at[self.tall] >= owned[self.tall]):
            for output, found in zip(after.outputs, results, strict=True):
                self._store(scope, output, at[-1], found, owned.get(len(at) - 1))

    def _store(
        self,
        scope: RowScope,
        output: Output,
        start: Expr,
        values: Sequence[Expr],
        owned: Expr | None,
    ) -> None:
        """Neighbouring results from `start` on; those from `owned` on alone, if that is given."""
        column = convert(start, self.after.index_dtype)
        if owned is None:
            piece = self._piece(output.offset, output.dtype)
            store_vector(scope, output, column, values, piece)
            return
        for lane, value in enumerate(values):
            with then(start + lane >= owned):
                store_vector(scope, output, column + lane, [value], bytes_of(output.dtype))

    def _window(self, spans: _Spans, lane: int) -> Expr:
        """What the window of a lane comes to."""
        problem = self.problem
        value = spans.of(lane * self.columns.stride, self.columns.taps)
        if problem.initial is not None:
            value = COMBINE[problem.kind](value, problem.initial)
        if problem.rounded:
            value = tirx.Cast("float32", tirx.Cast(problem.rounded, value))
        dtype = next(t.dtype for t in self.after.tiles if t.param == problem.result)
        return held(convert(value, widened(dtype)))

    def _piece(self, offset: Expr, dtype: str) -> int:
        """Bytes of an access to neighbouring results."""
        if self.multiple % self.config.width:
            return bytes_of(dtype)
        analyzer = self.problem.analyzer(self.after)
        return piece_bytes(offset, dtype, self.config.width, analyzer)

    def _beside(self, scope: RowScope, column: Expr) -> dict[Var, Var]:
        """Vectors of what else is read at the results."""
        found = {}
        for tile in self.after.tiles:
            piece = self._piece(tile.offset, tile.dtype)
            if tile.param == self.problem.result or piece == bytes_of(tile.dtype):
                continue
            width = self.config.width
            found[tile.var] = T.alloc_local((width,), tile.dtype)
            load_tile(scope, tile, column, (found[tile.var], 0), width, piece)
        return found


class _Row:
    """One row of places, loaded."""

    def __init__(self, kernel: _Kernel, at: Sequence[Expr], start: Expr) -> None:
        self.kernel, body = kernel, kernel.body
        self.scope = _Scope(body, kernel.frame, self._decided if kernel.last else None)
        for var, place in zip(body.row_vars, at, strict=True):
            self.scope.env[var] = place
        self.scope.load_scalars()
        self.start = start * kernel.columns.stride
        self.loaded: dict[tuple[Var, int], Expr] = {}
        for item in (*body.tiles, *body.elements):
            for place, size in kernel.runs.get(item.var, ()):
                self._load(item, place, size)

    def values(self) -> Iterator[tuple[int, Expr]]:
        """What is reduced at each place."""
        (output,) = self.kernel.body.outputs
        self.scope.prepare_values([output.value])
        prepared = self.scope.prepare(output.value)
        for place in self.kernel.needed:
            point = _Place(self.scope, self._column(place), self._local(place), self._decided)
            yield place, held(point.evaluate(prepared))

    def _column(self, place: int) -> Expr:
        return self.start + constant(place, self.kernel.index)

    def _local(self, place: int) -> Local:
        return lambda var: self.loaded.get((var, place))

    def _load(self, item: Tile | Element, place: int, size: int) -> None:
        """Elements from a place on, where their guard holds; by halves, where it may hold for some
        of them alone.
        """
        guard = item.guard if isinstance(item, Element) else None
        condition = constant(1, "bool") if guard is None else self._together(guard, place, size)
        if condition is None:
            self._load(item, place, size // 2)
            self._load(item, place + size // 2, size // 2)
            return
        start = self._column(place)
        offset = substitute(self.scope.row(item.offset), {self.kernel.body.column_var: start})
        if isinstance(item, Tile):
            offset = offset + convert(start, dtype_of(offset))
        buffer = T.alloc_local((size,), item.dtype)
        for n in range(size):
            self.loaded[item.var, place + n] = buffer[n]
        if number(condition) == 0:
            return
        with nullcontext() if number(condition) else then(condition):
            nbytes = size * bytes_of(item.dtype)
            load_values(self.scope, item.param, offset, item.dtype, (buffer, 0), size, nbytes)

    def _together(self, guard: Expr, place: int, size: int) -> Expr | None:
        """The condition under which all elements of a piece may be loaded; None where it may hold
        for some of them.
        """
        column, found = self.kernel.body.column_var, constant(1, "bool")
        for part in conjuncts(self.scope.row(guard)):
            first, last = (
                self.kernel.decided(substitute(part, {column: self._column(end)}))
                for end in (place, place + size - 1)
            )
            if size > 1 and uses_any(part, [column]) and not _alike(part, column, first, last):
                return None
            if number(first) == 0:
                return first
            if number(first) is None:
                found = first if number(found) == 1 else tirx.And(found, first)
        return found

    def _decided(self, expr: Expr) -> Expr:
        """`expr` without the conditions that the ranges of coordinates decide."""
        if isinstance(expr, tirx.Select):
            parts = expr.condition, expr.true_value, expr.false_value
        elif is_if_then_else(expr):
            parts = tuple(expr.args)
        else:
            return rebuild(expr, self._decided)
        condition = self.kernel.analyzer.simplify(parts[0])
        if self.kernel.last and number(condition) is None:
            condition = self._all(map(self.kernel.decided, conjuncts(condition)))
        if number(condition) is not None:
            return self._decided(parts[1] if number(condition) else parts[2])
        yes, no = map(self._decided, parts[1:])
        make = tirx.Select if isinstance(expr, tirx.Select) else tirx.if_then_else
        return make(condition, yes, no)

    @staticmethod
    def _all(conditions: Iterable[Expr]) -> Expr:
        """All of some conditions at once, without those that hold."""
        left = [condition for condition in conditions if number(condition) != 1]
        never = next((condition for condition in left if number(condition) == 0), None)
        return conjunction(*left) if left and never is None else constant(int(not left), "bool")


def _alike(part: Expr, column: Var, first: Expr, last: Expr) -> bool:
    """Whether a condition is the same in all columns from one to another, at which it is `first`
    and `last`: it is, where both are the same and it compares what grows with the column.
    """
    if not isinstance(part, tirx.LT | tirx.LE | tirx.GT | tirx.GE) or not same(first, last):
        return False
    return linear_form(part.a, [column]) is not None and linear_form(part.b, [column]) is not None


class _Scope(RowScope):
    """What is known of a row; `decide` takes conditions out before those on the row are bound."""

    def __init__(
        self, program: Program, frame: Frame, decide: Callable[[Expr], Expr] | None
    ) -> None:
        super().__init__(program, frame)
        self.decide = decide

    def prepare(self, expr: Expr) -> Expr:
        return super().prepare(expr if self.decide is None else self.decide(self.row(expr)))


class _Place(Point):
    """The values at a place, of which `decide` takes what is known out."""

    def __init__(
        self, scope: RowScope, column: Expr, local: Local, decide: Callable[[Expr], Expr]
    ) -> None:
        super().__init__(scope, column, local)
        self.decide = decide

    def evaluate(self, prepared: Expr) -> Expr:
        return self.decide(super().evaluate(prepared))


class _Spans:
    """What neighbouring taps come to: those of 2^n from those of half as many."""

    def __init__(self, kind: ReduceKind, dilation: int, partial: dict[int, Expr]) -> None:
        self.combine, self.dilation = COMBINE[kind], dilation
        self.known = {(place, 1): value for place, value in partial.items()}

    def of(self, place: int, taps: int) -> Expr:
        """What `taps` taps from a place on come to."""
        known = self.known.get((place, taps))
        if known is None:
            half = 1 << (taps - 1).bit_length() - 1
            right = self.of(place + half * self.dilation, taps - half)
            known = held(self.combine(self.of(place, half), right))
            self.known[place, taps] = known
        return known


def _batches(rows: list, row_bytes: int) -> Iterator[list]:
    """As many rows as are loaded together."""
    many = max(1, LOADED_AHEAD // max(1, row_bytes))
    for first in range(0, len(rows), many):
        yield rows[first : first + many]


def _identity(kind: ReduceKind, dtype: str) -> Expr:
    """What changes nothing that it is combined with."""
    if kind in (ReduceKind.SUM, ReduceKind.PROD):
        return constant(0 if kind is ReduceKind.SUM else 1, dtype)
    sign = -1 if kind is ReduceKind.MAX else 1
    if dtype.startswith("float"):
        return constant(sign * math.inf, dtype)
    return tvm.tirx.min_value(dtype) if sign < 0 else tvm.tirx.max_value(dtype)


def columns_multiple(problem: Windowed) -> int:
    """What the number of columns is known to be a multiple of."""
    return known_factor(problem.axes[-1].extent, problem.analyzer(problem.body))


def alignment(
    body: Program, item: Tile | Element, analyzer: tvm.sym.Analyzer
) -> tuple[int, int] | None:
    """What the offsets of a row's first place are a multiple of but for a constant, and that; None
    where neighbouring places are elsewhere in memory.
    """
    first, column = item.offset, body.column_var
    if isinstance(item, Element):
        data = (x.var for x in (*body.tiles, *body.elements, *body.values, *body.scalars))
        form = linear_form(item.offset, [column])
        if uses_any(item.offset, set(data)) or form is None or number(form[0][0]) != 1:
            return None
        first = form[1]
    known = analyzer.modular_set(first)
    coeff, base = int(known.coeff), int(known.base)
    if coeff == 0:  # a constant: all rows begin there
        return 1 << 20, base
    return coeff, base


# ---- ranking


def work_of(problem: Windowed, values: Mapping[Var, int] | None = None) -> Work:
    """What a problem takes, as far as its configurations differ in it, at values of its sizes; None
    for those that are assumed.
    """
    body, after, known = problem.body, problem.after, problem.analyzer(problem.body)
    if values is None:
        values = {size: of.nearest(ASSUMED_SYMBOLIC_EXTENT) for size, of in problem.sizes.items()}
    loads, pitch, first = [], 1 << 20, 0
    for item in (*body.tiles, *body.elements):
        aligned = alignment(body, item, known)
        if aligned is not None:
            loads.append(bytes_of(item.dtype))
            if math.gcd(aligned[0], WIDEST_ACCESS) <= math.gcd(pitch, WIDEST_ACCESS):
                pitch, first = aligned
    stores = tuple(bytes_of(output.dtype) for output in after.outputs)
    others = (*after.tiles, *after.elements)
    beside = sum(bytes_of(x.dtype) for x in others if x.param != problem.result)
    axes = problem.at(values)
    results = math.prod(axis.extent for axis in axes)
    places = math.prod(axis.seen(axis.extent) for axis in axes)
    moved = float(places * sum(loads) + results * (sum(stores) + beside))
    return Work(
        axes,
        columns_multiple(problem),
        tuple(loads),
        stores,
        float(beside),
        pitch,
        first,
        _operations(body),
        _operations(after),
        moved,
        moved,
    )


def _operations(program: Program) -> Operations:
    """Instructions of one point: nodes of its expressions."""
    exprs = [value.body for value in program.values]
    exprs += [output.value for output in program.outputs]
    count = 0.0

    def visit(expr: Expr) -> Expr:
        nonlocal count
        count += 0.0 if isinstance(expr, Var) or number(expr) is not None else 1.0
        return rebuild(expr, visit)

    for expr in exprs:
        visit(expr)
    return Operations(arithmetic=count)


def rank_windows(problem: Windowed, hw: HardwareProfile, policy: Policy | None = None) -> Ranked:
    """Predicted seconds and configurations that suit all sizes, the fastest first."""
    found = ranked(work_of(problem), hw)
    if not problem.is_static:
        found = [entry for entry in found if next(unproven(problem, entry[1]), None) is None]
    if not found:
        raise Unsupported("more places than a thread has registers for")
    return list(found)
