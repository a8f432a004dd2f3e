"""PartialColumns: sums over the positions of a convolution's result, or over the rows of a matrix
product's, become two stages, the first of which the product's own kernel can do.

    h = relu(conv2d(x, W))                    # [N, 7, 7, C]
    s = R.sum(h, axis=[1, 2])
->  s_part[n, t, u, c] = sum over i < 2, j < 8 of h[n, 2 t + i, 8 u + j, c], where that exists
    s      = R.sum(s_part, axis=[1, 2])       # reads N x 4 x 1 x C numbers

A block of 16 positions is what a warp has of a tensor core's sums. Of a matrix product's rows 16
side by side are a block, from the first one that is reduced on: 49 rows of an image are 4. Sums are
taken in float32 only, of channels or of groups of them.

A variance of one pass is that of shifted elements (see `decompose.statistics`), whose shift is made
of elements of h itself, which no kernel that is to compute them can read. It is left out where h is
stored as halves: of a mean m and a deviation s the squares lose 1e-7 (1 + m^2 / s^2) of the
variance, and the halves themselves as much. (Rounding each of h to 11 bits alone adds a variance of
m^2 2^-24 / 3, which is 2e-8 m^2.)

Does not handle (left alone): maxima, symbolic shapes, other layouts than channels last, sums over
few rows or over axes that are not side by side, devices whose kernels do not write partial results.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import tvm
from tvm import relax, te, tirx
from tvm.ir import Call
from tvm.relax import Expr, Var, op
from tvm.relax.expr_functor import PyExprMutator, mutator

from ...config import HardwareProfile
from ...kernels.contraction.model import RUN_ROWS
from ...kernels.convolution.boxes import best_run
from ...kernels.gemm.partials import writes_partials
from ..decompose.opening import HALF_DTYPES, dtype_of, normalize_axes
from ..decompose.statistics import SHIFT_ATTR
from ..functions.functions import rewrite_functions, static_shape
from .readers import Parts
from .row_origins import POINTWISE, TERMS

LEAST_ROWS = 2 * RUN_ROWS
LEAST_SHARE = 0.02
"""Of the elements of all products' results, those that are summed up: each is written and read
once at least, and a rewrite has to save 1 % of a module's time to be kept (the mean at the end of
ResNet-50 is over 0.9 % of them; planning it with and without took 3.5 s, without alone 2.6)."""
CONVOLUTIONS = ("relax.nn.conv1d", "relax.nn.conv2d", "relax.nn.conv3d")


@tvm.transform.module_pass(opt_level=0, name="tvm_fusion.PartialColumns")
class PartialColumns:
    """See the module docstring. `hw` is the device; one without such kernels leaves the module as
    it is.
    """

    def __init__(self, hw: HardwareProfile) -> None:
        self.hw = hw

    def transform_module(self, mod: tvm.IRModule, _ctx: tvm.transform.PassContext) -> tvm.IRModule:
        if not writes_partials(self.hw):
            return mod
        splitter = _Splitter(mod)
        return rewrite_functions(mod, splitter.builder_, splitter.split_function)


def sums_of_runs(
    heights: Sequence[int], order: Sequence[int] | None = None
) -> Callable[[te.Tensor], te.Tensor]:
    """What makes the sums over blocks of `heights` elements, one number for each dimension, as far
    as there are elements; dimensions of the result in another `order`, if that is given.
    """
    order = range(len(heights)) if order is None else order

    def compute(x: te.Tensor) -> te.Tensor:
        extents = [int(n) for n in x.shape]
        shape = [-(-n // height) for n, height in zip(extents, heights, strict=True)]
        long = [(i, height) for i, height in enumerate(heights) if height > 1]
        terms = {i: te.reduce_axis((0, height), f"r{i}") for i, height in long}

        def at(*ordered: Expr) -> Expr:
            index = [i for _, i in sorted(zip(order, ordered, strict=True), key=lambda x: x[0])]
            places = [i * heights[d] + terms[d] if d in terms else i for d, i in enumerate(index)]
            inside = [p < n for p, n, h in zip(places, extents, heights, strict=True) if n % h]
            value = x(*places)
            if inside:
                value = tirx.if_then_else(tirx.all(*inside), value, tirx.const(0, x.dtype))
            return te.sum(value, axis=list(terms.values()))

        return te.compute([shape[d] for d in order], at, name="sums_of_runs")

    return compute


@dataclass(frozen=True, slots=True, eq=False)
class _Origin:
    """The product that a tensor has the elements of, in its order: the shape of its results, and of
    a convolution the strides of its windows.
    """

    shape: tuple[int, ...]
    strides: tuple[int, ...] | None = None


@dataclass(frozen=True, slots=True)
class _Split:
    """A sum as two: over blocks of `heights` of a tensor viewed as `view`, with dimensions in this
    `order`, then over all of these, viewed as `blocks`, along the axes of the whole.
    """

    view: tuple[int, ...]
    heights: tuple[int, ...]
    order: tuple[int, ...]
    blocks: tuple[int, ...]


def _product(call: Call) -> _Origin | None:
    """The origin that a call is, if tensor cores compute it from tensors the TMA reads."""
    name, shape = getattr(call.op, "name", ""), static_shape(call)
    if not shape or name not in ("relax.matmul", *CONVOLUTIONS):
        return None
    left, right = (static_shape(arg) for arg in call.args[:2])
    if not left or not right or not all(dtype_of(arg) in HALF_DTYPES for arg in call.args[:2]):
        return None
    if name == "relax.matmul":
        whole = min(len(left), len(right)) >= 2 and left[-1] % TERMS == 0
        return _Origin(shape) if whole else None
    attrs = call.attrs
    last = all(layout.endswith("C") for layout in (attrs.data_layout, attrs.out_layout))
    groups = int(attrs.groups)
    if not last or left[-1] // groups % TERMS or shape[-1] == groups:
        return None
    return _Origin(shape, (1, *map(int, attrs.strides)))


def _has_matrix(matmul: Call) -> bool:
    """Whether all rows are multiplied by the same matrix, as by weights."""
    return len(static_shape(matmul.args[1]) or ()) == 2


def _split(origin: _Origin, shape: tuple[int, ...], axes: Sequence[int]) -> _Split | None:
    """How a sum over some axes of a tensor of an origin's elements is taken apart."""
    columns = origin.shape[-1]
    first = next((i for i in range(len(shape), 0, -1) if math.prod(shape[i:]) == columns), None)
    if first is None:
        return None
    rows, tail = shape[:first], shape[first:]
    reduced = [i for i in axes if i < first and rows[i] > 1]
    if math.prod(rows[i] for i in reduced) < LEAST_ROWS:
        return None
    if origin.strides is not None:
        run = best_run(rows, origin.strides, reduced) if rows == origin.shape[:-1] else None
        return None if run is None else _in_stages((*rows, columns), (*run, 1), shape, axes, first)
    if any(rows[i] > 1 for i in range(reduced[0], first) if i not in reduced):
        return None
    before, count = math.prod(rows[: reduced[0]]), math.prod(rows[reduced[0] :])
    flat, own = (before, count, *tail), [1, *(axis - first + 2 for axis in axes if axis >= first)]
    found = _in_stages((before, count, columns), (1, RUN_ROWS, 1), flat, own, 2)
    if found is None:
        return None
    ones = [1] * (first - reduced[0] - 1)
    return replace(found, blocks=(*rows[: reduced[0]], found.blocks[1], *ones, *found.blocks[2:]))


def _in_stages(
    view: tuple[int, ...],
    heights: tuple[int, ...],
    shape: tuple[int, ...],
    axes: Sequence[int],
    first: int,
) -> _Split | None:
    """The stages of a sum over `axes` of a tensor of this shape, whose dimensions from `first` on
    are the columns of `view`. Where it is over neighbouring columns, too, what is left to sum up
    lies side by side: no kernel walks over rows and columns.
    """
    counts = [-(-n // height) for n, height in zip(view, heights, strict=True)]
    kept = [axis for axis in range(first) if axis not in axes]
    rows = [axis for axis in range(first) if axis in axes]
    summed = [axis for axis in axes if axis >= first]
    if not summed:
        return _Split(view, heights, tuple(range(first + 1)), (*counts[:first], *shape[first:]))
    if summed != list(range(summed[0], len(shape))):
        return None
    beside = math.prod(shape[summed[0] :]) * math.prod(counts[axis] for axis in rows)
    blocks = [counts[axis] if axis in kept else 1 for axis in range(first)]
    blocks += [*shape[first : summed[0]], beside, *[1] * (len(summed) - 1)]
    return _Split(view, heights, (*kept, first, *rows), tuple(blocks))


_Shift = tuple[Var, tuple[int, ...]]
"""The tensor that a shift is made of, and the shift's shape."""


class _Reader:
    """What the tensors of a function come of, in the order of the bindings.

    Attributes
    ----------
    splits : the sums that are taken apart, by variable.
    summed : the products whose results they sum up.
    results : elements of the results of all products with one matrix: scores are not stored.
    shifts : variables that hold a shift of halves of an origin; those of `dropped` can be left out.
    """

    def __init__(self, mod: tvm.IRModule) -> None:
        self.mod = mod
        self.origins: dict[Var, _Origin] = {}
        self.halves: dict[Var, Var] = {}
        self.splits: dict[Var, _Split] = {}
        self.summed: set[_Origin] = set()
        self.results = 0
        self.shifts: dict[Var, _Shift] = {}
        self.dropped: set[_Shift] = set()

    def read(self, var: Var, value: Expr) -> None:
        """Takes in a binding."""
        if isinstance(value, Var):
            for known in (self.origins, self.shifts, self.halves):
                if value in known:
                    known[var] = known[value]
        if not isinstance(value, Call):
            return
        name = getattr(value.op, "name", "")
        if name == "relax.call_tir":
            self._read_shift(var, value)
        elif name == "relax.astype" and value.args[0] in self.shifts:
            self.shifts[var] = self.shifts[value.args[0]]
        elif name == "relax.sum":
            split = self._split_of(value)
            if split is not None:
                self.splits[var] = split
                self.summed.add(self.origins[value.args[0]])
        else:
            if name in CONVOLUTIONS or (name == "relax.matmul" and _has_matrix(value)):
                self.results += math.prod(static_shape(value) or ())
            if name == "relax.subtract":
                self._drop(*value.args)
            in_order = name in POINTWISE or name == "relax.reshape"
            found = self._latest(var, value.args) if in_order else _product(value)
            if found is not None:
                self.origins[var] = found

    @property
    def is_worth_it(self) -> bool:
        """Whether what is summed up is a share of all results that shows."""
        summed = sum(math.prod(origin.shape) for origin in self.summed)
        return summed > 0 and summed >= LEAST_SHARE * self.results

    def _read_shift(self, var: Var, call: Call) -> None:
        """A number near each mean is made of medians of elements of one tensor."""
        attrs, shape = self.mod[call.args[0]].attrs, static_shape(call)
        args = list(call.args[1].fields if isinstance(call.args[1], relax.Tuple) else [])
        if attrs is not None and SHIFT_ATTR in attrs:
            sources = {self.halves[a] for a in args if a in self.halves}
            if len(sources) == 1 and shape and all(a in self.halves for a in args):
                self.shifts[var] = (sources.pop(), shape)
        elif len(args) == 1 and args[0] in self.origins and dtype_of(args[0]) in HALF_DTYPES:
            self.halves[var] = args[0]

    def _drop(self, tensor: Expr, shift: Expr) -> None:
        """Notes a shift without which the kernel of the elements' origin can sum them up."""
        found, shape = self.shifts.get(shift), static_shape(tensor)
        if found is None or not shape or tensor not in self.origins:
            return
        pairs = enumerate(zip(shape, found[1], strict=True))
        axes = [axis for axis, (n, of_shift) in pairs if n != of_shift]
        if _split(self.origins[tensor], shape, axes) is not None:
            self.dropped.add(found)

    def _split_of(self, call: Call) -> _Split | None:
        origin, shape = self.origins.get(call.args[0]), static_shape(call.args[0])
        if origin is None or call.attrs.axis is None or dtype_of(call) != "float32":
            return None
        return _split(origin, shape, sorted(normalize_axes(call.attrs.axis, len(shape))))

    def _latest(self, var: Var, args: Sequence[Expr]) -> _Origin | None:
        """Of several arguments, the latest product's that has as many elements."""
        order = list(self.origins)
        size = math.prod(static_shape(var) or ())
        own = [a for a in args if isinstance(a, Var) and a in self.origins]
        own = [a for a in own if math.prod(self.origins[a].shape) == size]
        return self.origins[max(own, key=order.index)] if own else None


@mutator
class _Splitter(PyExprMutator):
    """Replaces the bindings of sums by those of their two stages."""

    def split_function(self, func: relax.Function) -> relax.Function | None:
        """The function with its sums split, or None where there was nothing to split."""
        if not isinstance(func.body, relax.SeqExpr):
            return None
        self.found = _Reader(self.builder_.get())
        for block in func.body.blocks:
            for binding in block.bindings:
                if isinstance(binding, relax.VarBinding):
                    self.found.read(binding.var, binding.value)
        if not self.found.is_worth_it:
            return None
        self.parts = Parts(self.builder_, func)
        return self.parts.tagged(self.visit_expr(func))

    def visit_var_binding_(self, binding: relax.VarBinding) -> None:
        call, found = binding.value, self.found.splits.get(binding.var)
        if found is None:
            kept = self._unshifted(call)
            if kept is None:
                super().visit_var_binding_(binding)
            else:
                self.parts.finish(self.visit_var_def(binding.var), self.visit_expr(kept))
            return
        name, tensor = binding.var.name, self.visit_expr(call.args[0])
        tensor = self._view(name, tensor, found.view)
        sums = self.builder_.call_te(
            sums_of_runs(found.heights, found.order), tensor, primfunc_name_hint="sums_of_runs"
        )
        part = self._view(name, self.parts.bind(name, "part", sums), found.blocks)
        last = op.sum(part, list(call.attrs.axis), bool(call.attrs.keepdims))
        self.parts.finish(self.visit_var_def(binding.var), last)

    def _unshifted(self, value: Expr) -> Expr | None:
        """What a difference from a shift that is left out is, or a sum with it; else None."""
        if getattr(getattr(value, "op", None), "name", "") not in ("relax.subtract", "relax.add"):
            return None
        shifts = [self.found.shifts.get(arg) in self.found.dropped for arg in value.args]
        if shifts.count(True) != 1:
            return None
        return value.args[shifts.index(False)]

    def _view(self, name: str, tensor: Expr, shape: tuple[int, ...]) -> Expr:
        if static_shape(tensor) == shape:
            return tensor
        return self.parts.bind(name, "view", op.reshape(tensor, shape))
