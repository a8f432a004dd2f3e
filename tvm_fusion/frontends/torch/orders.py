"""Converters for the order of numbers: places of extrema, sorts, the largest k.

    argmax(x)       the place of the first NaN, if there is one, else that of the maximum
    sort(x)         by keys in which NaN is the largest number, above infinity

TVM's comparisons pass over NaN, and its sorts leave rows with one in no order. Keys are of a wider
type than what is sorted, so that there is room above its infinity; values are read at the places
that are found. Does not handle: float64, whose infinities and NaN are one.
"""

from __future__ import annotations

from collections.abc import Callable

from torch import fx
from tvm import relax, te, tirx, topi
from tvm.ir import Expr

from ...transform.lower.first_of_sorts import SORT_KEYS
from .importer import Importer, bound_arguments
from .operators import HALVES, Converter, span

_KEYS = {  # the type of a key, what infinity is there, and NaN
    "float16": ("float32", 1e38, 2e38),
    "bfloat16": ("float64", 1e300, 2e300),
    "float32": ("float64", 1e300, 2e300),
    "float64": ("float64", 1.6e308, 1.7e308),
}

_BEYOND = (1 << 63) - 1  # all places of an axis of symbolic size
_COMPARED = {"bool": "int8", "bfloat16": "float32"}  # TVM has no argmax of these


def _or_nan(
    importer: Importer,
    place: relax.Expr,
    x: relax.Expr,
    axis: int,
    keepdims: bool,
    last: bool = False,
) -> relax.Expr:
    """A place along an axis, or that of the first NaN there, or of the last one."""
    extent = x.ty.shape[axis]
    nowhere = -1 if last else int(extent) if isinstance(extent, tirx.IntImm) else _BEYOND

    def places(x: te.Tensor) -> te.Tensor:
        def at(*index: Expr) -> Expr:
            value = tirx.Cast("float32", x(*index)) if str(x.dtype) in HALVES else x(*index)
            own = tirx.Cast("int64", index[axis])
            return tirx.Select(tirx.isnan(value), own, tirx.const(nowhere, "int64"))

        return te.compute(x.shape, at, name="nan_places", tag=topi.tag.ELEMWISE)

    found = importer.block_builder.emit_te(places, x, primfunc_name_hint="nan_places")
    found = importer.emit((relax.op.max if last else relax.op.min)(found, axis, keepdims=keepdims))
    is_none = importer.emit(relax.op.equal(found, relax.const(nowhere, "int64")))
    return importer.emit(relax.op.where(is_none, place, found))


def place_of_extremum(
    importer: Importer,
    index: Callable,
    x: relax.Expr,
    axis: int | None,
    keepdims: bool,
    last_nan: bool = False,
) -> relax.Expr:
    """Where the extremum along an axis is, or that of all in one row: the first of equal ones. A
    NaN counts as it, the first of several or the last.
    """
    rank = x.ty.ndim
    if axis is None:
        found = place_of_extremum(
            importer, index, importer.emit(relax.op.reshape(x, [-1])), 0, keepdims, last_nan
        )
        return importer.emit(relax.op.reshape(found, [1] * rank)) if keepdims else found
    x = importer.cast(x, _COMPARED.get(str(x.ty.dtype), str(x.ty.dtype)))
    found = importer.emit(index(x, axis, keepdims))
    if "float" not in str(x.ty.dtype):
        return found
    return _or_nan(importer, found, x, axis % rank, keepdims, last_nan)


def _extremum(index: Callable) -> Converter:
    """The values of max or min along an axis, and where they are: at the first of equal ones."""

    def convert(importer: Importer, node: fx.Node) -> relax.Expr:
        args = bound_arguments(node)
        x, axis, keepdim = importer.value_of(args["self"]), args["dim"], args["keepdim"]
        place = place_of_extremum(importer, index, x, axis, True)
        results = [importer.emit(relax.op.gather_elements(x, place, axis)), place]
        if not keepdim:
            results = [importer.emit(relax.op.squeeze(result, [axis])) for result in results]
        return importer.emit(relax.Tuple(results))

    return convert


def _place_of_extremum(index: Callable) -> Converter:
    """argmax or argmin."""

    def convert(importer: Importer, node: fx.Node) -> relax.Expr:
        args = bound_arguments(node)
        x = importer.value_of(args["self"])
        return place_of_extremum(importer, index, x, args["dim"], args["keepdim"])

    return convert


def _keys(importer: Importer, x: relax.Expr) -> relax.Expr:
    """Numbers in the order of x, with NaN above infinity."""
    dtype = str(x.ty.dtype)
    if dtype not in _KEYS:
        return x
    wide, infinity, nan = _KEYS[dtype]

    def keys(x: te.Tensor) -> te.Tensor:
        def at(*index: Expr) -> Expr:
            value = tirx.Cast("float32", x(*index)) if dtype in HALVES else x(*index)
            finite = tirx.min(tirx.Cast(wide, value), tirx.const(infinity, wide))
            return tirx.Select(tirx.isnan(value), tirx.const(nan, wide), finite)

        return te.compute(x.shape, at, name="sort_keys", tag=topi.tag.ELEMWISE)

    return importer.block_builder.emit_te(
        keys, x, primfunc_name_hint="sort_keys", primfunc_attrs={SORT_KEYS: True}
    )


def _order(importer: Importer, x: relax.Expr, axis: int, descending: bool) -> relax.Expr:
    """The places of the elements along an axis in ascending order, equal ones as they stand."""
    keys = _keys(importer, x)
    return importer.emit(relax.op.argsort(keys, axis, descending, "int64"))


def _sort(importer: Importer, node: fx.Node) -> relax.Expr:
    args = bound_arguments(node)
    x, axis = importer.value_of(args["self"]), args["dim"]
    if x.ty.ndim == 0:
        return importer.emit(relax.Tuple([x, relax.const(0, "int64")]))
    order = _order(importer, x, axis, args["descending"])
    return importer.emit(relax.Tuple([_at(importer, x, order, axis), order]))


def _argsort(importer: Importer, node: fx.Node) -> relax.Expr:
    args = bound_arguments(node)
    x = importer.value_of(args["self"])
    if x.ty.ndim == 0:
        return relax.const(0, "int64")
    return _order(importer, x, args["dim"], args["descending"])


def _topk(importer: Importer, node: fx.Node) -> relax.Expr:
    args = bound_arguments(node)
    x, axis = importer.value_of(args["self"]), args["dim"]
    if x.ty.ndim == 0:
        return importer.emit(relax.Tuple([x, relax.const(0, "int64")]))
    if args["k"] == 1 and args["largest"]:  # which of equal ones it takes is left open
        order = place_of_extremum(importer, relax.op.argmax, x, axis, True)
        return importer.emit(relax.Tuple([_at(importer, x, order, axis), order]))
    keys = _keys(importer, x)
    options = (args["k"], axis, "indices", args["largest"], "int64")
    order = importer.emit(relax.op.topk(keys, *options))
    return importer.emit(relax.Tuple([_at(importer, x, order, axis), order]))


def _median(importer: Importer, node: fx.Node) -> relax.Expr:
    """The lower median of an axis, and where it is; of a row with NaN its first one."""
    args = bound_arguments(node)
    x, axis = importer.value_of(args["self"]), args.get("dim")
    whole = "dim" not in args
    if x.ty.ndim == 0:
        return x if whole else importer.emit(relax.Tuple([x, relax.const(0, "int64")]))
    if whole:
        x, axis = importer.emit(relax.op.reshape(x, [-1])), 0
    order = _order(importer, x, axis, False)
    extent = int(x.ty.shape[axis])
    middle = span(importer, order, axis % x.ty.ndim, (extent - 1) // 2, 1)
    if "float" in str(x.ty.dtype):
        middle = _or_nan(importer, middle, x, axis % x.ty.ndim, True)
    results = [_at(importer, x, middle, axis), middle]
    if whole:
        return importer.emit(relax.op.reshape(results[0], []))
    if not args["keepdim"]:
        results = [importer.emit(relax.op.squeeze(result, [axis])) for result in results]
    return importer.emit(relax.Tuple(results))


def _at(importer: Importer, x: relax.Expr, places: relax.Expr, axis: int) -> relax.Expr:
    return importer.emit(relax.op.gather_elements(x, places, axis % x.ty.ndim))


CONVERTERS: dict[str, Converter] = {
    "argmax.default": _place_of_extremum(relax.op.argmax),
    "argmin.default": _place_of_extremum(relax.op.argmin),
    "max.dim": _extremum(relax.op.argmax),
    "min.dim": _extremum(relax.op.argmin),
    "sort.default": _sort,
    "sort.stable": _sort,
    "argsort.default": _argsort,
    "argsort.stable": _argsort,
    "topk.default": _topk,
    "median.dim": _median,
    "median.default": _median,
}
