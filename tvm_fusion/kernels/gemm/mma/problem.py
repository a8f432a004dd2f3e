"""A contraction as the mma.sync GEMM sees it: loops over terms, and how each operand is brought in.

q = x wq, k = x wk                 two segments, one loop each
silu(x wg) * (x wu)                one segment, one loop with one A and two B operands
x w + y u                          one segment, two loops that add to accumulators of their own
conv(concat(x, y), w)              one segment, two loops that add to one accumulator
"""

from __future__ import annotations

import enum
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import tvm_ffi
from tvm.ir import TensorLoad

from ....config import HardwareProfile
from ....errors import Unsupported
from ...contraction.model import Binding, RowPartial
from ...contraction.reader import (
    Axis,
    Contraction,
    Operand,
    Output,
    Product,
    Segment,
    equal_sizes,
    size_of,
)
from ...contraction.row_runs import with_row_bits
from ...contraction.windows import Windows
from ...gpu.access import AffineAccess, WindowAccess, affine_access, window_access
from ...program.expr import (
    FLOAT8_DTYPES,
    HALF_DTYPES,
    bytes_of,
    dtype_of,
    is_integer,
    same,
    substitute,
)
from ...program.program import Extent
from ..epilogue import EpilogueLoad, in_pairs, take_loads
from .plan import TERM_BYTES
from .units import CHUNK

# Widths of cp.async.
COPY_BYTES = (16, 8, 4)

# Columns of the accumulators that 4 threads hold side by side.
GROUP = 8

# Columns of a piece of a warp's tile, of which an epilogue works on one at a time.
PIECE = 16

# Columns of the widest access to a row of halves.
VECTOR = 8

# Sizes of elements whose fragments can be read where rows are neighbours.
TRANSPOSED_BYTES = (2, 4)

INT8_DTYPES = ("int8", "uint8")

# The bit, in a table of terms, that those and rows have that exist.
EXISTS = 1 << 30
ENTRY_BYTES = 8


class Way(enum.Enum):
    """How an operand comes into shared memory."""

    COPY = "cp.async"
    SHIFT = "registers, from addresses that cp.async cannot take"
    WINDOW = "cp.async at windows, zeros around them"
    GATHER = "registers, element by element at windows, terms from a table"
    EVALUATE = "registers, evaluated element by element at windows"
    COMPUTE = "registers, evaluated element by element"


def own_columns(block_n: int, window: int, along_k: bool) -> int:
    """How many columns of a tile are whole windows, in pairs where the operand lies along its
    terms, else in vectors.
    """
    return block_n - block_n % math.lcm(window, 2 if along_k else VECTOR)


@dataclass(frozen=True, slots=True, eq=False)
class Source:
    """An operand of a loop.

    Attributes
    ----------
    side : "m" for A, "n" for B: its rows are the axes of that group.
    dtype : of its elements in shared memory (float32 for tfloat32).
    along_k : terms are neighbours in memory (else rows are).
    k_major : terms are neighbours in shared memory.
    piece : bytes of a copy.
    window : how data that is read at windows lies in memory; None where it is computed.
    """

    operand: Operand
    side: str
    rows: tuple[Axis, ...]
    k: tuple[Axis, ...]
    dtype: str
    access: AffineAccess | None
    along_k: bool
    k_major: bool
    way: Way
    piece: int
    window: WindowAccess | None = None

    @property
    def element(self) -> int:
        """Bytes of an element in shared memory."""
        return bytes_of(self.dtype)


@dataclass(frozen=True, slots=True, eq=False)
class Loop:
    """Products of one A operand, summed up side by side."""

    K: Extent
    a: Source
    b: tuple[Source, ...]
    products: tuple[Product, ...]

    @property
    def terms(self) -> int:
        """Terms of one mma.sync."""
        return TERM_BYTES // self.a.element


@dataclass(frozen=True, slots=True, eq=False)
class MmaSegment:
    """A segment with its loops; the `loads` of its epilogue are taken out of its expressions."""

    segment: Segment
    loops: tuple[Loop, ...]
    bindings: tuple[Binding, ...]
    outputs: tuple[Output, ...]
    loads: tuple[EpilogueLoad, ...]

    @property
    def M(self) -> Extent:
        """Number of rows."""
        return self.segment.M

    @property
    def N(self) -> Extent:
        """Number of columns."""
        return self.segment.N

    @property
    def runs(self) -> list[int]:
        """Columns of the runs that are reduced in the epilogue."""
        return [o.partial.width for o in self.outputs if isinstance(o.partial, RowPartial)]

    @property
    def window(self) -> int | None:
        """Columns of the runs that are reduced where these are no pieces of a warp's columns."""
        return next((n for n in self.runs if n % PIECE or n & n - 1), None)

    def own_columns(self, block_n: int) -> int:
        """Columns of a block's tile that no other block has (`own_columns`)."""
        along_k = all(b.along_k for loop in self.loops for b in loop.b)
        return block_n if self.window is None else own_columns(block_n, self.window, along_k)

    @property
    def groups(self) -> dict[str, tuple[Axis, ...]]:
        """The axes of an access from the epilogue."""
        return self.segment.groups


def read_mma(contraction: Contraction, hw: HardwareProfile, wide: bool) -> tuple[MmaSegment, ...]:
    """The segments of a contraction; `wide`: operands may be float32.

    Raises
    ------
    Unsupported
        A device without cp.async, operands whose dtypes mma.sync does not take, or reductions of
        rows that are no 16 of a warp's.
    """
    if not (hw.architecture.has_cp_async and hw.architecture.has_mma):
        raise Unsupported(f"{hw.arch} has no cp.async")
    contraction = in_pairs(contraction, _pair_size)
    return tuple(_segment(contraction, s, hw, wide) for s in contraction.segments)


def _pair_size(segment: Segment) -> int:
    """How far apart a thread's columns of a pair are to be: groups of 8, or neighbours."""
    return GROUP if segment.partners.distance % GROUP == 0 else 1


def _segment(
    contraction: Contraction, segment: Segment, hw: HardwareProfile, wide: bool
) -> MmaSegment:
    groups: list[list[Product]] = []
    for product in segment.products:
        for group in groups:
            if _same_a(group[0], product):
                group.append(product)
                break
        else:
            groups.append([product])
    loops = tuple(_loop(contraction, segment, group, hw, wide) for group in groups)
    axes = segment.groups
    others = (*segment.batch, *segment.n)
    segment = replace(segment, outputs=with_row_bits(segment.outputs, segment.m, others))
    bindings, outputs, loads = take_loads(contraction, segment, axes)
    return MmaSegment(segment, loops, bindings, outputs, loads)


def _same_a(first: Product, other: Product) -> bool:
    """Whether two products read the same A operand."""
    if first.a.bindings or other.a.bindings or len(first.k) != len(other.k):
        return False
    if not all(equal_sizes(x.extent, y.extent) for x, y in zip(first.k, other.k, strict=True)):
        return False
    names = {y.var: x.var for x, y in zip(first.k, other.k, strict=True)}
    return same(first.a.value, substitute(other.a.value, names))


def _loop(
    contraction: Contraction,
    segment: Segment,
    products: list[Product],
    hw: HardwareProfile,
    wide: bool,
) -> Loop:
    dtypes = [_dtypes(p, hw, wide) for p in products]
    if len({a for a, _ in dtypes}) != 1 or len({bytes_of(b) for _, b in dtypes}) != 1:
        raise Unsupported("products of one operand in different dtypes")
    if len({p.dtype for p in products}) != 1:
        raise Unsupported("sums of different dtypes")
    a = _source(contraction, segment, products[0], "m", dtypes[0][0])
    b = tuple(
        _source(contraction, segment, p, "n", dtype)
        for p, (_, dtype) in zip(products, dtypes, strict=True)
    )
    return Loop(products[0].K, a, b, tuple(products))


def _dtypes(product: Product, hw: HardwareProfile, wide: bool) -> tuple[str, str]:
    """The dtypes in which the tensor cores take A and B."""
    stored = [x.stored for x in (product.a, product.b)]
    plain = [None if load is None else dtype_of(load) for load in stored]
    if product.dtype == "int32":
        if all(dtype in INT8_DTYPES for dtype in plain):
            return plain[0], plain[1]
        raise Unsupported("integer operands that are no plain 8-bit tensors")
    if product.dtype != "float32":
        raise Unsupported(f"sums in {product.dtype}")
    if all(dtype in FLOAT8_DTYPES for dtype in plain):
        if not hw.architecture.has_float8_mma:
            raise Unsupported(f"{hw.arch} has no 8-bit floats")
        return plain[0], plain[1]
    read = {d for x in (product.a, product.b) for d in _loaded(x) if not is_integer(d)}
    halves = read & set(HALF_DTYPES)
    others = read - halves - set(FLOAT8_DTYPES) - {"bool"}
    # A factor in float32 of an operand that was stored in half precision keeps it so.
    rounded = product.stored_dtype in halves and not any(d in others for d in plain)
    if len(halves) == 1 and (not others or rounded):
        (half,) = halves
        return half, half
    if read and others <= {"float32"} and wide:
        return "float32", "float32"
    raise Unsupported(f"tensor cores do not multiply {', '.join(sorted(read)) or 'integers'}")


def _loaded(operand: Operand) -> list[str]:
    """Dtypes of the elements that an operand is computed of."""
    return list(dict.fromkeys(dtype_of(load) for load in _loads_of(operand)))


def _loads_of(operand: Operand) -> list[TensorLoad]:
    """All loads of an operand, those of indices too."""
    found: list[TensorLoad] = []
    for expr in (*(b.value for b in operand.bindings), operand.value):
        tvm_ffi.structural_walk(expr, [(TensorLoad, found.append)])
    return found


def _source(
    contraction: Contraction, segment: Segment, product: Product, side: str, dtype: str
) -> Source:
    operand = product.a if side == "m" else product.b
    rows = segment.m if side == "m" else segment.n
    if operand.windows is not None:
        return _window_source(product, operand, side, rows, dtype)
    access, load = None, operand.load
    if load is not None:
        shape = next(p.shape for p in contraction.params if p.var.same_as(load.source))
        groups = {"batch": segment.batch, side: rows, "k": product.k}
        access = affine_access(load.indices, shape, groups) if shape else None
    along_k = access is None or access.contiguous("k") or not access.contiguous(side)
    k_major = along_k or bytes_of(dtype) not in TRANSPOSED_BYTES
    if access is None:
        along_k = k_major = _reads_along_k(contraction, segment, product, side, operand)
        k_major = k_major or bytes_of(dtype) not in TRANSPOSED_BYTES
    way, piece = Way.COMPUTE, CHUNK
    inner = "k" if along_k else side
    if access is not None and dtype_of(load) == dtype and along_k == k_major:
        element = bytes_of(dtype)
        widths = [w for w in COPY_BYTES if w >= element and access.aligned(w // element, inner)]
        if widths:
            way, piece = Way.COPY, widths[0]
        elif access.contiguous(inner) and len(access.digits[inner]) == 1 and element <= 2:
            way = Way.SHIFT
    return Source(
        operand, side, tuple(rows), tuple(product.k), dtype, access, along_k, k_major, way, piece
    )


def _window_source(
    product: Product, operand: Operand, side: str, rows: Sequence[Axis], dtype: str
) -> Source:
    """An operand that is read at windows: by copies where channels are neighbours."""
    windows, load, k = operand.windows, operand.stored, tuple(product.k)
    way, piece, window, element = Way.EVALUATE, CHUNK, None, bytes_of(dtype)
    plain = load is not None and dtype_of(load) == dtype
    if plain and all(w.expansion == 1 for w in windows.dims):
        window = window_access(windows)
    if window is not None:
        repeats = any(w.repeats > 1 for w in windows.dims)
        way = Way.EVALUATE if repeats or not _fits_table(windows, window) else Way.GATHER
        sizes = (w for w in COPY_BYTES if w >= element and k and k[-1] is windows.channels)
        widths = [w for w in sizes if window.aligned(w // element, windows)]
        if widths:
            way, piece = Way.WINDOW, widths[0]
    return Source(operand, side, tuple(rows), k, dtype, None, True, True, way, piece, window)


def _fits_table(windows: Windows, window: WindowAccess) -> bool:
    """Whether all taps of windows have a bit, and all offsets of terms 32 bits."""
    if not all(isinstance(n, int) for n in (*window.strides, window.channel)):
        return False
    taps = sum(w.taps for w in windows.dims if w.has_zeros)
    far = sum(abs(w.dilation) * w.taps * window.strides[w.dim] for w in windows.dims)
    far += window.channel * (1 if windows.channels is None else windows.channels.extent)
    return 1 << taps <= EXISTS and far < 1 << 31


def _reads_along_k(
    contraction: Contraction, segment: Segment, product: Product, side: str, operand: Operand
) -> bool:
    """Whether most of what a computed operand reads lies along the terms rather than the rows."""
    rows = segment.m if side == "m" else segment.n
    groups = {"batch": segment.batch, side: rows, "k": product.k}
    along_rows = along_k = 0
    for load in _loads_of(operand):
        param = next(p for p in contraction.params if p.var.same_as(load.source))
        access = affine_access(load.indices, param.shape, groups) if param.shape else None
        if access is None:
            continue
        size = param.elements if isinstance(param.elements, int) else 1
        along_rows += size if access.contiguous(side) and not access.contiguous("k") else 0
        along_k += size if not access.contiguous(side) else 0
    return along_k >= along_rows


def rows_of(source: Source) -> Extent:
    """Number of rows of an operand."""
    return size_of(source.rows)
