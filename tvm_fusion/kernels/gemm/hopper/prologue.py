"""What is computed of A: a function of an element of a stored matrix, on the way to wgmma.

    relu(x[m, k] * s[k] + b[k]) w[k, n]

      x        comes into shared memory by the TMA, like any A
      s, b     are read from global memory, a step ahead of their use
      wgmma    takes the function's values from registers

Each tile of columns computes it again, so it pays where few column tiles share a row tile, or where
storing the values and reading them back takes longer.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection
from dataclasses import dataclass

import tvm_ffi
from tvm.ir import Call, Expr

from ....config import HardwareProfile
from ....errors import Unsupported
from ....ir.access import Pipe
from ....ir.reader import op_name, pipe_of
from ...contraction.model import Binding
from ...contraction.reader import Contraction, Operand, Product
from ...gpu.access import Groups
from ...group.footprint import instructions_of
from ...program.expr import HALF_DTYPES, bytes_of, variables
from ...program.program import Extent
from ..epilogue import EpilogueLoad, LoadTaker, count_operations, holds_load
from ..launch import operation_seconds
from .cost import element_seconds


@dataclass(frozen=True, slots=True, eq=False)
class Prologue:
    """The function in front of a product.

    Attributes
    ----------
    bindings, value : over the placeholders of loads, and the axes of `groups`.
    stored : the element of the matrix that the TMA brings in.
    loads : what else the function reads, by few of the groups.
    groups : axes by name: batch, rows ("m", or those of windows) and terms ("k").
    terms : elements along "k"; what the function makes of those beyond counts for nothing.
    extents : of data that is read at windows, elements along each; those beyond are padding, which
        is zero whatever the function makes of zero.
    """

    bindings: tuple[Binding, ...]
    value: Expr
    stored: EpilogueLoad
    loads: tuple[EpilogueLoad, ...]
    groups: Groups
    terms: int
    extents: tuple[Extent, ...] = ()

    @property
    def reads_axes(self) -> bool:
        """Whether the function is one of where an element lies, too."""
        axes = {axis.var for group in self.groups.values() for axis in group}
        values = (*(b.value for b in self.bindings), self.value)
        return bool(axes & set(variables(*values)))

    def same_for_terms(self, load: EpilogueLoad) -> bool:
        """Whether a load is the same for all terms of a row."""
        return "k" not in load.groups

    def width(self, load: EpilogueLoad) -> int:
        """Neighbouring terms that are one aligned access: two, or one."""
        whole = load.access is not None and load.access.aligned(2, "k")
        return 2 if whole and bytes_of(load.dtype) in (2, 4) else 1

    @property
    def registers(self) -> int:
        """32-bit registers of a thread for what is loaded in a step: of 16 terms, each of two rows
        where rows differ; and for fragments.
        """
        total = FRAGMENT_WORDS
        for load in self.loads:
            each = 2 if is_by_row(load) else 1
            terms = 1 if self.same_for_terms(load) else TERMS_OF_THREAD
            packed = 2 if load.dtype in HALF_DTYPES and self.width(load) == 2 else 1
            total += each * -(-terms // packed)
        return total

    @property
    def registers_in_place(self) -> int:
        """The same where it is computed in shared memory: of so many channels."""
        total = 2 * CHANNELS_OF_THREAD
        for load in self.loads:
            terms = 1 if self.same_for_terms(load) else CHANNELS_OF_THREAD
            total += -(-terms * bytes_of(load.dtype) // 4)
        return total

    def seconds(self, hw: HardwareProfile) -> float:
        """Time that the whole device needs for one element."""
        values = [*(b.value for b in self.bindings), self.value]
        calls: list[Call] = []
        for value in values:
            tvm_ffi.structural_walk(value, [(Call, calls.append)])
        called = Counter(op_name(call) for call in calls if pipe_of(call) == Pipe.SPECIAL)
        more = instructions_of(called.items()) * 2 / hw.fma_per_s_f32
        counts = count_operations(values)
        return operation_seconds(counts.items(), hw) + more + element_seconds(hw)


TERMS_OF_THREAD = 16
"""Terms of a step that a thread holds, of each of its two rows."""
FRAGMENT_WORDS = 16
"""Words of a thread's fragments of a step of halves."""
CHANNELS_OF_THREAD = 8
"""Terms that a thread computes together in shared memory: 16 bytes of halves."""


def read_prologue(
    contraction: Contraction,
    product: Product,
    operand: Operand,
    groups: Groups,
    extents: tuple[Extent, ...] = (),
    alone: Collection[str] = (),
) -> Prologue:
    """What is computed of A; groups other than "batch" and "k" are rows, windows of such `extents`
    where there are any. Along those that are `alone` all rows that are computed together lie at the
    same place, so that what differs only along them and between terms is a vector.

    Raises
    ------
    Unsupported
        Where no single matrix of halves is read at all rows and terms, what else is read stands
        under a condition or at an index that is loaded, or the unfused graph multiplies float32.
    """
    taker = LoadTaker(contraction, groups, symbolic_strides=bool(extents))
    bindings = tuple(Binding(b.var, taker.visit(b.value)) for b in operand.bindings)
    value = taker.visit(operand.value)
    if any(map(holds_load, (*(b.value for b in bindings), value))):
        raise Unsupported("an operand computed of what is read under a condition")
    one = frozenset(alone)
    whole = [x for x in taker.found if "k" in x.groups and x.groups - {"batch", "k"} - one]
    if len(whole) != 1 or whole[0].access is None:
        raise Unsupported(f"an operand computed of {len(whole)} matrices")
    (stored,) = whole
    others = tuple(load for load in taker.found if load is not stored)
    # A factor in float32 of an operand that was stored in half precision keeps it so.
    wide = any(load.dtype not in HALF_DTYPES for load in others)
    if stored.dtype not in HALF_DTYPES or (wide and product.stored_dtype not in HALF_DTYPES):
        raise Unsupported("an operand computed of float32")
    if {load.dtype for load in taker.found} - {stored.dtype, "float32"}:
        raise Unsupported("an operand computed of other dtypes")
    if extents and any(load.groups - {"batch", "k"} - one for load in others):
        raise Unsupported("data computed of what differs between positions")
    terms = math.prod(axis.extent for axis in groups["k"])
    return Prologue(bindings, value, stored, others, groups, terms, extents)


def is_by_row(load: EpilogueLoad) -> bool:
    """Whether a load differs between rows."""
    return bool(load.groups - {"batch", "k"})
