"""A recurrence on a CPU, computed in float32: a vector of units at a time, the gates of several
sequences in registers.

    for each step:
        for each vector of units u:                         on all cores, where a step is much work
            for each few sequences:
                sums[gate, row, u] = sum over k of w[gate, k, u] * hidden[row, k]
                hidden', memory = cell(x, sums, hidden, memory)

Where a step is little work, and there are several groups of sequences, cores take these, each
with all its steps. Weights lie in panels [gates of a vector of units, terms, lanes], so that each
is read from end to end: packed when the module is compiled where they are constants, else before
the first step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from enum import Enum

from tvm import tirx
from tvm.ir import Expr, Var
from tvm.script.ir_builder import IRBuilder
from tvm.script.ir_builder import tirx as T

from ...errors import Unsupported
from ..cpu.contraction.panels import Panels, constants_of
from ..cpu.loops import seq
from ..cpu.machine import PRODUCT_WORK, Machine
from ..cpu.math import bfloat16_to_float32, lower_call, round_to_bfloat16
from ..cpu.nests.scope import allocate, new_buffer
from ..cpu.stages.rewrite import rebuild
from ..cpu.write import finished
from ..program.expr import HALF_DTYPES, constant, convert, dtype_of
from .cell import step
from .form import Recurrence, index

DTYPE = "float32"  # in which is computed
DTYPES = (DTYPE, *HALF_DTYPES)
SPARE_REGISTERS = 6  # for weights and hidden states beside the sums

NAMES = 8
"""Values that a cell gives names. They are vectors in memory to TVM, in registers to LLVM: TVM's
passes put the values of variables into each other, and took 6 s for an LSTM."""


class Cores(Enum):
    """What cores take."""

    UNITS = "units"
    SEQUENCES = "sequences"
    ONE = "one core takes all"


@dataclass(frozen=True, slots=True)
class CpuConfig:
    """How a recurrence is written.

    Attributes
    ----------
    lanes : units of a vector; a divisor of all.
    rows : sequences whose sums are in registers together.
    cores : Cores
    """

    lanes: int
    rows: int
    cores: Cores


def cpu_config(made: Recurrence, machine: Machine) -> CpuConfig:
    """The configuration.

    Raises
    ------
    Unsupported
        For other types than float32 and halves.
    """
    if made.dtype not in DTYPES:
        raise Unsupported(f"vectors of {made.dtype}")
    lanes = machine.lanes(4)
    while made.units % lanes:
        lanes //= 2
    rows = _rows(made, (machine.vector_registers - SPARE_REGISTERS) // made.cell.gates)
    batch = made.batch if isinstance(made.batch, int) else 1
    work = batch * made.columns * made.units * PRODUCT_WORK
    if machine.cores == 1:
        return CpuConfig(lanes, rows, Cores.ONE)
    if work >= machine.small_work and made.units // lanes >= machine.cores:
        return CpuConfig(lanes, rows, Cores.UNITS)
    steps = made.steps if isinstance(made.steps, int) else 1
    if batch > rows and work * steps >= machine.small_work:
        return CpuConfig(lanes, rows, Cores.SEQUENCES)
    return CpuConfig(lanes, rows, Cores.ONE)


def _rows(made: Recurrence, most: int) -> int:
    """Sequences of a group: a divisor of the batch if that is no small one, else what leaves the
    fewest groups. One, where the batch is symbolic.
    """
    if not isinstance(made.batch, int):
        return 1
    most = max(1, min(most, made.batch))
    divisor = next(n for n in range(most, 0, -1) if made.batch % n == 0)
    return divisor if 2 * divisor > most else -(-made.batch // -(-made.batch // most))


def write_on_cpu(func: tirx.PrimFunc, made: Recurrence, machine: Machine) -> tirx.PrimFunc:
    """The loops.

    Parameters
    ----------
    func : PrimFunc
        What the recurrence was read from: gives the parameters, and says which are constants.
    made : Recurrence
    machine : Machine

    Raises
    ------
    Unsupported
    """
    config = cpu_config(made, machine)
    given = dict(zip(made.shapes(), func.params, strict=True))
    how = Panels((), (1,), (0,), config.lanes)
    shape = [index(n) for n in how.shape((made.columns, made.units))]
    is_constant = any(given["w"].same_as(c) for c in constants_of(func))
    panels = new_buffer("panels", shape, made.dtype if is_constant else DTYPE)
    loops = _Loops(made, config, given, panels)
    body = loops.statements(None if is_constant else given["w"])
    own = [*loops.own, *(() if is_constant else (panels,))]
    body = seq(*map(allocate, own), body)
    return finished(func.with_body(body), {given["w"]: (panels, how)} if is_constant else {})


class _Loops:
    """Emits the loops of a kernel. The memory is carried along in its result, or, where that is of
    halves, beside it; hidden states of a step and of the next one take turns.
    """

    def __init__(
        self, made: Recurrence, config: CpuConfig, given: dict[str, Var], panels: Var
    ) -> None:
        self.made, self.config, self.given, self.panels = made, config, given, panels
        self.batch, self.steps = index(made.batch), index(made.steps)
        shape = [index(2), self.batch, index(made.units)]
        self.hidden = new_buffer("hidden", shape, DTYPE)
        self.own = [self.hidden]
        self.memory = given.get("c")
        if made.cell.has_memory and made.dtype != DTYPE:
            self.memory = new_buffer("memory", shape[1:], DTYPE)
            self.own.append(self.memory)

    def statements(self, weights: Var | None) -> tirx.Stmt:
        """All of them; with `weights`, these are packed first."""
        with IRBuilder() as builder, T.prim_func():  # a frame for several statements
            T.func_name("main")
            if weights is not None:
                self._pack(weights)
            if self.config.cores is Cores.SEQUENCES:
                self._each_group(self._all_steps, T.parallel)
            else:
                self._states(index(0), self.batch)
                with T.serial(index(0), self.steps) as s:
                    self._step(s)
                self._results(index(0), self.batch)
        return builder.get().body

    def _pack(self, weights: Var) -> None:
        panels, terms, lanes = map(int, self.panels.ty.shape)
        with (
            T.parallel(index(0), index(panels)) as p,
            T.serial(index(0), index(terms)) as k,
            T.serial(index(0), index(lanes)) as lane,
        ):
            value = _wide(weights[p * index(lanes) + lane, k])
            T.buffer_store(self.panels, value, [p, k, lane])

    # ---- sequences

    def _each_group(self, body: Callable[[Expr, int], None], loop: Callable) -> None:
        """`body` of the first sequence of each group, and how many it has."""
        rows = self.config.rows
        rest = self.made.batch % rows if isinstance(self.made.batch, int) else 0
        count = tirx.FloorDiv(self.batch + index(rows - 1), index(rows))
        with loop(index(0), count) as group:
            if not rest:
                body(group * index(rows), rows)
                return
            with T.If(group < count - index(1)):
                with T.Then():
                    body(group * index(rows), rows)
                with T.Else():
                    body(group * index(rows), rest)

    def _all_steps(self, first: Expr, rows: int) -> None:
        """One group, from the first step to the last."""
        self._states(first, index(rows))
        with T.serial(index(0), self.steps) as s, self._units(T.serial) as u:
            self._tile(s, u, first, rows)
        self._results(first, index(rows))

    def _states(self, first: Expr, rows: Expr) -> None:
        with self._each_unit(first, rows) as (b, j):
            T.buffer_store(self.hidden, _wide(self.given["h0"][b, j]), [index(0), b, j])
            if self.memory is not None:
                T.buffer_store(self.memory, _wide(self.given["c0"][b, j]), [b, j])

    def _results(self, first: Expr, rows: Expr) -> None:
        last = tirx.FloorMod(self.steps, index(2))
        with self._each_unit(first, rows) as (b, j):
            hidden = convert(self.hidden[last, b, j], self.made.dtype)
            T.buffer_store(self.given["h"], hidden, [b, j])
            if self.memory is not None and self.made.dtype != DTYPE:
                memory = convert(_rounded(self.memory[b, j], self.made.dtype), self.made.dtype)
                T.buffer_store(self.given["c"], memory, [b, j])

    @contextmanager
    def _each_unit(self, first: Expr, rows: Expr) -> Iterator[tuple[Expr, Expr]]:
        """Loops over the states of some sequences, in vectors."""
        lanes = self.config.lanes
        with (
            T.serial(index(0), rows) as row,
            self._units(T.serial) as u,
            T.vectorized(index(0), index(lanes)) as lane,
        ):
            yield first + row, u * index(lanes) + lane

    # ---- a step

    def _units(self, loop: Callable):
        """A loop over vectors of units."""
        return loop(index(0), index(self.made.units // self.config.lanes))

    def _step(self, s: Expr) -> None:
        loop = T.parallel if self.config.cores is Cores.UNITS else T.serial
        with self._units(loop) as u:
            self._each_group(lambda first, rows: self._tile(s, u, first, rows), T.serial)

    def _tile(self, s: Expr, u: Expr, first: Expr, rows: int) -> None:
        """A vector of units of some sequences."""
        made, lanes = self.made, self.config.lanes
        gates, units = made.cell.gates, index(made.units)
        now = tirx.FloorMod(s, index(2))
        time = self.steps - index(1) - s if made.backward else s
        sums = [[_vector(lanes) for _ in range(rows)] for _ in range(gates)]
        for line in sums:
            for total in line:
                with T.vectorized(index(0), index(lanes)) as lane:
                    T.buffer_store(total, constant(0, DTYPE), [lane])
        with T.serial(index(0), units) as k:
            for gate, line in enumerate(sums):
                panel = index(gate * (made.units // lanes)) + u
                for row, total in enumerate(line):
                    with T.vectorized(index(0), index(lanes)) as lane:
                        hidden = self.hidden[now, first + index(row), k]
                        value = total[lane] + _wide(self.panels[panel, k, lane]) * hidden
                        T.buffer_store(total, value, [lane])
        kept = T.alloc_buffer([gates, rows, lanes], DTYPE, scope="global")
        for gate, line in enumerate(sums):
            for row, total in enumerate(line):
                with T.vectorized(index(0), index(lanes)) as lane:
                    T.buffer_store(kept, total[lane], [index(gate), index(row), lane])
        held = [_vector(lanes) for _ in range(NAMES)]
        with T.serial(index(0), index(rows)) as row, T.vectorized(index(0), index(lanes)) as lane:
            products = [kept[index(gate), row, lane] for gate in range(gates)]
            names = iter(held)

            def bind(value: Expr) -> Expr:
                name = next(names)
                T.buffer_store(name, _lowered(value), [lane])
                return name[lane]

            self._cell(products, now, time, first + row, u * index(lanes) + lane, bind)

    def _cell(
        self,
        sums: list[Expr],
        now: Expr,
        time: Expr,
        row: Expr,
        unit: Expr,
        bind: Callable[[Expr], Expr],
    ) -> None:
        made, given = self.made, self.given
        places = (unit + index(gate * made.units) for gate in range(made.cell.gates))
        found, memory = step(
            made.cell,
            [_wide(given["x"][time, row, place]) for place in places],
            sums,
            _wide(given["bias"][unit]) if made.cell.has_bias else None,
            self.hidden[now, row, unit],
            None if self.memory is None else self.memory[row, unit],
            bind,
        )
        found = _rounded(found, made.dtype)
        found = found if made.dtype == DTYPE else bind(found)
        T.buffer_store(self.hidden, found, [index(1) - now, row, unit])
        T.buffer_store(given["y"], convert(found, made.dtype), [time, row, unit])
        if memory is not None:
            T.buffer_store(self.memory, memory, [row, unit])


def _vector(lanes: int) -> Var:
    return T.alloc_buffer([lanes], DTYPE, scope="global")


def _wide(x: Expr) -> Expr:
    """A number as float32."""
    return bfloat16_to_float32(x) if dtype_of(x) == "bfloat16" else convert(x, DTYPE)


def _rounded(x: Expr, dtype: str) -> Expr:
    """The number of a type nearest to a float32 in memory, as float32."""
    if dtype == "bfloat16":
        return round_to_bfloat16(x)
    return convert(convert(x, dtype), DTYPE)


def _lowered(expr: Expr) -> Expr:
    """With functions as polynomials, of which LLVM computes a vector at a time."""
    return lower_call(rebuild(expr, _lowered))
