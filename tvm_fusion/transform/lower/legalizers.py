"""Legalizations of our own, where TVM's are wrong, or hide from kernels what they should know.

Each takes a `relax.Call` and gives what stands for it; the tables are for
`relax.transform.LegalizeOps`.
"""

from __future__ import annotations

import itertools
import math
import operator
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import tvm
import tvm_ffi
from tvm import relax, te, tirx, topi
from tvm.ir import Call, Expr, Op

# ---- `relax.where` with numbers: they stand in the PrimFunc, as for arithmetic.
#
#     where(mask, x, const(-inf))  ->  call_tir(where, (mask, x))     -inf is in the PrimFunc
#
# TVM's own legalization hands them over as tensors with one element, so that no kernel knows which
# keys a mask hides.

# A relax.Call in, what stands for it out.
_WHERE = tvm.ir.Op.get("relax.where").get_attr("FLegalize")


def legalize_where(builder: relax.BlockBuilder, call: Call) -> relax.Expr:
    """The legalization of one `relax.where`; without numbers, TVM's own."""
    condition, *sides = call.args
    numbers = [_number(side) for side in sides]
    if numbers == [None, None] or not isinstance(call.ty.shape, relax.ShapeExpr):
        return _WHERE(builder, call)
    shape, dtype = list(call.ty.shape), str(call.ty.dtype)
    tensors = [side for side, value in zip(sides, numbers, strict=True) if value is None]

    def where(condition: te.Tensor, *tensors: te.Tensor) -> te.Tensor:
        def at(*index: tirx.Var) -> Expr:
            rest = iter(tensors)
            values = [
                _element(next(rest), index) if value is None else tirx.const(value, dtype)
                for value in numbers
            ]
            return tirx.Select(_element(condition, index), *values)

        return te.compute(shape, at, name="where")

    return builder.call_te(where, condition, *tensors, primfunc_name_hint="where")


def _number(expr: relax.Expr) -> int | float | None:
    """The number that a constant tensor of one element holds."""
    value = expr.value if isinstance(expr, tvm.ir.Constant) else None
    if not isinstance(value, tvm.runtime.Tensor) or len(value.shape):
        return None
    return value.numpy().item() if "float" in value.dtype or "int" in value.dtype else None


def _element(tensor: te.Tensor, index: tuple[tirx.Var, ...]) -> Expr:
    """The element of a tensor that is broadcast to where `index` points."""
    own = index[len(index) - len(tensor.shape) :]
    return tensor(
        *(
            0 if isinstance(n, tirx.IntImm) and int(n) == 1 else i
            for i, n in zip(own, tensor.shape, strict=True)
        )
    )


# ---- Quotients by the number 0, as products with infinity: TVM folds the division while it writes
# it, and stops there.
#
#     divide(x, const(0))  ->  call_tir(multiply, (x,))     inf is in the PrimFunc

_DIVIDE = tvm.ir.Op.get("relax.divide").get_attr("FLegalize")


def legalize_divide(builder: relax.BlockBuilder, call: Call) -> relax.Expr:
    """The legalization of one `relax.divide`; TVM's own where that does not divide by 0."""
    x, by = call.args
    dtype = str(call.ty.dtype)
    number = _number(by) if "float" in dtype else None
    if number != 0:
        return _DIVIDE(builder, call)
    infinity = tirx.const(math.copysign(math.inf, number), dtype)
    return builder.call_te(topi.multiply, x, infinity, primfunc_name_hint="divide")


# ---- Operators of 16-bit floats that TVM cannot legalize: one kernel that computes in float32.
#
#     Before                              After
#     y: bfloat16 = R.power(x, p)         def power(x: bfloat16, p: bfloat16, y: bfloat16):
#                                             y = bfloat16(pow(float32(x), float32(p)))
#
# TVM refuses some of them. Others get a float32 result from it, whatever the operator's type says,
# and what reads that fails. It divides means of float16 by the number of their elements as float16,
# which ends at 65,504. The median of bfloat16 it sorts as `sorts` says.
#
# Does not handle: group_norm and prelu of bfloat16, which no module can hold: TVM has no type for
# their results.

BOTH = ("float16", "bfloat16")
DTYPES = {
    **{f"relax.nn.adaptive_avg_pool{n}d": BOTH for n in (1, 2, 3)},
    "relax.image.grid_sample": BOTH,
    "relax.isnan": ("bfloat16",),
    "relax.log_add_exp": ("bfloat16",),
    "relax.median": ("bfloat16",),
    "relax.nn.batch_norm": BOTH,
    "relax.power": ("bfloat16",),
    "relax.vision.roi_align": BOTH,
}
"""The dtypes of the first operand that TVM's own legalization does not take, or of which it rounds
sums at each term."""

MEANS = ("relax.mean", "relax.variance", "relax.std")
ATTENTION = ("relax.nn.attention", "relax.nn.attention_bias")
"""Of halves, float32 behind a scale, which is a number of that dtype."""
_LARGEST = 65504  # of float16: stands for infinity in a reference (`check.reference`)

# A builder and a relax.Call in, what stands for it out.
Legalizer = Callable[[relax.BlockBuilder, Call], relax.Expr]


def needs_float32(call: Call) -> bool:
    """Whether TVM's own legalization does not take a call of an operator, or its dtype."""
    dtype = str(call.args[0].ty.dtype)
    if call.op.name in ATTENTION:
        return dtype in BOTH and call.attrs.scale is not None
    if call.op.name in MEANS:
        return dtype == "float16" and not _elements_of_mean(call) < _LARGEST
    return dtype in DTYPES.get(call.op.name, ())


def _elements_of_mean(call: Call) -> float:
    """How many elements become one; infinite where that is not known."""
    shape = getattr(call.args[0].ty, "shape", None)
    if not isinstance(shape, relax.ShapeExpr):
        return math.inf
    axes = range(len(shape.values)) if call.attrs.axis is None else call.attrs.axis
    extents = [shape.values[int(axis)] for axis in axes]
    return math.prod(int(e) if isinstance(e, tirx.IntImm) else math.inf for e in extents)


def _in_float32(name: str) -> Legalizer:
    """The legalization of an operator; of what does not need float32, TVM's own."""
    default = tvm.ir.Op.get(name).get_attr("FLegalize")

    def legalize(builder: relax.BlockBuilder, call: Call) -> relax.Expr:
        if not needs_float32(call):
            return default(builder, call)
        return default(_Float32Builder(builder, _dtypes_of(call.ty)), call)

    return legalize


class _Float32Builder:
    """Stands for the builder in a legalization of TVM's: what that computes, in float32."""

    def __init__(self, builder: relax.BlockBuilder, dtypes: list[str]) -> None:
        self.builder, self.dtypes = builder, dtypes

    def call_te(self, func: Callable, *args: Any, **kwargs: Any) -> relax.Expr:
        """The call of one kernel, with results of `dtypes`."""

        def in_float32(*args: Any, **kwargs: Any) -> te.Tensor | list[te.Tensor]:
            wide = {key: _widen(value) for key, value in kwargs.items()}
            found = func(*map(_widen, args), **wide)
            if isinstance(found, te.Tensor):
                return topi.cast(found, self.dtypes[0])
            return [topi.cast(r, dtype) for r, dtype in zip(found, self.dtypes, strict=True)]

        kwargs.setdefault("primfunc_name_hint", func.__name__)
        return self.builder.call_te(in_float32, *args, **kwargs)


def _widen(value: Any) -> Any:
    """A 16-bit tensor or number as float32; anything else as it is."""
    if isinstance(value, te.Tensor) and str(value.dtype) in BOTH:
        return topi.cast(value, "float32")
    if isinstance(value, tirx.FloatImm):
        return tirx.FloatImm("float32", value.value)
    return value


def _dtypes_of(ty: relax.Type) -> list[str]:
    fields = ty.fields if isinstance(ty, relax.TupleType) else [ty]
    return [str(field.dtype) for field in fields]


# ---- isinf and isfinite of 16-bit floats: what rounds to infinity is infinite, though a kernel
# that computes it has it in float32, before it is rounded.
#
#     isinf(x: float16)  ->  abs(float32(x)) >= 65520     the least number that rounds to infinity

_OVERFLOW = {"float16": 65520.0, "bfloat16": (2 - 2**-8) * 2.0**127}
_COMPARED = {"relax.isfinite": operator.lt, "relax.isinf": operator.ge}  # NaN is none of both


def _by_magnitude(name: str) -> Legalizer:
    """The legalization of an operator; of what is no 16-bit float, TVM's own."""
    default, compare = tvm.ir.Op.get(name).get_attr("FLegalize"), _COMPARED[name]

    def legalize(builder: relax.BlockBuilder, call: Call) -> relax.Expr:
        (x,) = call.args
        least = _OVERFLOW.get(str(x.ty.dtype))
        if least is None:
            return default(builder, call)

        def compared(x: te.Tensor) -> te.Tensor:
            def at(*index: tirx.Var) -> Expr:
                return compare(tirx.abs(x(*index).astype("float32")), tirx.const(least, "float32"))

            return te.compute(x.shape, at, name=name.removeprefix("relax."))

        return builder.call_te(compared, x, primfunc_name_hint=name.removeprefix("relax."))

    return legalize


HALF_OPERATORS = {
    **{name: _in_float32(name) for name in (*DTYPES, *MEANS, *ATTENTION)},
    **{name: _by_magnitude(name) for name in _COMPARED},
}
"""For `relax.transform.LegalizeOps`."""


# ---- argmax and argmin of rows without an element above the least number: the first place, where
# TVM's own legalization gives -1.
#
#     Before                          After
#     y[i] = index[i]                 y[i] = max(index[i], 0)
#
# A row of zeros of uint8 has none, nor has one of masked scores, all of them minus infinity: TVM
# starts from index -1 and the least finite number, and between equal numbers the lower index wins.
# (Its schedules find the reduction by that start, so it stays on a GPU; see `from_infinity`.)
# Integers of 8 bits are compared as int32: the last steps of TVM's reduction of them on a GPU go
# through shared memory without a barrier, those of 32 bits through shuffles.

EXTREMA = {"relax.argmax": topi.argmax, "relax.argmin": topi.argmin}
NARROW = ("int8", "uint8", "bool")


def _legalize_extremum(name: str, builder: relax.BlockBuilder, call: Call) -> relax.Expr:
    """The call of TVM's kernel, with the first place for none."""
    dtype, axis, keepdims = str(call.args[0].ty.dtype), call.attrs.axis, call.attrs.keepdims

    def extremum(x: te.Tensor) -> te.Tensor:
        x = topi.cast(x, "int32") if dtype in NARROW else x
        return EXTREMA[name](x, axis, keepdims)

    hint = name.removeprefix("relax.")
    made = builder.call_te(extremum, call.args[0], primfunc_name_hint=hint)
    gvar, *arguments = made.args  # sizes come after the tensors where no tensor has them
    mended = builder.add_func(_from_the_first(builder.get()[gvar]), gvar.name_hint)
    return Call(made.op, [mended, *arguments], made.attrs, made.ty_args)


def _from_the_first(func: tirx.PrimFunc) -> tirx.PrimFunc:
    _, result = func.params[:2]

    def store(node: tirx.BufferStore) -> tirx.BufferStore:
        if not node.buffer.same_as(result):
            return node
        return tirx.BufferStore(node.buffer, tirx.max(node.value, 0), node.indices)

    return func.with_body(tvm_ffi.structural_map(func.body, [(tirx.BufferStore, store)]))


FIRST_EXTREMA: dict[str, Legalizer] = {name: partial(_legalize_extremum, name) for name in EXTREMA}


# ---- Maxima and minima from infinity on: of a row of minus infinities TVM's own is the least
# finite number, and so is a window of max pooling that is padded.
#
#     Before                                        After
#     with T.init(): y[i] = -3.4028e38              with T.init(): y[i] = -inf         on a CPU
#     pad[i] = if_then_else(.., x[i], -3.4028e38)   pad[i] = if_then_else(.., x[i], -inf)
#
# TVM's schedules for GPUs know reductions of rows by where they start (and registering others ends
# Python in a double free): there the start stays, and kernels of this package take infinity for it.

_ROWS = ("relax.max", "relax.min")
_POOLS = tuple(f"relax.nn.max_pool{rank}d" for rank in (1, 2, 3))


def from_infinity(kind: str) -> dict[str, Legalizer]:
    """For `relax.transform.LegalizeOps` on a kind of target ("llvm", "cuda")."""
    known = {name: Op.get(name).get_attr("FLegalize") for name in (*_ROWS, *_POOLS)} | FIRST_EXTREMA
    names = _POOLS if kind == "cuda" else known
    return known | {name: partial(_legalize_extreme, known[name]) for name in names}


def _legalize_extreme(default: Legalizer, builder: relax.BlockBuilder, call: Call) -> relax.Expr:
    if not str(call.args[0].ty.dtype).startswith(("float", "bfloat")):
        return default(builder, call)
    aside = relax.BlockBuilder()  # a function that is replaced is not found again for an equal call
    made = default(aside, call)
    gvar, *arguments = made.args
    func = aside.get()[gvar]
    func = func.with_body(tvm_ffi.structural_map(func.body, [(tirx.FloatImm, _infinite)]))
    endless = builder.add_func(func, call.op.name.rpartition(".")[2])
    return Call(made.op, [endless, *arguments], made.attrs, made.ty_args)


def _infinite(number: tirx.FloatImm) -> tirx.FloatImm:
    """Infinity for the least and the largest number of a type; other numbers stay."""
    value, dtype = float(number.value), str(number.ty.dtype)
    if abs(value) < float(tirx.max_value(dtype).value):
        return number
    return tirx.FloatImm(dtype, math.copysign(math.inf, value))


# ---- Negation and sign of unsigned integers and booleans, for which TVM's legalizations look for a
# -1. # -x          ~x + 1, which is 2^bits - x: what other libraries give sign(x)     x != 0, as a
# number of its type


def _negative(x: te.Tensor) -> te.Tensor:
    # TVM takes 0 - x of uint32 for 0: what is never above 0, and not below it
    return topi.add(topi.bitwise_not(x), topi.full_like(x, 1))


def _sign(x: te.Tensor) -> te.Tensor:
    if str(x.dtype) == "bool":
        return topi.identity(x)
    return topi.cast(topi.not_equal(x, topi.full_like(x, 0)), x.dtype)


def _of_unsigned(name: str, unsigned: object) -> Legalizer:
    default = Op.get(name).get_attr("FLegalize")

    def legalize(builder: relax.BlockBuilder, call: Call) -> relax.Expr:
        if not str(call.ty.dtype).startswith(("uint", "bool")):
            return default(builder, call)
        return builder.call_te(unsigned, call.args[0], primfunc_name_hint=name.split(".")[-1])

    return legalize


UNSIGNED_SIGNS: dict[str, Legalizer] = {
    "relax.negative": _of_unsigned("relax.negative", _negative),
    "relax.sign": _of_unsigned("relax.sign", _sign),
}
"""For `relax.transform.LegalizeOps`."""


# ---- Concatenations of many tensors: a search for the part of an element, in place of TVM's chain.
#
#     Before    if i < n1: a[i] else if i < n1 + n2: b[i - n1] else if ... c[...]
#     After     if i < n1 + n2: (if i < n1: a[i] else b[i - n1]) else (if ...)
#
# Where each condition stands within the one before, hundreds of them are deeper than what reads,
# simplifies and compiles kernels can recurse, and the last part costs hundreds of comparisons.

MANY = 32  # parts; below it TVM's own form, which other passes know


def concatenate_many(parts: Sequence[te.Tensor], axis: int) -> te.Tensor:
    """The concatenation of tensors that differ in one axis only."""
    begins = [0, *itertools.accumulate(part.shape[axis] for part in parts)]
    shape = [*parts[0].shape[:axis], begins[-1], *parts[0].shape[axis + 1 :]]

    def at(*index: Expr) -> Expr:
        def among(first: int, last: int) -> Expr:
            """The element, which lies in one of the parts from `first` to before `last`."""
            if last - first == 1:
                place = index[axis] - begins[first]
                return parts[first](*index[:axis], place, *index[axis + 1 :])
            middle = (first + last) // 2
            halves = among(first, middle), among(middle, last)
            return tirx.if_then_else(index[axis] < begins[middle], *halves)

        return among(0, len(parts))

    return te.compute(shape, at, name="concatenate")


def legalize_concat(builder: relax.BlockBuilder, call: Call) -> relax.Expr:
    """A concatenation: of many tensors as `concatenate_many`, else as TVM has it."""
    parts, axis = call.args[0], call.attrs.axis
    if not isinstance(parts, relax.Tuple) or len(parts.fields) < MANY or axis is None:
        return Op.get("relax.concat").get_attr("FLegalize")(builder, call)
    axis = int(axis) % call.ty.ndim
    return builder.call_te(
        concatenate_many, list(parts.fields), axis, primfunc_name_hint="concatenate"
    )


LONG_CONCATS: dict[str, Legalizer] = {"relax.concat": legalize_concat}
"""For `relax.transform.LegalizeOps`."""


# ---- Transposed convolutions with channels last, which TVM leaves as they are.
#
#     x: [N, W, C], w: [F, R, C]        y[n, v, f] = sum_{r, c} s[n, v + r, c] * w[f, R - 1 - r, c]
#
# s are the elements of x at a distance of the stride from each other, with zeros between and around
# them, as in TVM's own legalizations for channels first. Of groups, w holds the filters of one, and
# the channels of all: [F / groups, R, C].


def _transposed(x: te.Tensor, w: te.Tensor, shape: Sequence[Expr], attrs: Any) -> te.Tensor:
    count = len(attrs.strides)
    ones, taps = [1], [int(extent) for extent in w.shape[1:-1]]
    reach = [int(d) * (t - 1) for d, t in zip(attrs.dilation, taps, strict=True)]
    padding, more = [int(p) for p in attrs.padding], [int(p) for p in attrs.output_padding]
    before = [r - p for r, p in zip(reach, padding[:count], strict=True)]
    after = [r - p + m for r, p, m in zip(reach, padding[count:], more, strict=True)]
    stretched = topi.nn.dilate(x, ones + [int(s) for s in attrs.strides] + ones)
    padded = topi.nn.pad(
        stretched, [0, *(max(b, 0) for b in before), 0], [0, *(max(a, 0) for a in after), 0]
    )
    filters, channels = int(w.shape[0]), int(w.shape[-1]) // int(attrs.groups)
    dtype = attrs.out_dtype or x.dtype
    axes = [te.reduce_axis((0, extent), name="tap") for extent in taps]
    channel = te.reduce_axis((0, channels), name="channel")

    def at(n: Expr, *index: Expr) -> Expr:
        *places, f = index
        own = tirx.floordiv(f, filters) * channels + channel
        read = [
            place + max(-b, 0) + axis * int(d)
            for place, axis, b, d in zip(places, axes, before, attrs.dilation, strict=True)
        ]
        back = [t - 1 - axis for t, axis in zip(taps, axes, strict=True)]
        weight = w(tirx.floormod(f, filters), *back, own)
        product = padded(n, *read, own).astype(dtype) * weight.astype(dtype)
        return te.sum(product, axis=[*axes, channel])

    return te.compute(shape, at, name="conv_transpose")


def _legalize_transposed(name: str, builder: relax.BlockBuilder, call: Call) -> relax.Expr:
    attrs, (x, w) = call.attrs, call.args
    rank = x.ty.ndim
    last = {3: ("NWC", "OWI"), 4: ("NHWC", "OHWI"), 5: ("NDHWC", "ODHWI")}[rank]
    layouts = str(attrs.data_layout), str(attrs.kernel_layout), str(attrs.out_layout)
    static = isinstance(w.ty.shape, relax.ShapeExpr) and isinstance(call.ty.shape, relax.ShapeExpr)
    if layouts != (*last, last[0]) or not static:
        return Op.get(name).get_attr("FLegalize")(builder, call)
    shape = list(call.ty.shape)
    hint = name.removeprefix("relax.nn.")
    return builder.call_te(_transposed, x, w, shape, attrs, primfunc_name_hint=hint)


TRANSPOSED_CONVOLUTIONS: dict[str, Legalizer] = {
    name: partial(_legalize_transposed, name)
    for name in (f"relax.nn.conv{n}d_transpose" for n in (1, 2, 3))
}
"""For `relax.transform.LegalizeOps`."""
