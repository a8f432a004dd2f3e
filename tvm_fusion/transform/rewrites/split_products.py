"""SplitProducts: products with few outputs and long sums, whose tiles leave most of the device
idle, become products of pieces of the terms, and a sum of these.

    y = matmul(xT, w)             xT: [443, 21473]    w: [21473, 109]    132 multiprocessors
->  y_piece = matmul(..., ...)    views of both: [44, 443, 480] by [44, 480, 109], float32
    y_left  = matmul(..., ...)    the terms that are left over: [443, 353] by [353, 109]
    y       = sum(y_piece, axis=0) + y_left

Gradients of weights are such products, and narrow layers of long rows. Pieces start at whole
vectors of 16 bytes; their number is that by which a simple model of the product's tiles and of the
sum takes least; the plans with and without it say whether it is kept.

Does not handle (left alone): symbolic sizes, few rows (`kernels.gemm.skinny` spreads their terms
over warps), products of integers, float64 and 8 bits.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product

import tvm
from tvm import relax
from tvm.relax import Expr, op
from tvm.relax.expr_functor import PyExprMutator, mutator

from ...config import HardwareProfile
from ...kernels.gemm.mma import rank
from ...kernels.gemm.mma.problem import Way
from ...kernels.gemm.simt.config import simt_seconds
from ...kernels.gemm.simt.kernel import CONFIGS
from ...kernels.gemm.time import MMA_STEPS, MMA_TILES, MOST_SPLIT, SKINNY_ROWS
from ..decompose.opening import HALF_DTYPES, dtype_of, shape_of, static_size
from ..functions.functions import rewrite_functions
from .factors import is_call, swaps_last_axes
from .readers import Parts, Readers

VECTOR_BYTES = 16
PARTIAL_BYTES = 4  # of an element of a piece's product
LEAST_TERMS = 128  # of a piece: a block's start and end cost as much as these
FULL_WAVES = 2  # a product with more blocks than these waves is left alone
SMALLEST_TILE = 64 * 64
TF32 = "tfloat32"  # by whose rate float32 in parts is predicted


@dataclass(frozen=True, slots=True)
class Sizes:
    """A product of matrices: batches, rows, columns and terms, of one dtype."""

    batch: int
    rows: int
    columns: int
    terms: int
    dtype: str

    @property
    def element_bytes(self) -> int:
        """Bytes of an element of the operands."""
        return tvm.DataType(self.dtype).itemsize


@tvm.transform.module_pass(opt_level=0, name="tvm_fusion.SplitProducts")
class SplitProducts:
    """See the module docstring. `hw` is the GPU that is to be filled."""

    def __init__(self, hw: HardwareProfile) -> None:
        self.hw = hw

    def transform_module(self, mod: tvm.IRModule, _ctx: tvm.transform.PassContext) -> tvm.IRModule:
        splitter = _Splitter(mod)

        def split(func: relax.Function) -> relax.Function | None:
            return splitter.split_function(func, self.hw)

        return rewrite_functions(mod, splitter.builder_, split)


def sizes_of(value: Expr | None) -> Sizes | None:
    """The sizes of a product that may be taken apart; None for all other values."""
    if not is_call(value, "matmul"):
        return None
    left, right = (shape_of(arg) for arg in value.args)
    dtype = dtype_of(value.args[0])
    if left is None or right is None or min(len(left), len(right)) < 2:
        return None
    if dtype not in (*HALF_DTYPES, "float32") or dtype_of(value.args[1]) != dtype:
        return None
    outputs = shape_of(value)
    found = [static_size([n]) for n in (outputs[-2], outputs[-1], left[-1])]
    batch = static_size(outputs[:-2])
    if batch is None or None in found or 0 in (batch, *found):
        return None
    return Sizes(batch, *found, dtype)


def piece_terms(sizes: Sizes, hw: HardwareProfile) -> int:
    """Terms of a piece; all of them where the product is to stay whole."""
    cells = sizes.batch * sizes.rows * sizes.columns
    if sizes.rows <= SKINNY_ROWS or cells > FULL_WAVES * hw.num_sms * SMALLEST_TILE * 4:
        return sizes.terms
    found = {sizes.terms: _seconds(sizes, sizes.terms, hw)}
    for terms in _candidates(sizes, hw):
        found[terms] = _seconds(sizes, terms, hw) + _sum_seconds(cells, sizes.terms / terms, hw)
    return min(found, key=lambda terms: (found[terms], -terms))


def _candidates(sizes: Sizes, hw: HardwareProfile) -> Iterator[int]:
    """Terms of equal pieces where there is such a divisor, else of pieces and a lesser one."""
    vector = VECTOR_BYTES // sizes.element_bytes
    most = min(sizes.terms // LEAST_TERMS, 2 * hw.num_sms)
    for pieces in range(2, most + 1):
        if sizes.terms % pieces == 0 and sizes.terms // pieces % vector == 0:
            yield sizes.terms // pieces
        else:
            yield -(-sizes.terms // (pieces * vector)) * vector


def _seconds(sizes: Sizes, terms: int, hw: HardwareProfile) -> float:
    """Predicted time of the products of all pieces, of any form of the kernel."""
    pieces = sizes.batch * -(-sizes.terms // terms)
    if sizes.dtype == "float32":
        segment = pieces, sizes.rows, sizes.columns, (terms,)
        found = [simt_seconds([segment], config, hw, 0.0) for config in CONFIGS]
        return min([*found, *_seconds_in_parts(sizes, terms, pieces, hw)])
    rate = hw.tensor_flop_per_s.get(sizes.dtype, hw.fma_per_s_f32) / hw.num_sms
    found = []
    for block_m, block_n, reads in MMA_TILES:
        tiles = pieces * -(-sizes.rows // block_m) * -(-sizes.columns // block_n)
        step = rank.tile_step_seconds(
            (block_m, block_n, reads),
            MMA_STEPS[-1],
            sizes.element_bytes,
            0.0,
            rate,
            hw.clock_ghz * 1e9,
        )
        steps = -(-terms * sizes.element_bytes // MMA_STEPS[-1])
        found.append(-(-tiles // hw.num_sms) * steps * step)
    return min(found)


def _seconds_in_parts(
    sizes: Sizes, terms: int, pieces: int, hw: HardwareProfile
) -> Iterator[float]:
    """The same of float32 on tensor cores, tile by tile."""
    if not hw.architecture.has_mma or TF32 not in hw.tensor_flop_per_s:
        return
    share = rank.SM90_SHARE if hw.architecture.is_rated_by_wgmma else rank.PEAK_SHARE
    rate, clock = hw.tensor_flop_per_s[TF32] * share / hw.num_sms, hw.clock_ghz * 1e9
    size = sizes.element_bytes
    waiting, stored = rank.STEP_SECONDS[Way.COPY], rank.EPILOGUE_SECONDS / 128**2
    for tile, step in product(MMA_TILES, MMA_STEPS):
        cells = tile[0] * tile[1]
        if cells > MOST_SPLIT:
            continue
        tiles = pieces * -(-sizes.rows // tile[0]) * -(-sizes.columns // tile[1])
        turns = -(-tiles // hw.num_sms)
        each = rank.tile_step_seconds(tile, step, size, 0.0, rate, clock, split=True)
        body = -(-terms * size // step) * (each + waiting / min(turns, 2))
        yield rank.START_SECONDS + turns * (body + stored * cells / min(turns, 2))


def _sum_seconds(cells: int, pieces: float, hw: HardwareProfile) -> float:
    """Predicted time of writing the products of pieces, and of summing them."""
    return 2 * PARTIAL_BYTES * cells * pieces / hw.hbm_bytes_per_s + hw.launch_us * 1e-6


@mutator
class _Splitter(PyExprMutator):
    """Replaces the bindings of products."""

    def split_function(self, func: relax.Function, hw: HardwareProfile) -> relax.Function | None:
        """The function with its products taken apart, or None where there was none to take."""
        if not isinstance(func.body, relax.SeqExpr):
            return None
        self.hw, self.changed = hw, False
        self.readers, self.parts = Readers(func), Parts(self.builder_, func)
        split = self.visit_expr(func)
        if not self.changed:
            return None
        return self.parts.tagged(relax.analysis.remove_all_unused(split))

    def visit_var_binding_(self, binding: relax.VarBinding) -> None:
        call = binding.value
        sizes = sizes_of(call)
        terms = 0 if sizes is None else piece_terms(sizes, self.hw)
        if sizes is None or terms == sizes.terms:
            super().visit_var_binding_(binding)
            return
        self.changed = True
        name, pieces = binding.var.name, sizes.terms // terms
        left, right = (
            self._pieces(name, operand, summed, pieces, terms)
            for operand, summed in zip(call.args, (-1, -2), strict=True)
        )
        result = self._product(name, "piece", left, right)
        result = op.sum(result, [len(shape_of(result)) - 3])
        if sizes.terms % terms:
            left, right = (
                self._left_over(name, operand, summed, pieces * terms)
                for operand, summed in zip(call.args, (-1, -2), strict=True)
            )
            last = self._product(name, "left", left, right)
            result = op.add(self.parts.bind(name, "pieces", result), last)
        if dtype_of(call) != "float32":
            result = op.astype(self.parts.bind(name, "wide", result), dtype_of(call))
        self.parts.finish(self.visit_var_def(binding.var), result)

    def _product(self, name: str, part: str, left: Expr, right: Expr) -> Expr:
        return self.parts.bind(name, part, op.matmul(left, right, out_dtype="float32"))

    def _pieces(self, name: str, operand: Expr, summed: int, pieces: int, terms: int) -> Expr:
        """An operand [..., rows, terms] (or [..., terms, columns]: `summed` is -2) as pieces, the
        number of which is a further axis before the last two.
        """
        source, flipped = self._source(operand)
        *outer, rows, columns = shape_of(source)
        along = -3 - summed if flipped else summed
        first = self._range(name, source, along, 0, pieces * terms)
        halved = [rows, pieces, terms] if along == -1 else [pieces, terms, columns]
        first = self.parts.bind(name, "view", op.reshape(first, [*outer, *halved]))
        axes = list(range(len(outer)))
        order = [1, 0, 2] if along == -1 else [0, 1, 2]
        if flipped:
            order = [order[0], order[2], order[1]]
        if order != [0, 1, 2]:
            order = [*axes, *(len(axes) + axis for axis in order)]
            first = self.parts.bind(name, "turned", op.permute_dims(first, order))
        return first

    def _left_over(self, name: str, operand: Expr, summed: int, start: int) -> Expr:
        """The last terms of an operand."""
        source, flipped = self._source(operand)
        along = -3 - summed if flipped else summed
        rest = self._range(name, source, along, start, int(shape_of(source)[along]))
        if not flipped:
            return rest
        outer = len(shape_of(source)) - 2
        axes = [*range(outer), outer + 1, outer]
        return self.parts.bind(name, "turned", op.permute_dims(rest, axes))

    def _range(self, name: str, source: Expr, axis: int, start: int, end: int) -> Expr:
        """Elements `start` to `end` of a tensor along an axis."""
        if (start, end) == (0, int(shape_of(source)[axis])):
            return source
        axis %= len(shape_of(source))
        part = op.strided_slice(source, [axis], [start], [end], assume_inbound=True)
        return self.parts.bind(name, "terms", part)

    def _source(self, operand: Expr) -> tuple[Expr, bool]:
        """An operand, or what it is the transposition of, and whether it is."""
        value = self.readers.within(operand)
        if is_call(value, "permute_dims") and swaps_last_axes(value):
            return self.visit_expr(value.args[0]), True
        return self.visit_expr(operand), False
