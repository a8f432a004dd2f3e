"""Random inputs for a Relax function, made from the types of its parameters."""

import zlib
from collections.abc import Mapping
from typing import Any

import ml_dtypes
import numpy as np
import tvm
import tvm_ffi
from tvm import relax, tirx

from ..errors import InputError

_DEFAULT_INTEGERS = 2
_MOVES = ("relax.astype", "relax.reshape", "relax.expand_dims", "relax.squeeze", "relax.flatten")


def random_inputs(
    func: relax.Function,
    seed: int = 0,
    sizes: Mapping[str, int] | None = None,
    integers: Mapping[str, int] | None = None,
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
        rows with (an embedding, before LegalizeOps) ranges over those rows, any other over 0 and 1,
        so that nothing is read out of bounds.

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
    bounds = lookup_bounds(func) | dict(integers or {})
    draw = _Draw(sizes, seed)
    values = [draw.value(p.ty, p.name, bounds.get(p.name, _DEFAULT_INTEGERS)) for p in func.params]
    known = {p.name for p in func.params}
    _refuse_unknown("parameter", set(integers or {}) - known, known)
    _refuse_unknown("symbolic dimension", set(sizes) - draw.used, draw.used)
    return values


class _Draw:
    """Draws values of Relax types; remembers which sizes it needed."""

    def __init__(self, sizes: dict[str, int], seed: int) -> None:
        self.sizes = sizes
        self.seed = seed
        self.used: set[str] = set()

    def value(self, ty: Any, name: str, bound: int) -> Any:
        if isinstance(ty, relax.TupleType):
            return [self.value(f, f"{name}.{i}", bound) for i, f in enumerate(ty.fields)]
        if isinstance(ty, relax.ShapeType) and ty.values is not None:
            return tuple(self.extent(v, name) for v in ty.values)
        if isinstance(ty, tvm.ir.PrimType):
            if name in self.sizes:
                self.used.add(name)
                return self.sizes[name]
            return self.array((), str(ty.dtype), name, bound).item()
        if isinstance(ty, relax.TensorType) and isinstance(ty.shape, relax.ShapeExpr):
            shape = tuple(self.extent(v, name) for v in ty.shape.values)
            return self.array(shape, str(ty.dtype), name, bound)
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
        number = (tirx.Var, lambda var: tirx.IntImm("int64", self.sizes[var.name]))
        return int(tvm.sym.Analyzer().simplify(tvm_ffi.structural_map(value, number)))

    def array(self, shape: tuple[int, ...], dtype: str, name: str, bound: int) -> np.ndarray:
        rng = np.random.default_rng([self.seed, zlib.crc32(name.encode())])
        if dtype == "bool":
            return np.asarray(rng.integers(0, 2, shape).astype("bool"))
        if dtype.startswith(("int", "uint")):
            return np.asarray(rng.integers(0, bound, shape).astype(dtype))
        return np.asarray(rng.standard_normal(shape)).astype(numpy_dtype(dtype))


def numpy_dtype(dtype: str) -> np.dtype:
    """NumPy's dtype for a name of TVM's; bfloat16 and the like come from ml_dtypes."""
    return np.dtype(getattr(ml_dtypes, dtype, dtype))


def lookup_bounds(func: relax.Function) -> dict[str, int]:
    """How many rows there are for each parameter that rows are taken with, cast or reshaped too."""
    origin = {param: param.name for param in func.params}
    bounds: dict[str, int] = {}
    for binding in (b for block in func.body.blocks for b in block.bindings):
        call = getattr(binding, "value", None)
        if not isinstance(call, relax.Call) or not isinstance(call.op, tvm.ir.Op):
            continue
        if call.op.name in _MOVES and call.args[0] in origin:
            origin[binding.var] = origin[call.args[0]]
        if call.op.name == "relax.take" and call.args[1] in origin:
            rows = _rows(call)
            name = origin[call.args[1]]
            bounds[name] = min(rows, bounds.get(name, rows))
    return bounds


def _rows(take: relax.Call) -> int:
    axis = take.attrs.axis
    extents = [int(e) for e in take.args[0].ty.shape.values if isinstance(e, tirx.IntImm)]
    if len(extents) < take.args[0].ty.ndim:
        return _DEFAULT_INTEGERS
    return extents[axis] if axis is not None else int(np.prod(extents))


def _refuse_unknown(what: str, unknown: set[str], known: set[str]) -> None:
    if unknown:
        raise InputError(
            f"no {what} is called {min(unknown)!r}; there is {', '.join(sorted(known)) or 'none'}"
        )
