"""Operators whose elements depend on one another in an order, as loops: a function of TIR each.

    values, places = cummax(x, 0)   rows in parallel, the elements of each in their order
    chebyshev_polynomial_t(x, n)    T[k + 1] = 2 x T[k] - T[k - 1], n times for each element

Nothing fuses with them. `loops` is what `linalg` is written with, too.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import fx
from tvm import relax, te, tirx
from tvm.ir import Expr
from tvm.script.ir_builder import IRBuilder
from tvm.script.ir_builder import tirx as T

from ...errors import FrontendError
from ...transform.lower.scans import SCAN_AXIS, SCAN_NAME
from .importer import Importer, bound_arguments
from .operators import HALVES, Converter

Result = tuple[Sequence[int], str]  # shape, element type
Write = Callable[[list, list], None]  # statements from flat inputs and results


def loops(
    importer: Importer,
    name: str,
    inputs: Sequence[relax.Expr],
    results: Sequence[Result],
    write: Write,
    attrs: Mapping[str, str | int] | None = None,
) -> list[relax.Expr]:
    """Results of a function that `write` makes with TVMScript's builder; buffers are flat there."""

    def compute(*tensors: te.Tensor) -> list[te.Tensor]:
        def statements(ins: list, outs: list) -> tirx.Stmt:
            with IRBuilder() as builder:
                write([T.buffer_proxy(x) for x in ins], [T.buffer_proxy(x) for x in outs])
            return builder.get()

        shapes, dtypes = zip(*results, strict=True)
        made = te.extern(list(shapes), tensors, statements, dtype=list(dtypes), name=name)
        return made if isinstance(made, list) else [made]

    made = importer.block_builder.emit_te(
        compute, *inputs, primfunc_name_hint=name, primfunc_attrs=dict(attrs or {})
    )
    if len(results) == 1:
        return [made] if isinstance(made.ty, relax.TensorType) else [importer.emit(made[0])]
    return [importer.emit(relax.TupleGetItem(made, i)) for i in range(len(results))]


def variable(dtype: str, value: Expr | float) -> object:
    """A number of a loop's own, read and written at [0]."""
    made = T.buffer_proxy(T.alloc_buffer([1], dtype, scope="local"))
    made[0] = value if isinstance(value, Expr) else tirx.const(value, dtype)
    return made


def known_shape(node: fx.Node) -> list[int]:
    """The shape of a node's tensor, of numbers."""
    shape = list(node.meta["val"].shape)
    if not all(isinstance(size, int) for size in shape):
        raise FrontendError("a loop over a symbolic size: give the sizes as numbers")
    return shape


# ---- Scans along an axis.


def _rows(shape: Sequence[int], axis: int) -> tuple[int, int, int]:
    """How many rows there are, elements in a row, and the distance of its elements."""
    inner = math.prod(shape[axis + 1 :])
    return math.prod(shape[:axis]) * inner, shape[axis], inner


def _as_scan(name: str, axis: int) -> dict[str, str | int]:
    """What tells `OpenScans` which scan a function is."""
    return {SCAN_NAME: f"relax.{name}", SCAN_AXIS: axis}


def _cumulative_extremum(is_least: bool) -> Converter:
    """cummax, cummin: the last of equal ones counts, and a NaN stays."""

    def convert(importer: Importer, node: fx.Node) -> relax.Expr:
        args = bound_arguments(node)
        x, shape = importer.value_of(args["self"]), known_shape(args["self"])
        stored = str(x.ty.dtype)
        x = importer.cast(x, _WIDER.get(stored, stored))
        dtype, is_float = str(x.ty.dtype), "float" in stored
        axis = args["dim"] % max(1, len(shape))
        rows, length, step = _rows(shape or [1], axis)

        def write(ins: list, outs: list) -> None:
            (x,), (values, places) = ins, outs
            with T.parallel(0, rows) as row:
                begin = row // step * (length * step) + row % step
                best, place = variable(dtype, x[begin]), variable("int64", 0)
                with T.serial(0, length) as i:
                    element = x[begin + i * step]
                    wins = element <= best[0] if is_least else element >= best[0]
                    if is_float:
                        known = tirx.Not(tirx.isnan(best[0]))
                        wins = tirx.Or(tirx.isnan(element), tirx.And(known, wins))
                    with T.If(wins), T.Then():
                        best[0] = element
                        place[0] = tirx.Cast("int64", i)
                    values[begin + i * step] = best[0]
                    places[begin + i * step] = place[0]

        results = [(shape, dtype), (shape, "int64")]
        how = _as_scan("cummin" if is_least else "cummax", axis)
        values, places = loops(importer, "cumulative_extremum", [x], results, write, how)
        return relax.Tuple([importer.cast(values, stored), places])

    return convert


_WIDER = {"float16": "float32", "bfloat16": "float32", "bool": "int8"}


def _logcumsumexp(importer: Importer, node: fx.Node) -> relax.Expr:
    """log(cumsum(exp(x))), from the greatest so far on."""
    args = bound_arguments(node)
    shape, dtype = known_shape(args["self"]), importer.dtype_of(node)
    wide = _WIDER.get(dtype, dtype)
    x = importer.operand(args["self"], wide)
    axis = args["dim"] % max(1, len(shape))
    rows, length, step = _rows(shape or [1], axis)

    def write(ins: list, outs: list) -> None:
        (x,), (result,) = ins, outs
        with T.parallel(0, rows) as row:
            begin = row // step * (length * step) + row % step
            total = variable(wide, x[begin])
            result[begin] = x[begin]
            with T.serial(1, length) as i:
                element = x[begin + i * step]
                high, low = tirx.max(total[0], element), tirx.min(total[0], element)
                ends = tirx.Or(high == low, tirx.isinf(high))  # their difference may be none
                both = high + tirx.log(tirx.const(1, wide) + tirx.exp(low - high))
                twice = high + tirx.const(math.log(2), wide)
                both = tirx.Select(ends, tirx.Select(high == low, twice, high), both)
                none = tirx.Or(tirx.isnan(total[0]), tirx.isnan(element))
                total[0] = tirx.Select(none, tirx.const(math.nan, wide), both)
                result[begin + i * step] = total[0]

    how = _as_scan("logcumsumexp", axis)
    return loops(importer, "logcumsumexp", [x], [(shape, wide)], write, how)[0]


# ---- Orthogonal polynomials: of each element by its recurrence, as often as its degree says.

# (k, x, p[k], p[k - 1]) -> p[k + 1], of constants as `c` makes them
Recurrence = Callable[[Expr, Expr, Expr, Expr], Expr]


def _polynomial(
    first: Callable[[Expr], Expr], step: Recurrence, shifted: bool = False
) -> Converter:
    """p[0] is 1, p[1] is `first` of x, 2 x - 1 where `shifted`; of degrees below 0 it is 0."""

    def convert(importer: Importer, node: fx.Node) -> relax.Expr:
        dtype, shape = importer.dtype_of(node), known_shape(node)
        x, n = (
            importer.operand(arg, to) for arg, to in zip(node.args, ("float64",) * 2, strict=True)
        )
        x, n = (importer.emit(relax.op.broadcast_to(y, shape)) for y in (x, n))
        n = importer.cast(n, "int64")
        count = math.prod(shape)

        def write(ins: list, outs: list) -> None:
            (xs, ns), (result,) = ins, outs
            with T.parallel(0, count) as i:
                x = 2.0 * xs[i] - 1.0 if shifted else xs[i]
                before, last = variable("float64", 1), variable("float64", first(x))
                with T.serial(1, tirx.max(ns[i], 1)) as k:
                    following = variable(
                        "float64", step(tirx.Cast("float64", k), x, last[0], before[0])
                    )
                    before[0] = last[0]
                    last[0] = following[0]
                low = tirx.Select(ns[i] < 0, tirx.const(0, "float64"), tirx.const(1, "float64"))
                result[i] = tirx.Select(ns[i] < 1, low, last[0])

        (made,) = loops(importer, "polynomial", [x, n], [(shape, "float64")], write)
        return importer.cast(made, dtype)

    return convert


def _chebyshev(k: Expr, x: Expr, last: Expr, before: Expr) -> Expr:
    return 2.0 * x * last - before


_CHEBYSHEV = {
    "t": lambda x: x,
    "u": lambda x: 2.0 * x,
    "v": lambda x: 2.0 * x - 1.0,
    "w": lambda x: 2.0 * x + 1.0,
}
_POLYNOMIALS: dict[str, Converter] = {
    **{
        f"{shifted}chebyshev_polynomial_{kind}": _polynomial(first, _chebyshev, bool(shifted))
        for kind, first in _CHEBYSHEV.items()
        for shifted in ("", "shifted_")
    },
    "hermite_polynomial_h": _polynomial(
        lambda x: 2.0 * x, lambda k, x, last, before: 2.0 * x * last - 2.0 * k * before
    ),
    "hermite_polynomial_he": _polynomial(
        lambda x: x, lambda k, x, last, before: x * last - k * before
    ),
    "laguerre_polynomial_l": _polynomial(
        lambda x: 1.0 - x,
        lambda k, x, last, before: ((2.0 * k + 1.0 - x) * last - k * before) / (k + 1.0),
    ),
    "legendre_polynomial_p": _polynomial(
        lambda x: x,
        lambda k, x, last, before: ((2.0 * k + 1.0) * x * last - k * before) / (k + 1.0),
    ),
}


# ---- Searches.


def _searched(importer: Importer, node: fx.Node) -> relax.Expr:
    """Where values go in sorted rows: before equal ones, or behind them. NaN goes behind all, and
    is passed in rows, by the comparisons of PyTorch's binary search.
    """
    args = bound_arguments(node)
    right = args["right"] or args.get("side") == "right"
    rows, sought = args.get("sorted_sequence", args.get("boundaries")), args["self"]
    value = sought.meta["val"] if isinstance(sought, fx.Node) else sought
    dtype = importer._convert_data_type(torch.result_type(rows.meta["val"], value))
    found, values = importer.operand(rows, dtype), importer.operand(sought, dtype)
    if args.get("sorter") is not None:
        found = importer.emit(
            relax.op.gather_elements(found, importer.value_of(args["sorter"]), -1)
        )
    shape, out = known_shape(node), importer.dtype_of(node)
    extent, is_shared = int(found.ty.shape[-1]), found.ty.ndim == 1

    def write(ins: list, outs: list) -> None:
        (row, sought), (result,) = ins, outs
        with T.parallel(0, math.prod(shape)) as i:
            begin = 0 if is_shared else i // shape[-1] * extent
            low, high = variable(out, 0), variable(out, extent)
            with T.While(low[0] < high[0]):
                middle = (low[0] + high[0]) // 2
                is_before = _is_passed(row[begin + middle], sought[i], right)
                step = variable(out, tirx.Select(is_before, middle + 1, low[0]))
                high[0] = tirx.Select(is_before, high[0], middle)
                low[0] = step[0]
            result[i] = low[0]

    return loops(importer, "searchsorted", [found, values], [(shape, out)], write)[0]


def _is_passed(element: Expr, value: Expr, right: bool) -> Expr:
    """`not element >= value`, or `not element > value`, which TVM would take for `<` and `<=`."""
    is_less = element <= value if right else element < value
    if "float" not in str(element.ty.dtype):
        return is_less
    wide = (tirx.Cast("float32", x) if str(x.ty.dtype) in HALVES else x for x in (element, value))
    return tirx.Or(is_less, tirx.Or(*map(tirx.isnan, wide)))


# ---- Integers.


def _greatest_divisor(importer: Importer, node: fx.Node) -> relax.Expr:
    """gcd by Euclid's algorithm; never negative."""
    shape, dtype = known_shape(node), importer.dtype_of(node)
    given = (importer.operand(arg, dtype) for arg in node.args[:2])
    given = [importer.emit(relax.op.broadcast_to(x, shape)) for x in given]

    def write(ins: list, outs: list) -> None:
        (xs, ys), (result,) = ins, outs
        with T.parallel(0, math.prod(shape)) as i:
            x, y = variable(dtype, xs[i]), variable(dtype, ys[i])
            with T.While(y[0] != 0):
                rest = variable(dtype, tirx.truncmod(x[0], y[0]))
                x[0] = y[0]
                y[0] = rest[0]
            result[i] = tirx.Select(x[0] < 0, tirx.const(0, dtype) - x[0], x[0])

    return loops(importer, "gcd", given, [(shape, dtype)], write)[0]


CONVERTERS: dict[str, Converter] = {
    "cummax.default": _cumulative_extremum(is_least=False),
    "cummin.default": _cumulative_extremum(is_least=True),
    "gcd.default": _greatest_divisor,
    "logcumsumexp.default": _logcumsumexp,
    **{
        f"{name}.{kind}": _searched
        for name in ("bucketize", "searchsorted")
        for kind in ("Scalar", "Tensor")
    },
    **{
        f"special_{name}.{kind}": converter
        for name, converter in _POLYNOMIALS.items()
        for kind in ("default", "x_scalar", "n_scalar")
    },
}
