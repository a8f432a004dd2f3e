"""Reductions across the threads of a row: registers, warp shuffles, shared memory.

Sums that run along with a maximum (online) are rescaled whenever their partial maxima meet.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from dataclasses import dataclass

from tvm import tirx
from tvm.ir import Expr, Var
from tvm.script import tirx as T

from ...errors import Unsupported
from ..gpu import intrinsics as device
from ..gpu.arithmetic import LOG2E, f32
from ..gpu.frame import then
from ..program.expr import bits_of, constant, convert, dtype_of, is_integer
from ..program.program import COMBINE, ReduceKind, Reduction

# argmax and argmin in row kernels: pairs in a thread, one 64-bit key among threads.
#
#     thread:   (value, column) of the best element so far, strictly better ones replace it
#     others:   key = ordered bits of the value << 32 | ~column; the largest key wins
#
# so that what exchanges sums and maxima exchanges keys as well. The smallest column of equal values
# wins. NaN counts as the worst value.

ARG_KINDS = (ReduceKind.ARGMAX, ReduceKind.ARGMIN)
NO_COLUMN = 2**31 - 1
KEY = "uint64"


def is_arg(reduction: Reduction) -> bool:
    """Whether a reduction gives an index."""
    return reduction.kind in ARG_KINDS


def carried(reduction: Reduction) -> Reduction:
    """The reduction that combines the partial results of threads: of keys, for an index."""
    if not is_arg(reduction):
        return reduction
    return dataclasses.replace(reduction, kind=ReduceKind.MAX, dtype=KEY, index=None)


def check_arg(reduction: Reduction) -> None:
    """Refuses values that do not fit into a key."""
    dtype = dtype_of(reduction.body)
    if is_arg(reduction) and dtype != "bool" and bits_of(dtype) > 32:
        raise Unsupported(f"{reduction.kind} of {dtype}")


class Best:
    """The best element of each accumulator of a thread.

    Parameters
    ----------
    reduction : an argmax or argmin.
    ways : independent accumulators.
    """

    def __init__(self, reduction: Reduction, ways: int) -> None:
        self.reduction, self.ways = reduction, ways
        dtype = dtype_of(reduction.body)
        self.dtype = "int32" if dtype == "bool" else dtype
        self.values = T.alloc_local((ways,), self.dtype)
        self.columns = T.alloc_local((ways,), "int32")
        for way in range(ways):
            T.buffer_store(self.values, self._worst(), [way])
            T.buffer_store(self.columns, constant(NO_COLUMN, "int32"), [way])

    def update(
        self, way: int, value: Expr, column: Expr, valid: Expr | None, in_order: bool
    ) -> None:
        """Takes an element into account; `in_order`: its column is larger than all before."""
        value = T.Bind(convert(value, self.dtype))
        column = convert(column, "int32")
        taken = self._better(value, self.values[way])
        if not in_order:
            first = tirx.And(tirx.EQ(value, self.values[way]), column < self.columns[way])
            taken = tirx.Or(taken, first)
        taken = T.Bind(taken if valid is None else tirx.And(valid, taken))
        T.buffer_store(self.values, tirx.Select(taken, value, self.values[way]), [way])
        T.buffer_store(self.columns, tirx.Select(taken, column, self.columns[way]), [way])

    def keys(self) -> Var:
        """A key for each accumulator."""
        found = T.alloc_local((self.ways,), KEY)
        for way in range(self.ways):
            T.buffer_store(found, self._key(self.values[way], self.columns[way]), [way])
        return found

    def key(self) -> Var:
        """One key for all accumulators, in an array of one element."""
        found = T.alloc_local((1,), KEY)
        for way in range(self.ways):
            key = T.Bind(self._key(self.values[way], self.columns[way]))
            T.buffer_store(found, key if way == 0 else tirx.Max(found[0], key), [0])
        return found

    def _worst(self) -> Expr:
        largest = self.reduction.kind == ReduceKind.ARGMAX
        if self.dtype.startswith("float"):
            return constant(-math.inf if largest else math.inf, self.dtype)
        return tirx.min_value(self.dtype) if largest else tirx.max_value(self.dtype)

    def _better(self, a: Expr, b: Expr) -> Expr:
        return a > b if self.reduction.kind == ReduceKind.ARGMAX else a < b

    def _key(self, value: Expr, column: Expr) -> Expr:
        bits = _ordered_bits(value)
        if self.reduction.kind == ReduceKind.ARGMIN:
            bits = tirx.bitwise_not(bits)
        low = tirx.bitwise_not(tirx.Cast("uint32", column))
        high = tirx.shift_left(tirx.Cast(KEY, bits), constant(32, KEY))
        return tirx.bitwise_or(high, tirx.Cast(KEY, low))


def index_of(reduction: Reduction, key: Expr) -> Expr:
    """The index behind the largest key; the first column where no element is better than none."""
    column = tirx.Cast("int32", tirx.bitwise_not(tirx.Cast("uint32", key)))
    column = T.Bind(column)
    none = tirx.EQ(column, constant(NO_COLUMN, "int32"))
    column = tirx.Select(none, constant(0, "int32"), column)
    return T.Bind(convert(column, reduction.dtype))


def _ordered_bits(value: Expr) -> Expr:
    """32 bits that compare as the values do."""
    dtype = dtype_of(value)
    sign = constant(2**31, "uint32")
    if is_integer(dtype):
        bits = tirx.Cast("uint32", value)
        return bits if dtype.startswith("uint") else tirx.bitwise_xor(bits, sign)
    bits = tirx.reinterpret("uint32", value)
    # a negative zero is equal to a positive one
    bits = T.Bind(tirx.Select(tirx.EQ(bits, sign), constant(0, "uint32"), bits))
    return tirx.Select(bits >= sign, tirx.bitwise_not(bits), tirx.bitwise_or(bits, sign))


WARP = 32
FEW_PARTIALS = 8  # up to here every thread combines all partial results itself
FEW_ONLINE_PARTIALS = 2


def identity(reduction: Reduction) -> Expr:
    """The neutral element of a reduction."""
    kind, dtype = reduction.kind, reduction.dtype
    if kind in (ReduceKind.SUM, ReduceKind.PROD):
        return constant(0 if kind == ReduceKind.SUM else 1, dtype)
    if dtype.startswith("float"):
        return constant(-math.inf if kind == ReduceKind.MAX else math.inf, dtype)
    return tirx.min_value(dtype) if kind == ReduceKind.MAX else tirx.max_value(dtype)


def finite(maximum: Expr) -> Expr:
    """Reference point of a running sum: a part of the row that is all -inf must give 0, not NaN."""
    return tirx.Max(maximum, f32(-1e38))


def rescale(old: Expr, new: Expr) -> Expr:
    """Factor that takes an online sum from maximum `old` to `new`."""
    return device.ex2(tirx.Mul(tirx.Sub(finite(old), finite(new)), f32(LOG2E)))


def collapse(reduction: Reduction, partial: Var, ways: int) -> None:
    """Combines the `ways` accumulators of a thread (a power of two) into the first."""
    combine = COMBINE[reduction.kind]
    while ways > 1:
        ways //= 2
        for way in range(ways):
            T.buffer_store(partial, combine(partial[way], partial[way + ways]), [way])


def warp_reduce(reduction: Reduction, partial: Var, width: int) -> None:
    """Combines the first accumulators of `width` neighbouring lanes; all of them get the result."""
    combine = COMBINE[reduction.kind]
    step = width // 2
    while step:
        mask = T.uint32(0xFFFFFFFF)
        other = T.tvm_warp_shuffle_xor(mask, partial[0], step, WARP, WARP)
        T.buffer_store(partial, combine(partial[0], other), [0])
        step //= 2


@dataclass(frozen=True, slots=True, eq=False)
class Threads:
    """The threads of a row: `per_block` in each of `blocks` blocks; `rows` rows a block.

    `thread` counts within row and block; `row` is the row within the block; `rank` is the block's
    place in the cluster.
    """

    per_block: int
    rows: int
    blocks: int
    thread: Expr
    lane: Expr
    row: Expr | int
    rank: Expr | None

    @property
    def warps(self) -> int:
        """Warps of a row in one block."""
        return max(1, self.per_block // WARP)

    @property
    def partials(self) -> int:
        """Partial results of a row once its warps have reduced."""
        return self.warps * self.blocks


class Exchange:
    """One exchange of partial results; every thread ends up with the results of its row.

    Parameters
    ----------
    threads : who takes part.
    turn : the loop variable of resident blocks. Two sets of slots then take turns, so that the
        barrier of the next turn is also the one that frees the slots.
    finish : told of each result.
    after_barrier : emitted right behind the barrier.
    """

    def __init__(
        self,
        threads: Threads,
        turn: Expr | None,
        finish: Callable[[Reduction, Expr], None],
        after_barrier: Callable[[], None],
    ) -> None:
        self.threads, self.turn = threads, turn
        self.finish, self.after_barrier = finish, after_barrier
        self.tops: dict[Var, Expr] = {}

    def run(self, group: list[tuple[Reduction, Var]]) -> None:
        """Exchanges the first accumulator of each reduction of `group`."""
        if self.threads.partials == 1:
            for reduction, partial in group:
                self._done(reduction, partial[0])
            return
        group = sorted(group, key=lambda item: item[0].online is not None)
        slots = self._publish(group)
        online = any(reduction.online is not None for reduction, _ in group)
        few = FEW_ONLINE_PARTIALS if online else FEW_PARTIALS
        if self.threads.partials <= few:
            self._combine_all(group, slots)
        else:
            self._combine_by_lanes(group, slots)

    def _done(self, reduction: Reduction, result: Expr) -> None:
        result = T.Bind(result)
        self.tops[reduction.var] = result
        self.finish(reduction, result)

    def _publish(
        self, group: list[tuple[Reduction, Var]]
    ) -> dict[Var, Callable[[Expr | int], Expr]]:
        """Writes the partial results of all warps; returns readers of each reduction's slots."""
        threads, total = self.threads, self.threads.partials
        readers = {}
        for dtype in dict.fromkeys(reduction.dtype for reduction, _ in group):
            members = [item for item in group if item[0].dtype == dtype]
            size = threads.rows * len(members) * total
            memory = T.alloc_shared((size * (1 if self.turn is None else 2),), dtype)
            base = threads.row * (len(members) * total)
            if self.turn is not None:
                base = T.Bind(base + T.truncmod(self.turn, 2) * size)
            for place, (reduction, partial) in enumerate(members):
                start = base + place * total
                self._write(memory, start, partial[0])
                readers[reduction.var] = lambda at, m=memory, s=start: m[s + at]
        T.evaluate(device.cluster_sync() if threads.blocks > 1 else T.cuda.cta_sync())
        self.after_barrier()
        return readers

    def _write(self, memory: Var, start: Expr | int, value: Expr) -> None:
        threads = self.threads
        warp = T.truncdiv(threads.thread, WARP)
        if threads.blocks == 1:
            with then(tirx.EQ(threads.lane, 0)):
                T.buffer_store(memory, value, [start + warp])
            return
        place = memory.ptr_to([start + threads.rank * threads.warps + warp])
        with then(threads.lane < threads.blocks):
            T.evaluate(device.cluster_store(place, value, threads.lane))

    def _combine_all(self, group, slots) -> None:
        """Every thread combines all partial results."""
        total = self.threads.partials
        for reduction, _ in group:
            read, combine = slots[reduction.var], COMBINE[reduction.kind]
            terms = [read(at) for at in range(total)]
            if reduction.online is not None:
                top, tops = self.tops[reduction.online], slots[reduction.online]
                terms = [term * rescale(tops(at), top) for at, term in enumerate(terms)]
            result = terms[0]
            for term in terms[1:]:
                result = combine(result, term)
            self._done(reduction, result)

    def _combine_by_lanes(self, group, slots) -> None:
        """Every lane reads some of the partial results, then the warp reduces."""
        total = self.threads.partials
        width = min(WARP, 1 << (total - 1).bit_length())
        each = -(-total // WARP)
        own: dict[Var, list[Expr]] = {}
        for reduction, _ in group:
            mine = T.alloc_local((each,), reduction.dtype)
            for step in range(each):
                self._read_slot(reduction, mine, step, width, slots[reduction.var])
            if reduction.online is not None:
                top = self.tops[reduction.online]
                for step, partial_top in enumerate(own[reduction.online]):
                    T.buffer_store(mine, mine[step] * rescale(partial_top, top), [step])
            else:
                own[reduction.var] = [T.Bind(mine[step]) for step in range(each)]
            for step in range(1, each):
                T.buffer_store(mine, COMBINE[reduction.kind](mine[0], mine[step]), [0])
            warp_reduce(reduction, mine, width)
            self._done(reduction, mine[0])

    def _read_slot(self, reduction: Reduction, mine: Var, step: int, width: int, read) -> None:
        total, lane = self.threads.partials, self.threads.lane
        at = T.truncmod(lane, width) + WARP * step if width < WARP else lane + WARP * step
        if WARP * step + width <= total:
            T.buffer_store(mine, read(at), [step])
            return
        T.buffer_store(mine, identity(reduction), [step])
        with then(at < total):
            T.buffer_store(mine, read(at), [step])


def with_initial(reduction: Reduction, result: Expr) -> Expr:
    """`result` combined with the initial value of the reduction."""
    if reduction.initial is None:
        return result
    initial = convert(reduction.initial, reduction.dtype)
    return T.Bind(COMBINE[reduction.kind](result, initial))
