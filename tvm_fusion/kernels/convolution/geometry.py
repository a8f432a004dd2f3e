"""Convolutions as values: which element of the data meets which of the weights, where zeros are.

    T[n, f, y, x] = sum_{c, r, s} pad(d)[n, c, 2 y + r, 2 x + s] * w[f, c, r, s]

      data       d[n, c, u, v]          zero outside of its windows' bounds
      windows    n;  u = 2 y + r - 1;  v = 2 x + s - 1
      channels   c                      filters f, group none

Any rank, any layout of data, weights and results: a dimension of the data is a window (an axis of
the results slides over it, with or without taps of a filter) or holds the channels. A grouped
convolution has an axis for its groups, which data and weights share; a transposed one steps over
less than an element a tap: its windows have an expansion. What is not a plain element of the data,
such as a function of it, is told as an expression of where it lies.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import tvm_ffi
from tvm import tirx
from tvm.ir import Expr, TensorLoad, Var

from ...errors import Unsupported
from ..contraction.model import (
    INDEX,
    Axis,
    Binding,
    Contraction,
    Operand,
    Product,
    RowPartial,
    Segment,
    Simplifier,
    fresh_var,
)
from ..contraction.reader import analyze_contraction
from ..contraction.row_runs import loads_of
from ..contraction.windows import Window, Windows
from ..program.expr import (
    conjuncts,
    constant,
    convert,
    dtype_of,
    is_if_then_else,
    keeps_value,
    number,
    rebuild,
    same,
    substitute,
    variables,
)
from ..program.extents import simplified, smaller
from ..program.program import Extent
from .ranges import Linear, Ranges, floored, linear_of
from .sources import Source, cuts_of, decided, is_zero, put_together


@dataclass(frozen=True, slots=True, eq=False)
class Convolution:
    """A convolution with pointwise work behind it, and maybe on the data before it; results may be
    reduced over runs of 16 positions.

    Attributes
    ----------
    contraction : Contraction
        What it was read from, one segment of one product; a grouped convolution has its filters
        split: its batch is the group.
    windows : tuple of Window
        In the order of the data's dimensions.
    group, filters, channels : Axis or None
        None where there is one.
    channel_dim : int or None
        The dimension of the data that holds the channels, of all groups.
    data : Expr
        An element of the data where it is no padding, over `coordinates`.
    coordinates : tuple of Var
        Stand for the dimensions of the data.
    weights : Operand
        Read at axes as they are, see `weight_dims`.
    weight_dims : tuple
        For each dimension of the weights, the axes that index it, the outer one first.
    sources : tuple of Source
        The parts that the data is put together of along the channels; none where it is one tensor.
        `windows` and `data` then are those of the whole.
    is_depthwise : bool
        Whether each filter has a channel of its own, so that there is no axis of channels or
        groups: `channel_dim` is indexed by the filter. See `by_channels`.
    """

    contraction: Contraction
    windows: tuple[Window, ...]
    group: Axis | None
    filters: Axis | None
    channels: Axis | None
    channel_dim: int | None
    data: Expr
    coordinates: tuple[Var, ...]
    weights: Operand
    weight_dims: tuple[tuple[Axis, ...], ...]
    sources: tuple[Source, ...] = ()
    is_depthwise: bool = False

    @property
    def segment(self) -> Segment:
        """The product and the outputs."""
        return self.contraction.segments[0]

    @property
    def product(self) -> Product:
        """The sum of products."""
        return self.segment.products[0]

    @property
    def groups(self) -> int:
        """Number of groups."""
        return _size(self.group)

    @property
    def filters_of_group(self) -> int:
        """Number of filters of a group."""
        return _size(self.filters)

    @property
    def channels_of_group(self) -> int:
        """Number of channels that a filter sums over."""
        return _size(self.channels)

    @property
    def taps(self) -> int:
        """Taps of a filter."""
        found = 1
        for window in self.windows:
            found *= window.taps
        return found

    @property
    def is_symbolic(self) -> bool:
        """Whether the number of positions along some window is not known."""
        return any(window.is_symbolic for window in self.windows)

    @property
    def positions(self) -> Extent:
        """Results of a filter, of all images."""
        found = 1
        for window in self.windows:
            found *= window.size
        return found

    @property
    def multiply_adds(self) -> Extent:
        """Of all results, those with padding and with zeros of an expansion left out of none."""
        terms = self.channels_of_group * self.taps
        return self.positions * self.groups * self.filters_of_group * terms


def _size(axis: Axis | None) -> int:
    return 1 if axis is None else int(axis.extent)


def by_channels(convolution: Convolution) -> Convolution | None:
    """A convolution of one filter and one channel a group, told as one with a filter a channel;
    None for any other.
    """
    if convolution.group is None or convolution.filters or convolution.channels:
        return None
    return replace(convolution, filters=convolution.group, group=None, is_depthwise=True)


def merged(convolution: Convolution) -> Convolution:
    """The convolution with its last two windows as one, while both read one element a position, all
    of them in order: x[n, c, y, x] -> x[n, c, yx // W, yx % W].
    """
    while (found := _merged(convolution)) is not None:
        convolution = found
    return convolution


def _merged(convolution: Convolution) -> Convolution | None:
    if len(convolution.windows) < 2:
        return None
    *others, above, last = convolution.windows
    pairs = [convolution.windows[-2:], *(s.windows[-2:] for s in convolution.sources)]
    plain = all(
        w.axis is not None and w.reads_all and not w.is_symbolic for pair in pairs for w in pair
    )
    if not plain or last.dim != above.dim + 1:
        return None
    segment, size = convolution.segment, constant(last.size, INDEX)
    both = Axis(fresh_var("position", INDEX), above.size * last.size)
    parts = tirx.FloorDiv(both.var, size), tirx.FloorMod(both.var, size)
    axes = [a for a in segment.space if a is not above.axis and a is not last.axis]
    env = dict(zip((above.axis.var, last.axis.var), parts, strict=True))
    put = Put(env, Simplifier([*axes, both]))

    def group(some: tuple[Axis, ...]) -> tuple[Axis, ...]:
        kept = tuple(a for a in some if a is not above.axis and a is not last.axis)
        return (*kept, both) if any(a is last.axis for a in some) else kept

    segment = replace(
        put.segment(segment),
        batch=group(segment.batch),
        m=group(segment.m),
        n=group(segment.n),
    )

    def moved(data: Expr, coordinates: Sequence[Var]) -> Expr:
        at = coordinates[last.dim]
        where = {coordinates[above.dim]: tirx.FloorDiv(at, size), at: tirx.FloorMod(at, size)}
        return Put(where, Simplifier([Axis(at, both.extent)]))(data)

    window = replace(last, axis=both, high=both.extent, repeats=1)
    return replace(
        convolution,
        contraction=replace(convolution.contraction, segments=(segment,)),
        windows=(*others, window),
        sources=tuple(
            replace(
                source,
                windows=(*source.windows[:-2], window),
                data=moved(source.data, source.coordinates),
                placed=moved(source.placed, convolution.coordinates),
            )
            for source in convolution.sources
        ),
        data=moved(convolution.data, convolution.coordinates),
    )


# ---- reading


def read_convolution(func: tirx.PrimFunc, exact: bool = False) -> Convolution:
    """Read a fused PrimFunc as a convolution with pointwise work around it.

    Parameters
    ----------
    func : tirx.PrimFunc
        s_tir blocks over buffers that are parameters or local, as FuseTIR leaves them.
    exact : bool
        Keep every rounding of the unfused graph.

    Raises
    ------
    Unsupported
        For what is no contraction of one product, symbolic numbers of filters, channels and taps,
        weights that are computed, and data that is not read by windows with zeros around it.
    """
    contraction = analyze_contraction(func, exact)
    outputs = [o for segment in contraction.segments for o in segment.outputs]
    in_rows = any(isinstance(o.partial, RowPartial) for o in outputs)
    if len(contraction.products) != 1 or in_rows or contraction.has_partners:
        raise Unsupported("no convolution: not one product with pointwise work behind it")
    contraction = _split_groups(contraction)
    (product,) = contraction.products
    reasons = []
    for data, weights in ((product.a, product.b), (product.b, product.a)):
        try:
            return _Reader(contraction, data, weights).read()
        except Unsupported as why:
            reasons.append(str(why))
    raise Unsupported("; ".join(dict.fromkeys(reasons)))


def _split_groups(contraction: Contraction) -> Contraction:
    """The filters of a grouped convolution as two axes: ``f // 4`` and ``f % 4``."""
    (segment,) = contraction.segments
    (product,) = segment.products
    operands = [product.a, product.b]
    parts: dict[Var, int] = {}

    def look(expr: Expr) -> None:
        size = number(expr.b)
        if isinstance(expr.a, Var) and size is not None:
            parts.setdefault(expr.a, int(size))

    for operand in operands:
        for index in (i for load in loads_of(operand.value) for i in load.indices):
            tvm_ffi.structural_walk(index, [(tirx.FloorDiv, look), (tirx.FloorMod, look)])
    divided = [a for a in segment.batch if a.var in parts and isinstance(a.extent, int)]
    split = [a for a in divided if a.extent % parts[a.var] == 0]
    if len(split) != 1 or parts[split[0].var] in (1, split[0].extent):
        return contraction
    (axis,) = split
    size = parts[axis.var]
    group = Axis(fresh_var("group", INDEX), axis.extent // size)
    filters = Axis(fresh_var("filter", INDEX), size)
    env = {axis.var: group.var * constant(size, INDEX) + filters.var}
    batch = tuple(group if a is axis else a for a in segment.batch)
    simplify = Simplifier([*batch, filters, *segment.m, *segment.n, *product.k])
    put = Put(env, simplify)
    product = replace(product, a=put.operand(product.a), b=put.operand(product.b))
    moved = put.segment(segment)
    m = (filters, *segment.m)
    segment = replace(moved, batch=batch, m=m, products=(product,))
    return replace(contraction, segments=(segment,))


class Put:
    """Puts values in the place of variables, and simplifies the indices that hold them."""

    def __init__(self, env: Mapping[Var, Expr], simplify: Simplifier) -> None:
        self.env, self.simplify = env, simplify

    def __call__(self, expr: Expr) -> Expr:
        if isinstance(expr, TensorLoad):
            return tirx.BufferLoad(expr.source, [self(i) for i in expr.indices])
        is_index = dtype_of(expr) in (INDEX, "bool") and not loads_of(expr)
        if is_index and set(variables(expr)) & set(self.env):
            return self.simplify(substitute(expr, self.env))
        if isinstance(expr, Var):
            return self.env.get(expr, expr)
        return rebuild(expr, self)

    def operand(self, operand: Operand) -> Operand:
        return Operand(self(operand.value), self._bindings(operand.bindings))

    def segment(self, segment: Segment) -> Segment:
        """The segment with what stands behind its products over other axes."""
        outputs = tuple(output.map(self) for output in segment.outputs)
        return replace(segment, bindings=self._bindings(segment.bindings), outputs=outputs)

    def _bindings(self, bindings: Sequence[Binding]) -> tuple[Binding, ...]:
        return tuple(Binding(b.var, self(b.value)) for b in bindings)


class _Reader:
    """Reads one operand as the data and the other one as the weights."""

    def __init__(self, contraction: Contraction, data: Operand, weights: Operand) -> None:
        self.contraction = contraction
        (self.segment,) = contraction.segments
        (self.product,) = self.segment.products
        self.data, self.weights = data, weights
        self.axes = {a.var: a for a in (*self.segment.space, *self.product.k)}
        self.reduced = {a.var for a in self.product.k}

    def read(self) -> Convolution:
        self._turn_taps()
        dims = self._weight_dims()
        in_weights = {a.var for dim in dims for a in dim}
        if self.data.bindings:
            raise Unsupported("data that is computed in several steps")
        sources: tuple[Source, ...] = ()
        cuts = cuts_of(self.data.value, self._linear, {v: self.axes[v] for v in self.reduced})
        if cuts is None:
            found = self._geometry(self.data.value, in_weights)
        else:
            channels, starts = cuts
            ends = (0, *starts, int(channels.extent))
            spans = itertools.pairwise(ends)
            parts = [self._part(channels, *span, in_weights) for span in spans]
            found, sources = put_together(channels, parts)
        filters = [a for a in self.segment.space if a.var in in_weights and a is not found.group]
        self._check_roles(found.dims, found.group, filters, found.channels)
        contraction = replace(
            self.contraction, segments=(replace(self.segment, products=(self.product,)),)
        )
        return Convolution(
            contraction,
            found.dims,
            found.group,
            filters[0] if filters else None,
            found.channels,
            found.channel_dim,
            found.data,
            found.coordinates,
            self.weights,
            dims,
            sources,
        )

    def _part(self, channels: Axis, first: int, end: int, in_weights: set[Var]) -> Windows:
        """How the data is read at some of its channels."""
        own = Axis(fresh_var("channel", INDEX), end - first)
        others = [a for a in self.axes.values() if a is not channels]
        reader = _Reader(self.contraction, self.data, self.weights)
        reader.axes = {a.var: a for a in (*others, own)}
        reader.reduced = (self.reduced - {channels.var}) | {own.var}
        put = Put({channels.var: own.var + constant(first, INDEX)}, Simplifier([*others, own]))
        value = decided(put(self.data.value))
        return reader._geometry(value, (in_weights - {channels.var}) | {own.var})

    def _geometry(self, value: Expr, in_weights: set[Var]) -> Windows:
        """How data is read that is `value` at all axes."""
        conditions, value = self._without_conditions(value)
        ranges = Ranges(conditions, self._linear)
        load = self._primary(value)
        if any(self._linear(index) is None for index in load.indices) and not ranges.multiples:
            value = floored(value, ranges, self.axes)
            load = self._primary(value)
        indices, shape = self._whole_indices(load)
        coordinates = tuple(fresh_var(f"d{i}", INDEX) for i in range(len(indices)))
        windows, channel_dim = [], None
        group = channels = None
        forms = [self._expanded(index, ranges) for index in indices]
        forms = self._with_pinned(forms, ranges)
        shared = [{v for v in at if v in in_weights - self.reduced} for (at, _), *_ in forms]
        for dim, (at, expansion, repeats) in enumerate(forms):
            # Beside a dimension of groups, taps alone are a window of one position.
            plain = not any(shared) and len(at[0]) == 1 and set(at[0]) <= self.reduced
            if shared[dim] or (plain and not self._slides(at, load)):
                if channel_dim is not None or expansion != 1 or repeats != 1:
                    raise Unsupported("two dimensions of channels")
                group, channels = self._channels(at)
                channel_dim = dim
                continue
            size = simplified(shape[dim])
            window = self._window(dim, at, expansion, size * repeats, ranges)
            windows.append(replace(window, repeats=repeats))
        ranges.check()
        places = [
            tirx.FloorDiv(at, constant(repeats, INDEX)) if repeats > 1 else at
            for at, (_, _, repeats) in zip(coordinates, forms, strict=True)
        ]
        source = self._over(value, indices, places)
        return Windows(tuple(windows), channel_dim, group, channels, source, coordinates)

    # ---- weights

    def _turn_taps(self) -> None:
        """Count the taps of a filter that is read backwards from its end."""
        load = self.weights.load
        if load is None or self.weights.bindings:
            raise Unsupported("weights that are computed")
        env = {}
        for index in load.indices:
            coefficients, first = self._linear(index) or ({}, 0)
            if list(coefficients.values()) == [-1]:
                (var,) = coefficients
                if var in self.reduced and first == self.axes[var].extent - 1:
                    env[var] = constant(first, INDEX) - var
        if env:
            put = Put(env, Simplifier(self.axes.values()))
            self.data, self.weights = put.operand(self.data), put.operand(self.weights)

    def _weight_dims(self) -> tuple[tuple[Axis, ...], ...]:
        load = self.weights.load
        dims = []
        for index, extent in zip(load.indices, load.source.ty.shape, strict=True):
            at = self._linear(index)
            if at is None or not _from_zero(at):
                raise Unsupported("weights that are read at other indices than axes")
            ordered = sorted(at[0].items(), key=lambda item: -item[1])
            step, axes = 1, []
            for var, factor in reversed(ordered):
                if factor != step:
                    raise Unsupported("weights that are read at other indices than axes")
                axes.append(self.axes[var])
                step *= self.axes[var].extent
            if step != number(extent):
                raise Unsupported("weights of which only a part is read")
            dims.append(tuple(reversed(axes)))
        return tuple(dims)

    # ---- data

    def _without_conditions(self, value: Expr) -> tuple[list[Expr], Expr]:
        """The conditions for reading the data, which is zero elsewhere; and what is read."""
        casts: list[str] = []
        conditions: list[Expr] = []
        inner = value
        while True:
            if isinstance(inner, tirx.Cast):
                casts.append(dtype_of(inner))
                inner = inner.value
            elif is_if_then_else(inner):
                test, inner, other = inner.args
                if not is_zero(other):
                    raise Unsupported("data with other padding than zeros")
                conditions += conjuncts(test)
            else:
                break
        for dtype in reversed(casts):
            back = isinstance(inner, tirx.Cast) and dtype_of(inner.value) == dtype
            if back and keeps_value(dtype, dtype_of(inner)):
                inner = inner.value
            else:
                inner = convert(inner, dtype)
        return conditions, inner

    def _primary(self, value: Expr) -> TensorLoad:
        """The load that tells the geometry: the one that depends on the most axes."""
        loads = loads_of(value)
        if not loads:
            raise Unsupported("data that is no tensor")
        return max(loads, key=lambda load: len(set(variables(*load.indices)) & set(self.axes)))

    def _whole_indices(self, load: TensorLoad) -> tuple[list[Expr], list[Expr]]:
        """The indices of a load, and sizes, of which those of two dimensions that hold one, such as
        groups of channels (``c // 8`` and ``c % 8``), are that one.
        """
        indices: list[Expr] = []
        sizes: list[Expr] = []
        for index, size in zip(load.indices, load.source.ty.shape, strict=True):
            above = indices[-1] if indices else None
            if (
                isinstance(above, tirx.FloorDiv)
                and isinstance(index, tirx.FloorMod)
                and number(above.b) == number(index.b) == number(size) is not None
                and number(sizes[-1]) is not None
                and same(above.a, index.a)
            ):
                indices[-1] = index.a
                sizes[-1] = constant(int(number(sizes[-1])) * int(number(size)), INDEX)
            else:
                indices.append(index)
                sizes.append(size)
        return indices, sizes

    def _over(self, value: Expr, indices: Sequence[Expr], places: Sequence[Expr]) -> Expr:
        """An element of the data, with `places` in the place of `indices`."""

        def visit(expr: Expr) -> Expr:
            for index, at in zip(indices, places, strict=True):
                if number(index) is None and dtype_of(expr) == INDEX and same(expr, index):
                    return at
            if isinstance(expr, TensorLoad):
                return tirx.BufferLoad(expr.source, [visit(i) for i in expr.indices])
            return rebuild(expr, visit)

        found = visit(value)
        if set(variables(found)) & set(self.axes):
            raise Unsupported("data that is computed from elements beside each other")
        return found

    def _linear(self, expr: Expr) -> Linear | None:
        return linear_of(expr, self.axes)

    def _expanded(self, index: Expr, ranges: Ranges) -> tuple[Linear, int, int]:
        """An index as a linear form over an expansion, or of data that is enlarged so many times
        by repeating its elements.
        """
        at, divisor = self._quotient(index)
        if divisor == 1 or ranges.divides(at, divisor):
            return at, divisor, 1
        return at, 1, divisor

    def _with_pinned(
        self, forms: Sequence[tuple[Linear, int, int]], ranges: Ranges
    ) -> list[tuple[Linear, int, int]]:
        """Indices as they are, those that conditions leave one value as what is bounded: an element
        of data that has one is read at 0, which is ``h`` under ``0 <= h < 1``.
        """
        taken = {v for (coefficients, _), *_ in forms for v in coefficients}
        pinned = [
            (form, first)
            for form, first in ranges.pinned(self.axes)
            if not taken & set(form) and not set(form) <= self.reduced
        ]
        found = []
        for at, expansion, repeats in forms:
            if not at[0] and pinned:
                form, first = pinned.pop(0)
                at = form, at[1] - first
            found.append((at, expansion, repeats))
        return found

    def _quotient(self, index: Expr) -> tuple[Linear, int]:
        """An index as a linear form over a number, rounded down."""
        at = self._linear(index)
        if at is not None:
            return at, 1
        if isinstance(index, tirx.FloorDiv) and number(index.b) is not None:
            at, divisor = self._linear(index.a), int(number(index.b))
            if at is not None and divisor > 0:
                return at, divisor
        if isinstance(index, tirx.Add | tirx.Sub):
            (a, over), (b, under) = self._quotient(index.a), self._quotient(index.b)
            sign = 1 if isinstance(index, tirx.Add) else -1
            if 1 in (over, under) and (sign == 1 or under == 1):
                return _scaled_sum(a, under, b, sign * over), over * under
        raise Unsupported("data that is read at no window")

    def _slides(self, at: Linear, load: TensorLoad) -> bool:
        """Whether a reduced axis alone is a filter's taps: a window of one position."""
        (var,) = (v for v in at[0] if v in self.reduced)
        return at[0][var] != 1 or not _from_zero(at) or var in self._tapped(load)

    def _tapped(self, load: TensorLoad) -> set[Var]:
        """The reduced axes that are taps: if there is none that is left for the channels, all but
        the longest one.
        """
        alone = []
        for index in load.indices:
            at = self._linear(index)
            if at is not None and set(at[0]) <= self.reduced and _from_zero(at):
                alone += at[0] if list(at[0].values()) == [1] else ()
        longest = max(alone, key=lambda v: self.axes[v].extent, default=None)
        return {v for v in alone if v is not longest}

    def _channels(self, at: Linear) -> tuple[Axis | None, Axis | None]:
        """The group and the channel of ``group * 4 + channel``."""
        reduced = [v for v in at[0] if v in self.reduced]
        others = [v for v in at[0] if v not in self.reduced]
        if not _from_zero(at) or len(reduced) > 1 or len(others) > 1:
            raise Unsupported("channels that are read at no plain index")
        channels = self.axes[reduced[0]] if reduced else None
        if channels is not None and at[0][channels.var] != 1:
            raise Unsupported("channels that are not all read")
        group = self.axes[others[0]] if others else None
        if group is not None and at[0][group.var] != _size(channels):
            raise Unsupported("groups of channels that are not side by side")
        return group, channels

    def _window(self, dim: int, at: Linear, expansion: int, size: Extent, ranges: Ranges) -> Window:
        taps = [v for v in at[0] if v in self.reduced]
        axes = [v for v in at[0] if v not in self.reduced]
        if len(taps) > 1 or len(axes) > 1:
            raise Unsupported("a window over two axes")
        axis = self.axes[axes[0]] if axes else None
        tap = self.axes[taps[0]] if taps else None
        stride = at[0][axes[0]] if axes else 1
        if stride < 1:
            raise Unsupported("a window that slides backwards")
        if not isinstance(at[1], int):
            raise Unsupported("a window that begins at a symbolic element")
        low, high = ranges.of(at, expansion)
        if not isinstance(low, int | None):
            raise Unsupported("zeros up to a symbolic element")
        dilation = at[0][taps[0]] if taps else 1
        return Window(
            dim,
            axis,
            tap,
            stride,
            dilation,
            -at[1],
            expansion,
            max(0, low if low is not None else 0),
            size if high is None else smaller(size, high),
        )

    def _check_roles(
        self,
        windows: Sequence[Window],
        group: Axis | None,
        filters: Sequence[Axis],
        channels: Axis | None,
    ) -> None:
        """Every axis has one role."""
        if len(filters) > 1:
            raise Unsupported("filters of several axes")
        known = [a for a in (group, channels, *filters) if a is not None]
        known += [a for w in windows for a in (w.tap,) if a is not None]
        if not all(isinstance(a.extent, int) for a in known):
            raise Unsupported("a symbolic number of filters, channels or taps")
        placed = [a for w in windows for a in (w.axis, w.tap) if a is not None]
        placed += [a for a in (group, channels, *filters) if a is not None]
        names = [a.var for a in placed]
        if len(set(names)) != len(names) or set(names) != set(self.axes):
            raise Unsupported("axes that are neither windows nor channels nor filters")
        if not windows:
            raise Unsupported("no window")


def _from_zero(at: Linear) -> bool:
    """Whether a linear form has no constant."""
    return isinstance(at[1], int) and at[1] == 0


def _scaled_sum(some: Linear, scale: int, others: Linear, other_scale: int) -> Linear:
    """The sum of two linear forms, each times a number."""
    found = {v: n * scale for v, n in some[0].items()}
    for var, factor in others[0].items():
        found[var] = found.get(var, 0) + factor * other_scale
    constants = some[1] * scale + others[1] * other_scale
    return {v: n for v, n in found.items() if n}, constants
