"""From a PrimFunc to the recurrence that it computes: one that has the form of `form`, whatever its
name.
"""

from __future__ import annotations

import tvm_ffi
from tvm import tirx
from tvm.ir import Expr

from ...errors import Unsupported
from ..program.program import Extent
from .cell import Cell
from .form import Recurrence, recurrence_form


def read_recurrence(func: tirx.PrimFunc, exact: bool = False) -> Recurrence:
    """The recurrence that a function computes; it rounds nothing that its kernels keep.

    Raises
    ------
    Unsupported
        The function has another form.
    """
    plain = _bare(func)
    for candidate in _candidates(func):
        if tvm_ffi.structural_equal(plain, _bare(recurrence_form(candidate))):
            return candidate
    raise Unsupported("the function has not the form of a recurrence")


def _candidates(func: tirx.PrimFunc) -> list[Recurrence]:
    """The recurrences that functions with such parameters may compute."""
    types = [param.ty for param in func.params]
    if not all(isinstance(ty, tirx.BufferType) for ty in types) or len(types) < 2:
        return []
    x, w = ([_extent(n) for n in ty.shape] for ty in types[:2])
    dtype = str(types[0].dtype)
    if len(x) != 3 or len(w) != 2 or not isinstance(w[1], int) or "float" not in dtype:
        return []
    made = (
        Recurrence(cell, x[0], x[1], w[1], dtype, backward)
        for cell in Cell
        for backward in (False, True)
    )
    return [
        r for r in made if len(r.shapes()) == len(types) and w[0] == r.columns and x[2] == r.columns
    ]


def _extent(size: Expr) -> Extent:
    return int(size) if isinstance(size, tirx.IntImm) else size


def _bare(func: tirx.PrimFunc) -> tirx.PrimFunc:
    for name in [] if func.attrs is None else list(func.attrs.keys()):
        func = func.without_attr(name)
    return func
