"""Tensor maps: tiles of strided tensors as the tensor memory accelerator (TMA) addresses them.

x[b, s, h, d] with batch (b, h), rows s, terms d, a box of 128 rows and 64 terms
  -> a map of 4 dimensions, ordered by stride:  d (box 64), h (1), s (box 128), b (1)
     coordinates of the box at (batch z, row m, term k): k, z % H, m, z // H
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from tvm import tirx
from tvm.ir import Expr, Var
from tvm.script import tirx as T

from ...errors import Unsupported
from ..program.expr import bytes_of, convert, variables
from ..program.extents import with_values
from ..program.program import Extent
from .access import AffineAccess, Digit, is_multiple

# What cuTensorMapEncodeTiled accepts.
MAX_DIMENSIONS = 5
MAX_BOX = 256
MAX_STEP = 8
STRIDE_BYTES = 16

# Width of a box in bytes: one row of the 128-byte swizzle that wgmma and ldmatrix read.
BOX_BYTES = 128

SWIZZLE_128B = 3
L2_PROMOTION_128B = 2

ORDER_SIZE = 1 << 10
"""That symbolic sizes are taken for where dimensions are put in order."""

# The data type under which the TMA rounds float32 to what tensor cores read of it.
TFLOAT32 = 11


@dataclass(frozen=True, slots=True)
class Dimension:
    """One dimension: a digit of the flat coordinate of `group`, (coordinate // divisor) % extent.

    The outermost digit of a group needs no modulo. The box takes every `step`-th element, `box` of
    them.
    """

    group: str
    extent: Extent
    stride: Extent
    box: int
    divisor: Extent
    outermost: bool
    step: int = 1


@dataclass(frozen=True, slots=True, eq=False)
class TensorMap:
    """The boxes of one tensor; `dimensions` are innermost first."""

    param: Var
    dtype: str
    base: int
    dimensions: tuple[Dimension, ...]

    def coordinates(self, at: Mapping[str, Expr | int]) -> list[Expr | int]:
        """Coordinates of the box that starts at these flat coordinates of the groups."""
        found = []
        for d in self.dimensions:
            value = at.get(d.group, 0)
            if not _is(d.divisor, 1):
                value = value // _int32(d.divisor)
            found.append(value if d.outermost else value % _int32(d.extent))
        return found

    def encode(self, buffer: Var, boxes: Mapping[str, Expr] | None = None) -> Var:
        """Emits the host code that makes the map of `buffer`; the map's address. `boxes` are sizes
        of boxes along groups that are known at the call, at most those of the dimensions.
        """
        handle = T.Bind(T.tvm_stack_alloca("tensormap", 1), T.handle("tensormap"))
        data = buffer.data
        if self.base:
            data = tirx.handle_add_byte_offset(data, self.base * bytes_of(self.dtype))
        rank = len(self.dimensions)
        numbers = [d.extent for d in self.dimensions]
        numbers += [d.stride * bytes_of(self.dtype) for d in self.dimensions[1:]]
        at_call = boxes or {}
        numbers += [
            d.box * d.step if d.box == 1 else at_call.get(d.group, d.box * d.step)
            for d in self.dimensions
        ]
        numbers += [d.step for d in self.dimensions]
        flags = (0, SWIZZLE_128B, L2_PROMOTION_128B, 0)
        if self.dtype == "float32":
            flags = (*flags, TFLOAT32)
        T.evaluate(
            T.call_packed(
                "runtime.cuTensorMapEncodeTiled", handle, self.dtype, rank, data, *numbers, *flags
            )
        )
        return handle

    def load(
        self,
        target: Expr,
        handle: Var,
        at: Mapping[str, Expr | int],
        barrier: Expr,
        blocks: int = 1,
    ) -> None:
        """Emits the copy of a box to shared memory, counted by `barrier`.

        With several `blocks`, it goes to the same place of the first blocks of the cluster, and
        each block's own barrier counts it.
        """
        name = (
            f"cp.async.bulk.tensor.{len(self.dimensions)}d"
            ".shared::cluster.global.mbarrier::complete_tx::bytes"
        )
        arguments = [target, T.address_of(handle), *self.coordinates(at), barrier]
        if blocks > 1:
            name += ".multicast::cluster"
            arguments.append(T.uint16(2**blocks - 1))
        T.evaluate(T.ptx[name](*arguments))

    def store(self, source: Expr, handle: Var, at: Mapping[str, Expr | int]) -> None:
        """Emits the copy of a box from shared memory; what lies outside the tensor is left out."""
        name = f"cp.async.bulk.tensor.{len(self.dimensions)}d.global.shared::cta.tile.bulk_group"
        T.evaluate(T.ptx[name](T.address_of(handle), *self.coordinates(at), source))


def tensor_map(
    param: Var, dtype: str, access: AffineAccess, inner: str, boxes: Mapping[str, int]
) -> TensorMap:
    """The map of an access with boxes of `boxes` points along each group, `inner` contiguous.

    Raises
    ------
    Unsupported
        Where a tile is no box of the tensor (it would cross the edge of an inner digit), where
        strides are no multiples of 16 bytes or negative, or where there are more than five
        dimensions.
    """
    unit = STRIDE_BYTES // bytes_of(dtype)
    found: list[Dimension] = []
    for group, digits in access.digits.items():
        found += _dimensions(group, digits, boxes.get(group, 1))
    for group, box in boxes.items():
        if not any(d.group == group for d in found):
            found.append(_single(group, box, found, unit))
    found.sort(key=lambda d: _order(d, inner))
    first, *others = found
    if first.group != inner or not _is(first.stride, 1) or access.base % unit:
        raise Unsupported(f"an operand is not contiguous along {inner}, or starts off 16 bytes")
    if not all(is_multiple(d.stride, unit) for d in others):
        raise Unsupported("a row pitch that is no multiple of 16 bytes")
    if any(isinstance(d.stride, int) and d.stride < 0 for d in others):
        raise Unsupported("a row pitch below 0: a tensor that is read backwards")
    if len(found) > MAX_DIMENSIONS or max(d.box for d in found) > MAX_BOX:
        raise Unsupported("more dimensions or a larger box than a tensor map has")
    return TensorMap(param, dtype, access.base, tuple(found))


def with_steps(found: TensorMap, steps: Mapping[str, int]) -> TensorMap:
    """The map with boxes of every so-many-th point along some groups.

    Raises
    ------
    Unsupported
        Where the TMA takes no such steps.
    """
    dimensions = []
    for d in found.dimensions:
        step = steps.get(d.group, 1)
        if step > MAX_STEP or d.box * step > MAX_BOX:
            raise Unsupported(f"every {step}th of {d.box * step} points in a box")
        dimensions.append(replace(d, step=step))
    return replace(found, dimensions=tuple(dimensions))


def _dimensions(group: str, digits: tuple[Digit, ...], box: int) -> list[Dimension]:
    """The dimensions of one group; digits that do not move the access need none."""
    found = []
    divisor = 1
    for position, digit in enumerate(reversed(digits)):
        outermost = position == len(digits) - 1
        width = box if position == 0 else 1
        if not _is(digit.stride, 0):
            if not outermost and not is_multiple(digit.extent, width):
                raise Unsupported(f"a tile of {box} points along {group} is no box of the tensor")
            found.append(Dimension(group, digit.extent, digit.stride, width, divisor, outermost))
        elif width > 1:
            raise Unsupported(f"a tensor that does not change along {group}")
        divisor *= digit.extent
    return found


def _single(group: str, box: int, others: list[Dimension], unit: int) -> Dimension:
    """A dimension for a group with one point: whatever else the box holds is outside."""
    known = [d for d in others if isinstance(d.extent, int) and isinstance(d.stride, int)]
    reach = max((d.extent * d.stride for d in known), default=1)
    return Dimension(group, 1, -(-reach // unit) * unit, box, 1, True)


def _is(size: Extent, value: int) -> bool:
    return isinstance(size, int) and size == value


def _int32(size: Extent) -> Expr | int:
    return size if isinstance(size, int) else convert(size, "int32")


def _order(dimension: Dimension, inner: str) -> tuple[bool, bool, int]:
    """The contiguous dimension first, the others by stride, unknown strides last, those that hold
    more symbolic sizes behind others.
    """
    stride = dimension.stride
    known = isinstance(stride, int)
    contiguous = dimension.group == inner and _is(stride, 1)
    if known:
        return not contiguous, False, stride
    return not contiguous, True, with_values(stride, dict.fromkeys(variables(stride), ORDER_SIZE))
