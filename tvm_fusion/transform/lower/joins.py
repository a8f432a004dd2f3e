"""MarkJoins: which concatenations need no kernel, since their parts are computed where they belong.

    y = conv2d(x, w1)                         y = conv2d(x, w1)         # into the memory of c
    z = conv2d(y, w2)              becomes    z = conv2d(y, w2)         # likewise
    c = concat(y, z)                          c = join(y, z)            # nothing to do

A join is the PrimFunc of a concatenation with attribute `JOIN_ATTR`, the axis. As it stands it is
right wherever it runs: its kernel copies. What makes it free comes later: kernels store its parts
at the pitch of the whole (`transform.apply.place_parts`), and memory is planned so that they lie
within it (`transform.memory.plan_memory`).

A part lies in one place only, and what reads it has to know its pitch. So there are parts that get
a copy, which is an operator as any other (it may be one more result of the kernel of the part):
inputs and constants, results of the function, what is in another join already or twice in this
one, and what views or operators that cannot be read take.

Does not handle (concatenations stay as they are): symbolic sizes, functions with branches or
beside others (whose memory this package does not plan), results of the function, parts that do not
begin at whole sectors, those of which most would be copied, and those without a part that a matrix
product, a convolution or a window computes: what is only pointwise is written once by the
concatenation's own kernel, too.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import tvm
from tvm import relax, te, topi
from tvm.ir import Call
from tvm.tirx import PrimFunc

from ...config import HardwareProfile
from ...ir.graph import COPY_ATTR, JOIN_ATTR, FusionGraph, OpKind, build_graph
from ...ir.reader import read_prim_func
from ...plan.group_view import dtype_bytes
from ..functions.functions import has_branches, operator_name, static_shape
from ..functions.unique_names import FreshNames
from .legalizers import MANY, Legalizer, legalize_concat

MOST_COPIED = 0.5
"""Share of the bytes of a join that may be copies: each is read and written once more, as all would
be without the join."""


def _legalize(builder: relax.BlockBuilder, call: Call) -> relax.Expr:
    parts, axis = call.args[0], call.attrs.axis
    if not isinstance(parts, relax.Tuple) or axis is None or not 1 < len(parts.fields) < MANY:
        return legalize_concat(builder, call)
    axis = int(axis) % call.ty.ndim
    return builder.call_te(
        topi.concatenate,
        list(parts.fields),
        axis,
        primfunc_name_hint="concatenate",
        primfunc_attrs={JOIN_ATTR: axis},
    )


JOINED_CONCATS: dict[str, Legalizer] = {"relax.concat": _legalize}
"""For `relax.transform.LegalizeOps`, where `MarkJoins` comes behind it."""


@tvm.transform.module_pass(opt_level=0, name="tvm_fusion.MarkJoins")
class MarkJoins:
    """See the module docstring; of what `JOINED_CONCATS` marked, the joins keep the mark."""

    def __init__(self, hw: HardwareProfile) -> None:
        self.hw = hw

    def transform_module(self, mod: tvm.IRModule, _ctx: tvm.transform.PassContext) -> tvm.IRModule:
        """Return `mod` with its joins; `mod` itself where it has no concatenations."""
        marked = {
            gvar.name_hint
            for gvar, func in mod.functions_items()
            if isinstance(func, PrimFunc) and JOIN_ATTR in func.attrs
        }
        if not marked:
            return mod
        functions = {g: f for g, f in mod.functions_items() if isinstance(f, relax.Function)}
        joins: dict[str, Join] = {}
        if len(functions) == 1 and not any(map(has_branches, functions.values())):
            [gvar] = functions
            if _may_have_joins(mod, functions[gvar]):
                joins = find_joins(build_graph(mod, gvar.name_hint), mod, functions[gvar], self.hw)
        return _rewritten(mod, marked, joins)


def _may_have_joins(mod: tvm.IRModule, func: relax.Function) -> bool:
    """Whether `_Finder.join` may take a concatenation, as far as types and PrimFuncs tell: a part
    of one is computed. A graph, which takes much longer, is made for those alone (the halves that
    rotary embeddings put together are none).
    """
    values = {b.var: b.value for block in func.body.blocks for b in block.bindings}
    reduces: dict[str, bool] = {}

    def is_reduction(name: str) -> bool:
        if name not in reduces:
            blocks = read_prim_func(mod[name]).blocks
            reduces[name] = any(block.reduction is not None for block in blocks)
        return reduces[name]

    def is_computed(part: relax.Expr) -> bool:
        shape, pending, seen = static_shape(part), [part], set()
        while pending:
            e = pending.pop()
            if isinstance(e, relax.Tuple):
                pending += e.fields[:]
            elif isinstance(e, relax.TupleGetItem):
                pending.append(e.tuple_value)
            elif isinstance(e, relax.Var) and e in values and e not in seen:
                seen.add(e)
                if static_shape(e) in (None, shape):  # None: of a tuple, too
                    pending.append(values[e])
            elif isinstance(e, Call):
                if operator_name(e) == "relax.call_tir" and is_reduction(e.args[0].name_hint):
                    return True
                pending += e.args[:]
        return False

    concats = (
        value
        for value in values.values()
        if operator_name(value) == "relax.call_tir"
        and JOIN_ATTR in (mod[value.args[0].name_hint].attrs or {})
    )
    return any(any(map(is_computed, concat.args[1].fields)) for concat in concats)


@dataclass(frozen=True, slots=True)
class Join:
    """A concatenation whose parts lie within it; `copied` are the positions of those that get a
    copy.
    """

    copied: frozenset[int]


@dataclass(frozen=True, slots=True)
class Part:
    """A tensor of the graph, or none: a constant, a field of a tuple."""

    tensor: int | None
    shape: tuple[int, ...]
    dtype: str


def _bytes(shape: Sequence[int], dtype: str) -> int:
    return math.prod(shape) * dtype_bytes(dtype)


@dataclass
class _Finder:
    graph: FusionGraph
    sector_bytes: int
    placed: set[int] = field(default_factory=set)

    def join(self, result: int, parts: Sequence[Part], axis: int) -> Join | None:
        """How a concatenation is a join, and None where it is none."""
        if self.graph.tensors[result].is_output:
            return None
        rows = [_bytes(part.shape[axis:], part.dtype) for part in parts]
        if not all(row > 0 and row % self.sector_bytes == 0 for row in rows):
            return None
        numbers = [part.tensor for part in parts]
        copied, computed = set(), False
        for position, tensor in enumerate(numbers):
            if tensor is None or tensor in numbers[:position] or not self._can_be_placed(tensor):
                copied.add(position)
            else:
                computed = computed or self._is_computed(tensor)
        if not computed or sum(rows[p] for p in copied) > MOST_COPIED * sum(rows):
            return None
        self.placed.update(t for p, t in enumerate(numbers) if p not in copied and t is not None)
        return Join(frozenset(copied))

    def _can_be_placed(self, tensor: int) -> bool:
        """Whether one kernel writes a tensor, and all that read it can do so at a pitch."""
        t, ops = self.graph.tensors[tensor], self.graph.ops
        if t.producer is None or t.is_output or tensor in self.placed:
            return False
        producer = ops[t.producer]
        single = producer.kind is OpKind.CALL_TIR and len(producer.outputs) == 1
        return single and all(ops[c].kind is OpKind.CALL_TIR for c in t.consumers)

    def _is_computed(self, tensor: int) -> bool:
        """Whether a tensor has the elements of a reduction's result, each computed on."""
        shape = self.graph.tensors[tensor].shape
        pending, seen = [tensor], set()
        while pending:
            t = self.graph.tensors[pending.pop()]
            if t.producer is None or t.producer in seen or t.shape != shape:
                continue
            seen.add(t.producer)
            op = self.graph.ops[t.producer]
            if any(b.reduction is not None for b in op.blocks):
                return True
            pending += op.inputs
        return False


def find_joins(
    graph: FusionGraph, mod: tvm.IRModule, func: relax.Function, hw: HardwareProfile
) -> dict[str, Join]:
    """The concatenations of a function that are joins, by the names of their variables."""
    if not all(isinstance(n, int) for t in graph.tensors for n in t.shape):
        return {}
    values = {b.var.name: b.value for block in func.body.blocks for b in block.bindings}
    numbers = {t.name: t.id for t in graph.tensors if not t.is_inner}

    def number(part: relax.Expr) -> int | None:
        """The tensor of an argument; None for constants and fields of tuples."""
        while isinstance(part, relax.Var) and part.name not in numbers:
            part = values.get(part.name)
        return numbers[part.name] if isinstance(part, relax.Var) else None

    finder, found = _Finder(graph, hw.sector_bytes), {}
    for op in graph.ops:
        if op.kind is not OpKind.CALL_TIR or JOIN_ATTR not in mod[op.func].attrs:
            continue
        call = values[op.name]
        parts = [
            Part(number(part), tuple(map(int, part.ty.shape.values)), str(part.ty.dtype))
            for part in call.args[1].fields
        ]
        join = finder.join(op.outputs[0], parts, int(mod[op.func].attrs[JOIN_ATTR]))
        if join is not None:
            found[op.name] = join
    return found


def _rewritten(mod: tvm.IRModule, marked: set[str], joins: Mapping[str, Join]) -> tvm.IRModule:
    """The module with copies, and without the mark on what is no join."""
    builder = relax.BlockBuilder(mod)
    joined: dict[str, tvm.ir.GlobalVar] = {}
    for name in sorted(marked):
        gvar, func = mod.get_global_var(name), mod[name]
        builder.update_func(gvar, func.without_attr(JOIN_ATTR))
        if joins:
            joined[name] = builder.add_func(func, "join")
    for gvar, func in mod.functions_items() if joins else ():
        if isinstance(func, relax.Function):
            builder.update_func(gvar, _with_joins(builder, func, joins, joined))
    found = builder.get()
    return relax.transform.DeadCodeElimination()(found) if joins else found


def _with_joins(
    builder: relax.BlockBuilder,
    func: relax.Function,
    joins: Mapping[str, Join],
    joined: Mapping[str, tvm.ir.GlobalVar],
) -> relax.Function:
    fresh, blocks = FreshNames.beside(func), []
    for block in func.body.blocks:
        bindings: list[relax.Binding] = []
        for binding in block.bindings:
            join = joins.get(binding.var.name)
            if join is not None:
                call = binding.value
                parts = list(call.args[1].fields)
                for position in sorted(join.copied):
                    name = fresh(f"{binding.var.name}_part")
                    bindings.append(_copy(builder, parts[position], name))
                    parts[position] = bindings[-1].var
                args = [joined[call.args[0].name_hint], relax.Tuple(parts), *call.args[2:]]
                value = relax.Call(call.op, args, call.attrs, call.ty_args, call.span)
                binding = relax.VarBinding(binding.var, builder.normalize(value))
            bindings.append(binding)
        blocks.append(type(block)(bindings))
    body = relax.SeqExpr(blocks, func.body.body)
    relax.expr._update_type(body, func.body.ty)
    return relax.Function(func.params, body, func.ret_ty, func.is_pure, func.attrs)


def _copy(builder: relax.BlockBuilder, part: relax.Expr, name: str) -> relax.VarBinding:
    def same(x: te.Tensor) -> te.Tensor:
        return te.compute(x.shape, lambda *index: x(*index), name="copy")

    attrs = {COPY_ATTR: True}
    made = builder.call_te(same, part, primfunc_name_hint="copy", primfunc_attrs=attrs)
    call = builder.normalize(made)
    return relax.VarBinding(relax.DataflowVar(name, call.ty), call)
