"""Random inputs for a Relax function, made from the types of its parameters."""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import ml_dtypes
import numpy as np
import tvm
import tvm_ffi
from tvm import relax, tirx

from ..errors import InputError
from ..ir.weights import numbers, tensor_of, weight_of
from ..transform.functions.functions import expressions_of, operator_name

_LARGEST = 9
_NUMBERS = range(-_LARGEST, _LARGEST + 1)
_DIVISORS = range(1, _LARGEST + 1)
_PLACES = range(2)  # within whatever has two elements

_MOST_DRAWN = 2**22 - 3
"""Floats that are drawn for a tensor; behind them they begin again. A prime: no two of its rows of
a power of two are the same. 2e9 numbers, a model's caches, would be drawn for a minute."""

_FAR, _ENDS = 4.0, 16  # extreme floats, and among how many of the last elements of a line they are

_MOVES = ("relax.astype", "relax.reshape", "relax.expand_dims", "relax.squeeze", "relax.flatten")
_DIVISIONS = frozenset(
    f"relax.{name}" for name in ("divide", "floor_divide", "mod", "floor_mod", "trunc_divide")
)

_LOW_LEVEL = frozenset(
    f"relax.{name}" for name in ("call_tir", "call_dps_packed", "call_pure_packed", "call_inplace")
)

# Operators that compute with the values of integers, or move them: none is a place or a size.
_COMPUTING = _DIVISIONS.union(
    _MOVES,
    (
        f"relax.{name}"
        for name in (
            *("add", "subtract", "multiply", "maximum", "minimum", "negative", "abs", "sign"),
            *("clip", "where", "square", "equal", "not_equal", "less", "less_equal", "greater"),
            *("greater_equal", "logical_and", "logical_or", "logical_xor", "logical_not"),
            *("bitwise_and", "bitwise_or", "bitwise_xor", "bitwise_not", "sum", "max", "min"),
            *("mean", "prod", "argmax", "argmin", "cumsum", "matmul", "nn.relu", "sigmoid"),
            *("permute_dims", "broadcast_to", "concat", "split", "stack", "strided_slice"),
            *("flip", "tile", "repeat", "nn.pad", "full_like", "zeros_like", "ones_like"),
        )
    ),
)


def random_inputs(
    func: relax.Function,
    seed: int = 0,
    sizes: Mapping[str, int] | None = None,
    integers: Mapping[str, int] | None = None,
    extreme: bool = False,
) -> list[Any]:
    """Draw one value per parameter.

    Parameters
    ----------
    func : relax.Function
        The function to call.
    seed : int
        A parameter's values depend on its name, its type and the seed, on nothing else.
    sizes : mapping of str to int
        A value for every symbolic dimension that occurs in the parameters.
    integers : mapping of str to int
        Exclusive upper bounds of integer parameters. Without one a parameter that `func` takes
        rows with (an embedding, before LegalizeOps) ranges over those rows, as far as it is known
        what is computed from it before (`places`), one that is only
        computed with over -9 to 9 (1 to 9 where something is divided by it), and any other over 0
        and 1, so that nothing is read out of bounds.
    extreme : bool
        On each line along each axis one of the last elements is far from the others, up or down:
        what only the ends of loops and the lanes of remainders compute decides results.

    Returns
    -------
    list
        Arrays; floats are drawn from N(0, 1), booleans fairly. Shape parameters are tuples of
        ints, scalars are numbers, tuple parameters are lists.

    Raises
    ------
    InputError
        A dimension has no size, a parameter has no known shape, or a name is not the function's.

    Examples
    --------
    >>> random_inputs(mod["main"], seed=1, sizes={"batch": 3})   # doctest: +SKIP
    """
    sizes = dict(sizes or {})
    ranges = ranges_of(func) | {name: range(n) for name, n in (integers or {}).items()}
    draw = _Draw(sizes, seed, extreme)
    values = [draw.value(p.ty, p.name, ranges.get(p.name, _PLACES)) for p in func.params]
    known = {p.name for p in func.params}
    _refuse_unknown("parameter", set(integers or {}) - known, known)
    _refuse_unknown("symbolic dimension", set(sizes) - draw.used, draw.used)
    return values


def other_numbers(values: Sequence[Any]) -> list[Any]:
    """Inputs like these with other numbers, none of which is a place out of bounds where these are
    none: floats half as large, integers in the opposite order along the first axis.
    """
    return [_other(value) for value in values]


def _other(value: Any) -> Any:
    if isinstance(value, list):
        return other_numbers(value)
    if not isinstance(value, np.ndarray):
        return value
    if "float" in value.dtype.name:
        return (value * value.dtype.type(0.5)).astype(value.dtype)
    return value[::-1] if value.ndim else value


def objects(func: relax.Function) -> list[str]:
    """The parameters that no value can be drawn for: caches and other objects."""
    return [param.name for param in func.params if not _is_number(param.ty)]


def has_values(func: relax.Function) -> bool:
    """Whether all that a function returns can be read and compared: it is no object."""
    return _is_number(func.ret_ty)


def _is_number(ty: Any) -> bool:
    if isinstance(ty, relax.TupleType):
        return all(map(_is_number, ty.fields))
    return isinstance(ty, relax.TensorType | relax.ShapeType | tvm.ir.PrimType)


class _Draw:
    """Draws values of Relax types; remembers which sizes it needed."""

    def __init__(self, sizes: dict[str, int], seed: int, extreme: bool) -> None:
        self.sizes = sizes
        self.seed = seed
        self.extreme = extreme
        self.used: set[str] = set()

    def value(self, ty: Any, name: str, integers: range) -> Any:
        if isinstance(ty, relax.TupleType):
            return [self.value(f, f"{name}.{i}", integers) for i, f in enumerate(ty.fields)]
        if isinstance(ty, relax.ShapeType) and ty.values is not None:
            return tuple(self.extent(v, name) for v in ty.values)
        if isinstance(ty, tvm.ir.PrimType):
            if name in self.sizes:
                self.used.add(name)
                return self.sizes[name]
            return self.array((), str(ty.dtype), name, integers).item()
        if isinstance(ty, relax.TensorType) and isinstance(ty.shape, relax.ShapeExpr):
            shape = tuple(self.extent(v, name) for v in ty.shape.values)
            return self.array(shape, str(ty.dtype), name, integers)
        raise InputError(f"parameter {name} has type {ty}, which says no shape: give its value")

    def extent(self, value: tvm.ir.Expr, parameter: str) -> int:
        """A dimension as an int."""
        names: list[str] = []
        tvm_ffi.structural_walk(value, (tirx.Var, lambda var: names.append(var.name)))
        self.used.update(names)
        if missing := [name for name in names if name not in self.sizes]:
            raise InputError(
                f"parameter {parameter} has the symbolic dimension {missing[0]!r}: give its size"
            )
        return extent_of(value, self.sizes)

    def array(self, shape: tuple[int, ...], dtype: str, name: str, integers: range) -> np.ndarray:
        places = integers == _PLACES and "float" in dtype
        seed = 0 if places else self.seed  # nobody knows which other floats are in bounds
        rng = np.random.default_rng([seed, zlib.crc32(name.encode())])
        if dtype == "bool":
            return np.asarray(rng.integers(0, 2, shape).astype("bool"))
        if dtype.startswith(("int", "uint")):
            low = max(integers.start, 0) if dtype.startswith("uint") else integers.start
            values = np.asarray(rng.integers(low, integers.stop, shape))
            if self.extreme and integers == _NUMBERS:
                _spike(values, rng, 3.0 * _LARGEST, unsigned=dtype.startswith("uint"))
            return values.astype(dtype)
        drawn = rng.standard_normal(min(math.prod(shape), _MOST_DRAWN)).astype(numpy_dtype(dtype))
        values = np.resize(drawn, shape)
        if self.extreme and integers == _NUMBERS:
            _spike(values, rng, _FAR)
        return values


def extent_of(value: tvm.ir.Expr, sizes: Mapping[str, int]) -> int:
    """A dimension as an int; `sizes` are those of its variables by name."""
    number = (tirx.Var, lambda var: tirx.IntImm(str(var.ty.dtype), sizes[var.name]))
    return int(tvm.sym.Analyzer().simplify(tvm_ffi.structural_map(value, number)))


def _spike(
    values: np.ndarray, rng: np.random.Generator, height: float, unsigned: bool = False
) -> None:
    """Put `height` and up to a half more, or as much below 0, at one of the last elements of each
    line of each axis. (No two are the same: nobody can say which of two is the largest.)
    """
    for axis, extent in enumerate(values.shape):
        if extent > 1 and values.size:
            lines = (*values.shape[:axis], 1, *values.shape[axis + 1 :])
            places = extent - 1 - rng.integers(0, min(extent, _ENDS), lines)
            signs = 1 if unsigned else rng.choice([-1, 1], lines)
            heights = height * (1 + 0.5 * rng.random(lines)) * signs
            np.put_along_axis(values, places, heights.astype(values.dtype), axis)


def numpy_dtype(dtype: str) -> np.dtype:
    """NumPy's dtype for a name of TVM's; bfloat16 and the like come from ml_dtypes."""
    return np.dtype(getattr(ml_dtypes, dtype, dtype))


def ranges_of(func: relax.Function) -> dict[str, range]:
    """What parameters range over, by name, as far as their readers tell (`random_inputs`).

    An integer is followed through the operators that only compute with numbers or move them; what
    any other reads (as a place, a size, a shift, a power) is 0 or 1. A float is followed through
    all operators; what some read a place with, or round to an integer, is drawn once for all seeds.
    """
    behind: dict[relax.Var, frozenset[str]] = {p: frozenset([p.name]) for p in func.params}
    moved = dict(behind)  # the same numbers, cast or in another shape
    tensors = {p.name: p.ty for p in func.params if isinstance(p.ty, relax.TensorType)}
    ranges = dict.fromkeys(tensors, _NUMBERS)
    floats = {name for name, ty in tensors.items() if "float" in str(ty.dtype)}
    rows: dict[str, range] = {}
    indices = {
        p: any_number(p.name, str(tensors[p.name].dtype))
        for p in func.params
        if p.name in tensors and "int" in str(tensors[p.name].dtype)
    }

    def narrow(names: Iterable[str], to: range) -> None:
        ranges.update((n, to) for n in names if ranges.get(n) == _NUMBERS or to == _PLACES)

    for binding in (b for block in func.body.blocks for b in block.bindings):
        value = getattr(binding, "value", None)
        name = operator_name(value)
        reads = [behind.get(v, frozenset()) for v in _variables(value)]
        if name == "relax.take" and (found := _range_of_indices(value, moved, indices)):
            for index, places in found.items():
                rows[index] = _both(places, rows.get(index, places))
            reads = reads[:1]
        elif name in _DIVISIONS and value.args[1] in moved:
            narrow(moved[value.args[1]], _DIVISORS)
        elif _reads_places(value, name):
            narrow(frozenset().union(*reads), _PLACES)
            reads = []
        elif isinstance(value, relax.Call) and name not in _COMPUTING:
            names = frozenset().union(*reads)
            narrow(names - floats, _PLACES)
            reads = [names & floats]
        elif not isinstance(value, relax.Call | relax.Tuple | relax.TupleGetItem | relax.Var):
            narrow(frozenset().union(*reads), _PLACES)
        behind[binding.var] = frozenset().union(*reads)
        if name in _MOVES and value.args[0] in moved:
            moved[binding.var] = moved[value.args[0]]
        if (found := computed(value, indices)) is not None:
            indices[binding.var] = found
    return ranges | {n: of for n, of in rows.items() if ranges[n] != _PLACES}


def _range_of_indices(
    take: relax.Call,
    moved: Mapping[relax.Var, frozenset[str]],
    indices: Mapping[relax.Var, Computed],
) -> dict[str, range]:
    """What the parameters that a call takes rows by may be; nothing where that is not known."""
    index, rows = take.args[1], _rows(take)
    if index in moved:
        return {name: range(rows) for name in moved[index]}
    if index not in indices:
        return {}
    name, numbers = indices[index]
    places = range_of_places(numbers, rows)
    return {} if places is None else {name: places}


def _both(one: range, other: range) -> range:
    return range(max(one.start, other.start), min(one.stop, other.stop))


def _reads_places(value: Any, name: str) -> bool:
    """Whether floats may be places for a call: regions of an image, what becomes an integer, and
    whatever is no operator of TVM's.
    """
    if not isinstance(value, relax.Call):
        return False
    if name == "relax.astype":
        from_float = "float" in str(value.args[0].ty.dtype)
        return from_float and str(value.ty.dtype).startswith(("int", "uint"))
    return name in _LOW_LEVEL or not name or name.startswith(("relax.vision.", "relax.image."))


def _variables(value: Any) -> list[relax.Var]:
    """The variables that a value reads, in order."""
    return [] if value is None else expressions_of(value, relax.Var)


def _rows(take: relax.Call) -> int:
    axis = take.attrs.axis
    extents = [int(e) for e in take.args[0].ty.shape.values if isinstance(e, tirx.IntImm)]
    if len(extents) < take.args[0].ty.ndim:
        return _PLACES.stop
    return extents[axis] if axis is not None else int(np.prod(extents))


def _refuse_unknown(what: str, unknown: set[str], known: set[str]) -> None:
    if unknown:
        raise InputError(
            f"no {what} is called {min(unknown)!r}; there is {', '.join(sorted(known)) or 'none'}"
        )


# ---- Integers that become places after some arithmetic (`table[ids.abs()]`, `table[ids + 1]`):
# what an input may range over so that all places are rows of the table. # The arithmetic is carried
# out on every number that an input could be.

_MOST = 127  # the inputs that are tried are at most so large: all of them are int8

_UNARY = {
    "relax.abs": np.abs,
    "relax.negative": np.negative,
    **dict.fromkeys(
        (
            *("relax.astype", "relax.reshape", "relax.expand_dims", "relax.squeeze"),
            *("relax.flatten", "relax.permute_dims"),
        ),
        np.array,
    ),
}
_COMBINED: dict[str, Callable[..., np.ndarray]] = {
    "relax.add": np.add,
    "relax.subtract": np.subtract,
    "relax.multiply": np.multiply,
    "relax.maximum": np.maximum,
    "relax.minimum": np.minimum,
    "relax.less": np.less,
    "relax.where": np.where,  # negative places count from the end
}

Computed = tuple[str, np.ndarray]
"""The name of an input, and what is made of each number that it could be."""


def any_number(name: str, dtype: str) -> Computed:
    """An input of an integer dtype, as it is."""
    return name, np.arange(-_MOST, _MOST + 1).astype(dtype)


def computed(value: object, known: Mapping[relax.Var, Computed]) -> Computed | None:
    """What a call of an operator makes of one input and of constants, in its own dtype; None where
    that is not known.
    """
    if not isinstance(value, relax.Call) or not isinstance(value.op, tvm.ir.Op):
        return None
    if not str(getattr(value.ty, "dtype", "")).startswith(("int", "uint", "bool")):
        return None
    if value.op.name in _UNARY and value.args[0] in known:
        name, numbers = known[value.args[0]]
        return name, _UNARY[value.op.name](numbers).astype(str(value.ty.dtype))
    if value.op.name not in _COMBINED:
        return None
    names = {known[a][0] for a in value.args if a in known}
    operands = [known[a][1] if a in known else _constant(a) for a in value.args]
    if len(names) != 1 or any(operand is None for operand in operands):
        return None
    return names.pop(), _COMBINED[value.op.name](*operands)


def _constant(value: object) -> np.ndarray | None:
    """An integer that stands in the graph."""
    if tensor_of(value) is None or weight_of(value) is not None:
        return None
    array = numbers(value)
    return array.reshape(()) if array.size == 1 and array.dtype.kind in "iu" else None


def range_of_places(numbers: np.ndarray, rows: int) -> range | None:
    """The numbers around 0 that an input may be so that all that is made of them are rows; None
    where 0 may not.
    """
    numbers = numbers.astype("int64")
    wrong = np.flatnonzero((numbers < 0) | (numbers >= rows))
    below, above = wrong[wrong < _MOST], wrong[wrong > _MOST]
    if not 0 <= numbers[_MOST] < rows:
        return None
    first = int(below[-1]) + 1 if len(below) else 0
    last = int(above[0]) if len(above) else len(numbers)
    return range(first - _MOST, last - _MOST)
