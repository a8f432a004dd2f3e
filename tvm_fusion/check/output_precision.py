"""The narrowest float that an output is computed in: how exact it can be at all.

    h: float16 = R.call_tir(exp, x)            # rounded to float16
    y: float32 = R.call_tir(widen, h)          # float32, and as wrong as float16 is

Counted is what is rounded: results of arithmetic and of casts, in every operator between the inputs
and the output, inside of its loops too. Inputs and constants are as they are, and a value that is
only moved or picked loses nothing.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

import tvm
from tvm import relax, tirx
from tvm.ir import Expr

from .roundings import rounded
from .rules import TOLERANCES


def computed_dtypes(mod: tvm.IRModule, entry: str = "main") -> list[str | None]:
    """Find the narrowest float dtype that each output is computed in.

    Parameters
    ----------
    mod : IRModule
        A call_tir module (after LegalizeOps); calls of other functions count with their result.
    entry : str

    Returns
    -------
    list of str or None
        For each output, tuples flattened; None where no float is computed.
    """
    func = mod[entry]
    found = _Finder(mod)
    for binding in (b for block in func.body.blocks for b in block.bindings):
        if hasattr(binding, "value"):
            found.known[binding.var] = found.of(binding.value)
    return found.of(func.body.body)


def narrowest(dtypes: Iterable[str | None]) -> str | None:
    """Return the float dtype that allows the largest error; None of no floats."""
    floats = [d for d in dtypes if d in TOLERANCES]
    return max(floats, key=lambda d: TOLERANCES[d].ceiling, default=None)


@dataclass
class _Finder:
    """The narrowest dtypes behind the values of a function, tuples flattened."""

    mod: tvm.IRModule
    known: dict[relax.Var, list[str | None]] = field(default_factory=dict)
    inside: dict[tvm.ir.GlobalVar, str | None] = field(default_factory=dict)

    def of(self, value: Expr) -> list[str | None]:
        if isinstance(value, relax.Var) and value in self.known:
            return self.known[value]
        if isinstance(value, relax.Tuple):
            return [d for item in value.fields for d in self.of(item)]
        if isinstance(value, relax.TupleGetItem):
            before = value.tuple_value.ty.fields[: value.index]
            first = sum(map(_count, before))
            return self.of(value.tuple_value)[first : first + _count(value.ty)]
        if isinstance(value, relax.Call):
            return [self._of_call(value)] * _count(value.ty)
        return [None] * _count(value.ty)

    def _of_call(self, call: relax.Call) -> str | None:
        """What the call computes in, and its operands are computed in."""
        dtypes = [d for argument in call.args for d in self.of(argument)]
        called = call.args[0] if call.args else None
        if isinstance(called, tvm.ir.GlobalVar) and isinstance(self.mod[called], tirx.PrimFunc):
            if called not in self.inside:
                self.inside[called] = narrowest(rounded(self.mod[called].body))
            dtypes.append(self.inside[called])
        else:
            dtypes += dtypes_of(call.ty)
        return narrowest(dtypes)


def _count(ty: object) -> int:
    return sum(map(_count, ty.fields)) if isinstance(ty, relax.TupleType) else 1


def dtypes_of(ty: object) -> list[str]:
    """The dtypes of the tensors of a type, tuples flattened."""
    if isinstance(ty, relax.TupleType):
        return [d for field in ty.fields for d in dtypes_of(field)]
    return [str(ty.dtype)] if isinstance(ty, relax.TensorType) else []
