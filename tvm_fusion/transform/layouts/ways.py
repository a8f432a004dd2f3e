"""The orders of axes in which an operator can be computed, and how.

    relu(x)                      any order, the result in that of x
    sum(x, axis=[2, 3])          any order, axis=[1, 2] for NHWC; the result has what is left of it
    max_pool2d(x, layout=NCHW)   as it is, or layout=NHWC
    conv2d(x, w)                 layout=NHWC alone, w in OHWI
    conv2d(x, w), w: [F, C, 1, 1], one step a position, no padding, no groups
                                 matmul(x: NHWC, permute_dims(reshape(w, [F, C])))
    reshape(x)                   any order in, any out; of some pairs nothing moves

Any other operator is computed in the order of the model alone.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import tvm
from tvm import relax
from tvm.ir import Call
from tvm.relax import Expr, op

from ..decompose.opening import dtype_of, normalize_axes, shape_of
from ..functions.functions import operator_name
from ..rewrites.factors import is_one, padded_shape
from ..rewrites.layout_turns import ELEMENTWISE, relabeling_of
from ..rewrites.readers import Parts
from ..rewrites.relabeling import Relabeling
from .orders import Order, change, channels_last, kept, natural, of_letters, ordered, plain

Build = Callable[[Parts, str, list[Expr]], Expr]
"""The value of a variable of a name, of the tensors an operator reads, each in its order."""

SLOWER = 1e-3
"""What a window that slides over the inner axes costs, as a share of moving its data: its lanes are
positions, of which many read the same elements."""

SLOWER_TAP = 0.02
"""The same of a depthwise convolution, for each tap of a filter (H200, 2026-11-26: 3 x 3 on 56 x 56
21.8 us, channels last 16.2, a change of layout 12)."""


@dataclass(frozen=True, slots=True, eq=False)
class Way:
    """One way to compute an operator.

    Attributes
    ----------
    inputs : tuple of Order
        Of each tensor that `operands` gives.
    outputs : tuple of Order
        Of the result, or of each field of a tuple.
    build : Build
    moved : float
        The share of its data that it moves only for the sake of the order.
    is_product : bool
        Whether it makes a convolution a matrix product.
    """

    inputs: tuple[Order, ...]
    outputs: tuple[Order, ...]
    build: Build
    moved: float = 0.0
    is_product: bool = False

    @property
    def is_plain(self) -> bool:
        """Whether all is in the order of the model."""
        return all(order == plain(len(order)) for order in (*self.inputs, *self.outputs))

    @property
    def is_last(self) -> bool:
        """Whether the first result has channels last."""
        return self.outputs[0] == channels_last(len(self.outputs[0]))


def operands(call: Call) -> list[Expr]:
    """The tensors that an operator reads, those of a tuple one by one."""
    flat = [f for a in call.args for f in (a.fields if isinstance(a, relax.Tuple) else [a])]
    return [arg for arg in flat if isinstance(getattr(arg, "ty", None), relax.TensorType)]


def results(call: Call) -> list[relax.Type]:
    """The types of an operator's results."""
    return list(call.ty.fields) if isinstance(call.ty, relax.TupleType) else [call.ty]


def is_known(call: Expr) -> bool:
    """Whether an operator is one of those that have several ways, of known shapes."""
    name = operator_name(call)
    if name not in RULES and name not in CONVOLUTIONS:
        return False
    types = [*(t.ty for t in operands(call)), *results(call)]
    return all(
        isinstance(t, relax.TensorType) and isinstance(t.shape, relax.ShapeExpr) for t in types
    )


def is_to_change(call: Expr) -> bool:
    """Whether an operator is a convolution that is not yet computed as it should be."""
    if operator_name(call) not in CONVOLUTIONS or not is_known(call):
        return False
    way = _convolution(call)
    return way is not None and (way.is_product or not way.is_plain)


def is_window(call: Expr) -> bool:
    """Whether an operator is a pool or a change of size."""
    return RULES.get(operator_name(call)) is _window and is_known(call)


def ways_of(call: Call, offered: Sequence[Order]) -> list[Way]:
    """The ways to compute a known operator.

    Parameters
    ----------
    call : Call
    offered : sequence of Order
        Orders that its operands may come in.
    """
    if operator_name(call) in CONVOLUTIONS:
        found = _convolution(call)
        if found is None:
            return [_as_it_is(call)]
        taps = _depthwise_taps(call)
        return [found, _as_it_is(call, SLOWER_TAP * taps)] if taps else [found]
    rule = RULES[operator_name(call)]
    types = [t.ty for t in operands(call)] + ([] if rule is _view else results(call))
    rank = max(t.ndim for t in types)
    orders = dict.fromkeys(
        (plain(rank), channels_last(rank), *(order for order in offered if len(order) == rank))
    )
    return [way for order in orders for way in rule(call, order)]


def _as_it_is(call: Call, moved: float = 0.0) -> Way:
    inputs = tuple(plain(t.ty.ndim) for t in operands(call))
    outputs = tuple(plain(t.ndim) for t in results(call))
    return Way(inputs, outputs, partial(_rebuilt, call), moved)


def _rebuilt(call: Call, _parts: Parts, _name: str, tensors: list[Expr], **changed) -> Call:
    """The call with other tensors, and with attributes changed."""
    rest = iter(tensors)

    def put(arg: Expr) -> Expr:
        if isinstance(arg, relax.Tuple):
            return relax.Tuple([put(field) for field in arg.fields])
        return next(rest) if isinstance(getattr(arg, "ty", None), relax.TensorType) else arg

    attrs = call.attrs
    if changed:
        info = type(attrs).__tvm_ffi_type_info__
        fields = {field.name: getattr(attrs, field.name) for field in info.fields}
        attrs = tvm.ir.make_node(info.type_key, **{**fields, **changed})
    return Call(call.op, [put(arg) for arg in call.args], attrs, call.ty_args, call.span)


def _alike(call: Call, order: Order, **changed) -> list[Way]:
    """All tensors in one order."""
    inputs, outputs = (order,) * len(operands(call)), (order,) * len(results(call))
    return [Way(inputs, outputs, partial(_rebuilt, call, **changed))]


# ---- pointwise operators, and those that broadcast


def _broadcast(
    order: Order, tensors: list[Expr]
) -> tuple[tuple[Order, ...], list[Relabeling | None], float]:
    """The orders in which tensors are read that broadcast against one in `order`; for those with
    fewer axes, how they are relabeled; and the share that this moves.
    """
    orders, steps, moved = [], [], 0.0
    for tensor in tensors:
        rank = tensor.ty.ndim
        if rank in (0, len(order)):
            orders.append(order if rank else ())
            steps.append(None)
            continue
        own = shape_of(tensor)
        padded = padded_shape(own, len(order))
        turned = Relabeling.reshape(own, padded).then(change(padded, plain(len(order)), order))
        orders.append(plain(rank))
        steps.append(turned)
        moved = moved if turned.is_view else 1.0
    return tuple(orders), steps, moved


def _pointwise(call: Call, order: Order) -> list[Way]:
    if order == plain(len(order)):
        return [_as_it_is(call)]
    inputs, steps, moved = _broadcast(order, operands(call))

    def build(parts: Parts, name: str, tensors: list[Expr]) -> Call:
        return _rebuilt(call, parts, name, _relabeled(parts, name, tensors, steps))

    return [Way(inputs, (order,), build, moved)]


def _relabeled(
    parts: Parts, name: str, tensors: list[Expr], steps: list[Relabeling | None]
) -> list[Expr]:
    pairs = zip(tensors, steps, strict=True)
    return [t if step is None else parts.relabeled(t, step, name) for t, step in pairs]


def _broadcast_to(call: Call, order: Order) -> list[Way]:
    if order == plain(len(order)):
        return [_as_it_is(call)]
    inputs, steps, moved = _broadcast(order, operands(call))

    def build(parts: Parts, name: str, tensors: list[Expr]) -> Call:
        (tensor,) = _relabeled(parts, name, tensors, steps)
        return op.broadcast_to(tensor, ordered(shape_of(call), order))

    return [Way(inputs, (order,), build, moved)]


# ---- operators along axes


def _along(call: Call, order: Order) -> list[Way]:
    """Operators that work along `axis` and keep it: softmax, concat, split, flip, ..."""
    if call.attrs.axis is None:
        return [_as_it_is(call)] if order == plain(len(order)) else []
    return _alike(call, order, axis=order.index(int(call.attrs.axis) % len(order)))


def _reduction(call: Call, order: Order) -> list[Way]:
    """Sums and extrema over one axis (a number) or several."""
    axes, rank = call.attrs.axis, len(order)
    gone = normalize_axes(int(axes) if isinstance(axes, int) else axes, rank)
    if isinstance(axes, int):
        changed = order.index(gone[0])
    elif axes is None:
        changed = None
    else:
        changed = sorted(order.index(axis) for axis in gone)
    if axes is None and operator_name(call) in EXTREMA and order != plain(rank):
        return []  # the place among all elements
    left = order if call.attrs.keepdims else kept(order, set(range(rank)) - set(gone))
    return [Way((order,), (left,), partial(_rebuilt, call, axis=changed))]


def _take(call: Call, order: Order) -> list[Way]:
    indices = operands(call)[1]
    if call.attrs.axis is None or indices.ty.ndim > 1 or call.args[0].ty.ndim != len(order):
        return [_as_it_is(call)] if order == plain(len(order)) else []
    axis = int(call.attrs.axis) % len(order)
    left = order if indices.ty.ndim else kept(order, set(range(len(order))) - {axis})
    build = partial(_rebuilt, call, axis=order.index(axis))
    return [Way((order, plain(indices.ty.ndim)), (left,), build)]


def _norm(call: Call, order: Order) -> list[Way]:
    """Norms over `axes`, their parameters along these or along `channel_axis`."""
    rank, attrs = len(order), call.attrs
    axes = normalize_axes(attrs.axes, rank)
    places = sorted(order.index(axis) for axis in axes)
    changed = {"axes": places}
    parameters = [t.ty.ndim for t in operands(call)[1:]]
    own = plain(1)
    if hasattr(attrs, "channel_axis"):
        changed["channel_axis"] = order.index(int(attrs.channel_axis) % rank)
    elif axes != sorted(axes) or any(n != len(axes) for n in parameters):
        return [_as_it_is(call)] if order == plain(rank) else []
    else:
        own = kept(order, axes)
    inputs = (order, *[own] * len(parameters))
    return [Way(inputs, (order,), partial(_rebuilt, call, **changed))]


def _batch_norm(call: Call, order: Order) -> list[Way]:
    axis = order.index(int(call.attrs.axis) % len(order))
    vectors = [plain(1)] * 4
    outputs = (order, *vectors[: len(results(call)) - 1])
    return [Way((order, *vectors), outputs, partial(_rebuilt, call, axis=axis))]


def _prelu(call: Call, order: Order) -> list[Way]:
    axis = order.index(int(call.attrs.axis) % len(order))
    return [Way((order, plain(1)), (order,), partial(_rebuilt, call, axis=axis))]


def _slice(call: Call, order: Order) -> list[Way]:
    _, axes, *limits = call.args
    rank = len(order)
    if not all(isinstance(a, relax.Tuple) for a in (axes, *limits)):
        return [_as_it_is(call)] if order == plain(rank) else []
    places = relax.Tuple([_integer(order.index(int(a) % rank)) for a in axes.fields])

    def build(_parts: Parts, _name: str, tensors: list[Expr]) -> Call:
        return Call(call.op, [*tensors, places, *limits], call.attrs, call.ty_args, call.span)

    return [Way((order,), (order,), build)]


def _integer(value: int) -> Expr:
    return tvm.tirx.IntImm("int64", value)


def _pad(call: Call, order: Order) -> list[Way]:
    pairs = [call.attrs.pad_width[2 * axis : 2 * axis + 2] for axis in order]
    return _alike(call, order, pad_width=[width for pair in pairs for width in pair])


def _tile(call: Call, order: Order) -> list[Way]:
    repeats = call.attrs.repeats
    ranks = {len(repeats), call.ty.ndim, call.args[0].ty.ndim}
    if ranks != {len(order)}:
        return [_as_it_is(call)] if order == plain(len(order)) else []
    return _alike(call, order, repeats=ordered(repeats, order))


def _matmul(call: Call, order: Order) -> list[Way]:
    """matmul(a, b), or the product of both transposed, which is that of b and a transposed."""
    rank = len(order)
    if order == plain(rank):
        return [_as_it_is(call)]
    is_transposed = order == (*range(rank - 2), rank - 1, rank - 2)
    if not is_transposed or any(len(t.ty.shape) != rank for t in operands(call)):
        return []

    def build(_parts: Parts, _name: str, tensors: list[Expr]) -> Call:
        return op.matmul(*reversed(tensors), out_dtype=call.attrs.out_dtype)

    return [Way((order, order), (order,), build, SLOWER)]


# ---- permutations and reshapes


def _view(call: Call, order: Order) -> list[Way]:
    relabeling, (x,) = relabeling_of(call), operands(call)
    rank = call.ty.ndim
    if relabeling is None:
        return [_as_it_is(call)] if order == plain(len(order)) else []
    before = change(shape_of(x), order, plain(len(order))).then(relabeling)
    if before is None:
        return [_as_it_is(call)] if order == plain(len(order)) else []
    outputs = dict.fromkeys((plain(rank), channels_last(rank), natural(before)))
    found = []
    for output in outputs:
        if order == plain(len(order)) and output == plain(rank):
            found.append(_as_it_is(call, float(not relabeling.is_view)))
            continue
        step = before.then(change(shape_of(call), plain(rank), output))
        if step is not None:
            build = partial(_build_view, step)
            found.append(Way((order,), (output,), build, float(not step.is_view)))
    return found


def _build_view(step: Relabeling, parts: Parts, name: str, tensors: list[Expr]) -> Expr:
    return parts.relabeled(tensors[0], step, name)


# ---- windows


def _window(call: Call, order: Order) -> list[Way]:
    """Pools and changes of size: as they are, or with channels last."""
    layout = str(call.attrs.layout)
    same = str(getattr(call.attrs, "out_layout", "") or layout) == layout
    is_last = layout.startswith("N") and layout.endswith("C")
    if order == plain(len(order)):
        return [_as_it_is(call, 0.0 if is_last else SLOWER)]
    if not layout.startswith("NC") or not same or order != channels_last(len(layout)):
        return []
    new = "".join(ordered(layout, order))
    both = {"out_layout": new} if hasattr(call.attrs, "out_layout") else {}
    return _alike(call, order, layout=new, **both)


SPATIAL = ("", "W", "HW", "DHW")


def _depthwise_taps(call: Call) -> int:
    """The taps of a convolution with one channel a group, channels first; 0 of any other one."""
    weight = call.args[1]
    layouts = str(call.attrs.data_layout), str(call.attrs.kernel_layout)
    space = SPATIAL[call.args[0].ty.ndim - 2]
    sizes = shape_of(weight)
    is_first = layouts == (f"NC{space}", f"OI{space}") and int(call.attrs.groups) > 1
    fixed = all(isinstance(n, tvm.tirx.IntImm) for n in sizes)
    if not (is_first and fixed and is_one(sizes[1])) or "transpose" in operator_name(call):
        return 0
    return math.prod(map(int, sizes[2:]))


def _convolution(call: Call) -> Way | None:
    """A convolution of any layout with channels last, its weights with channels innermost."""
    attrs, rank = call.attrs, call.args[0].ty.ndim
    if not 3 <= rank <= 5:
        return None
    data, kernel = f"N{SPATIAL[rank - 2]}C", f"O{SPATIAL[rank - 2]}I"
    layouts = str(attrs.data_layout), str(attrs.kernel_layout)
    out = str(attrs.out_layout) or layouts[0]
    letters = (sorted(layouts[0]), sorted(layouts[1]), sorted(out))
    if letters != (sorted(data), sorted(kernel), sorted(data)):
        return None  # blocks of channels
    orders = of_letters(layouts[0], data), of_letters(layouts[1], kernel)
    result = of_letters(out, data)
    if _is_pointwise(call, orders[1]):
        return Way(orders, (result,), partial(_product, call), is_product=True)
    changed = {"data_layout": data, "kernel_layout": kernel, "out_layout": data}
    return Way(orders, (result,), partial(_rebuilt, call, **changed))


def _is_pointwise(call: Call, order: Order) -> bool:
    """Whether each result is a sum over the channels at its own position."""
    attrs = call.attrs
    taps = ordered(shape_of(call.args[1]), order)[1:-1]
    padding = [*attrs.padding, *getattr(attrs, "output_padding", ())]
    return (
        all(map(is_one, taps))
        and all(int(s) == 1 for s in attrs.strides)
        and not any(map(int, padding))
        and int(attrs.groups) == 1
    )


def _product(call: Call, parts: Parts, name: str, tensors: list[Expr]) -> Call:
    x, weight = tensors
    shape = shape_of(weight)
    matrix = parts.relabeled(weight, Relabeling.reshape(shape, [shape[0], shape[-1]]), name)
    turned = parts.bind(name, "weight", op.permute_dims(matrix, [1, 0]))
    return op.matmul(x, turned, out_dtype=call.attrs.out_dtype or dtype_of(call))


EXTREMA = ("relax.argmax", "relax.argmin")

CONVOLUTIONS = tuple(f"relax.nn.conv{n}d{kind}" for n in (1, 2, 3) for kind in ("", "_transpose"))


def _table(rule: Callable[[Call, Order], list[Way]], *names: str) -> dict:
    return {f"relax.{name}": rule for name in names}


RULES: dict[str, Callable[[Call, Order], list[Way]]] = {
    **{name: _pointwise for name in ELEMENTWISE},
    **_table(_along, "nn.softmax", "nn.log_softmax", "concat", "split", "flip", "repeat"),
    **_table(_along, "cumsum", "cumprod", "gather_elements", "sort", "argsort"),
    **_table(_reduction, "sum", "mean", "max", "min", "prod", "variance", "std"),
    **_table(_reduction, "argmax", "argmin"),
    **_table(_norm, "nn.layer_norm", "nn.rms_norm", "nn.group_norm", "nn.instance_norm"),
    **_table(_view, "permute_dims", "reshape", "expand_dims", "squeeze", "flatten"),
    **_table(_view, "nn.batch_flatten"),
    **_table(_window, *(f"nn.{kind}_pool{n}d" for kind in ("max", "avg") for n in (1, 2, 3))),
    **_table(_window, *(f"nn.adaptive_avg_pool{n}d" for n in (1, 2, 3))),
    **_table(_window, "image.resize2d", "image.resize3d"),
    "relax.broadcast_to": _broadcast_to,
    "relax.matmul": _matmul,
    "relax.nn.batch_norm": _batch_norm,
    "relax.nn.pad": _pad,
    "relax.nn.prelu": _prelu,
    "relax.strided_slice": _slice,
    "relax.take": _take,
    "relax.tile": _tile,
}
