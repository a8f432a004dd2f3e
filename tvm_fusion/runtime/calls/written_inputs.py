"""Which inputs a module writes into, and how that reaches a caller whose tensor was copied.

A cache of keys is such an input. Where the module computes on the caller's memory, nothing is to be
done; NumPy arrays for a GPU, tensors on another device and views that kernels cannot read are
copied, and copied back after the call.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import tvm
from tvm import relax

from ...errors import InputError
from ...transform.functions.function_apart import reached
from ...transform.functions.functions import expressions_of, has_branches
from .signature import Signature
from .tensors import Kind, from_tvm, kind_of

# Which outputs of a module lie in memory that its call has taken for them alone.
#
# Such an output can be lent to the caller as it is: its memory goes back to the pool of the virtual
# machine when the caller lets go of it, and keeps its pages. Others are the caller's inputs,
# weights,
# views of these, or one memory under two names: a caller who may write to them gets copies.

_STORAGE = "relax.memory.alloc_storage"
_WITHIN = ("relax.memory.alloc_tensor", "relax.reshape", "relax.memory.view")


def own_outputs(mod: tvm.IRModule, function: str = "main") -> tuple[bool, ...]:
    """Tell of each tensor that a function returns, tuples flattened, whether its memory is its own.

    Parameters
    ----------
    mod : tvm.IRModule
        Its storages are planned. Where branches or functions of Relax return memory, or a packed
        function, nothing is known of it: False.
    """
    main = mod[function]
    bound = {
        binding.var: binding.value
        for block in main.body.blocks
        for binding in block.bindings
        if isinstance(binding, relax.VarBinding)
    }
    taken: list[relax.Call] = []
    found = []
    for leaf in _leaves(main.body.body, main.ret_ty, bound):
        storage = storage_of(leaf, bound)
        is_own = storage is not None and not any(storage.same_as(other) for other in taken)
        found.append(is_own)
        if is_own:
            taken.append(storage)
    return tuple(found)


def _leaves(value: Any, ty: Any, bound: dict[relax.Var, Any]) -> list[Any]:
    """The tensors of a result, None for one that cannot be followed."""
    if not isinstance(ty, relax.TupleType):
        return [value]
    value = bound_value(value, bound)
    fields = value.fields if isinstance(value, relax.Tuple) else [None] * len(ty.fields)
    return [leaf for f, t in zip(fields, ty.fields, strict=True) for leaf in _leaves(f, t, bound)]


def storage_of(value: Any, bound: Mapping[relax.Var, Any]) -> relax.Call | None:
    """The call that made the storage of a tensor, within this call of the module."""
    while isinstance(source := bound_value(value, bound), relax.Call):
        operator = getattr(source.op, "name", None)
        if operator == _STORAGE:
            return source
        value = source.args[0] if operator in _WITHIN else None
    return None


def bound_value(value: Any, bound: Mapping[relax.Var, Any]) -> Any:
    """What a name or a field of a tuple stands for."""
    while True:
        if isinstance(value, relax.Var) and value in bound:
            value = bound[value]
        elif isinstance(value, relax.TupleGetItem):
            whole = bound_value(value.tuple_value, bound)
            if not isinstance(whole, relax.Tuple):
                return value
            value = whole.fields[value.index]
        else:
            return value


_WRITING = ("relax.call_tir_inplace", "relax.call_inplace_packed")
_VIEWS = ("relax.reshape", "relax.memory.view")


def written_inputs(mod: tvm.IRModule, function: str = "main") -> tuple[int, ...]:
    """Return the numbers of the inputs of a function that it, or one that it calls, writes into.

    All of them, where branches or other Relax functions write: whose memory that is, is not
    followed through these.
    """
    main = mod[function]
    functions = [main, *(mod[gvar] for gvar in reached(mod, main))]
    writing = [f for f in functions if isinstance(f, relax.Function) and _writes(f)]
    if not writing:
        return ()
    if len(writing) > 1 or not writing[0].same_as(main) or has_branches(main):
        return tuple(range(len(main.params)))
    return tuple(sorted(last_writes(main)))


def writes_constants(mod: tvm.IRModule) -> bool:
    """Whether a call of some function writes into a constant, or a view of one."""
    for func in mod.functions.values():
        if not isinstance(func, relax.Function):
            continue
        bound = dict(relax.analysis.get_var2val(func).items())
        for call in expressions_of(func, relax.Call):
            name = getattr(call.op, "name", None)
            targets = _targets(call) if name in _WRITING else []
            if any(isinstance(_without_views(t, bound), tvm.ir.Constant) for t in targets):
                return True
    return False


def _without_views(value: relax.Expr, bound: Mapping[relax.Var, Any]) -> Any:
    value = bound_value(value, bound)
    while isinstance(value, relax.Call) and getattr(value.op, "name", None) in _VIEWS:
        value = bound_value(value.args[0], bound)
    return value


def refuse_lost_writes(signature: Signature, writes: Sequence[int], inputs: Sequence[Any]) -> None:
    """Check that inputs can be written to, element by element.

    Raises
    ------
    InputError
        One is read-only, or several of its elements are one.
    """
    for number in writes:
        spec, value = signature.inputs[number], inputs[number]
        if spec.dtype is None or kind_of(value) is Kind.TVM:
            continue
        of_numpy = kind_of(value) is Kind.NUMPY
        if of_numpy and not value.flags.writeable:
            raise InputError(
                f"input {spec.name} is written to, but the array is read-only: pass a copy of it"
            )
        strides = value.strides if of_numpy else value.stride()
        if any(n > 1 and stride == 0 for n, stride in zip(value.shape, strides, strict=True)):
            raise InputError(
                f"input {spec.name} is written to, but several of its elements are one in memory "
                "(it was expanded): pass a copy of it"
            )


def refuse_copies(
    signature: Signature, writes: Sequence[int], inputs: Sequence[Any], arguments: Sequence[Any]
) -> None:
    """Check that what is written to is the caller's memory; raises InputError."""
    for number in writes:
        if not _is_lent(inputs[number], arguments[number]):
            raise InputError(
                f"input {signature.inputs[number].name} is written to, but it would be copied: it "
                f"has to be contiguous, aligned, and on {arguments[number].device}"
            )


def write_back(writes: Sequence[int], inputs: Sequence[Any], arguments: Sequence[Any]) -> None:
    """Copy what a module wrote into copies of inputs back into these."""
    for number in writes:
        value, argument = inputs[number], arguments[number]
        if _is_lent(value, argument):
            continue
        if kind_of(value) is Kind.NUMPY:
            np.copyto(value, argument.numpy())
        elif kind_of(value) is Kind.TORCH:
            value.detach().copy_(from_tvm(argument, Kind.TORCH, None))
        else:
            argument.copyto(value)


def _is_lent(value: Any, argument: Any) -> bool:
    """Whether a caller's tensor has the memory of the one that the module was given."""
    if not isinstance(argument, tvm.runtime.Tensor):
        return True
    kind, address = kind_of(value), int(argument.data_ptr())
    if kind is Kind.NUMPY:
        return argument.device.type == "cpu" and value.ctypes.data == address
    pointer = int(value.data_ptr())
    return value.device.type == argument.device.type and pointer == address


def _writes(func: relax.Function) -> bool:
    return any(True for _ in _calls(func, _WRITING))


def _calls(func: relax.Function, operators: Sequence[str]) -> Iterable[relax.Call]:
    calls = expressions_of(func, relax.Call)
    return [call for call in calls if getattr(call.op, "name", None) in operators]


def last_writes(main: relax.Function) -> dict[int, relax.Var]:
    """The result of the last call that writes into the memory of an input, by number of the input.
    Writes within branches and other functions are not seen.
    """
    roots = {param: frozenset([number]) for number, param in enumerate(main.params)}
    found: dict[int, relax.Var] = {}

    def roots_of(value: Any) -> frozenset[int]:
        """The inputs whose memory a value may have."""
        if isinstance(value, relax.Var):
            return roots.get(value, frozenset())
        if isinstance(value, relax.Tuple):
            return frozenset().union(*map(roots_of, value.fields))
        if isinstance(value, relax.TupleGetItem):
            return roots_of(value.tuple_value)
        if not isinstance(value, relax.Call):
            return frozenset()
        name = getattr(value.op, "name", None)
        if name in _WRITING:
            return frozenset().union(*map(roots_of, _targets(value)))
        return roots_of(value.args[0]) if name in _VIEWS else frozenset()

    for block in main.body.blocks:
        for binding in block.bindings:
            roots[binding.var] = roots_of(binding.value)
            if getattr(getattr(binding.value, "op", None), "name", None) in _WRITING:
                found |= dict.fromkeys(roots[binding.var], binding.var)
    return found


def _targets(call: relax.Call) -> list[relax.Expr]:
    """What an operator writes into."""
    in_tir = call.op.name == "relax.call_tir_inplace"
    given = call.args[1]
    arguments = given.fields if in_tir and isinstance(given, relax.Tuple) else [given]
    if not in_tir:
        arguments = call.args[1:]
    return [arguments[i] for i in map(int, call.attrs.inplace_indices) if i >= 0]
