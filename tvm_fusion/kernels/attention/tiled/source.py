"""Operands that are copied row by row: stored as they are multiplied, contiguous along the head.

k[page[b, n // 16], n % 16, h, d]     a row for each key n, of the elements d; 16, 8 or 4 bytes at a
                                      time, as far as the addresses are multiples of these
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import tvm
from tvm.ir import Expr, TensorLoad, Var
from tvm.script import tirx as T

from ....errors import Unsupported
from ...contraction.model import INDEX, Simplifier
from ...contraction.reader import Axis, Operand, size_of
from ...gemm.mma.operand import digit_sum
from ...gpu.access import AffineAccess, Digit, affine_access
from ...gpu.product_frame import Frame, coordinates
from ...program.expr import (
    bytes_of,
    constant,
    convert,
    dtype_of,
    flatten,
    known_factor,
    linear_form,
    number,
)
from ...program.program import Extent, Param
from ..read.model import Attention

PIECES = (16, 8, 4)
"""Bytes of an asynchronous copy."""


@dataclass(frozen=True, slots=True, eq=False)
class Source:
    """An operand in memory: contiguous along the head, one row a key (or a query).

    Attributes
    ----------
    offset : of the element, over batch, rows and the head's axes, in elements.
    access : the same as digits of "batch", `along` and "head", where it is affine in them.
    along : the group of the rows, "m" or "n".
    head : the head's axes; `extent` is their size.
    piece : bytes of the widest copy that the addresses allow.
    """

    load: TensorLoad
    offset: Expr
    access: AffineAccess | None
    along: str
    head: tuple[Axis, ...]
    extent: int
    piece: int

    @property
    def size(self) -> int:
        """Bytes of an element."""
        return bytes_of(dtype_of(self.load))

    @property
    def rows(self) -> tuple[Digit, ...] | None:
        """Distances between rows where these do not depend on what is loaded, else None."""
        return None if self.access is None else self.access.digits[self.along]


def read_source(
    attention: Attention, operand: Operand, along: str, head: tuple[Axis, ...], what: str
) -> Source:
    """An operand in memory; `what` it is called in messages.

    Raises
    ------
    Unsupported
        Where it is computed, of another dtype, not contiguous along the head, or at odd addresses.
    """
    load, extent = operand.load, size_of(head)
    if load is None or operand.bindings:
        raise Unsupported(f"attention whose {what} are computed")
    if dtype_of(load) != attention.operand_dtype:
        raise Unsupported(f"{what} stored as {dtype_of(load)}")
    shape = _shape(attention.params, load)
    axes = [axis for group in attention.groups.values() for axis in group]
    offset = Simplifier(axes)(flatten(load.indices, shape, INDEX))
    rest = _along_head(offset, head)
    if rest is None:
        raise Unsupported(f"{what} that are not contiguous along the head")
    analyzer = tvm.sym.Analyzer()
    factor, size = known_factor(rest, analyzer), bytes_of(dtype_of(load))
    piece = next(
        (p for p in PIECES if p >= size and factor * size % p == 0 and extent * size % p == 0), None
    )
    if piece is None:
        raise Unsupported(f"{what} at odd addresses")
    groups = {"batch": attention.batch, along: attention.groups[along], "head": head}
    access = affine_access(load.indices, shape, groups)
    return Source(load, offset, access, along, head, extent, piece)


def _shape(params: Sequence[Param], load: TensorLoad) -> tuple[Extent, ...]:
    return next(p.shape for p in params if p.var.same_as(load.source))


def _along_head(offset: Expr, head: Sequence[Axis]) -> Expr | None:
    """The offset of a row's first element, where its elements follow each other."""
    form = linear_form(offset, [axis.var for axis in head])
    if form is None:
        return None
    stride = 1
    for coefficient, axis in zip(reversed(form[0]), reversed(head), strict=True):
        if number(coefficient) != stride:
            return None
        stride *= axis.extent
    return form[1]


class Lines:
    """Addresses within the rows of one head; `env` has the axes of the batch."""

    def __init__(self, frame: Frame, source: Source, axes: tuple, env: Mapping[Var, Expr]):
        self.frame, self.source, self.axes, self.env = frame, source, axes, env
        buffer = frame.buffers[source.load.source]
        self.pointer = buffer.ptr_to([0] * len(source.load.indices))

    def prepare(self) -> None:
        """Emits what does not change from row to row."""
        zero = {axis.var: constant(0, self.frame.index) for axis in self.source.head}
        self.env = {**self.env, **zero}
        self.base = None
        if self.source.rows is not None:
            first = {axis.var: constant(0, self.frame.index) for axis in self.axes}
            base = self.frame.rewrite(self.source.offset, {**self.env, **first})
            self.base = T.Bind(convert(base, "int64"))

    @property
    def evenly(self) -> bool:
        """Whether each row lies as far behind the one before as any other."""
        return self.source.rows is not None and len(self.source.rows) <= 1

    def further(self, rows: int) -> Expr:
        """Bytes between a row and the one so many behind it, where they lie evenly."""
        stride = self.source.rows[0].stride if self.source.rows else 0
        return _int64(stride) * constant(rows * self.source.size, "int64")

    def at(self, row: Expr, column: Expr, count: Expr | None = None) -> Expr:
        """Distance of a row's piece number `column` from the start of the parameter, in bytes.

        Where addresses are loaded, no row at or above `count` is looked at.
        """
        index = self.frame.index
        if self.base is not None:
            digits = self.source.rows or (Digit(1, 0),)
            index = "int64" if len(digits) == 1 else index
            line = self.base + convert(self._sum(digits, convert(row, index)), "int64")
        else:
            if count is not None:
                row = T.min(row, count - 1)
            env = {**self.env, **coordinates(self.axes, convert(row, index), self.frame)}
            line = convert(self.frame.rewrite(self.source.offset, env), "int64")
        column = convert(column * self.source.piece, "int64")
        return line * constant(self.source.size, "int64") + column

    def _sum(self, digits: tuple[Digit, ...], flat: Expr) -> Expr:
        if len(digits) > 1:
            return digit_sum(digits, flat, self.frame)
        return flat * _int64(digits[0].stride)


def _int64(size: Extent) -> Expr:
    return constant(size, "int64") if isinstance(size, int) else convert(size, "int64")
