"""Convolutions of few channels a group on the CUDA cores, each element of the data read about once.

    for each row of the data that the positions of a thread meet:
        read the row after it; what lies outside of the data stays zero
        each element of the row goes to the sums of all rows of results that have it under a tap
        the oldest row of results is complete: epilogue, store; the others move up

A thread has a strip of neighbouring positions of a row of results, and a few filters: neighbouring
threads have neighbouring filters where channels lie side by side in memory, else neighbouring
strips. Rows of dilated filters are taken in phases, in which their taps are neighbours.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

from tvm import tirx
from tvm.ir import Expr, Var
from tvm.script import tirx as T

from ....config import HardwareProfile
from ...gpu.frame import launch_bounds
from ...gpu.product_frame import Frame, ceil_div, divided, open_kernel
from ...program.expr import conjunction, constant, convert
from ...program.extents import is_below, is_multiple
from ...program.program import Extent
from ..geometry import Convolution
from .config import DepthwiseConfig
from .epilogue import Epilogue
from .problem import Direct, direct_problem
from .reads import Row, guard
from .shape import Roles, Shape
from .time import resident_blocks
from .weights import Weights

GROUP = 8
"""Columns of an access to what lies along them, at most."""


def emit_depthwise(
    convolution: Convolution, hw: HardwareProfile, config: DepthwiseConfig
) -> tirx.PrimFunc:
    """Write a convolution of few channels a group as one TIRx kernel.

    Parameters
    ----------
    convolution : Convolution
        Depthwise, or of at most 32 channels a group; any number of windows, taps, strides and
        dilations, any layout and epilogue.
    hw : HardwareProfile
        The CUDA device.
    config : DepthwiseConfig
        One of `depthwise_ranked`.

    Returns
    -------
    func : tirx.PrimFunc
        With the parameters of the PrimFunc that the convolution was read from.

    Raises
    ------
    Unsupported
        Where the convolution, or the configuration for it, cannot be written.
    """
    problem = direct_problem(convolution)
    shape = Shape(Roles(problem.numbers, config.rolls), config)
    shape.check(hw)
    with open_kernel(convolution.contraction) as frame:
        _Kernel(frame, problem, shape).emit(resident_blocks(shape, hw))
    return frame.func


class _Kernel:
    def __init__(self, frame: Frame, problem: Direct, shape: Shape) -> None:
        self.frame, self.problem, self.shape = frame, problem, shape
        self.config, self.numbers = shape.config, shape.numbers
        self.convolution = problem.convolution
        s, c = shape, shape.config
        self.columns, self.rows_of_results = (
            problem.size(w) for w in (self.numbers.columns, s.row_window)
        )
        self.high = problem.high(s.row_window)
        self.row_positions = ceil_div(self.rows_of_results, s.rows.phases)
        self.strips = ceil_div(ceil_div(self.columns, s.columns.phases), c.columns)
        self.bands = ceil_div(self.row_positions, c.rows)

    def emit(self, resident: int) -> None:
        s, c = self.shape, self.config
        chunks = -(-s.lanes // c.lanes)
        tasks = self.strips * s.columns.phases * self.bands * s.rows.phases
        tasks = tasks * math.prod(self._places)
        blocks = chunks * ceil_div(tasks, c.tasks)
        T.device_entry()
        block = T.cta_id([blocks if isinstance(blocks, int) else convert(blocks, "int32")])
        thread = T.thread_id([c.threads])
        if self.numbers.along_channels:
            lane, task = thread % c.lanes, thread // c.lanes
        else:
            lane, task = thread // c.tasks, thread % c.tasks
        lane, task = T.Bind(lane), T.Bind(task)
        first = T.Bind(self._index(block % chunks) * c.lanes)
        self.lane = T.Bind(first + self._index(lane))
        self.task = T.Bind(self._index(block // chunks) * c.tasks + self._index(task))
        self.weights = Weights(self.frame, self.problem, s)
        if s.is_staged:
            self.weights.fill(first, lane, thread)
        inside = guard(
            conjunction(
                None if s.lanes % c.lanes == 0 else self.lane < s.lanes,
                None if is_multiple(tasks, c.tasks) else self.task < self.frame.size(tasks),
            )
        )
        with launch_bounds(resident), inside:
            self._thread()

    def _index(self, value: Expr | int) -> Expr:
        if isinstance(value, int):
            return constant(value, self.frame.index)
        return convert(value, self.frame.index)

    # ---- a thread

    def _thread(self) -> None:
        s, c = self.shape, self.config
        rest = self.task
        rest, strip = divided(rest, self.frame.size(self.strips))
        self.strip, rest = T.Bind(strip), T.Bind(rest)
        self.column_phase, rest = self._digit(rest, s.columns.phases)
        self.band, rest = self._digit(rest, self.bands)
        self.row_phase, rest = self._digit(rest, s.rows.phases)
        self.places: list[Expr] = []
        for size in reversed(self._places):
            place, rest = self._digit(rest, size)
            self.places.insert(0, place)
        self.first_column = T.Bind(
            s.columns.step * self.column_phase
            - s.columns.before
            + self.strip * (s.columns.unit * s.columns.stride * c.columns)
        )
        self.first_row = T.Bind(
            s.rows.step * self.row_phase
            - s.rows.before
            + self.band * (s.rows.unit * s.rows.stride * c.rows)
        )
        if not c.shared:
            self.weights.hold(self.lane)
        group = math.gcd(GROUP, c.columns) if s.columns.phases == 1 else 1
        while not is_multiple(self.columns, group):
            group //= 2
        self.epilogue = Epilogue(self.frame, self.problem, c.filters, c.columns, group)
        self.epilogue.prepare(self._filter)
        self._walk()

    @property
    def _places(self) -> list[Extent]:
        """Positions along each outer window."""
        return [self.convolution.windows[i].size for i in self.shape.outer]

    def _digit(self, number: Expr, extent: Extent) -> tuple[Expr, Expr]:
        size = self.frame.size(extent)
        if isinstance(size, int) and size == 1:
            return constant(0, self.frame.index), number
        quotient, rest = divided(number, size)
        return T.Bind(rest), T.Bind(quotient)

    def _filter(self, f: int) -> dict[Var, Expr]:
        return self.problem.filter(self.lane * self.config.filters + f)

    def _walk(self) -> None:
        s, c = self.shape, self.config
        count = c.columns * c.filters
        self.sums = T.alloc_local((s.alive * count,), "float32")
        self._clear(0, s.alive * count)
        rows: Expr | int = c.rows
        if not is_multiple(self.row_positions, c.rows):
            left = self.frame.size(self.row_positions) - self.band * c.rows
            rows = T.Bind(T.min(self._index(left), self._index(c.rows)))
        self.steps = rows + s.alive - 1
        parts = s.chunks * s.outer_taps if s.unrolled else 1
        self.rows = [
            [Row(self.frame, self.problem, c.channels, c.columns) for _ in range(s.units)]
            for _ in range(parts)
        ]
        first, end = self._steps_with_rows()
        for part, units in enumerate(self.rows):
            for unit, row in enumerate(units):
                self._read(row, first, self._index(part), unit, end)
        if not s.ramps:
            self._steps(first, end, end)
        else:
            # Rows above the results of the thread's first row, and below those of its last one, go
            # to the sums of some rows only.
            held = self._index(s.alive - 1)
            self._steps(first, T.min(held, end), end, lambda step, k: step >= k, completes=False)
            self._steps(held, T.min(end, self._index(rows)), end)
            behind = T.max(held, self._index(rows))
            self._steps(behind, end, end, lambda step, k: step < rows + k)
        if not self._ends_inside():
            with T.serial(T.max(end, first), self.steps, unroll=False) as step:
                self._move(count)
                with guard(self._completes(step)):
                    self.epilogue.request(self._point(step), self._inside)
                    self.epilogue.finish(self._sum, self._point(step), self._inside)

    def _steps(
        self,
        first: Expr,
        last: Expr,
        end: Expr,
        meets: Callable[[Expr, int], Expr | None] = lambda step, k: None,
        completes: bool = True,
    ) -> None:
        """Steps from one on and below another, of those below `end` that have rows of the data.

        `meets` is the condition under which a step's rows go to the sums of the row of results that
        is the k-th youngest.
        """
        s, count = self.shape, self.config.columns * self.config.filters
        with T.serial(first * s.turns, last * s.turns, unroll=False) as number:
            step, turn = number, self._index(0)
            if s.turns > 1:
                step, turn = T.Bind(number // s.turns), T.Bind(number % s.turns)
            done = self._completes(step)
            with guard(None if s.turns == 1 else turn == 0):
                self._move(count)
                if completes:
                    with guard(done):
                        self.epilogue.request(self._point(step), self._inside)
            for part, units in enumerate(self.rows):
                for unit, row in enumerate(units):
                    x = self._next(row, number, part, unit, end)
                    for k in reversed(range(s.alive)):
                        if (tap := k * s.rows.stride + unit) < s.rows.taps:
                            with guard(meets(step, k)):
                                self._multiply(x, k, turn + part, tap)
            if completes:
                last_turn = None if s.turns == 1 else turn == s.turns - 1
                with guard(conjunction(last_turn, done)):
                    self.epilogue.finish(self._sum, self._point(step), self._inside)

    def _steps_with_rows(self) -> tuple[Expr, Expr]:
        """The first step that a row of the data may be added in, and the first one beyond the last.

        Steps before the first one add and complete nothing.
        """
        s = self.shape
        slide = s.rows
        first: Expr | int = 0
        if s.alive > 1 and slide.before + slide.low > 0:
            above = self._paces(slide.low - (s.units - 1) * slide.unit)
            first = T.min(T.max(above, self._index(0)), self._index(s.alive - 1))
        end: Expr | int = self.steps
        if not self._ends_inside():
            end = T.min(self._paces(self.high), self._index(self.steps))
        return (T.Bind(self._index(x)) for x in (first, end))

    def _paces(self, element: Extent) -> Expr:
        """Steps from the thread's first row on until one is at `element` or beyond.

        ``ceil((element - first_row) / pace)``, divided as a number that rises with the thread: TVM
        divides a falling one by a negative number, which CUDA's code generator refuses in bounds.
        """
        slide = self.shape.rows
        behind = self.first_row - self.frame.size(element)
        return self._index(0) - behind // (slide.stride * slide.unit)

    def _ends_inside(self) -> bool:
        """Whether the last step of a thread always has a row of the data."""
        slide = self.shape.rows
        pace, c = slide.stride * slide.unit, self.config
        steps = self.bands * c.rows + self.shape.alive - 1
        last = slide.step * (slide.phases - 1) - slide.before + pace * (steps - 1)
        return is_below(last, self.high)

    def _completes(self, step: Expr) -> Expr | None:
        """Condition under which a step completes a row of results."""
        s = self.shape
        return conjunction(
            None if s.alive == 1 else step >= s.alive - 1,
            None
            if is_multiple(self.rows_of_results, s.rows.phases)
            else self._result_row(step) < self.frame.size(self.rows_of_results),
        )

    def _next(self, row: Row, number: Expr, part: int, unit: int, end: Expr) -> Expr:
        """A row of the data as numbers; the next one is read."""
        s = self.shape
        x = row.numbers()
        step, turn = T.Bind(number + 1), self._index(part)
        if s.turns > 1:
            step, turn = T.Bind(step // s.turns), T.Bind(step % s.turns)
        self._read(row, step, turn, unit, end)
        return x

    def _multiply(self, x: Expr, k: int, part: Expr, tap: int) -> None:
        """Adds a row of the data under a row of taps to the sums of a row of results."""
        s, c = self.shape, self.config
        chunk, outer = self._parts(part)
        depthwise = self.numbers.is_depthwise
        pitch = s.reach.pitch
        with T.serial(s.columns.taps, unroll=True) as t:
            for v in range(1 if depthwise else c.channels):
                channel = self._index(0) if depthwise else chunk * c.channels + v
                entry = (channel * s.outer_taps + outer) * s.rows.taps + tap
                weights = self.weights.at(entry * s.columns.taps + t)
                with T.serial(c.columns, unroll=True) as q:
                    at = (q * s.columns.stride + t * pitch) * c.channels
                    for f in range(c.filters):
                        element = x[at + (f // s.each if depthwise else v)]
                        place = (k * c.columns + q) * c.filters + f
                        T.buffer_store(self.sums, self.sums[place] + element * weights[f], [place])

    def _parts(self, part: Expr) -> tuple[Expr, Expr]:
        """Which channels of a group, and which outer taps."""
        outer = self.shape.outer_taps
        if outer == 1:
            return part, constant(0, self.frame.index)
        return part // outer, part % outer

    # ---- where things are

    def _row_element(self, step: Expr, unit: int) -> Expr:
        s = self.shape
        return self.first_row + (step * s.rows.stride + unit) * s.rows.unit

    def _outer_elements(self, part: Expr) -> list[Expr]:
        """The element of each outer window under a tap."""
        _, rest = self._parts(part)
        found: list[Expr] = []
        for i, place in zip(reversed(self.shape.outer), reversed(self.places), strict=True):
            slide = self.numbers.windows[i]
            tap: Expr | int = 0
            if slide.taps > 1:
                tap, rest = rest % slide.taps, rest // slide.taps
            reach = slide.dilation
            found.insert(0, place * slide.step + tap * reach - slide.before)
        return found

    def _meets(self, step: Expr, part: Expr, unit: int) -> Expr | None:
        """Condition under which a row of the data, of a step that has one, is no padding."""
        s = self.shape
        conditions = []
        slide = s.rows
        element = self._row_element(step, unit)
        above = slide.before + slide.low
        skipped = s.units == 1 and above <= (s.alive - 1) * slide.unit * slide.stride
        conditions.append(None if above <= 0 or skipped else element >= slide.low)
        conditions.append(None if s.units == 1 else element < self.frame.size(self.high))
        elements = self._outer_elements(part)
        for i, at in zip(s.outer, elements, strict=True):
            slide = self.numbers.windows[i]
            reach = slide.dilation * (slide.taps - 1)
            size, high = self.problem.size(i), self.problem.high(i)
            most = slide.step * (size - 1) + reach - slide.before
            conditions.append(None if -slide.before >= slide.low else at >= slide.low)
            conditions.append(None if is_below(most, high) else at < self.frame.size(high))
        return conjunction(*conditions)

    def _leaves(self, step: Expr, exists: Expr | None, unit: int) -> Expr | None:
        """Condition under which a row of padding takes the place of another one, and is needed:
        those above the data, and of outer windows that each row is in, come before all others.
        """
        slide = self.shape.rows
        if self.shape.turns > 1:
            return None if exists is None else tirx.Not(exists)
        last = slide.step * (self.rows_of_results - 1) - slide.before
        last += slide.dilation * (slide.taps - 1)
        if self.shape.units == 1 or is_below(last, self.high):
            return None
        return self._row_element(step, unit) >= self.frame.size(self.high)

    def _read(self, row: Row, step: Expr, part: Expr, unit: int, end: Expr) -> None:
        """Reads a row of the data where the thread has such a step; padding is zero."""
        s = self.shape
        exists = self._meets(step, part, unit)
        if (leaves := self._leaves(step, exists, unit)) is not None:
            with T.If(leaves), T.Then():
                row.clear()
        with guard(conjunction(step < end, exists)):
            chunk, _ = self._parts(part)
            element = self._row_element(step, unit)
            outer = dict(zip(s.outer, self._outer_elements(part), strict=True))
            channel = self._channel(chunk)

            def place(column: Expr, v: int) -> Sequence[Expr]:
                at = {self.numbers.columns: column, s.row_window: element, **outer}
                by_dim = {w.dim: at[i] for i, w in enumerate(self.convolution.windows)}
                dims = range(len(self.convolution.coordinates))
                return [self._index(by_dim.get(dim, channel + v)) for dim in dims]

            row.read(self.first_column, place)

    def _channel(self, chunk: Expr) -> Expr:
        """The thread's first channel, of all groups."""
        c, n = self.config, self.numbers
        group = T.Bind(self.lane * c.filters // n.filters)
        return group if n.is_depthwise else T.Bind(group * n.channels + chunk * c.channels)

    def _column(self, start: Expr | int, i: int) -> Expr:
        s = self.shape
        inner = self.strip * self.config.columns + start + i
        return self.column_phase + inner * s.columns.phases

    def _inside(self, first: Expr):
        """Guard of a group of columns."""
        s, c = self.shape, self.config
        whole = is_multiple(self.columns, c.columns * s.columns.phases)
        return guard(None if whole else self._column(first, 0) < self.frame.size(self.columns))

    def _result_row(self, step: Expr) -> Expr:
        s = self.shape
        inner = self.band * self.config.rows + step - (s.alive - 1)
        return self.row_phase + inner * s.rows.phases

    def _point(self, step: Expr):
        """Axes of the results at a column and a filter."""
        s, row = self.shape, self._result_row(step)

        def point(start: Expr | int, i: int):
            places = {self.numbers.columns: self._index(self._column(start, i)), s.row_window: row}
            places |= dict(zip(s.outer, self.places, strict=True))
            axes = ((self.problem.axis(window), at) for window, at in places.items())
            env = {axis.var: at for axis, at in axes if axis is not None}

            def at(f: int) -> Mapping[Var, Expr]:
                return {**env, **self._filter(f)}

            return at

        return point

    # ---- sums

    def _sum(self, start: Expr | int, i: int):
        s, c = self.shape, self.config

        def of(f: int) -> Expr:
            place = ((s.alive - 1) * c.columns + start + i) * c.filters + f
            return self.sums[place]

        return of

    def _move(self, count: int) -> None:
        """The sums of each row of results take the place of those of the one before it."""
        for k in reversed(range(1, self.shape.alive)):
            with T.serial(count, unroll=True) as i:
                T.buffer_store(self.sums, self.sums[(k - 1) * count + i], [k * count + i])
        self._clear(0, count)

    def _clear(self, first: int, count: int) -> None:
        with T.serial(count, unroll=True) as i:
            T.buffer_store(self.sums, constant(0, "float32"), [first + i])
