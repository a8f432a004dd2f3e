"""Symbolic sizes of PyTorch as expressions of TVM."""

import functools
import operator
from collections.abc import Callable, Iterable, Mapping

import sympy
import torch
import tvm
from torch.utils._sympy import functions as torch_functions
from tvm import relax, tirx

Size = int | tvm.ir.Expr
Symbols = Mapping[str, tirx.Var]


def _folded(combine: Callable) -> Callable[..., Size]:
    return lambda *args: functools.reduce(combine, args)


FUNCTIONS: dict[type, Callable[..., Size]] = {
    sympy.Add: _folded(operator.add),
    sympy.Mul: _folded(operator.mul),
    sympy.Max: _folded(tirx.max),
    sympy.Min: _folded(tirx.min),
    torch_functions.Max: _folded(tirx.max),
    torch_functions.Min: _folded(tirx.min),
    torch_functions.FloorDiv: tirx.floordiv,
    torch_functions.CleanDiv: tirx.floordiv,
    torch_functions.Mod: tirx.floormod,
    torch_functions.PythonMod: tirx.floormod,
}


def symbols_of(variables: Iterable[relax.Var]) -> dict[str, tirx.Var]:
    """The symbols that stand alone as a dimension of one of the given tensors, by name."""
    dimensions = (size for variable in variables for size in variable.ty.shape or ())
    return {size.name: size for size in dimensions if tvm.ir.is_prim_var(size)}


def size_of(value: int | torch.SymInt, symbols: Symbols) -> Size | None:
    """A size of PyTorch in terms of the given symbols; None where it has no such form."""
    return int(value) if isinstance(value, int) else _convert(value.node.expr, symbols)


def shape_of(value: torch.Tensor, symbols: Symbols) -> list[Size] | None:
    """The shape of a traced tensor in terms of the given symbols; None if it has no such form."""
    sizes = [size_of(size, symbols) for size in value.shape]
    return None if any(size is None for size in sizes) else sizes


def _convert(expression: sympy.Expr, symbols: Symbols) -> Size | None:
    if isinstance(expression, sympy.Integer):
        return tirx.IntImm("int64", int(expression))
    if isinstance(expression, sympy.Symbol):
        return symbols.get(str(expression))
    args = [_convert(arg, symbols) for arg in expression.args]
    function = FUNCTIONS.get(type(expression))
    return None if function is None or any(arg is None for arg in args) else function(*args)
