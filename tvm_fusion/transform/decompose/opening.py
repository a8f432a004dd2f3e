"""What a rule needs to open one composite: named bindings, half-precision widening, and means.

A rule is a function `(opening, call) -> Expr | None`. It emits primitives through the opening and
returns the variable (or the tuple of variables) that stands for the composite's result, or None
when it does not apply; bindings emitted before a None are thrown away.
"""

import math
from collections.abc import Callable, Sequence

import numpy as np
import tvm
import tvm_ffi
from tvm import relax, te, tirx
from tvm.ir import Call
from tvm.relax import Expr, Var, op

from ...config import HardwareProfile

HALF_DTYPES = ("float16", "bfloat16")
FLOAT_DTYPES = (*HALF_DTYPES, "float32", "float64")


def dtype_of(tensor: Expr) -> str:
    """The element type of a typed tensor expression, as a string."""
    return str(tensor.ty.dtype)


def shape_of(tensor: Expr) -> list | None:
    """The extents of a typed tensor expression, or None where the shape is not known."""
    shape = tensor.ty.shape
    # A slice of an array of TVM takes a quarter of the time of iterating over the shape.
    return list(shape.values[:]) if isinstance(shape, relax.ShapeExpr) else None


def compute_dtype(dtype: str) -> str:
    """The type in which values of `dtype` are accumulated: float32 for the half types."""
    return "float32" if dtype in HALF_DTYPES else dtype


def normalize_axes(axes: int | Sequence[int] | None, ndim: int) -> list[int]:
    """Axes counted from the front, in the order given; None means all of them."""
    if axes is None:
        return list(range(ndim))
    if isinstance(axes, int):
        axes = [axes]
    return [int(axis) % ndim for axis in axes]


def static_size(extents: Sequence) -> int | None:
    """The product of the extents, or None where one of them is symbolic."""
    if not all(isinstance(extent, tirx.IntImm) for extent in extents):
        return None
    return math.prod(int(extent) for extent in extents)


class Opening:
    """The primitives of one composite, collected in order under one name prefix.

    `hw` is the device whose limits decide between forms; None: the plain form everywhere. Where a
    model writes out a variance (see `variances`), `is_center` says that the mean being opened is
    the one within it; its rule may leave the variance as `spread`, but for a rounding below 0,
    which is then given to the rule that opens the variance itself.
    """

    is_center: bool = False
    spread: Expr | None = None

    def __init__(
        self,
        builder: relax.BlockBuilder,
        prefix: str,
        fresh: Callable[[str], str],
        hw: HardwareProfile | None = None,
    ) -> None:
        self.builder = builder
        self.hw = hw
        self.bindings: list[relax.VarBinding] = []
        self._prefix = prefix
        self._fresh = fresh

    def emit(self, part: str, value: Expr) -> Var:
        """Bind `value` to `<prefix>_<part>`."""
        value = self.builder.normalize(value)
        kind = relax.DataflowVar if self.builder.current_block_is_dataflow() else relax.Var
        var = kind(self._fresh(f"{self._prefix}_{part}"), value.ty)
        self.bindings.append(relax.VarBinding(var, value))
        return var

    def const(self, value: float, like: Expr) -> Expr:
        """A 0-d constant of the type of `like`; LegalizeOps writes it into the PrimFunc."""
        dtype = dtype_of(like)
        return relax.const(np.array(value, dtype), dtype)

    def widen(self, part: str, tensor: Expr) -> Expr:
        """`tensor` in the type it is accumulated in: itself, or a cast of a half tensor."""
        dtype = dtype_of(tensor)
        wide = compute_dtype(dtype)
        return tensor if wide == dtype else self.emit(f"{part}_wide", op.astype(tensor, wide))

    def narrow(self, part: str, tensor: Expr, dtype: str) -> Expr:
        """`tensor` rounded to `dtype`: itself where it already has that type."""
        return tensor if dtype_of(tensor) == dtype else self.emit(part, op.astype(tensor, dtype))

    def mean(self, part: str, tensor: Expr, axes: Sequence[int], *, keepdims: bool = True) -> Expr:
        """mean(x) -> sum(x) * (1 / n); with a symbolic (or zero) n `relax.mean` stays."""
        size = static_size([shape_of(tensor)[axis] for axis in axes])
        if not size:
            return self.emit(part, op.mean(tensor, axes, keepdims))
        total = self.emit(f"{part}_sum", op.sum(tensor, axes, keepdims))
        return self.emit(part, op.multiply(total, self.const(1.0 / size, tensor)))

    def where(self, part: str, condition: Expr, tensor: Expr, otherwise: float) -> Expr:
        """where(condition, tensor, otherwise), all of one shape, with `otherwise` in the PrimFunc.

        LegalizeOps leaves the constants of `relax.where` outside as 0-d tensors, which FuseTIR
        refuses.
        """

        def where(chosen: te.Tensor, value: te.Tensor) -> te.Tensor:
            constant = tirx.const(otherwise, value.dtype)

            def select(*index):
                return tirx.Select(chosen(*index), value(*index), constant)

            return te.compute(value.shape, select, name="where")

        return self.emit(part, self.builder.call_te(where, condition, tensor))

    def reshape(self, part: str, tensor: Expr, shape: Sequence) -> Expr:
        """`tensor` in another shape: itself where the shapes already agree."""
        old = shape_of(tensor)
        if old is not None and tvm_ffi.structural_equal(old, list(shape)):
            return tensor
        return self.emit(part, op.reshape(tensor, list(shape)))

    def permute(self, part: str, tensor: Expr, axes: Sequence[int]) -> Expr:
        """permute(permute(x, p), q) -> permute(x, p[q]), and the identity -> x."""
        axes = list(axes)
        source = self.builder.lookup_binding(tensor) if isinstance(tensor, Var) else None
        if isinstance(source, Call) and source.op == tvm.ir.Op.get("relax.permute_dims"):
            inner = source.attrs.axes
            ndim = len(axes)
            inner = list(range(ndim))[::-1] if inner is None else normalize_axes(inner, ndim)
            axes = [inner[axis] for axis in axes]
            tensor = source.args[0]
        if axes == list(range(len(axes))):
            return tensor
        return self.emit(part, op.permute_dims(tensor, axes))


Rule = Callable[[Opening, Call], Expr | None]
