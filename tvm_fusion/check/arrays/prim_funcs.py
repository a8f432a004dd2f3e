"""Plain PrimFuncs on whole arrays of PyTorch: a reference that nothing is compiled for.

    for i, j, k:                                 x = X as (i, 1, k)
        if k == 0: C[i, j] = 0          ->       w = W as (1, j, k)
        C[i, j] += X[i, k] * W[k, j]             C = einsum("ik,jk->ij", x, w)

An expression of a block is a tensor with an axis for each axis of the block, of length 1 where the
expression is the same all along it. What an affine index reads is a view; any other index is
computed, and what it reads is gathered. A sum of a product is an `einsum`. A tensor that is written
at places that are data, or in part, becomes another one: what was given stays as it is.

Before anything runs, all of a function has become a list of steps; a function with anything else
than this in it is refused (`NotOnArrays`), and so is a run that reads out of bounds or divides an
integer by zero. Compiled loops (`check.reference`) do what is refused, and say why where data is
wrong.

Does not handle: symbolic extents, reductions of several results (argmax), scans in loops, writes to
places of a tensor that is read elsewhere meanwhile, bit casts, floats of fewer than 32 bits,
unsigned integers of more than 8.
"""

from __future__ import annotations

import math
import string
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial, reduce
from typing import Any

import tvm_ffi
from tvm import s_tir, tirx
from tvm.ir import Call, Expr, TensorLoad, Var
from tvm.ir.prim.expr import BitwiseNot, Let

from ...ir.blocks import log_terms
from ...kernels.program.expr import dtype_of, is_if_then_else, is_integer, number, same
from .narrow import wide
from .operations import (
    BINARY,
    FUNCTIONS,
    INTEGER_DIVISIONS,
    REDUCTIONS,
    NotOnArrays,
    Shape,
    dtype_in_torch,
    freeing,
    operation,
)

MOST = {"cpu": 1 << 26, "cuda": 1 << 28}
"""Elements of a tensor, at most: 0.5 GB of float64 in host memory, 2 GB on a GPU."""

_FOLDED = 1 << 18  # elements of what is computed once, of axes and numbers alone
_MULTIPLIED = 1 << 14  # terms of a sum of products that are written down: `einsum` takes longer


_AT_ONCE = 16  # terms of a sum of products in the time of one pointwise operation


@dataclass(frozen=True, slots=True)
class _Step:
    name: str
    compute: Callable[..., Any]
    inputs: tuple[int, ...]
    output: int


class ArrayFunction:
    """A PrimFunc whose floats are float64, for tensors of one device.

    Parameters
    ----------
    func : tirx.PrimFunc
    count : int
        How many of its parameters are inputs.
    device : str
        torch's name of the device.
    results : sequence of int, optional
        The numbers of the parameters that are results, which inputs may be (by default those behind
        the inputs).

    Attributes
    ----------
    operations : int
        Of one call, in pointwise ones of one element, about.

    Raises
    ------
    NotOnArrays
    """

    def __init__(
        self, func: tirx.PrimFunc, count: int, device: str, results: Sequence[int] | None = None
    ) -> None:
        numbers = range(count, len(func.params)) if results is None else results
        writer = _Writer(device)
        for param in func.params[:count]:
            writer.add_input(param)
        writer.nests(func)
        self.operations = writer.operations
        self._outputs = [writer.tensor_of(func.params[i]) for i in numbers]
        made = {step.output for step in writer.steps}
        self._narrow = {i for i in range(count) if _may_be_narrow(i, writer)}
        self._narrow -= set(self._outputs)
        self._registers = writer.registers
        self._steps = freeing(
            writer.steps, lambda step: made.intersection((*step.inputs, step.output)), self._outputs
        )

    def __call__(self, tensors: Sequence[Any]) -> list[Any]:
        """The outputs; inputs are contiguous tensors of the types of the parameters, or `Narrow`.

        Raises
        ------
        NotOnArrays
            An index is out of range, or an integer is divided by zero.
        """
        registers = list(self._registers)
        for i, tensor in enumerate(tensors):
            registers[i] = tensor if i in self._narrow else wide(tensor)
        for step, freed in self._steps:
            found = step.compute(*[registers[i] for i in step.inputs])
            registers[step.output] = found
            for i in freed:
                registers[i] = None
        return [registers[i] for i in self._outputs]


@dataclass(slots=True)
class _Axes:
    """The axes of a block: their variables, extents, and which of them are reduced."""

    vars: list[Var]
    extents: Shape
    reduced: tuple[int, ...]
    in_order: bool = True  # as the loops are nested

    def places(self, var: Var) -> int | None:
        return next((i for i, axis in enumerate(self.vars) if axis.same_as(var)), None)


@dataclass
class _Writer:
    """Writes the steps of a function.

    A register holds a tensor; of `registers` those have a value from the beginning that depends on
    no input. `shapes` are those of expressions, () of what is one number.
    """

    device: str
    registers: list[Any] = field(default_factory=list)
    steps: list[_Step] = field(default_factory=list)
    shapes: list[Shape] = field(default_factory=list)
    buffers: dict[Var, int] = field(default_factory=dict)
    axes: _Axes = field(default_factory=lambda: _Axes([], (), ()))
    known: dict[tuple, int] = field(default_factory=dict)
    bound: dict[Var, int] = field(default_factory=dict)
    operations: int = 0

    # ---- Registers and steps.

    def new(self, shape: Shape, value: Any = None) -> int:
        self.registers.append(value)
        self.shapes.append(shape)
        return len(self.registers) - 1

    def emit(self, name: str, inputs: Sequence[int], shape: Shape, *how: Any) -> int:
        """The register of an operation's result: an old one where that was computed before."""
        if name != "view":
            self._limit(shape)
        key = (name, *inputs, *how)
        if key in self.known:
            return self.known[key]
        compute = operation(name)
        compute = partial(compute, *how) if how else compute
        values = [self.registers[i] for i in inputs]
        if all(value is not None for value in values) and math.prod(shape) <= _FOLDED:
            self.known[key] = self.new(shape, compute(*values))
        else:
            self.known[key] = self.new(shape)
            sums = math.prod(self.axes.extents) // _AT_ONCE if name == "contracted" else 0
            self.operations += max(sums, math.prod(shape))
            self.steps.append(_Step(name, compute, tuple(inputs), self.known[key]))
        return self.known[key]

    def _limit(self, shape: Shape, most: int = 0) -> None:
        if math.prod(shape) > max(MOST[self.device], most):
            raise NotOnArrays(f"a tensor of {math.prod(shape)} elements")

    def pointwise(self, name: str, *inputs: int) -> int:
        return self.emit(name, inputs, self.together(inputs))

    def together(self, inputs: Sequence[int]) -> Shape:
        """The shape of what is computed of some registers point by point."""
        shapes = [self.shapes[i] for i in inputs if self.shapes[i]]
        return tuple(map(max, *shapes)) if len(shapes) > 1 else next(iter(shapes), ())

    def value(self, immediate: float, dtype: str) -> int:
        key = ("value", repr(immediate), dtype)
        if key not in self.known:
            torch = sys.modules["torch"]
            made = torch.tensor(immediate, dtype=dtype_in_torch(dtype), device=self.device)
            self.known[key] = self.new((), made)
        return self.known[key]

    def add_input(self, param: Var) -> None:
        self.buffers[param] = self.new(_extents(param))

    def tensor_of(self, buffer: Var) -> int:
        """The register of what a buffer holds now."""
        if buffer not in self.buffers:
            raise NotOnArrays(f"{buffer.name}, which nothing is written to")
        return self.buffers[buffer]

    # ---- Statements.

    def nests(self, func: tirx.PrimFunc) -> None:
        """All loop nests of a function in turn."""
        body = func.body
        if not isinstance(body, s_tir.SBlockRealize) or "tirx.is_scheduled" in (func.attrs or {}):
            raise NotOnArrays("a function that is no plain one")
        root = body.block.body if body.block.name_hint == "root" else body
        for stmt in root.seq if isinstance(root, tirx.SeqStmt) else [root]:
            self.known, self.bound = {}, {}
            self._nest(stmt)

    def _nest(self, stmt: tirx.Stmt) -> None:
        loops: dict[Var, int] = {}
        while isinstance(stmt, tirx.For):
            loops[stmt.loop_var] = _known(stmt.extent)
            if number(stmt.min) != 0 or number(stmt.step) not in (None, 1):
                raise NotOnArrays("a loop that does not begin at 0")
            stmt = stmt.body
        if not isinstance(stmt, s_tir.SBlockRealize) or number(stmt.predicate) != 1:
            raise NotOnArrays(f"a nest of {type(stmt).__name__}")
        block = stmt.block
        if not isinstance(block.body, tirx.BufferStore):
            raise NotOnArrays(f"a block of {type(block.body).__name__}")
        self.axes = self._axes_of(block, stmt.iter_values, loops)
        store, whole = block.body, self._is_whole(block.body)
        if self.axes.reduced:
            if not whole:
                raise NotOnArrays("a reduction into a part")
            self._store(store, self._reduction(store, block.init))
        elif whole:
            if not all(_is_same_place(load, store) for load in _loads(store.value, store.buffer)):
                raise NotOnArrays("a scan")
            self._store(store, self.expr(store.value))
        else:
            self._write(store)

    def _axes_of(self, block: s_tir.SBlock, values: Sequence[Expr], loops: dict[Var, int]) -> _Axes:
        left, extents, reduced = dict(loops), [], []
        nested = {loop: i for i, loop in enumerate(loops)}
        order = [nested[value] for value in values if value in nested]
        for i, (axis, value) in enumerate(zip(block.iter_vars, values, strict=True)):
            extent = _known(axis.dom.extent)
            is_loop = (extent == 1 and number(value) == 0) or left.pop(value, None) == extent
            if not is_loop or number(axis.dom.min) != 0:
                raise NotOnArrays("an axis that is no loop")
            extents.append(extent)
            if axis.iter_type == tirx.IterVar.CommReduce:
                reduced.append(i)
        if any(extent != 1 for extent in left.values()):
            raise NotOnArrays("a loop that is no axis")
        axes = [axis.var for axis in block.iter_vars]
        return _Axes(axes, tuple(extents), tuple(reduced), order == sorted(order))

    def _is_whole(self, store: tirx.BufferStore) -> bool:
        """Whether a block writes each element of a buffer once."""
        order = [self._axis_of(index) for index in store.indices]
        used = [axis for axis in order if axis is not None]
        rest = [i for i in range(len(self.axes.extents)) if i not in used]
        return (
            len(set(used)) == len(used)
            and all(
                extent == (1 if axis is None else self.axes.extents[axis])
                and (axis is not None or number(index) == 0)
                for index, axis, extent in zip(
                    store.indices, order, _extents(store.buffer), strict=True
                )
            )
            and all(self.axes.extents[i] == 1 or i in self.axes.reduced for i in rest)
        )

    def _axis_of(self, index: Expr) -> int | None:
        return self.axes.places(index) if isinstance(index, Var) else None

    def _store(self, store: tirx.BufferStore, value: int) -> None:
        """What a buffer holds after a block that writes all of it."""
        shape, axes = _extents(store.buffer), self.axes
        order = [axis for axis in map(self._axis_of, store.indices) if axis is not None]
        rest = [i for i in range(len(axes.extents)) if i not in order]
        whole = tuple(1 if i in axes.reduced else e for i, e in enumerate(axes.extents))
        how = (whole, (*order, *rest), shape)
        self.buffers[store.buffer] = self.emit("laid out", [value], shape, *how)

    def _write(self, store: tirx.BufferStore) -> None:
        """What a buffer holds after a block that writes some places of it, one after the other."""
        buffer, value, adds = store.buffer, store.value, False
        if buffer not in self.buffers or not self.axes.in_order:
            raise NotOnArrays("a block that writes a part")
        if isinstance(value, tirx.Add):
            own = [_is_same_place(side, store) for side in (value.a, value.b)]
            adds = any(own)
            value = (value.b if own[0] else value.a) if adds else value
        if any(_loads(e, buffer) for e in (value, *store.indices)):
            raise NotOnArrays("a write of what it reads elsewhere")
        shape = _extents(buffer)
        place, inside = self._place(store.indices, shape, None)
        inputs = [self.buffers[buffer], self.expr(value), place, inside]
        name = "added at" if adds else "written at"
        self.buffers[buffer] = self.emit(name, inputs, shape, self.axes.extents)

    # ---- Reductions.

    def _reduction(self, store: tirx.BufferStore, init: tirx.Stmt | None) -> int:
        if not isinstance(init, tirx.BufferStore):
            raise NotOnArrays("a reduction of another kind")
        logarithmic = log_terms(store)
        if logarithmic is not None:
            scanned = self._scanned("log sum of", logarithmic[1], init.value)
            if scanned is not None:
                return scanned
        if type(store.value) not in REDUCTIONS:
            raise NotOnArrays("a reduction of another kind")
        step = store.value
        sides = [(step.a, step.b), (step.b, step.a)]
        term = next((b for a, b in sides if _is_same_place(a, store)), None)
        if term is None or _loads(term, store.buffer):
            raise NotOnArrays("a reduction of another kind")
        scanned = self._scanned(REDUCTIONS[type(step)], term, init.value)
        if scanned is not None:
            return scanned
        found = self._sum(term) if isinstance(step, tirx.Add) else self._extreme(step, term)
        if isinstance(step, tirx.Add) and number(init.value) == 0:
            return found
        return self.pointwise(BINARY[type(step)], self.expr(init.value), found)

    def _scanned(self, name: str, term: Expr, neutral: Expr) -> int | None:
        """A reduction of the places up to each own one (`ir.blocks.Scan`); None for others."""
        if not is_if_then_else(term) or not isinstance(term.args[0], tirx.LE | tirx.LT):
            return None
        condition, body, other = term.args
        source, axis = (self.axes.places(x) for x in (condition.a, condition.b))
        if self.axes.reduced != (source,) or axis in (None, source) or not same(other, neutral):
            return None
        length, value = self.axes.extents[axis], self.expr(body)
        shape = self.shapes[value]
        if self.axes.extents[source] != length or not shape or shape[axis] != 1:
            return None
        left = tuple(length if n == axis else 1 if n == source else e for n, e in enumerate(shape))
        how = (name, source, axis, length, isinstance(condition, tirx.LT), number(neutral))
        return self.emit("scanned", [value], left, *how)

    def _sum(self, term: Expr) -> int:
        factors = [self.expr(factor) for factor in _factors(term)]
        shape, dtype = self.together(factors), dtype_of(term)
        multiplied = len(factors) == 1 or math.prod(shape) <= _MULTIPLIED
        if multiplied or not dtype.startswith("float"):
            product = reduce(partial(self.pointwise, "mul"), factors)
            return self._reduced("sum of", product, dtype)
        found = self._contracted(factors)
        return self._repeated(found, shape, dtype)

    def _contracted(self, factors: Sequence[int]) -> int:
        letters = string.ascii_letters[: len(self.axes.extents)]
        names = [
            "".join(x for x, extent in zip(letters, self.shapes[f], strict=False) if extent != 1)
            for f in factors
        ]
        left = [
            x for i, x in enumerate(letters) if i not in self.axes.reduced and x in "".join(names)
        ]
        shape = tuple(
            e if x in left else 1 for x, e in zip(letters, self.together(factors), strict=True)
        )
        return self.emit("contracted", factors, shape, f"{','.join(names)}->{''.join(left)}", shape)

    def _extreme(self, step: Expr, term: Expr) -> int:
        return self._reduced(REDUCTIONS[type(step)], self.expr(term), dtype_of(term))

    def _reduced(self, name: str, value: int, dtype: str) -> int:
        shape = self.shapes[value]
        along = tuple(i for i in self.axes.reduced if shape and shape[i] != 1)
        left = tuple(1 if i in along else e for i, e in enumerate(shape))
        found = self.emit(name, [value], left, along) if along else value
        return self._repeated(found, shape, dtype) if name == "sum of" else found

    def _repeated(self, value: int, shape: Shape, dtype: str) -> int:
        """A sum over axes along which its terms are the same."""
        extents = [self.axes.extents[i] for i in self.axes.reduced if not shape or shape[i] == 1]
        if math.prod(extents) == 1:
            return value
        return self.pointwise("mul", value, self.value(math.prod(extents), dtype))

    # ---- Expressions.

    def expr(self, e: Expr, where: int | None = None) -> int:
        """The register of an expression that has to read within bounds at least in `where`."""
        if isinstance(e, tirx.IntImm | tirx.FloatImm):
            return self.value(number(e), dtype_of(e))
        if isinstance(e, Var):
            return self._variable(e)
        if isinstance(e, TensorLoad):
            return self._load(e, where)
        if isinstance(e, tirx.Cast):
            return self._cast(self.expr(e.value, where), dtype_of(e.value), dtype_of(e))
        if isinstance(e, tirx.Div | tirx.Mod | tirx.FloorDiv | tirx.FloorMod):
            return self._division(e, where)
        if type(e) in BINARY:
            return self.pointwise(BINARY[type(e)], self.expr(e.a, where), self.expr(e.b, where))
        if isinstance(e, tirx.Not | BitwiseNot):
            return self.pointwise("bitwise_not", self.expr(e.a, where))
        if isinstance(e, tirx.Select):
            parts = (e.condition, e.true_value, e.false_value)
            return self.pointwise("where", *(self.expr(part, where) for part in parts))
        if isinstance(e, Let):
            self.bound[e.var] = self.expr(e.value, where)
            return self.expr(e.body, where)
        if isinstance(e, Call):
            return self._call(e, where)
        raise NotOnArrays(f"an expression of {type(e).__name__}")

    def _variable(self, var: Var) -> int:
        if var in self.bound:
            return self.bound[var]
        place = self.axes.places(var)
        if place is None:
            raise NotOnArrays(f"the variable {var.name}")
        shape = tuple(e if i == place else 1 for i, e in enumerate(self.axes.extents))
        how = (shape, dtype_in_torch(dtype_of(var)), self.device)
        return self.emit("places", [], shape, *how)

    def _cast(self, value: int, source: str, dtype: str) -> int:
        if source == dtype:
            return value
        return self.emit("cast", [value], self.shapes[value], dtype_in_torch(dtype))

    def _division(self, e: Expr, where: int | None) -> int:
        a, b = self.expr(e.a, where), self.expr(e.b, where)
        if is_integer(dtype_of(e)):
            return self.pointwise(INTEGER_DIVISIONS[type(e)], a, b)
        if not isinstance(e, tirx.Div):
            raise NotOnArrays(f"floats in {type(e).__name__}")
        return self.pointwise("true_divide", a, b)

    def _call(self, e: Call, where: int | None) -> int:
        name = getattr(e.op, "name", "").partition(".")[2]
        if name == "if_then_else":
            return self._chosen(*e.args, where)
        if name == "likely":
            return self.expr(e.args[0], where)
        if name not in FUNCTIONS or not dtype_of(e.args[0]).startswith("float"):
            raise NotOnArrays(f"a call of {name}")
        args = [self.expr(arg, where) for arg in e.args]
        return self.pointwise(FUNCTIONS[name], *args)

    def _chosen(self, condition: Expr, yes: Expr, no: Expr, where: int | None) -> int:
        first = self.expr(condition, where)
        other = self.pointwise("logical_not", first)
        if where is None:
            inside, outside = first, other
        else:
            inside = self.pointwise("logical_and", where, first)
            outside = self.pointwise("logical_and", where, other)
        return self.pointwise("where", first, self.expr(yes, inside), self.expr(no, outside))

    # ---- Loads.

    def _load(self, load: TensorLoad, where: int | None) -> int:
        buffer, extents = self.tensor_of(load.source), _extents(load.source)
        if len(load.indices) != len(extents):
            raise NotOnArrays("a load of another rank")
        forms = [self._affine(index) for index in load.indices]
        if all(self._is_inside(form, e) for form, e in zip(forms, extents, strict=True)):
            return self._view(buffer, forms, extents)
        return self._gathered(buffer, load.indices, extents, where)

    def _affine(self, index: Expr) -> tuple[int, tuple[int, ...]] | None:
        """Of an index what it is at the first point, and its step along each axis."""
        none = (0,) * len(self.axes.extents)
        if isinstance(index, tirx.IntImm):
            return int(index.value), none
        if isinstance(index, Var):
            place = self.axes.places(index)
            return None if place is None else (0, (*none[:place], 1, *none[place + 1 :]))
        if isinstance(index, tirx.Cast) and is_integer(dtype_of(index.value)):
            return self._affine(index.value)
        if not isinstance(index, tirx.Add | tirx.Sub | tirx.Mul):
            return None
        a, b = self._affine(index.a), self._affine(index.b)
        if a is None or b is None:
            return None
        if isinstance(index, tirx.Mul):
            if any(a[1]):
                a, b = b, a
            return None if any(a[1]) else (a[0] * b[0], tuple(a[0] * step for step in b[1]))
        sign = 1 if isinstance(index, tirx.Add) else -1
        steps = tuple(x + sign * y for x, y in zip(a[1], b[1], strict=True))
        return a[0] + sign * b[0], steps

    def _is_inside(self, form: tuple[int, tuple[int, ...]] | None, extent: int) -> bool:
        """Whether an index is known, goes forward, and stays within an axis of a buffer."""
        if form is None or any(step < 0 for step in form[1]):
            return False
        ends = (s * (e - 1) for s, e in zip(form[1], self.axes.extents, strict=True))
        return form[0] >= 0 and form[0] + sum(ends) < extent

    def _view(
        self, buffer: int, forms: Sequence[tuple[int, tuple[int, ...]]], extents: Shape
    ) -> int:
        strides = _strides(extents)
        first = sum(form[0] * stride for form, stride in zip(forms, strides, strict=True))
        steps = tuple(
            sum(form[1][axis] * stride for form, stride in zip(forms, strides, strict=True))
            for axis in range(len(self.axes.extents))
        )
        used = [any(form[1][axis] for form in forms) for axis in range(len(steps))]
        shape = tuple(e if u else 1 for e, u in zip(self.axes.extents, used, strict=True))
        self._limit(shape, math.prod(extents))  # windows become copies in a product
        return self.emit("view", [buffer], shape, shape, steps, first)

    def _gathered(
        self, buffer: int, indices: Sequence[Expr], extents: Shape, where: int | None
    ) -> int:
        place, inside = self._place(indices, extents, where)
        if not math.prod(extents):
            raise NotOnArrays("a load of nothing")
        inputs = [buffer, place, inside]
        shape = self.together(inputs[1:])
        if self.registers[inside] is not None and bool(self.registers[inside].all()):
            return self.emit("taken", inputs[:2], shape)
        if where is not None:
            inputs, shape = [*inputs, where], self.together([place, inside, where])
        return self.emit("taken inside", inputs, shape)

    def _place(self, indices: Sequence[Expr], extents: Shape, where: int | None) -> tuple[int, int]:
        """The registers of a place in a flat buffer, and of whether it is one."""
        place, inside = self.value(0, "int64"), self.value(1, "bool")
        for index, extent, stride in zip(indices, extents, _strides(extents), strict=True):
            at = self._cast(self.expr(index, where), dtype_of(index), "int64")
            inside = self.pointwise("logical_and", inside, self._within(at, extent))
            place = self.pointwise("add", place, self.scaled(at, stride))
        return place, inside

    def scaled(self, value: int, factor: int) -> int:
        if factor == 1:
            return value
        return self.pointwise("mul", value, self.value(factor, "int64"))

    def _within(self, at: int, extent: int) -> int:
        low = self.pointwise("ge", at, self.value(0, "int64"))
        high = self.pointwise("lt", at, self.value(extent, "int64"))
        return self.pointwise("logical_and", low, high)


# ---- Parts of functions.


def _may_be_narrow(register: int, writer: _Writer) -> bool:
    """Whether all that reads a tensor widens as much of it as it reads: products, what takes
    elements by their places, and what moves it to where only such read it.
    """
    return all(
        _reads_narrow(step, register, writer) for step in writer.steps if register in step.inputs
    )


def _reads_narrow(step: _Step, register: int, writer: _Writer) -> bool:
    if step.name in ("taken", "taken inside"):
        return step.inputs.index(register) == 0
    if step.name not in ("view", "laid out"):
        return step.name == "contracted"
    before, after = (math.prod(writer.shapes[i]) for i in (register, step.output))
    return after <= before and _may_be_narrow(step.output, writer)


def _known(extent: Expr) -> int:
    size = number(extent)
    if size is None:
        raise NotOnArrays("a symbolic extent")
    return int(size)


def _extents(buffer: Var) -> Shape:
    shape = getattr(buffer.ty, "shape", None)
    if shape is None:
        raise NotOnArrays(f"{buffer.name}, which is no tensor")
    dtype_in_torch(dtype_of(buffer))
    return tuple(map(_known, shape))


def _strides(extents: Shape) -> Shape:
    """Of a contiguous tensor."""
    return tuple(math.prod(extents[i + 1 :]) for i in range(len(extents)))


def _factors(term: Expr) -> Iterator[Expr]:
    """The factors of a product of floats; an integer product is one factor."""
    if isinstance(term, tirx.Cast) and dtype_of(term.value) == dtype_of(term):
        yield from _factors(term.value)
    elif isinstance(term, tirx.Mul) and dtype_of(term).startswith("float"):
        yield from _factors(term.a)
        yield from _factors(term.b)
    else:
        yield term


def _loads(e: Expr, buffer: Var) -> list[TensorLoad]:
    """Where an expression reads a buffer."""
    found: list[TensorLoad] = []
    tvm_ffi.structural_walk(e, [(TensorLoad, found.append)])
    return [load for load in found if load.source.same_as(buffer)]


def _is_same_place(e: Expr, store: tirx.BufferStore) -> bool:
    """Whether an expression is what stands where something is stored."""
    return (
        isinstance(e, TensorLoad)
        and e.source.same_as(store.buffer)
        and tvm_ffi.structural_equal(e.indices, store.indices)
    )
