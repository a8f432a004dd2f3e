"""What the threads of a row tell one another in a scan, turn by turn.

    local    values[k] = values[k - 1] + body      a thread's own columns
    before = carry + what the threads of earlier columns come to
    carry  = carry + what all come to

Threads of a row that are neighbours pass theirs on by shuffles, and warps through shared memory.
Where rows are neighbours, the walkers of a warp do, and warps of walkers meet in shared memory,
where a warp scans what they left there. Blocks that share a row leave what theirs comes to in
global memory, wait for all, and each combines what the others left, in one order.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from contextlib import nullcontext
from dataclasses import dataclass

from tvm import tirx
from tvm.ir import Expr, Var
from tvm.script import tirx as T

from ..gemm.mma.units import warp_sync
from ..gpu import intrinsics as device
from ..gpu.frame import Frame, then
from ..gpu.memory import shared_pool
from ..program.expr import bytes_of, constant, convert
from ..program.program import COMBINE, ReduceKind, Scan
from .config import FEW_PARTS, WARP, ScanConfig

ALL_LANES = 0xFFFFFFFF
MOST_STATIC = 40 << 10
"""Bytes of shared memory that a kernel declares beside what its threads tell one another."""


@dataclass(frozen=True, slots=True, eq=False)
class Place:
    """Where a thread stands: at which columns (`place`) of which row of the block (`side`)."""

    config: ScanConfig
    frame: Frame
    place: Expr
    side: Expr
    several_turns: bool

    @property
    def thread(self) -> Expr:
        """In the block."""
        return self.frame.thread


def combination(scan: Scan) -> Callable[[Expr, Expr], Expr]:
    """What combines two parts of a scan, the earlier one first."""
    if scan.kind is ReduceKind.LOG_SUM and scan.dtype == "float32":
        return device.log_add
    return COMBINE[scan.kind]


def neutral(scan: Scan) -> Expr:
    """What changes nothing."""
    if scan.kind is ReduceKind.SUM:
        return constant(0, scan.dtype)
    if scan.kind is ReduceKind.PROD:
        return constant(1, scan.dtype)
    lowest = scan.kind is not ReduceKind.MIN  # of maxima, and of sums of exponentials
    if scan.dtype.startswith("float"):
        return constant(-math.inf if lowest else math.inf, scan.dtype)
    return (tirx.min_value if lowest else tirx.max_value)(scan.dtype)


def slots_left(config: ScanConfig) -> int:
    """Slots of a scan for what blocks of the same rows come to, in two turns."""
    return 2 * config.rows * config.vector * config.blocks


class Exchange:
    """One scan along the columns of `vector` rows of a thread.

    Parameters
    ----------
    left : where blocks that share a row leave what theirs comes to (`slots_left`).
    """

    def __init__(self, scan: Scan, at: Place, left: Var | None) -> None:
        self.scan, self.at, self.config = scan, at, at.config
        self.combine, self.neutral = combination(scan), neutral(scan)
        self.rows, self.lines, self.left = self.config.vector, self.config.lines, left
        self.carry = T.alloc_local((self.rows,), scan.dtype)
        for row in range(self.rows):
            T.buffer_store(self.carry, self.neutral, [row])
        sets = 2 if at.several_turns else 1
        self.partials = self.config.partials
        if self.partials:
            self.memory = T.alloc_shared((sets * self.partials,), scan.dtype)

    def run(self, turn: Expr, elements: list[Expr]) -> list[Expr]:
        """The scan at each of a thread's columns, row after row."""
        combine, width = self.combine, self.config.width
        values = T.alloc_local((len(elements),), self.scan.dtype)
        for n, element in enumerate(elements):
            T.buffer_store(values, element, [n])
            if n % width:
                T.buffer_store(values, combine(values[n - 1], values[n]), [n])
        totals = [T.Bind(values[line * width + width - 1]) for line in range(self.lines)]
        found: list[Expr] = []
        for line, before in enumerate(self._before(turn, totals)):
            own = [values[line * width + k] for k in range(width)]
            if self.scan.exclusive:
                found += [before, *(T.Bind(combine(before, value)) for value in own[:-1])]
            else:
                found += [T.Bind(combine(before, value)) for value in own]
        return found

    def _before(self, turn: Expr, totals: list[Expr]) -> list[Expr]:
        """What stands before each of a thread's runs; what all come to is carried on."""
        pairs = [self._in_warp(total) for total in totals]
        if self.partials:
            pairs = self._among_warps(turn, pairs)
        runs, found = self.config.runs, []
        wholes = [pairs[row * runs][1] for row in range(self.rows)]
        for row in range(self.rows):
            for _, whole in pairs[row * runs + 1 : (row + 1) * runs]:
                wholes[row] = T.Bind(self.combine(wholes[row], whole))
        others = self._among_blocks(turn, wholes) if self.config.blocks > 1 else None
        for row in range(self.rows):
            before, whole = self.carry[row], wholes[row]
            if others is not None:
                earlier, whole = others[row]
                before = T.Bind(self.combine(before, earlier))
            for left, own in pairs[row * runs : (row + 1) * runs]:
                found.append(T.Bind(self.combine(before, left)))
                before = T.Bind(self.combine(before, own)) if runs > 1 else before
            if self.at.several_turns:
                T.buffer_store(self.carry, self.combine(self.carry[row], whole), [row])
        return found

    def _among_blocks(self, turn: Expr, wholes: list[Expr]) -> list[tuple[Expr, Expr]]:
        """What earlier blocks of each row come to, and all of them; the threads of a row in a warp
        look at some each.
        """
        config, rank = self.config, self.at.frame.rank
        count, blocks = config.in_warp, config.blocks
        first = self.at.frame.block * slots_left(config)
        if self.at.several_turns:  # one set is read while the next is written
            first = first + convert(T.truncmod(turn, 2), "int32") * (slots_left(config) // 2)
        slots = [
            T.Bind(first + (self.at.side * self.rows + row) * blocks) for row in range(self.rows)
        ]
        with then(tirx.EQ(self.at.place, 0)):
            for slot, whole in zip(slots, wholes, strict=True):
                T.buffer_store(self.left, whole, [slot + rank])
        T.evaluate(T.cuda.grid_sync())
        own, found = T.Bind(T.truncmod(self.at.place, count)), []
        for slot in slots:
            both = T.alloc_local((2,), self.scan.dtype)
            for n in range(2):
                T.buffer_store(both, self.neutral, [n])
            for start in range(0, blocks, count):
                other = T.Bind(own + start)
                inside = None if start + count <= blocks else other < blocks
                with nullcontext() if inside is None else then(inside):
                    term = T.Bind(self.left[slot + other])
                    with then(other < rank):
                        T.buffer_store(both, self.combine(both[0], term), [0])
                    T.buffer_store(both, self.combine(both[1], term), [1])
            found.append(tuple(self._in_warp(T.Bind(both[n]))[1] for n in range(2)))
        return found

    def _in_warp(self, total: Expr) -> tuple[Expr, Expr]:
        """What earlier threads of the row in the warp come to, and all of them."""
        count, apart = self.config.in_warp, 1 if self.config.along else self.config.rows
        if count == 1:
            return self.neutral, total
        lanes, mask = count * apart, T.uint32(ALL_LANES)
        lane = T.Bind(T.truncmod(self.at.thread, lanes))
        found = T.alloc_local((1,), self.scan.dtype)
        T.buffer_store(found, total, [0])
        step = apart
        while step < lanes:
            other = T.Bind(T.tvm_warp_shuffle_up(mask, found[0], step, lanes, WARP))
            with then(lane >= step):
                T.buffer_store(found, self.combine(other, found[0]), [0])
            step *= 2
        other = T.Bind(T.tvm_warp_shuffle_up(mask, found[0], apart, lanes, WARP))
        left = T.Bind(tirx.Select(lane < apart, self.neutral, other))
        last = lanes - 1
        if apart > 1:
            last = T.Bind(T.truncmod(lane, apart) + (lanes - apart))
        return left, T.Bind(T.tvm_warp_shuffle(mask, found[0], last, lanes, WARP))

    def _among_warps(self, turn: Expr, pairs: list[tuple[Expr, Expr]]) -> list[tuple[Expr, Expr]]:
        """The same over all warps of the row."""
        config, each = self.config, self.config.in_warp
        part = T.Bind(T.truncdiv(self.at.place, each)) if each > 1 else self.at.place
        first: Expr | int = 0
        if self.at.several_turns:
            first = T.Bind(convert(T.truncmod(turn, 2), "int32") * self.partials)
        publishes = tirx.EQ(T.truncmod(self.at.place, each), each - 1) if each > 1 else None
        slots = [
            T.Bind(first + (self.at.side * self.lines + line) * config.pitch)
            for line in range(self.lines)
        ]
        with nullcontext() if publishes is None else then(publishes):
            for slot, (_, whole) in zip(slots, pairs, strict=True):
                T.buffer_store(self.memory, whole, [slot + part])
        T.evaluate(T.cuda.cta_sync())
        if config.parts * self.lines > FEW_PARTS:
            self._scan_partials(first)
            find = self._scanned
        else:
            find = self._combined
        return [find(slot, part, left) for slot, (left, _) in zip(slots, pairs, strict=True)]

    def _combined(self, slot: Expr, part: Expr, left: Expr) -> tuple[Expr, Expr]:
        """What the earlier warps come to with `left` of the own one, and all: each thread looks at
        all that are there.
        """
        both = T.alloc_local((2,), self.scan.dtype)
        for n in range(2):
            T.buffer_store(both, self.neutral, [n])
        for other in range(self.config.parts):
            term = T.Bind(self.memory[slot + other])
            with then(part > other):
                T.buffer_store(both, self.combine(both[0], term), [0])
            T.buffer_store(both, self.combine(both[1], term), [1])
        return T.Bind(self.combine(both[0], left)), T.Bind(both[1])

    def _scan_partials(self, first: Expr | int) -> None:
        """The lanes of a warp scan the partial results of rows in their places."""
        config, lanes, mask = self.config, self.config.parts, T.uint32(ALL_LANES)
        at_once, rows = config.block // lanes, config.rows * self.lines
        lane, own = (T.Bind(f(self.at.thread, lanes)) for f in (T.truncmod, T.truncdiv))
        for start in range(0, rows, at_once):
            row = own + start
            inside = None if start + at_once <= rows else T.Bind(row < rows)
            row = row if inside is None else tirx.Min(row, rows - 1)
            slot = T.Bind(first + row * config.pitch + lane)
            found = T.alloc_local((1,), self.scan.dtype)
            T.buffer_store(found, self.memory[slot], [0])
            step = 1
            while step < lanes:
                other = T.Bind(T.tvm_warp_shuffle_up(mask, found[0], step, lanes, WARP))
                with then(lane >= step):
                    T.buffer_store(found, self.combine(other, found[0]), [0])
                step *= 2
            with nullcontext() if inside is None else then(inside):
                T.buffer_store(self.memory, found[0], [slot])
        T.evaluate(T.cuda.cta_sync())

    def _scanned(self, slot: Expr, part: Expr, left: Expr) -> tuple[Expr, Expr]:
        """As `_combined`, of partial results that were scanned."""
        before = T.alloc_local((1,), self.scan.dtype)
        T.buffer_store(before, left, [0])
        with then(part > 0):
            T.buffer_store(before, self.combine(self.memory[slot + part - 1], left), [0])
        return T.Bind(before[0]), T.Bind(self.memory[slot + (self.config.parts - 1)])


def staged_bytes(config: ScanConfig, dtypes: Iterable[str]) -> int:
    """Bytes of shared memory through which elements of these types change hands."""
    return sum(config.staging * bytes_of(dtype) for dtype in dtypes)


def _memory(count: int, dtypes: list[str]) -> dict[str, Var]:
    """Shared memory for `count` elements of each type."""
    if sum(count * bytes_of(dtype) for dtype in dtypes) <= MOST_STATIC:
        return {dtype: T.alloc_shared((count,), dtype) for dtype in dtypes}
    pool = shared_pool()
    found = {dtype: pool.alloc((count,), dtype, align=16, layout=None) for dtype in dtypes}
    pool.commit()
    return found


class Staging:
    """Shared memory in which the elements of a block change hands: each thread computes those that
    lie beside its neighbours' in memory, and scans consecutive columns.

    Parameters
    ----------
    at : the threads' places; those of a row take `width` consecutive columns each.
    dtypes : of the scans.
    """

    def __init__(self, at: Place, dtypes: set[str]) -> None:
        self.at, self.config = at, at.config
        config = self.config
        self.inner, self.run = config.staged, config.width
        self.pitch = self.run * self.inner + (self.run * self.inner + 1) % 2
        group = config.threads * self.pitch  # of as many rows as are neighbours
        self.group = group
        groups = config.rows // self.inner
        self.memory = _memory(groups * group, sorted(dtypes))
        own, column = T.truncdiv(at.side, self.inner), T.truncmod(at.side, self.inner)
        self.mine = T.Bind(own * group + at.place * self.pitch + column)

    def slot(self, group: Expr | int, element: Expr) -> Expr:
        """Where an element of a group lies, counted as in global memory from its turn's first."""
        run = self.run * self.inner
        return group * self.group + element + T.truncdiv(element, run) * (self.pitch - run)

    def exchanged(
        self, exchange: Exchange, turn: Expr, slots: list[Expr], elements: list[Expr]
    ) -> list[Expr]:
        """The scan at each of the elements that a thread computes."""
        memory = self.memory[exchange.scan.dtype]
        for slot, element in zip(slots, elements, strict=True):
            T.buffer_store(memory, element, [slot])
        self._sync()
        own = [memory[self.mine + k * self.inner] for k in range(self.run)]
        found = exchange.run(turn, own)
        for k, value in enumerate(found):
            T.buffer_store(memory, value, [self.mine + k * self.inner])
        self._sync()
        return [T.Bind(memory[slot]) for slot in slots]

    def _sync(self) -> None:
        """A warp's elements are its own, where no rows are neighbours."""
        T.evaluate(warp_sync() if self.inner == 1 else T.cuda.cta_sync())
