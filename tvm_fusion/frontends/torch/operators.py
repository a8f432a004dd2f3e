"""Converters for arithmetic, reductions and indexing.

What differs from TVM 0.27:
- Arithmetic follows PyTorch's type promotion (TVM makes the 0.5 of `integers * 0.5` an integer, 0).
- cumsum and cumprod of booleans and integers are int64 (TVM keeps booleans).
- Powers of 2, 3 and 1/2 are products and a square root, as in PyTorch.
- Slices and selections are affine, and of symbolic dimensions have the size that PyTorch found
  (TVM gathers, and leaves the size unknown).
- amax, amin and any without an axis exist, and so do shifts and exp2.
- ELUs have their scales (TVM's leave them out, so that selu and celu are wrong).
- hypot and products along an axis exist.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import fx
from tvm import relax, sym, tirx

from .importer import Importer, Size, bound_arguments, size_of

Converter = Callable[["Importer", fx.Node], relax.Expr]
HALVES = ("float16", "bfloat16")


def scaled(importer: Importer, x: relax.Expr, factor: float) -> relax.Expr:
    """factor * x in the type of x; 0 * x is NaN where x is no number, which TVM takes for 0."""
    if factor == 1:
        return x
    if factor == 0 and "float" in str(x.ty.dtype):
        return _nothing_of(importer, x)
    return importer.emit(relax.op.multiply(x, relax.const(factor, x.ty.dtype)))


def _nothing_of(importer: Importer, x: relax.Expr) -> relax.Expr:
    """0 where floats are finite, NaN elsewhere. TVM's simplifier takes x - x for 0, too, where
    something is computed with it.
    """
    dtype = str(x.ty.dtype)
    wide = importer.cast(x, "float32" if dtype == "bfloat16" else dtype)
    finite = importer.emit(relax.op.isfinite(wide))
    zero, nan = (relax.const(number, dtype) for number in (0.0, math.nan))
    return importer.emit(relax.op.where(finite, zero, nan))


def _arithmetic(op: Callable, neutral: int | None = None) -> Converter:
    """Operands take the type of the result first; a right operand `neutral` changes nothing."""

    def convert(importer: Importer, node: fx.Node) -> relax.Expr:
        dtype = importer.dtype_of(node)
        a, b = (importer.operand(arg, dtype) for arg in node.args[:2])
        if _changes_nothing(node, neutral):
            return a
        alone = op is relax.op.subtract and "float" in dtype and "alpha" not in node.kwargs
        if alone and node.args[0] is node.args[1]:
            return _nothing_of(importer, a)
        if op is relax.op.multiply and isinstance(node.args[1], int | float):
            return scaled(importer, a, node.args[1])
        # add and sub compute a + alpha * b
        return importer.emit(op(a, scaled(importer, b, node.kwargs.get("alpha", 1))))

    return convert


def _changes_nothing(node: fx.Node, neutral: int | None) -> bool:
    b = node.args[1]
    return neutral is not None and isinstance(b, int | float) and b == neutral


def _comparison(op: Callable) -> Converter:
    """Operands take the type that PyTorch promotes both to; the result is boolean."""

    def convert(importer: Importer, node: fx.Node) -> relax.Expr:
        values = [arg.meta["val"] if isinstance(arg, fx.Node) else arg for arg in node.args[:2]]
        if node.args[0] is node.args[1] and values[0].is_floating_point():
            return _compared_with_itself(importer, node, op)
        dtype = importer._convert_data_type(torch.result_type(*values))
        return importer.emit(op(*(importer.operand(arg, dtype) for arg in node.args[:2])))

    return convert


def _compared_with_itself(importer: Importer, node: fx.Node, op: Callable) -> relax.Expr:
    """x != x, which TVM takes for False, is a question for NaN."""
    nan = _is_nan(importer, node)
    if op is relax.op.not_equal:
        return nan
    number = importer.emit(relax.op.logical_not(nan))
    if op in (relax.op.equal, relax.op.less_equal, relax.op.greater_equal):
        return number
    return importer.emit(relax.op.logical_and(nan, number))


def _is_nan(importer: Importer, node: fx.Node) -> relax.Expr:
    """isnan, in float32 for bfloat16, which TVM knows no question about."""
    x = importer.value_of(node.args[0])
    dtype = str(x.ty.dtype)
    if "float" not in dtype:
        return importer.emit(relax.op.not_equal(x, x))
    return importer.emit(
        relax.op.isnan(importer.cast(x, "float32" if dtype == "bfloat16" else dtype))
    )


def _finite(of_integers: Callable, of_floats: Callable) -> Converter:
    """isinf and isfinite; integers are finite."""

    def convert(importer: Importer, node: fx.Node) -> relax.Expr:
        x = importer.value_of(node.args[0])
        is_float = "float" in str(x.ty.dtype)
        return importer.emit(of_floats(x) if is_float else of_integers(x, x))

    return convert


def _reciprocal(importer: Importer, node: fx.Node) -> relax.Expr:
    x = importer.operand(node.args[0], importer.dtype_of(node))
    return importer.emit(relax.op.divide(relax.const(1, x.ty.dtype), x))


def _added(op: Callable) -> Converter:
    """self + value * op(tensor1, tensor2); a value of 0 keeps NaN and infinities."""

    def convert(importer: Importer, node: fx.Node) -> relax.Expr:
        args, dtype = bound_arguments(node), importer.dtype_of(node)
        x, a, b = (importer.operand(args[name], dtype) for name in ("self", "tensor1", "tensor2"))
        both = importer.emit(op(scaled(importer, a, args["value"]), b))
        return importer.emit(relax.op.add(x, both))

    return convert


def _where(importer: Importer, node: fx.Node) -> relax.Expr:
    condition = importer.operand(node.args[0], "bool")
    a, b = (importer.operand(arg, importer.dtype_of(node)) for arg in node.args[1:3])
    return importer.emit(relax.op.where(condition, a, b))


def _power(importer: Importer, node: fx.Node) -> relax.Expr:
    x, exponent = importer.operand(node.args[0], importer.dtype_of(node)), node.args[1]
    if exponent in (2, 3):
        square = importer.emit(relax.op.multiply(x, x))
        return square if exponent == 2 else importer.emit(relax.op.multiply(square, x))
    if exponent == 0.5:
        return importer.emit(relax.op.sqrt(x))
    return _general_power(importer, node)


def _general_power(importer: Importer, node: fx.Node) -> relax.Expr:
    """a ** b; of integers in float64, which holds those below 2 ** 53."""
    dtype = importer.dtype_of(node)
    wide = dtype if "float" in dtype else "float64"
    a, b = (importer.operand(arg, wide) for arg in node.args[:2])
    power = importer.emit(relax.op.power(a, b))
    return importer.cast(importer.emit(relax.op.round(power)), dtype) if wide != dtype else power


def _exp2(importer: Importer, node: fx.Node) -> relax.Expr:
    """2 ** x as exp(x log 2), in float32 for halves: the product would lose their last bits."""
    dtype = importer.dtype_of(node)
    x = importer.operand(node.args[0], dtype)
    wide = importer.cast(x, "float32") if dtype in HALVES else x
    result = importer.emit(relax.op.exp(scaled(importer, wide, math.log(2))))
    return importer.cast(result, dtype)


def _hypot(importer: Importer, node: fx.Node) -> relax.Expr:
    """a * sqrt(1 + (b / a) ** 2) of the larger and the smaller magnitude: squares overflow.

    It is infinite where either is, whatever the other: NaN, too.
    """
    dtype = importer.dtype_of(node)
    wide = "float32" if dtype in HALVES else dtype
    x, y = (importer.emit(relax.op.abs(importer.operand(arg, wide))) for arg in node.args[:2])
    ordered = importer.emit(relax.op.greater_equal(x, y))
    large, small = (importer.emit(relax.op.where(ordered, *of)) for of in ((x, y), (y, x)))
    one = relax.const(1, wide)
    ratio = importer.emit(relax.op.divide(small, large))
    equal = importer.emit(relax.op.equal(small, large))  # two zeros or infinities, too
    ratio = importer.emit(relax.op.where(equal, one, ratio))
    square = importer.emit(relax.op.add(importer.emit(relax.op.multiply(ratio, ratio)), one))
    root = importer.emit(relax.op.sqrt(square))
    length = importer.emit(relax.op.multiply(large, root))
    ends = (importer.emit(relax.op.isinf(side)) for side in (x, y))
    endless = importer.emit(relax.op.logical_or(*ends))
    length = importer.emit(relax.op.where(endless, relax.const(math.inf, wide), length))
    return importer.cast(length, dtype)


def _clamp(importer: Importer, node: fx.Node) -> relax.Expr:
    """Bounds that are tensors, of a type of their own at times."""
    args, dtype = bound_arguments(node), importer.dtype_of(node)
    result = importer.operand(args["self"], dtype)
    for name, op in (("min", relax.op.maximum), ("max", relax.op.minimum)):
        if args[name] is not None:
            result = importer.emit(op(result, importer.operand(args[name], dtype)))
    return result


def _clamp_by_numbers(importer: Importer, node: fx.Node) -> relax.Expr:
    """TVM's, but for integers: where one of their bounds is not given, it takes infinity for it."""
    is_float = node.meta["val"].is_floating_point()
    return importer._clamp(node) if is_float else _clamp(importer, node)


def _elu(importer: Importer, node: fx.Node) -> relax.Expr:
    """scale * (x if x > 0 else alpha * (exp(input_scale * x) - 1)), in float32 for halves."""
    args, dtype = bound_arguments(node), importer.dtype_of(node)
    x = importer.operand(args["self"], dtype)
    wide = importer.cast(x, "float32") if dtype in HALVES else x
    zero, one = (relax.const(number, wide.ty.dtype) for number in (0, 1))
    below = scaled(importer, importer.emit(relax.op.minimum(wide, zero)), args["input_scale"])
    below = importer.emit(relax.op.subtract(importer.emit(relax.op.exp(below)), one))
    below = scaled(importer, below, args["alpha"] * args["scale"])
    above = scaled(importer, importer.emit(relax.op.nn.relu(wide)), args["scale"])
    return importer.cast(importer.emit(relax.op.add(above, below)), dtype)


def _remainder(importer: Importer, node: fx.Node) -> relax.Expr:
    """What a division rounded down leaves, with the sign of the divisor."""
    a, b = (importer.operand(arg, importer.dtype_of(node)) for arg in node.args[:2])
    if "float" not in str(a.ty.dtype):
        return importer.emit(relax.op.floor_mod(a, b))
    rest, less = _rest(importer, a, b)
    return importer.emit(relax.op.where(less, importer.emit(relax.op.add(rest, b)), rest))


def _rest(importer: Importer, a: relax.Expr, b: relax.Expr) -> tuple[relax.Expr, relax.Expr]:
    """The exact rest of a division rounded towards zero, and whether rounding down is one less.

    TVM's floor_mod is a - floor(a / b) * b, which loses bits, and is NaN where b is infinite.
    """
    zero = relax.const(0, str(a.ty.dtype))
    rest = importer.emit(relax.op.mod(a, b))
    signs = (importer.emit(relax.op.less(x, zero)) for x in (rest, b))
    less = importer.emit(relax.op.not_equal(*signs))
    return rest, importer.emit(
        relax.op.logical_and(importer.emit(relax.op.not_equal(rest, zero)), less)
    )


def _floored(importer: Importer, a: relax.Expr, b: relax.Expr) -> relax.Expr:
    """a / b rounded down; of floats as PyTorch has it, where a quotient may round to the next."""
    if "float" not in str(a.ty.dtype):
        return importer.emit(relax.op.floor_divide(a, b))
    emit = importer.emit
    zero, half, one = (relax.const(x, str(a.ty.dtype)) for x in (0, 0.5, 1))
    rest, less = _rest(importer, a, b)
    whole = emit(relax.op.divide(emit(relax.op.subtract(a, rest)), b))
    whole = emit(relax.op.where(less, emit(relax.op.subtract(whole, one)), whole))
    down = emit(relax.op.floor(whole))
    above = emit(relax.op.greater(emit(relax.op.subtract(whole, down)), half))
    found = emit(relax.op.where(above, emit(relax.op.add(down, one)), down))
    by_zero = emit(relax.op.equal(b, zero))
    return emit(relax.op.where(by_zero, emit(relax.op.divide(a, b)), found))


def _rounded_division(importer: Importer, node: fx.Node) -> relax.Expr:
    a, b = (importer.operand(arg, importer.dtype_of(node)) for arg in node.args[:2])
    rounding = node.kwargs.get("rounding_mode")
    if rounding == "floor":
        return _floored(importer, a, b)
    quotient = importer.emit(relax.op.divide(a, b))  # of integers: rounded towards zero
    if rounding is None or not node.meta["val"].is_floating_point():
        return quotient
    return importer.emit(relax.op.trunc(quotient))


def _scan(op: Callable) -> Converter:
    """cumsum and cumprod, in float32 for halves: each element is rounded once."""

    def convert(importer: Importer, node: fx.Node) -> relax.Expr:
        dtype = importer.dtype_of(node)
        wide = "float32" if dtype in HALVES else dtype
        result = op(importer.operand(node.args[0], wide), node.args[1], wide)
        return importer.cast(importer.emit(result), dtype)

    return convert


def _reduction(op: Callable) -> Converter:
    """amax, amin, and any (the maximum of booleans)."""

    def convert(importer: Importer, node: fx.Node) -> relax.Expr:
        args = bound_arguments(node)
        x = importer.operand(args["self"], importer.dtype_of(node))
        axes = args.get("dim")
        axes = None if axes == [] else axes
        return importer.emit(op(x, axes, keepdims=args.get("keepdim", False)))

    return convert


def _product(importer: Importer, node: fx.Node) -> relax.Expr:
    """prod, in float32 for halves: their products overflow and round at every step."""
    args, dtype = bound_arguments(node), importer.dtype_of(node)
    if importer.value_of(args["self"]).ty.ndim == 0:
        return importer.operand(args["self"], dtype)
    x = importer.operand(args["self"], "float32" if dtype in HALVES else dtype)
    result = relax.op.prod(x, args.get("dim"), keepdims=args.get("keepdim", False))
    return importer.cast(importer.emit(result), dtype)


def _cat(importer: Importer, node: fx.Node) -> relax.Expr:
    """Tensors joined along an axis; those without elements count for nothing, also such of another
    number of axes.
    """
    args = bound_arguments(node)
    given = [t for t in args["tensors"] if 0 not in t.meta["val"].shape]
    values = [importer.operand(tensor, importer.dtype_of(node)) for tensor in given]
    return values[0] if len(values) == 1 else importer.emit(relax.op.concat(values, args["dim"]))


def _permute(importer: Importer, node: fx.Node) -> relax.Expr:
    return importer.permute(importer.value_of(node.args[0]), node.args[1])


def _select(importer: Importer, node: fx.Node) -> relax.Expr:
    x, axis, index = importer.value_of(node.args)
    axis %= x.ty.ndim
    if isinstance(index, int) and index < 0:
        index += x.ty.shape[axis]
    return importer.emit(relax.op.squeeze(span(importer, x, axis, index, 1), [axis]))


def _slice(importer: Importer, node: fx.Node) -> relax.Expr:
    args = bound_arguments(node)
    x = importer.value_of(args["self"])
    axis = args["dim"] % x.ty.ndim
    begin = 0 if args["start"] is None else importer.value_of(args["start"])
    size = size_of(node.meta["val"].shape[axis], importer.symbols)
    if size is None or args["step"] != 1:
        return importer._slice(node)
    if isinstance(begin, int) and begin < 0:
        begin += x.ty.shape[axis]
        begin = max(int(begin.value), 0) if isinstance(begin, tirx.IntImm) else begin
    if sym.Analyzer().can_prove_equal(size, x.ty.shape[axis]):
        return x
    return span(importer, x, axis, begin, size)


def span(importer: Importer, x: relax.Expr, axis: int, begin: Size, size: Size) -> relax.Expr:
    """x[..., begin : begin + size, ...], which is inside x."""
    return importer.emit(
        relax.op.strided_slice(x, [axis], [begin], [begin + size], assume_inbound=True)
    )


def _tensor_and_scalar(name: str, converter: Converter) -> dict[str, Converter]:
    return {f"{name}.Tensor": converter, f"{name}.Scalar": converter}


def _converted(importer: Importer, node: fx.Node) -> relax.Expr:
    """`prims.convert_element_type`, of numbers that are tensors and in PyTorch's decompositions."""
    return importer.operand(node.args[0], importer.dtype_of(node))


def _shifts(side: str) -> list[str]:
    spelt = [f"__{side[0]}shift__.{kind}" for kind in ("Scalar", "Tensor")]
    kinds = ("Tensor", "Tensor_Scalar", "Scalar_Tensor")
    return spelt + [f"bitwise_{side}_shift.{kind}" for kind in kinds]


CONVERTERS: dict[str, Converter] = {
    **_tensor_and_scalar("add", _arithmetic(relax.op.add, neutral=0)),
    **_tensor_and_scalar("sub", _arithmetic(relax.op.subtract, neutral=0)),
    **_tensor_and_scalar("mul", _arithmetic(relax.op.multiply, neutral=1)),
    **_tensor_and_scalar("div", _arithmetic(relax.op.divide, neutral=1)),
    **_tensor_and_scalar("remainder", _remainder),
    "remainder.default": _remainder,  # of prims: a number by a tensor
    **_tensor_and_scalar("eq", _comparison(relax.op.equal)),
    **_tensor_and_scalar("ne", _comparison(relax.op.not_equal)),
    **_tensor_and_scalar("lt", _comparison(relax.op.less)),
    **_tensor_and_scalar("le", _comparison(relax.op.less_equal)),
    **_tensor_and_scalar("gt", _comparison(relax.op.greater)),
    **_tensor_and_scalar("ge", _comparison(relax.op.greater_equal)),
    **_tensor_and_scalar("bitwise_and", _arithmetic(relax.op.bitwise_and)),
    **_tensor_and_scalar("bitwise_or", _arithmetic(relax.op.bitwise_or)),
    **_tensor_and_scalar("bitwise_xor", _arithmetic(relax.op.bitwise_xor)),
    **{name: _arithmetic(relax.op.left_shift) for name in _shifts("left")},
    **{name: _arithmetic(relax.op.right_shift) for name in _shifts("right")},
    "reciprocal.default": _reciprocal,
    "addcmul.default": _added(relax.op.multiply),
    "addcdiv.default": _added(relax.op.divide),
    "cat.default": _cat,
    "div.Tensor_mode": _rounded_division,
    "atan2.default": _arithmetic(relax.op.atan2),
    "maximum.default": _arithmetic(relax.op.maximum),
    "minimum.default": _arithmetic(relax.op.minimum),
    "exp2.default": _exp2,
    "clamp.Tensor": _clamp,
    "clamp.default": _clamp_by_numbers,
    "elu.default": _elu,
    "pow.Scalar": _general_power,
    "pow.Tensor_Tensor": _general_power,
    "pow.Tensor_Scalar": _power,
    "where.self": _where,
    "convert_element_type.default": _converted,
    "cumsum.default": _scan(relax.op.cumsum),
    "cumprod.default": _scan(relax.op.cumprod),
    "hypot.default": _hypot,
    "isfinite.default": _finite(relax.op.equal, relax.op.isfinite),
    "isinf.default": _finite(relax.op.not_equal, relax.op.isinf),
    "isnan.default": _is_nan,
    "prod.default": _product,
    "prod.dim_int": _product,
    "amax.default": _reduction(relax.op.max),
    "amin.default": _reduction(relax.op.min),
    "any.default": _reduction(relax.op.max),
    "any.dim": _reduction(relax.op.max),
    "any.dims": _reduction(relax.op.max),
    "permute.default": _permute,
    "select.int": _select,
    "slice.Tensor": _slice,
}
