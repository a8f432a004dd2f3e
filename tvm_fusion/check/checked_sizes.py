"""The inputs that a module is checked on, and at which values of its symbolic sizes: small and odd
ones, and those below, at and above a power of two, as far as the module allows and its reference is
quick.

Even draws give all symbols one size, odd ones give each another.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import tvm
from tvm import relax, tirx

from ..transform.functions.functions import operator_name
from ._loops import points_of
from .inputs import is_extreme, random_inputs

SIZES = (5, 17, 32, 1, 31, 65)
SMALL = (5, 9, 8, 1, 7, 3)  # where loops of `SIZES` are too long

# Of all loops of a module, 20 ms in float64, and nine times that where bounds are asked for.
MOST_POINTS = 1 << 21

_BY_PLACE = frozenset(
    f"relax.{name}"
    for name in (
        *("take", "gather_elements", "gather_nd", "index_tensor"),
        *("strided_slice", "dynamic_strided_slice"),
    )
)
_MOVES = ("relax.astype", "relax.reshape", "relax.expand_dims", "relax.squeeze", "relax.flatten")


def drawn_inputs(
    mod: tvm.IRModule, number: int = 0, lowered: tvm.IRModule | None = None
) -> list[Any]:
    """Random inputs of `main` for checks and timing, by the number of the draw; some are extreme
    near the ends of each axis (`inputs.is_extreme`). Parameters as for `checked_sizes`.
    """
    sizes = checked_sizes(mod["main"], number, lowered)
    return random_inputs(mod["main"], number, sizes, extreme=is_extreme(number))


def symbols_of(func: relax.Function) -> list[str]:
    """The names of the symbolic sizes in the parameters of a function, in order."""
    names = (v.name for p in func.params for v in relax.analysis.tir_vars_in_type(p.ty))
    return list(dict.fromkeys(names))


def checked_sizes(
    func: relax.Function, number: int, lowered: tvm.IRModule | None = None
) -> dict[str, int]:
    """The sizes of a draw of inputs, by symbol.

    Parameters
    ----------
    func : relax.Function
        `main` of a model; its `tir_var_lower_bound` and `tir_var_upper_bound` are kept.
    number : int
        Of the draw; the first has all sizes at 5.
    lowered : IRModule, optional
        The model as the reference runs it, which says how long its loops are.
    """
    symbols = symbols_of(func)
    found = _sizes(func, symbols, SIZES, number)
    if lowered is None or not found:
        return found
    quick = points_of(lowered, max(found.values())) <= MOST_POINTS
    return found if quick else _sizes(func, symbols, SMALL, number)


def _sizes(
    func: relax.Function, symbols: list[str], sizes: tuple[int, ...], number: int
) -> dict[str, int]:
    lower, upper = (_bounds(func, f"tir_var_{which}_bound") for which in ("lower", "upper"))
    most = min(_rows_read_by_place(func), default=max(SIZES))
    found = {}
    for i, name in enumerate(symbols):
        size = sizes[(number + (i if number % 2 else 0)) % len(sizes)]
        size = max(min(size, most), lower.get(name, 1))
        found[name] = min(size, upper.get(name, size))
    return found


def _bounds(func: relax.Function, name: str) -> dict[str, int]:
    attrs = func.attrs or {}
    return {str(k): int(v) for k, v in attrs[name].items()} if name in attrs else {}


def _rows_read_by_place(func: relax.Function) -> Iterator[int]:
    """Known extents of tensors of which as much is read as a symbolic size says (a table of
    positions, a mask that is cut out of a larger one).
    """
    given = set(func.params)  # drawn within bounds, with what only moves them
    for binding in (b for block in func.body.blocks for b in block.bindings):
        call = getattr(binding, "value", None)
        name = operator_name(call)
        if name in _MOVES and call.args[0] in given:
            given.add(binding.var)
        if name not in _BY_PLACE or (name == "relax.take" and call.args[1] in given):
            continue
        data = getattr(call.args[0].ty, "shape", None)
        if isinstance(data, relax.ShapeExpr) and relax.analysis.tir_vars_in_type(binding.var.ty):
            yield from (int(e) for e in data.values if isinstance(e, tirx.IntImm) and int(e) > 1)
