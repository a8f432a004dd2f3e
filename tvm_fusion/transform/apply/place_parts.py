"""Parts of joins at the pitch of the whole, once groups are PrimFuncs.

Before::

    y = R.call_tir(cls.f, (x,), R.Tensor((8, 32)))                 # y[i, j] = ..., j < 32
    z = R.call_tir(cls.g, (y,), R.Tensor((8, 32)))                 # z[i, j] = y[i, j] ...
    c = R.call_tir(cls.concatenate, (y, z), R.Tensor((8, 64)))     # has JOIN_ATTR

After::

    y = R.call_tir(cls.f1, (x,), R.Tensor((8, 64)))                # the same: j < 32 is set
    z = R.call_tir(cls.g1, (y,), R.Tensor((8, 64)))
    c = R.call_tir(cls.concatenate1, (y, z), R.Tensor((8, 64)))    # has PLACED_ATTR = [0, 64]

This is a module as any other, with some memory that nothing writes or reads. `PLACED_ATTR` has the
byte at which each part begins in the whole: where memory is planned so (`plan_memory`), the call of
the concatenation has nothing left to do. Kernels know the pitch only, not where they begin: those
of equal layers stay equal.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import tvm
import tvm_ffi
from tvm import relax, tirx
from tvm.ir import GlobalVar, Var
from tvm.tirx import BufferType, PrimFunc

from ...ir.graph import JOIN_ATTR, PLACED_ATTR
from ...ir.parts import PARTS_ATTR
from ...plan.group_view import dtype_bytes
from ..functions.functions import expressions_of, operator_name

Shape = tuple[int, ...]


def place_parts(mod: tvm.IRModule, function: str) -> tvm.IRModule:
    """The module with the parts of a function's joins at their pitch; `mod` where it has none."""
    joined = {
        gvar.name_hint
        for gvar, func in mod.functions_items()
        if isinstance(func, PrimFunc) and JOIN_ATTR in func.attrs
    }
    func = mod[function]
    if not joined or not isinstance(func.body, relax.SeqExpr):
        return mod
    placer = _Placer(mod, joined)
    placer.survey(func)
    return placer.rewritten(mod.get_global_var(function), func) if placer.offsets else mod


def _shape_of(tensor: relax.Expr) -> Shape:
    return tuple(map(int, tensor.ty.shape.values))


@dataclass
class _Placer:
    """`memory` has the shapes that parts get, `offsets` the bytes at which the parts of a join
    begin, by its variable; `fields` the variables of a kernel's results, where it has several.
    """

    mod: tvm.IRModule
    joined: set[str]
    memory: dict[Var, Shape] = field(default_factory=dict)
    offsets: dict[Var, list[int]] = field(default_factory=dict)
    fields: dict[Var, dict[int, Var]] = field(default_factory=dict)
    made: dict[tuple, GlobalVar] = field(default_factory=dict)
    renewed: dict[Var, Var] = field(default_factory=dict)

    def survey(self, func: relax.Function) -> None:
        """Find what is placed: joins behind others first, since these may lie within them."""
        bindings = [b for block in func.body.blocks for b in block.bindings]
        kernels = {b.var for b in bindings if _is_kernel(b)}
        placeable = {var for var in kernels if not isinstance(var.ty, relax.TupleType)}
        used = set(expressions_of(func.body.body, relax.Var))
        for binding in bindings:
            if binding.var in kernels:
                continue
            value = getattr(binding, "value", None)
            if isinstance(value, relax.TupleGetItem) and value.tuple_value in kernels:
                of = self.fields.setdefault(value.tuple_value, {})
                (used if value.index in of else placeable).add(binding.var)
                used.update(filter(None, [of.get(value.index)]))
                of.setdefault(value.index, binding.var)
            elif value is not None:
                used.update(expressions_of(value, relax.Var))
        placeable -= used
        for binding in reversed(bindings):
            if _is_kernel(binding) and binding.value.args[0].name_hint in self.joined:
                parts = list(binding.value.args[1].fields)
                placed = all(p in placeable and p not in self.memory for p in parts)
                if placed and len(set(parts)) == len(parts):
                    self._place(binding, parts)

    def _place(self, binding: relax.VarBinding, parts: list[Var]) -> None:
        axis = int(self.mod[binding.value.args[0]].attrs[JOIN_ATTR])
        whole = self.memory.get(binding.var, _shape_of(binding.var))
        step = math.prod(whole[axis + 1 :]) * dtype_bytes(str(binding.var.ty.dtype))
        offsets, begin = [], 0
        for part in parts:
            shape = _shape_of(part)
            self.memory[part] = (shape[0], *whole[1:])
            offsets.append(begin * step)
            begin += shape[axis]
        self.offsets[binding.var] = offsets

    def rewritten(self, gvar: GlobalVar, func: relax.Function) -> tvm.IRModule:
        """The module with other functions for what reads or writes parts."""
        builder = relax.BlockBuilder(self.mod)
        blocks = []
        for block in func.body.blocks:
            bindings = [self._binding(builder, binding) for binding in block.bindings]
            blocks.append(type(block)(bindings))
        body = relax.SeqExpr(blocks, func.body.body)
        relax.expr._update_type(body, func.body.ty)
        new = relax.Function(func.params, body, func.ret_ty, func.is_pure, func.attrs)
        builder.update_func(gvar, new)
        return relax.transform.DeadCodeElimination([gvar.name_hint])(builder.get())

    def _binding(self, builder: relax.BlockBuilder, binding: relax.Binding) -> relax.Binding:
        if _is_kernel(binding):
            return self._kernel(builder, binding)
        value = getattr(binding, "value", None)
        if isinstance(value, relax.TupleGetItem) and value.tuple_value in self.renewed:
            field = relax.TupleGetItem(self.renewed[value.tuple_value], value.index)
            field = builder.normalize(field)
            return relax.VarBinding(self._renewed(binding.var, field.ty), field)
        return binding

    def _renewed(self, var: Var, ty: relax.Type) -> Var:
        if var not in self.memory and var not in self.fields:
            return var
        self.renewed[var] = type(var)(var.name, ty)
        return self.renewed[var]

    def _kernel(self, builder: relax.BlockBuilder, binding: relax.VarBinding) -> relax.VarBinding:
        """The call of a kernel with its tensors at their pitches."""
        call, var = binding.value, binding.var
        arguments = list(call.args[1].fields)
        results = self._results(var)
        tensors = [a if isinstance(a, Var) else None for a in arguments] + results
        shapes = [self.memory.get(tensor) for tensor in tensors]
        offsets = self.offsets.get(var)
        if offsets is None and not any(shapes):
            return binding
        name = call.args[0].name_hint
        key = (name, tuple(shapes), offsets and tuple(offsets))
        if key not in self.made:
            kernel = with_pitches(self.mod[name], shapes)
            if offsets is not None:
                kernel = kernel.with_attr(PLACED_ATTR, offsets)
            self.made[key] = builder.add_func(kernel, name)
        given = [self.renewed.get(a, a) if isinstance(a, Var) else a for a in arguments]
        types = [
            relax.TensorType(shape, ty.dtype) if shape else ty
            for shape, ty in zip(shapes[len(arguments) :], _types(var), strict=True)
        ]
        ty = relax.TupleType(types) if isinstance(var.ty, relax.TupleType) else types[0]
        args = [self.made[key], relax.Tuple(given), *call.args[2:]]
        value = relax.Call(call.op, args, call.attrs, [ty], call.span)
        out = self._renewed(var, ty) if any(shapes[len(arguments) :]) else var
        return relax.VarBinding(out, builder.normalize(value))

    def _results(self, var: Var) -> list[Var | None]:
        if not isinstance(var.ty, relax.TupleType):
            return [var]
        of = self.fields.get(var, {})
        return [of.get(i) for i in range(len(var.ty.fields))]


def _types(var: Var) -> list[relax.Type]:
    return list(var.ty.fields) if isinstance(var.ty, relax.TupleType) else [var.ty]


def _is_kernel(binding: relax.Binding) -> bool:
    value = getattr(binding, "value", None)
    is_call = isinstance(binding, relax.VarBinding) and operator_name(value) == "relax.call_tir"
    return is_call and isinstance(value.args[1], relax.Tuple)


def with_pitches(func: PrimFunc, shapes: list[Shape | None]) -> PrimFunc:
    """A function that finds its buffers with other shapes, which are larger: elements stay at the
    same indices.
    """
    buffers = [p for p in func.params if isinstance(p.ty, BufferType)]
    renewed: dict[Var, Var] = {
        buffer: tirx.decl_buffer(
            [tirx.IntImm("int64", extent) for extent in shape],
            buffer.ty.dtype,
            buffer.name,
            layout=None,
        )
        for buffer, shape in zip(buffers, shapes, strict=True)
        if shape is not None
    }
    body = tvm_ffi.structural_map(func.body, [(Var, lambda var: renewed.get(var, var))])
    params = [renewed.get(param, param) for param in func.params]
    parts = [[int(extent) for extent in buffer.ty.shape] for buffer in buffers]
    found = PrimFunc(params, body, func.ret_type, attrs=func.attrs)
    return found.with_attr(PARTS_ATTR, parts) if renewed else found
