"""Functions that write outputs where a caller wants them: TVM's destination-passing style.

main(x)              ->   main_into(x, out)
    s = alloc_storage         double(x, out)
    y = alloc_tensor(s)       return null
    double(x, y)
    return y

A call of `main` takes each output from TVM's pool, and a tensor of torch is made of it afterwards;
20 outputs take 25 us. Memory of torch takes 5, and the function has less to do. It is for callers
who know that inputs and outputs are as they should be: nothing in it looks.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import tvm
import tvm_ffi
from tvm import relax, tirx

from ...transform.functions.functions import has_branches, operator_name, static_extents
from ...transform.memory.plan_memory import without_dead_names
from ..calls.written_inputs import bound_value, own_outputs, storage_of

_ALLOCATE, _RESHAPE = "relax.memory.alloc_tensor", "relax.reshape"
_KILLS = ("relax.memory.kill_storage", "relax.memory.kill_tensor")

Outputs = tuple[tuple[tuple[int, ...] | None, str] | None, ...]


@dataclass(frozen=True, slots=True)
class Destinations:
    """A function beside another one, that takes outputs behind its inputs and returns the rest.

    Attributes
    ----------
    function : str
        Its name in the executable. It returns a tuple of the outputs that are not given, or None
        where all are.
    outputs : tuple of ((int, ...) or None, str) or None
        Shape and dtype of each output, a shape of None where sizes are symbolic; None for an output
        that is not given.
    is_tuple : bool
        Whether the other function returns a tuple.
    kernel : str or None
        The PrimFunc of the library that it calls, if that takes just what it takes itself and it
        does nothing else: it can be called without a virtual machine.
    """

    function: str
    outputs: Outputs
    is_tuple: bool
    kernel: str | None = None


@tvm.transform.module_pass(opt_level=0, name="tvm_fusion.AddDestinations")
class AddDestinations:
    """Puts such a function beside each of some functions that has outputs of its own, whose sizes
    are known or told by its parameters, and tells `found`. Runs where memory is planned.
    """

    def __init__(self, functions: Sequence[str], found: dict[str, Destinations]) -> None:
        self.functions, self.found = functions, found

    def transform_module(self, mod: tvm.IRModule, _ctx: tvm.transform.PassContext) -> tvm.IRModule:
        """Return `mod` with more functions."""
        builder = relax.BlockBuilder(mod)
        for name in self.functions:
            made = _with_destinations(mod, name)
            if made is not None:
                func, outputs = made
                gvar = builder.add_func(func, f"{name}_into")
                symbol = func.with_attr("global_symbol", gvar.name_hint)
                builder.update_func(gvar, symbol)
                is_tuple = isinstance(mod[name].ret_ty, relax.TupleType)
                kernel = _only_kernel(func)
                self.found[name] = Destinations(gvar.name_hint, outputs, is_tuple, kernel)
        return builder.get()


def _with_destinations(mod: tvm.IRModule, name: str) -> tuple[relax.Function, Outputs] | None:
    """The function, and what it is given; None where there is nothing to give."""
    main = mod[name]
    types = main.ret_ty.fields if isinstance(main.ret_ty, relax.TupleType) else [main.ret_ty]
    if not _have_shapes([*types, *(param.ty for param in main.params)]) or not _tells(main, types):
        return None
    if has_branches(main) or not isinstance(main.body.body, relax.Var):
        return None
    bound = _bound(main)
    result = bound_value(main.body.body, bound)
    leaves = list(result.fields) if isinstance(result, relax.Tuple) else [main.body.body]
    if len(leaves) != len(types):
        return None
    storages = [storage_of(leaf, bound) for leaf in leaves]
    given = {
        number: allocated
        for number, (leaf, own) in enumerate(zip(leaves, own_outputs(mod, name), strict=True))
        if own
        and sum(storages[number].same_as(other) for other in storages if other is not None) == 1
        and (allocated := _allocation(leaf, bound)) is not None
    }
    if not given:
        return None
    params = {
        number: var
        if tvm_ffi.structural_equal(var.ty.shape, types[number].shape)
        else relax.Var("output", types[number])
        for number, var in given.items()
    }
    places = {allocated: params[number] for number, allocated in given.items()}
    rest = [leaf for number, leaf in enumerate(leaves) if number not in given]
    body = _filled(main, bound, places, rest)
    all_params = [*main.params, *params.values()]
    func = relax.Function(all_params, body, None, main.is_pure, main.attrs)
    func = relax.utils.copy_with_new_vars(func)
    outputs = [(static_extents(ty), str(ty.dtype)) for ty in types]
    return func, tuple(output if i in given else None for i, output in enumerate(outputs))


def _have_shapes(types: Sequence[relax.Type]) -> bool:
    """Whether all are tensors whose shapes are told, if by symbols."""
    tensors = [ty for ty in types if isinstance(ty, relax.TensorType)]
    return len(tensors) == len(types) and all(isinstance(t.shape, relax.ShapeExpr) for t in tensors)


def _tells(main: relax.Function, types: Sequence[relax.Type]) -> bool:
    """Whether parameters of a function tell all symbols of some types."""
    told = {v for param in main.params for v in param.ty.shape.values if isinstance(v, tirx.Var)}
    return all(set(relax.analysis.tir_vars_in_type(ty)) <= told for ty in types)


def _bound(func: relax.Function) -> dict[relax.Var, Any]:
    blocks = func.body.blocks
    return {binding.var: binding.value for block in blocks for binding in block.bindings}


def _allocation(leaf: Any, bound: Mapping[relax.Var, Any]) -> relax.Var | None:
    """The variable of the tensor that an output is, reshaped or as it is; None unless it is all of
    a storage.
    """
    while isinstance(leaf, relax.Var):
        source = bound.get(leaf)
        operator = operator_name(source)
        if operator == _ALLOCATE:
            readers = [v for v in bound.values() if operator_name(v) == _ALLOCATE]
            storage, offset = source.args[0], source.args[1]
            alone = sum(reader.args[0].same_as(storage) for reader in readers) == 1
            return leaf if alone and int(offset.value) == 0 else None
        leaf = source.args[0] if operator == _RESHAPE else source
    return None


def _filled(
    main: relax.Function,
    bound: Mapping[relax.Var, Any],
    places: Mapping[relax.Var, relax.Var],
    rest: Sequence[Any],
) -> relax.SeqExpr:
    """The body, with parameters in the places of tensors that it makes; returns `rest`."""
    dropped = {bound[allocated].args[0] for allocated in places} | set(places)

    def stays(binding: relax.Binding) -> bool:
        is_kill = operator_name(binding.value) in _KILLS
        return (binding.value.args[0] if is_kill else binding.var) not in dropped

    returned = relax.Tuple(rest) if rest else relax.op.null_value()
    if not rest:
        relax.expr._update_type(returned, relax.AnyType())
    result = relax.Var("rest", returned.ty)
    views = [_view(var, param) for var, param in places.items() if var is not param]
    blocks = [views]
    for block in main.body.blocks:
        blocks.append([])
        for binding in block.bindings:
            if stays(binding):
                blocks[-1].append(binding)
            if rest and binding.var.same_as(main.body.body):  # tensors are killed afterwards
                blocks[-1].append(relax.VarBinding(result, returned))
    if not rest:
        blocks[-1].append(relax.VarBinding(result, returned))
    body = without_dead_names(relax.SeqExpr([relax.BindingBlock(b) for b in blocks], result))
    relax.expr._update_type(body, returned.ty)
    return body


def _only_kernel(func: relax.Function) -> str | None:
    """The PrimFunc that a function calls with its parameters, where it does nothing else."""
    call, *rest = [binding.value for block in func.body.blocks for binding in block.bindings]
    is_call = isinstance(call, relax.Call) and isinstance(call.op, tvm.ir.GlobalVar)
    if not is_call or [operator_name(value) for value in rest] != ["relax.null_value"]:
        return None
    same = len(call.args) == len(func.params) and all(
        given.same_as(param) for given, param in zip(call.args, func.params, strict=True)
    )
    return call.op.name_hint if same else None


def _view(var: relax.Var, output: relax.Var) -> relax.Binding:
    """An output in the shape in which it is written."""
    view = relax.op.reshape(output, var.ty.shape)
    relax.expr._update_type(view, var.ty)
    return relax.VarBinding(var, view)
