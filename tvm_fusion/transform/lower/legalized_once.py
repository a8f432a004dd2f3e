"""Legalizations that are worked out once for equal calls.

    y1 = matmul(x1, w1)      call_tir(matmul, (x1, w1))
    y2 = matmul(x2, w2)  ->  call_tir(matmul, (x2, w2))     without writing the PrimFunc again

TVM writes the PrimFunc of each call, 0.5 to 5 ms of it, to find that the module has an equal one. A
model of equal layers has few calls that differ: by operator, attributes, types of operands, numbers
among them, and which operands are the same.

Does not handle (each is worked out): symbolic sizes, results that are no single `call_tir` of
operands, such as constants that are folded.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache, partial
from typing import Any, NamedTuple

import tvm
import tvm_ffi
from tvm import relax, tirx
from tvm.ir import Call, Expr, Op

from ...ir.weights import numbers
from ..functions.functions import static_extents
from .legalizers import Legalizer

_CALL_TIR = Op.get("relax.call_tir")
_SETTINGS = (tirx.IntImm, tirx.FloatImm)


@cache
def usual_legalizations() -> Mapping[str, Legalizer]:
    """TVM's own, by operator."""
    names = (name for name in Op.list_op_names() if name.startswith("relax."))
    found = {name: Op.get(name).get_attr("FLegalize") for name in names}
    return {name: legalize for name, legalize in found.items() if legalize is not None}


def once(table: Mapping[str, Legalizer]) -> dict[str, Legalizer]:
    """The legalizations of a table, and TVM's own of other operators, for one run of
    `relax.transform.LegalizeOps`.
    """
    known: dict[Any, _Found] = {}
    every = {**usual_legalizations(), **table}
    return {name: partial(_legalize, known, name, usual) for name, usual in every.items()}


class _Found(NamedTuple):
    """A call of a PrimFunc, and which operands it takes."""

    call: Call
    positions: tuple[int, ...]


def _legalize(
    known: dict[Any, _Found], name: str, usual: Legalizer, builder: relax.BlockBuilder, call: Call
) -> Expr:
    operands = _Operands()
    if not all(map(operands.add, call.args)):
        return usual(builder, call)
    described = tvm_ffi.StructuralKey(tvm_ffi.convert([call.attrs, call.ty, *operands.described]))
    key = (name, described, *operands.rest)
    found = known.get(key)
    if found is not None:
        like = found.call
        tensors = relax.Tuple([operands.tensors[n] for n in found.positions])
        return Call(like.op, [like.args[0], tensors], like.attrs, like.ty_args, like.span)
    legal = usual(builder, call)
    positions = operands.positions_in(legal)
    if positions is not None:
        known[key] = _Found(legal, positions)
    return legal


class _Operands:
    """The operands of a call, and what of them decides how it is legalized."""

    def __init__(self) -> None:
        self.tensors: list[Expr] = []
        self.described: list[Any] = []
        self.rest: list[Any] = []

    def add(self, operand: Expr) -> bool:
        """Takes one; False where it says too little by itself."""
        if isinstance(operand, relax.Tuple):
            self.rest.append(len(operand.fields))
            return all(map(self.add, operand.fields))
        if isinstance(operand, relax.Var | tvm.ir.GenericConst):
            return self._add_tensor(operand)
        if isinstance(operand, relax.ShapeExpr):
            self.described.append(operand)
            return all(isinstance(n, tirx.IntImm) for n in operand.values)
        self.described.append(operand)
        return isinstance(operand, _SETTINGS)

    def _add_tensor(self, operand: Expr) -> bool:
        ty = operand.ty
        if static_extents(ty) is None:
            return False
        places = (n for n, other in enumerate(self.tensors) if other.same_as(operand))
        self.rest.append(next(places, None))
        self.tensors.append(operand)
        self.described.append(ty)
        if isinstance(operand, tvm.ir.GenericConst) and ty.ndim == 0:
            self.rest.append(numbers(operand).tobytes())
        return True

    def positions_in(self, legal: Expr) -> tuple[int, ...] | None:
        """Which tensors a call of a PrimFunc takes; None where it is none, or takes others."""
        if not isinstance(legal, Call) or legal.op != _CALL_TIR or len(legal.args) != 2:
            return None
        found = [
            next((n for n, own in enumerate(self.tensors) if own.same_as(field)), None)
            for field in legal.args[1].fields
        ]
        return None if None in found else tuple(found)
