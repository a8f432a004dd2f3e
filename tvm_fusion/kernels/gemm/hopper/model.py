"""What the Hopper kernel computes, as values: operands and outputs as the TMA addresses them."""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass
from functools import lru_cache

import tvm_ffi
from tvm.ir import Call, Expr, Var

from ....errors import Unsupported
from ...contraction.model import Binding, Space
from ...contraction.reader import Contraction, Output, Partners, Product
from ...gpu.access import AffineAccess, is_multiple
from ...gpu.product_frame import ceil_div, divided
from ...gpu.tensor_map import TensorMap, tensor_map
from ...program.expr import FLOAT8_DTYPES, HALF_DTYPES, bytes_of, conjunction, convert
from ...program.program import Extent
from ..epilogue import EpilogueLoad
from .prologue import Prologue

# Halves in one row of a box (128 bytes), and rows of a box that a warpgroup stores.
BOX = 64

# Bytes of one row of the swizzle, which are the terms of one step, and terms of one wgmma in bytes.
STEP_BYTES = 128
BOX_ALIGNMENT = 1024
WGMMA_BYTES = 32

# Steps after which sums of 8-bit floats are added up in full precision. Error relative to the
# largest value of 4096^3, half outputs (H200, 2026-11-20): 4.5e-4 after each step, 6.5e-4 after 4
# (7 % faster), 4.3e-3 if never.
PROMOTE_STEPS = 4

# What wgmma calls the dtypes of its operands. All but the halves have to be contiguous along k.
OPERAND_KINDS = {
    "float16": "f16",
    "bfloat16": "bf16",
    "float8_e4m3fn": "e4m3",
    "float8_e5m2": "e5m2",
    "float32": "tf32",
}


@dataclass(frozen=True, slots=True, eq=False)
class OperandView:
    """An operand as a tensor over (batch, `rows`, k), contiguous along the group `inner`."""

    param: Var
    dtype: str
    access: AffineAccess
    rows: str
    inner: str

    @property
    def k_major(self) -> bool:
        """Whether neighbouring terms are neighbours in memory."""
        return self.inner == "k"

    def boxes(self, rows: int) -> TensorMap:
        """Boxes of 128 bytes of terms by `rows` rows, or of 128 bytes of contiguous rows."""
        return _boxes(self, rows if self.k_major else BOX)


@lru_cache(maxsize=256)  # of each operand for all configurations
def _boxes(view: OperandView, rows: int) -> TensorMap:
    box = {view.rows: rows, "k": STEP_BYTES // bytes_of(view.dtype)}
    return tensor_map(view.param, view.dtype, view.access, view.inner, box)


@dataclass(frozen=True, slots=True, eq=False)
class Windows:
    """Rows that are positions of windows, taps that are terms: a convolution's A.

        row      box number, place in a box of 64       box (n, p, q) of 1 x 8 x 8 positions
        step     tap, 128 bytes of channels             tap (r, s)
        reads    a[n, stride p + (offset + dilation r) // repeats - before, (q, s alike), channel]
                 w[filter, tap number first_tap + r * tap_step + s * tap_step, channel]

    With `rims` a step has all taps: a box is brought in with its rim once, and each tap reads it
    from another row on; with `streams`, too, weights have stages of their own, one for each tap.
    What the TMA reads outside of the data is zero, which is the padding. The axes of rows are the
    boxes along each window, then the positions in one along each of them; there are `sizes`
    positions, and boxes at the end may reach beyond them.

    Attributes
    ----------
    sizes, shape : positions along each window, and those of a box.
    strides, dilations, before, taps : of each window.
    repeats, offsets : of each window, of data whose elements are read several times beside each
        other; 1 and 0 of others.
    tap_steps, first_tap : from tap to tap of each window in the weights, and the first one.
    channels : terms of a tap, whole steps.
    group_channels : from a group's channels to the next one's, which are whole steps and lie behind
        each other; 0 where groups are a dimension of their own.
    rims : a box of A holds what all taps of its positions read.
    streams : with rims, the taps' weights of a step come one after the other.
    """

    sizes: tuple[Extent, ...]
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dilations: tuple[int, ...]
    before: tuple[int, ...]
    taps: tuple[int, ...]
    tap_steps: tuple[int, ...]
    first_tap: int
    channels: int
    repeats: tuple[int, ...]
    offsets: tuple[int, ...]
    group_channels: int = 0
    rims: bool = False
    streams: bool = False

    @property
    def sliding(self) -> tuple[int, ...]:
        """The windows with several taps."""
        return tuple(i for i, taps in enumerate(self.taps) if taps > 1)

    @property
    def boxes(self) -> tuple[Extent, ...]:
        """Boxes along each window."""
        return tuple(ceil_div(n, size) for n, size in zip(self.sizes, self.shape, strict=True))

    @property
    def names(self) -> tuple[str, ...]:
        """What tensor maps call the windows."""
        return tuple(f"w{i}" for i in range(len(self.sizes)))

    @property
    def is_ragged(self) -> bool:
        """Whether some rows are no position."""
        return not all(map(is_multiple, self.sizes, self.shape))

    @property
    def reach(self) -> tuple[int, ...]:
        """Elements from the first tap to the last one, along each window."""
        return tuple(abs(d) * (n - 1) for d, n in zip(self.dilations, self.taps, strict=True))

    @property
    def held(self) -> tuple[int, ...]:
        """Elements of a box along each window."""
        if not self.rims:
            return self.shape
        return tuple(n + more for n, more in zip(self.shape, self.reach, strict=True))

    @property
    def box_bytes(self) -> int:
        """Shared memory of a box; swizzled ones start at multiples of 1 KB."""
        return -(-math.prod(self.held) * STEP_BYTES // BOX_ALIGNMENT) * BOX_ALIGNMENT

    @property
    def taps_of_step(self) -> list[tuple[int, int]]:
        """Of each tap of a step with rims: its number, and the row of a box that it starts at."""
        found = []
        for tap in itertools.product(*map(range, self.taps)):
            number, row = self.first_tap, 0
            for i, t in enumerate(tap):
                place = t if self.dilations[i] >= 0 else self.taps[i] - 1 - t
                number += t * self.tap_steps[i]
                row = row * self.held[i] + place * abs(self.dilations[i])
            found.append((number, row))
        return found

    @property
    def group_rows(self) -> int:
        """Rows of a box from 8 positions side by side to the next 8.

        Raises
        ------
        Unsupported
            They are not all that far apart.
        """
        if not self.rims or self.shape[-1] == BOX:
            return 8
        long = [i for i, n in enumerate(self.shape) if n > 1]
        if self.shape[-1] != 8 or len(long) != 2:
            raise Unsupported(f"boxes of {self.shape} with their rims")
        return math.prod(self.held[long[0] + 1 :])

    def first(self, box: Expr) -> list[Expr]:
        """The first position of a box along each window."""
        found, rest = [], box
        counts = list(zip(self.boxes, self.shape, strict=True))
        for position in range(len(counts) - 1, -1, -1):
            count, size = counts[position]
            if position == 0:
                found.append(rest * size)
                break
            count = count if isinstance(count, int) else convert(count, "int32")
            rest, place = divided(rest, count)
            found.append(place * size)
        return found[::-1]

    def positions(self, row: Expr) -> list[Expr]:
        """The position of a row along each window."""
        place, found = row % BOX, []
        for first, size in zip(self.first(row // BOX)[::-1], self.shape[::-1], strict=True):
            found.append(first + place % size)
            place = place // size
        return found[::-1]

    def exists(self, row: Expr) -> Expr:
        """Whether a row is a position."""
        place, firsts = row % BOX, self.first(row // BOX)
        inside = []
        for position in range(len(self.shape) - 1, -1, -1):
            size = self.shape[position]
            if not is_multiple(self.sizes[position], size):
                end = self.sizes[position]
                end = end if isinstance(end, int) else convert(end, "int32")
                inside.append(firsts[position] + place % size < end)
            place = place // size
        return conjunction(*inside)


@dataclass(frozen=True, slots=True, eq=False)
class WindowPart:
    """Channels of A from `first` on and below `end`, that lie in a tensor of their own: read at
    `windows`, whose positions, taps and boxes are those of all parts.
    """

    first: int
    end: int
    windows: Windows
    view: OperandView


@dataclass(frozen=True, slots=True, eq=False)
class HopperSegment(Space):
    """A segment over its batch, M and N axes; `loads` are what its epilogue reads ahead of use.

    `staged` is the position of the output that leaves through shared memory and the TMA, by the map
    `staged_map`; the others are stored from registers. With `factors`, one a product, the epilogue
    starts from accumulators that are multiplied by them; they are the same for all columns. With
    `partners` it reads those of two columns. With `windows` its rows are positions of them, and
    `parts` says which channels lie where if not all are in `a`, the first of them. With a
    `prologue` A is computed of what the TMA brings in.
    """

    products: tuple[Product, ...]
    a: OperandView
    b: tuple[OperandView, ...]
    bindings: tuple[Binding, ...]
    outputs: tuple[Output, ...]
    loads: tuple[EpilogueLoad, ...]
    staged: int | None = None
    staged_map: TensorMap | None = None
    residual: EpilogueLoad | None = None
    residual_map: TensorMap | None = None
    factors: tuple[Expr, ...] = ()
    partners: Partners | None = None
    windows: Windows | None = None
    parts: tuple[WindowPart, ...] = ()
    prologue: Prologue | None = None

    @property
    def K(self) -> int:
        """Number of terms."""
        return self.products[0].K

    @property
    def views(self) -> tuple[OperandView, ...]:
        """The tensors that A lies in."""
        return tuple(part.view for part in self.parts) or (self.a,)


@dataclass(frozen=True, slots=True, eq=False)
class HopperProblem:
    """Made by `read_problems`; `dtype` is that of A, and of B but for two kinds of 8-bit floats.

    `shared` says that all segments have one A, whose sizes are `batch`, `M` and `K`. Else each
    segment has its own, and these are the largest.
    """

    contraction: Contraction
    dtype: str
    batch: Extent
    M: Extent
    K: int
    a: OperandView
    segments: tuple[HopperSegment, ...]
    shared: bool

    @property
    def has_windows(self) -> bool:
        """Whether rows of A are positions of windows, not rows of a matrix."""
        return self.segments[0].windows is not None

    @property
    def most_rows(self) -> int | None:
        """How many rows there are at most, if that is known."""
        if isinstance(self.M, int):
            return self.M
        one = isinstance(self.batch, int) and self.batch == 1
        return self.contraction.rows.most if one and not self.has_windows else None

    def whole_tiles(self, height: int) -> Extent:
        """Rows, in whole tiles of a height where all numbers that may be take as many; else `M`."""
        if isinstance(self.M, int) or self.most_rows is None:
            return self.M
        tiles = ceil_div(self.most_rows, height)
        same = ceil_div(max(self.contraction.rows.least, 1), height) == tiles
        return tiles * height if same else self.M

    @property
    def prologue(self) -> Prologue | None:
        """What is computed of A, if anything is: there is one segment then."""
        return self.segments[0].prologue

    @property
    def kinds(self) -> tuple[str, str]:
        """What wgmma calls the dtypes of A and B."""
        return OPERAND_KINDS[self.dtype], OPERAND_KINDS[self.segments[0].b[0].dtype]

    @property
    def narrow(self) -> bool:
        """Whether operands are 8-bit floats, whose sums wgmma keeps with 14 bits or so."""
        return self.dtype in FLOAT8_DTYPES

    @property
    def rounds_operands(self) -> bool:
        """Whether operands are float32, of which wgmma reads the bits of a tfloat32."""
        return self.dtype == "float32"

    @property
    def precision(self) -> dict[str, int | bool]:
        """Fields of a configuration that the dtype of the operands decides."""
        return {"promote": PROMOTE_STEPS if self.narrow else 0, "tf32": self.rounds_operands}

    @property
    def kept_dtype(self) -> str | None:
        """The half precision in which the unfused graph stores all products, if it is one."""
        found = {
            p.scaled_dtype if segment.factors else p.stored_dtype
            for segment in self.segments
            for p in segment.products
        }
        kept = found.pop()
        return kept if not found and kept in HALF_DTYPES else None

    @property
    def box_bytes(self) -> int:
        """Shared memory of 64 rows of A in a step."""
        windows = self.segments[0].windows
        return BOX * STEP_BYTES if windows is None else windows.box_bytes

    @property
    def taps(self) -> int:
        """Taps of a step: tiles of B."""
        windows = self.segments[0].windows
        return 1 if windows is None or not windows.rims else math.prod(windows.taps)

    @property
    def streams(self) -> bool:
        """Whether A and B have stages of their own, B one for each tap."""
        windows = self.segments[0].windows
        return windows is not None and windows.streams

    @property
    def taps_of_stage(self) -> int:
        """Tiles of B in a stage."""
        return 1 if self.streams else self.taps

    @property
    def block_k(self) -> int:
        """Terms of one step."""
        return STEP_BYTES // bytes_of(self.dtype)

    @property
    def columns(self) -> list[int]:
        """N of each segment."""
        return [segment.N for segment in self.segments]

    @property
    def dual(self) -> bool:
        """Whether two products meet in each output."""
        return len(self.segments[0].products) == 2

    @property
    def staged(self) -> bool:
        """Whether every segment has an output that the TMA can store."""
        return all(segment.staged is not None for segment in self.segments)

    @property
    def unlowered_functions(self) -> bool:
        """Whether the epilogue calls functions that exact rounding keeps as they are."""
        if not self.contraction.exact:
            return False
        calls: list[Call] = []
        for segment in self.segments:
            for item in (*segment.bindings, *segment.outputs):
                tvm_ffi.structural_walk(item.value, [(Call, calls.append)])
        return bool(calls)

    @property
    def pairs_with_wide_loads(self) -> bool:
        """Whether values of pairs of columns read elements of more than two bytes."""
        paired = [segment for segment in self.segments if segment.partners is not None]
        loads = [load for segment in paired for load in segment.loads if load.per_column]
        return any(bytes_of(load.dtype) > 2 for load in loads)

    @property
    def residual(self) -> EpilogueLoad | None:
        """The matrix of the output's shape that the TMA loads into the output's own box: that of
        the first segment, where all have one.
        """
        return self.segments[0].residual
