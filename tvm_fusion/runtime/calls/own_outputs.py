"""Which outputs of a module lie in memory that its call has taken for them alone.

Such an output can be lent to the caller as it is: its memory goes back to the pool of the virtual
machine when the caller lets go of it, and keeps its pages. Others are the caller's inputs, weights,
views of these, or one memory under two names: a caller who may write to them gets copies.
"""

from typing import Any

import tvm
from tvm import relax

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
        storage = _storage(leaf, bound)
        is_own = storage is not None and not any(storage.same_as(other) for other in taken)
        found.append(is_own)
        if is_own:
            taken.append(storage)
    return tuple(found)


def _leaves(value: Any, ty: Any, bound: dict[relax.Var, Any]) -> list[Any]:
    """The tensors of a result, None for one that cannot be followed."""
    if not isinstance(ty, relax.TupleType):
        return [value]
    value = _bound(value, bound)
    fields = value.fields if isinstance(value, relax.Tuple) else [None] * len(ty.fields)
    return [leaf for f, t in zip(fields, ty.fields, strict=True) for leaf in _leaves(f, t, bound)]


def _storage(value: Any, bound: dict[relax.Var, Any]) -> relax.Call | None:
    """The call that made the storage of a tensor, within this call of the module."""
    while isinstance(source := _bound(value, bound), relax.Call):
        operator = getattr(source.op, "name", None)
        if operator == _STORAGE:
            return source
        value = source.args[0] if operator in _WITHIN else None
    return None


def _bound(value: Any, bound: dict[relax.Var, Any]) -> Any:
    """What a name or a field of a tuple stands for."""
    while True:
        if isinstance(value, relax.Var) and value in bound:
            value = bound[value]
        elif isinstance(value, relax.TupleGetItem):
            whole = _bound(value.tuple_value, bound)
            if not isinstance(whole, relax.Tuple):
                return value
            value = whole.fields[value.index]
        else:
            return value
