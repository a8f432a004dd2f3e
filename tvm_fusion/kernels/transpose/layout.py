"""Where a tile lies in shared memory between the two phases of a transpose kernel.

Columns of the tile are lines of `pitch` bytes, consecutive along p, and every `width` lines the
next ones move on by `skew` bytes:

    address(p, j) = j * pitch + j // width * skew + p * size

Written along p in 16-byte pieces, a line is contiguous. Read, the `lanes` threads of a warp that
lie along j stand `width` lines apart, that is `skew` bytes apart modulo the 128 bytes of all banks:
with ``lanes * skew = 128`` they meet in no bank.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

from tvm.ir import Expr, Var
from tvm.script import tirx as T

from ..gpu.frame import then
from ..gpu.memory import WIDEST
from ..gpu.scope import Point, RowScope

# What the forms of transposing kernels share: values of one row, conditions.


def row_values(
    scope: RowScope,
    column: Expr,
    width: int,
    registers: Callable[[int], Mapping[Var, Expr]],
) -> list[list[Expr]]:
    """The `width` columns from `column` on of each output, in the row that `scope` knows.

    `registers` gives, for the number of a column, the loads that are in registers.
    """
    values = [output.value for output in scope.program.outputs]
    scope.prepare_values(values)
    prepared = [scope.prepare(value) for value in values]
    results: list[list[Expr]] = [[] for _ in prepared]
    for lane in range(width):
        point = Point(scope, column + lane, registers(lane).get)
        for lanes, expr in zip(results, prepared, strict=True):
            lanes.append(T.Bind(point.evaluate(expr)))
    return results


@contextmanager
def when(*conditions: Expr | None) -> Iterator[None]:
    """Statements under those of the conditions that are not None."""
    with ExitStack() as stack:
        for condition in conditions:
            if condition is not None:
                stack.enter_context(then(condition))
        yield


LANES = 32
BANKS_BYTES = 128
BANK = 4


@dataclass(frozen=True, slots=True)
class Layout:
    """Tile of `rows` (along p) x `columns` (along j) elements of `size` bytes.

    Attributes
    ----------
    width : columns of one vector of the second phase.
    lanes : threads of a warp that lie along j; the others lie along p.
    stack : consecutive rows that a thread reads together.
    """

    size: int
    rows: int
    columns: int
    width: int
    lanes: int
    stack: int

    @property
    def pitch(self) -> int:
        """Bytes between lines; `width` lines are a multiple of 128 bytes."""
        unit = max(WIDEST, BANKS_BYTES // self.width)
        return -(-self.rows * self.size // unit) * unit

    @property
    def skew(self) -> int:
        """Bytes that lines move on, every `width` lines."""
        return BANKS_BYTES // self.lanes

    @property
    def nbytes(self) -> int:
        """Shared memory of the tile."""
        used = self.columns * self.pitch + -(-self.columns // self.width) * self.skew
        return -(-used // BANKS_BYTES) * BANKS_BYTES

    def piece(self, nbytes: int) -> int:
        """Bytes of one access of `nbytes` consecutive bytes that start at a multiple of them."""
        return min(nbytes, self.skew, WIDEST)

    def place(self, row: Expr | int, column: Expr | int, block: Expr | int) -> Expr | int:
        """Byte of element (row, column); `block` is ``column // width``."""
        return column * self.pitch + block * self.skew + row * self.size

    # ---- bank conflicts

    def write_conflicts(self, vector: int) -> int:
        """Worst conflict of the first phase: threads along p, `vector` rows each."""
        per_line = max(1, self.rows // vector)
        piece = self.piece(vector * self.size)
        ways = 1
        for first in range(0, per_line * self.columns, LANES):
            threads = range(first, min(first + LANES, per_line * self.columns))
            starts = [self._at(t % per_line * vector, t // per_line) for t in threads]
            for part in range(0, vector * self.size, piece):
                ways = max(ways, bank_conflict([start + part for start in starts], piece))
        return ways

    def read_conflicts(self) -> int:
        """Worst conflict of the second phase: each thread reads `width` lines, `stack` rows."""
        piece = self.piece(self.stack * self.size)
        ways = 1
        for line in range(self.width):
            starts = [
                self._at(t // self.lanes * self.stack, t % self.lanes * self.width + line)
                for t in range(LANES)
            ]
            for part in range(0, self.stack * self.size, piece):
                ways = max(ways, bank_conflict([start + part for start in starts], piece))
        return ways

    def _at(self, row: int, column: int) -> int:
        return self.place(row, column, column // self.width)


def bank_conflict(addresses: Sequence[int], nbytes: int) -> int:
    """Passes that shared memory needs for each part of a warp's access; 1 is without conflict.

    A warp's access of 8 (16) bytes a thread goes out for 16 (8) threads at a time; threads that
    touch the same 4-byte word share it.

    Parameters
    ----------
    addresses : byte that each thread accesses, in the order of the threads.
    nbytes : bytes of one access.
    """
    together = LANES * BANK // max(BANK, nbytes)
    parts = (addresses[i : i + together] for i in range(0, len(addresses), together))
    return max(_passes(part, nbytes) for part in parts)


def _passes(addresses: Iterable[int], nbytes: int) -> int:
    words = {(a + byte) // BANK for a in addresses for byte in range(0, max(nbytes, 1), BANK)}
    counts: dict[int, int] = {}
    for word in words:
        bank = word % (BANKS_BYTES // BANK)
        counts[bank] = counts.get(bank, 0) + 1
    return max(counts.values())
