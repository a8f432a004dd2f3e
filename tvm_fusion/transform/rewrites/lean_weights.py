"""LeanWeights: constant operands of matrix products, stored as a kernel loads them well.

    matmul(x, w)                   w: float8 const [K, N]
->  matmul(x, permute_dims(v))     v: float8 const [N, K]

    matmul(x, w)                   w: float16 const [1001, 1003], rows of 2006 bytes
->  matmul(x, v[:, 0:1003])        v: float16 const [1001, 1024], zeros at the end of each row

- Rows (the contiguous axis) that are no multiple of 16 bytes, which vector loads and the tensor
  memory accelerator need, or of 128, without which boxes straddle cache lines. The other order of
  the axes if its rows are, else padded rows.
- float8 (and float32 whose products may be rounded to tf32) not contiguous along the summed axis:
  tensor cores take no other order.
- Halves of a product of one or two rows, likewise: threads that sum up neighbouring terms reach the
  rate of memory (1 x 11008 x 4096 on an H200: 21.5 us, 23.7 the other way).

Slices and transpositions become part of a kernel's index arithmetic.

Does not handle: constants with one long axis, functions other than `main`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import partial

import numpy as np
import tvm
from tvm import relax
from tvm.ir import Call
from tvm.relax import Expr, op
from tvm.relax.expr_functor import mutator

from ...config import HardwareProfile
from ...ir.weights import made
from ..decompose.opening import HALF_DTYPES, dtype_of, shape_of, static_size
from .factors import FLOAT8_DTYPES, PACKED_DTYPES, constant_behind, is_call, is_constant
from .hidden_weights import Hider, on_gpu
from .readers import Reader

VECTOR_BYTES = 16  # rows are multiples of these
LINE_BYTES = 128  # and of these where that costs little
MOST_WASTE = 0.1  # of the weight
FEW_ROWS = 2  # of the other operand


@tvm.transform.module_pass(opt_level=0, name="tvm_fusion.LeanWeights")
class LeanWeights:
    """See the module docstring. Runs before LegalizeOps; `BindWeights` after FoldConstant. A module
    with no weight to store in another way is returned as it is.

    Parameters
    ----------
    hw : HardwareProfile
        A CPU changes nothing.
    allow_tf32 : bool
        `Policy.allow_tf32`.
    """

    def __init__(self, hw: HardwareProfile | None, allow_tf32: bool = False) -> None:
        self.hw, self.allow_tf32 = hw, allow_tf32

    def transform_module(self, mod: tvm.IRModule, _ctx: tvm.transform.PassContext) -> tvm.IRModule:
        if not on_gpu(self.hw, mod):
            return mod
        storer = _Storer(mod)
        storer.allow_tf32 = self.allow_tf32
        return storer.hide(mod)


@dataclass(frozen=True, slots=True)
class Storage:
    """How a constant is stored: with its last two axes exchanged or not, and rows padded."""

    transposed: bool
    padding: int = 0


def storage(
    shape: tuple[int, int],
    dtype: str,
    flipped: bool,
    is_right: bool,
    allow_tf32: bool = False,
    rows: int | None = None,
) -> Storage | None:
    """How to store an operand, or None to leave it as constant folding makes it.

    Parameters
    ----------
    shape : (int, int)
        The last two extents of the constant.
    dtype : str
    flipped : bool
        Whether the product reads the transposition of the constant.
    is_right : bool
        Whether it is the right operand.
    allow_tf32 : bool
    rows : int or None
        Of the other operand, where they are known.
    """
    bytes_each = tvm.DataType(dtype).itemsize
    extent = {False: shape[1], True: shape[0]}  # contiguous elements, by Storage.transposed
    waste = {order: padded(n, bytes_each) - n for order, n in extent.items()}
    folded = flipped  # constant folding stores what the product reads
    few = dtype in HALF_DTYPES and is_right and rows is not None and rows <= FEW_ROWS
    if few or dtype in FLOAT8_DTYPES or (dtype == "float32" and allow_tf32):
        along_sum = flipped != is_right  # the right operand is [K, N]
        found = Storage(along_sum, waste[along_sum])
    elif dtype not in HALF_DTYPES or not waste[folded]:
        return None
    else:
        order = min((folded, not folded), key=lambda order: waste[order] / extent[order])
        found = Storage(order, waste[order])
    return None if found == Storage(folded) else found


def padded(elements: int, bytes_each: int) -> int:
    """The length of a row that is a multiple of 128 bytes, if that costs little, or of 16."""
    lengths = [_rounded_up(elements, size // bytes_each) for size in (LINE_BYTES, VECTOR_BYTES)]
    return lengths[0] if lengths[0] - elements < MOST_WASTE * elements else lengths[1]


def _rounded_up(n: int, multiple: int) -> int:
    return -(-n // multiple) * multiple


@mutator
class _Storer(Hider):
    def rewritten(self, call: Call) -> Expr | None:
        if not is_call(call, "matmul") or any(len(shape_of(a) or ()) < 2 for a in call.args):
            return None
        rows = static_size(shape_of(call.args[0])[:-1])
        args = [self._operand(arg, place == 1, rows) for place, arg in enumerate(call.args)]
        if all(new.same_as(old) for new, old in zip(args, call.args, strict=True)):
            return None
        args = [self.visit_expr(arg) for arg in args]
        return relax.Call(call.op, args, call.attrs, call.ty_args, call.span)

    def _operand(self, operand: Expr, is_right: bool, rows: int | None) -> Expr:
        found = constant_behind(operand, self.readers.within)
        if found is None or not is_matrix(found.source):
            return operand
        constant, shape = found.source, [int(extent) for extent in shape_of(found.source)]
        dtype = dtype_of(constant)
        matrix = tuple(shape[-2:])
        chosen = storage(matrix, dtype, found.flipped, is_right, self.allow_tf32, rows)
        if chosen is None:
            return operand
        weight: Expr = self.hidden(constant, chosen, lambda: _stored(constant, chosen))
        if chosen.padding:
            last = int(shape_of(weight)[-1]) - chosen.padding
            weight = self.builder_.emit(op.strided_slice(weight, [len(shape) - 1], [0], [last]))
        if chosen.transposed == found.flipped:
            return weight
        axes = [*range(len(shape) - 2), len(shape) - 1, len(shape) - 2]
        return self.builder_.emit(op.permute_dims(weight, axes))


def _stored(constant: Expr, chosen: Storage) -> tvm.runtime.Tensor:
    if chosen == Storage(False):
        return constant.value
    shape = [int(extent) for extent in shape_of(constant)]
    if chosen.transposed:
        shape[-2:] = shape[:-3:-1]
    shape[-1] += chosen.padding
    make = partial(_as_stored, chosen=chosen)
    return made(str(chosen), make, constant, shape, dtype_of(constant)).value


def _as_stored(array: np.ndarray, chosen: Storage) -> np.ndarray:
    if chosen.transposed:
        array = array.swapaxes(-1, -2)
    if chosen.padding:
        array = np.pad(array, [*[(0, 0)] * (array.ndim - 1), (0, chosen.padding)])
    return array


# ---- PackedWeights: constants that are stored in fewer bytes than they are computed with stay so.
#
#     w = astype(const int8 [K, N], "float16")      a float16 constant, if it were folded
#     y = matmul(x, w)
#
# What stands between them and a product is computed on the device, in each call: less is read, and
# more is computed. Those are int8, uint8 and float8 constants that are widened, and 32-bit integers
# that are taken apart by shifts and masks.
#
# Does not handle: constants with one long axis, functions other than `main`.

LEAST_ELEMENTS = 1 << 12  # smaller constants stay in the caches, whatever their type

_UNPACKING = ("right_shift", "left_shift", "bitwise_and")
_MOVES = ("reshape", "permute_dims", "expand_dims", "squeeze")


@tvm.transform.module_pass(opt_level=0, name="tvm_fusion.PackedWeights")
class PackedWeights:
    """See the module docstring. Runs before LegalizeOps, `BindWeights` after FoldConstant. A module
    without such weights, or for a CPU, is returned as it is.
    """

    def __init__(self, hw: HardwareProfile | None) -> None:
        self.hw = hw

    def transform_module(self, mod: tvm.IRModule, _ctx: tvm.transform.PassContext) -> tvm.IRModule:
        return _Keeper(mod).hide(mod) if on_gpu(self.hw, mod) else mod


def is_matrix(constant: Expr) -> bool:
    """Whether a constant has two long axes, and elements worth a thought."""
    extents = [int(extent) for extent in shape_of(constant)]
    size = math.prod(extents)
    return len(extents) > 1 and size >= LEAST_ELEMENTS and size > max(extents)


@mutator
class _Keeper(Hider):
    def rewritten(self, call: Call) -> Expr | None:
        if not is_call(call, "astype", *_UNPACKING, *_MOVES):
            return None
        args = [self._kept(call, arg) for arg in call.args]
        if all(new.same_as(old) for new, old in zip(args, call.args, strict=True)):
            return None
        return type(call)(call.op, args, call.attrs, call.ty_args, call.span)

    def _kept(self, call: Call, arg: Expr) -> Expr:
        if not is_constant(arg) or not is_matrix(arg):
            return arg
        readers = self.readers.of_constant(arg)
        words = dtype_of(arg) in ("int32", "uint32")
        keeps = any(map(self._is_taken_apart, readers)) if words else dtype_of(arg) in PACKED_DTYPES
        if not keeps or not any(map(self._becomes_operand, readers)):
            return arg
        return self.hidden(arg, "packed", lambda: arg.value)

    def _is_taken_apart(self, reader: Reader) -> bool:
        """Whether shifts or masks follow, at once or after the words were moved."""
        value = self.readers.lookup(reader.var)
        if is_call(value, *_UNPACKING):
            return True
        return is_call(value, *_MOVES) and any(
            map(self._is_taken_apart, self.readers.of(reader.var))
        )

    def _becomes_operand(self, reader: Reader) -> bool:
        """Whether a product reads a constant, or what is made of constants alone."""
        value = self.readers.lookup(reader.var)
        if is_call(value, "matmul"):
            return True
        if reader.var is None or not all(map(self._is_known, getattr(value, "args", ()))):
            return False
        return any(map(self._becomes_operand, self.readers.of(reader.var)))

    def _is_known(self, expr: Expr) -> bool:
        if isinstance(expr, tvm.relax.Tuple):
            return all(map(self._is_known, expr.fields))
        if not isinstance(expr.ty, tvm.relax.TensorType) or is_constant(expr):
            return True
        value = self.readers.lookup(expr)
        return value is not None and all(map(self._is_known, getattr(value, "args", ())))
