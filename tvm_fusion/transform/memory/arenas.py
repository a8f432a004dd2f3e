"""Memory of functions with symbolic sizes: one arena a function, of the size that a call needs,
kept from one call to the next and grown.

Before:
    a = R.builtin.alloc_tensor(R.shape([n, 64]), ...)
    first(x, a)
    b = R.builtin.alloc_tensor(R.shape([n, 128]), ...)
    second(a, b)

After `PlanArenas`:
    _ = R.match_cast(R.shape([768 * n, 256 * n]), R.Shape([arena_bytes, offset_1]))
    arena = R.memory.alloc_storage(R.shape([arena_bytes]), ...)
    a = R.memory.alloc_tensor(arena, 0, R.shape([n, 64]), ...)
    first(x, a)
    b = R.memory.alloc_tensor(arena, offset_1, R.shape([n, 128]), ...)
    settle_offset(b)
    second(a, b)

After `KeepArenas`, where the virtual machine is about to take storages from its pool:
    taken = keep_arena(arena_bytes, 0)    # of the host
    arena = R.memory.alloc_storage(R.shape([taken]), ...)
    _ = keep_arena(arena_bytes, taken)

The pool keeps memory by its size. `keep_arena` therefore asks for one size as long as it suffices:
the largest so far, rounded up by an eighth at most. When that grows, all pools give their free
memory back, the arena before among it. It is told what was taken once that is there: a call that
the device has no memory for leaves the size of the calls behind it as it was.

What else has a symbolic size, an output for example, is rounded as well: a pool that has seen
outputs of all sizes holds a few of each octave, not all.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import tvm
import tvm_ffi
from tvm import relax, tirx
from tvm.script import tirx as T

from ...ir.extents import UPPER_BOUNDS_ATTR
from ...plan.group_view import dtype_bytes
from ..functions.functions import has_branches, operator_name, with_functions
from .arena import ArenaPlan, SymbolicTensor, plan_arena
from .plan_memory import (
    SETTLE,
    Lives,
    host_function,
    is_allocation,
    settle_offset,
    with_body,
    without_dead_tuples,
)

HOST_FUNCTIONS = (SETTLE, "keep_arena", "round_bytes")  # or such a name and a number
_ARENA = "arena"
_BYTES = tirx.Var("bytes", "int64").ty
_STORAGE = "relax.memory.alloc_storage"
_OF_EIGHTH, _PAGE = 3, 12  # logarithms; the pool rounds up to pages of 4,096 bytes itself


@tvm.transform.module_pass(opt_level=0, name="tvm_fusion.PlanArenas")
class PlanArenas:
    """Put the intermediates of functions with symbolic sizes into arenas; outputs, and what has a
    size that the inputs do not tell, keep allocations of their own.
    """

    def transform_module(self, mod: tvm.IRModule, _ctx: tvm.transform.PassContext) -> tvm.IRModule:
        """Return `mod`; functions without symbolic sizes, and with branches, stay."""
        found = [
            gvar
            for gvar, func in mod.functions_items()
            if isinstance(func, relax.Function) and _symbols(func) and not has_branches(func)
        ]
        if not found:
            return mod
        mod = without_dead_tuples(mod)
        builder = relax.BlockBuilder(mod)
        for gvar in found:
            func = _with_arena(mod, mod[gvar], builder)
            if func is not None:
                builder.update_func(gvar, func)
        return builder.get()


def _symbols(func: relax.Function) -> list[tvm.ir.Var]:
    return [var for param in func.params for var in relax.analysis.tir_vars_in_type(param.ty)]


def _with_arena(
    mod: tvm.IRModule, func: relax.Function, builder: relax.BlockBuilder
) -> relax.Function | None:
    """The function with an arena; None where nothing is to lie in it."""
    lives = Lives.of_function(mod, func, symbolic=True)
    if lives is None:
        return None
    known = _symbols(func)
    allocations = [b for block in func.body.blocks for b in block.bindings if _allocates(b)]
    inner = [
        number
        for number, binding in enumerate(allocations)
        if number not in lives.outputs and _is_known(binding.value, known)
    ]
    if not any(_variables(allocations[number].value) for number in inner):
        return None
    tensors = [
        SymbolicTensor(
            list(allocations[number].value.args[0].values),
            dtype_bytes(str(allocations[number].value.ty.dtype)),
            lives.found[number].first,
            lives.found[number].last,
        )
        for number in inner
    ]
    plan = plan_arena(tensors, _bounds(func))
    places = {allocations[number].var: i for i, number in enumerate(inner)}
    return _placed(func, plan, places, builder)


def _placed(
    func: relax.Function,
    plan: ArenaPlan,
    places: Mapping[relax.Var, int],
    builder: relax.BlockBuilder,
) -> relax.Function:
    """The function with its arena and what lies in it."""
    numbers = [plan.size_bytes, *plan.offsets]
    named = [number for number in numbers if not isinstance(number, tirx.IntImm)]
    variables = [
        tirx.Var(f"{_ARENA}_bytes" if i == 0 else f"offset_{i}", "int64") for i in range(len(named))
    ]
    left = iter(variables)
    size, *offsets = [n if isinstance(n, tirx.IntImm) else next(left) for n in numbers]
    storage = builder.normalize(
        relax.op.memory.alloc_storage(
            relax.ShapeExpr([size]), relax.prim_value(0), "global", "uint8"
        )
    )
    arena = relax.Var(_ARENA, storage.ty)
    start = [*_told(named, variables, builder), relax.VarBinding(arena, storage)]
    settle = None
    blocks = [relax.BindingBlock(start)]
    for block in func.body.blocks:
        bindings = []
        for binding in block.bindings:
            if binding.var not in places:
                bindings.append(binding)
                continue
            offset = offsets[places[binding.var]]
            shape, dtype = binding.value.args[0], binding.value.args[1]
            at = relax.prim_value(offset)
            tensor = relax.op.memory.alloc_tensor(arena, at, shape, dtype)
            bindings.append(relax.VarBinding(binding.var, builder.normalize(tensor)))
            if not isinstance(offset, tirx.IntImm) or int(offset) != 0:
                settle = settle or builder.add_func(settle_offset(), SETTLE)
                nothing = relax.TupleType([])
                call = relax.Call(settle, [binding.var], ty_args=[nothing])
                settled = relax.Var("_", nothing)
                bindings.append(relax.VarBinding(settled, builder.normalize(call)))
        blocks.append(relax.BindingBlock(bindings))
    return with_body(func, relax.SeqExpr(blocks, func.body.body))


def _told(
    numbers: Sequence[tvm.ir.Expr], variables: Sequence[tvm.ir.Var], builder: relax.BlockBuilder
) -> list[relax.Binding]:
    """Bindings after which variables are numbers that TIR computes once."""
    shape = builder.normalize(relax.ShapeExpr(numbers))
    var, told = relax.Var("numbers", shape.ty), relax.ShapeType(variables)
    return [relax.VarBinding(var, shape), relax.MatchCast(relax.Var("told", told), var, told)]


def _allocates(binding: relax.Binding) -> bool:
    return isinstance(binding, relax.VarBinding) and is_allocation(binding.value)


def _variables(allocation: relax.Call) -> list[tvm.ir.Var]:
    return list(relax.analysis.tir_vars_in_type(relax.ShapeType(allocation.args[0].values)))


def _is_known(allocation: relax.Call, symbols: list[tvm.ir.Var]) -> bool:
    """Whether the inputs tell the size of a tensor."""
    return all(any(v.same_as(known) for known in symbols) for v in _variables(allocation))


def _bounds(func: relax.Function) -> dict[str, int]:
    attrs = func.attrs or {}
    if UPPER_BOUNDS_ATTR not in attrs:
        return {}
    return {str(name): int(most) for name, most in attrs[UPPER_BOUNDS_ATTR].items()}


@tvm.transform.module_pass(opt_level=0, name="tvm_fusion.KeepArenas")
class KeepArenas:
    """Have storages of symbolic sizes taken from the pool in sizes that it knows already."""

    def transform_module(self, mod: tvm.IRModule, _ctx: tvm.transform.PassContext) -> tvm.IRModule:
        """Return `mod`; functions with branches stay."""
        functions = dict(mod.functions_items())
        builder = relax.BlockBuilder(mod)
        for gvar, func in functions.items():
            if not isinstance(func, relax.Function) or has_branches(func):
                continue
            if not isinstance(func.body, relax.SeqExpr):
                continue
            blocks = [_in_kept_sizes(block, builder) for block in func.body.blocks]
            body = relax.SeqExpr(blocks, func.body.body)
            functions[gvar] = with_body(func, body)
        made = builder.get()
        return with_functions(made, dict(made.functions_items()) | functions)


def _in_kept_sizes(block: relax.BindingBlock, builder: relax.BlockBuilder) -> relax.BindingBlock:
    """A block whose storages of symbolic sizes are of sizes that functions of the host give."""
    bindings: list[relax.Binding] = []
    for binding in block.bindings:
        value = getattr(binding, "value", None)
        (size,) = value.args[0].values if operator_name(value) == _STORAGE else (None,)
        if size is None or isinstance(size, tirx.IntImm):
            bindings.append(binding)
            continue
        taken = tirx.Var("taken", "int64")
        variables = list(relax.analysis.tir_vars_in_type(relax.ShapeType([size])))
        is_arena = binding.var.name == _ARENA
        make = _keep_arena if is_arena else _round_bytes
        function = builder.add_func(_of(make(), variables, size), make.__name__.lstrip("_"))

        def asked(*more: object, of: relax.Expr = function, about: tuple = (*variables,)) -> Any:
            call = relax.Call(of, [*about, *map(relax.prim_value, more)], ty_args=[_BYTES])
            return builder.normalize(call)

        bindings.append(relax.VarBinding(taken, asked(*([0] if is_arena else []))))
        storage = relax.Call(value.op, [relax.ShapeExpr([taken]), *value.args[1:]], value.attrs)
        bindings.append(relax.VarBinding(binding.var, builder.normalize(storage)))
        if is_arena:
            bindings.append(relax.VarBinding(tirx.Var("_", "int64"), asked(taken)))
    return relax.BindingBlock(bindings)


def _of(func: tirx.PrimFunc, variables: Sequence[tvm.ir.Var], size: tvm.ir.Expr) -> tirx.PrimFunc:
    """A function of bytes as one of the symbols that the bytes are computed from."""
    needed, *others = func.params
    own = [tirx.Var(var.name, str(var.ty.dtype)) for var in variables]
    size = _substituted(size, lambda var: own[[v.same_as(var) for v in variables].index(True)])
    body = _substituted(func.body, lambda var: size if var.same_as(needed) else var)
    return tirx.PrimFunc([*own, *others], body, func.ret_type, attrs=func.attrs)


def _substituted(value: Any, by: Callable[[tvm.ir.Var], tvm.ir.Expr]) -> Any:
    return tvm_ffi.structural_map(value, (tvm.ir.Var, by))


def _round_bytes() -> tirx.PrimFunc:
    """A function of the host from bytes to bytes: rounded up by an eighth at most, or to a page."""
    with host_function("round_bytes") as builder:
        needed = T.arg("needed", tirx.Var("needed", "int64"))
        T.func_ret(needed.ty)
        T.Return(_rounded(needed))
    return builder.get()


def _keep_arena() -> tirx.PrimFunc:
    """A function of the host that returns how many bytes to take where so many are `needed`: the
    most that were ever `taken`, or more. The library that the module was built into holds that.

    Two threads that write it at once may leave the smaller one, but each gets what it needs.
    """
    with host_function("keep_arena") as builder:
        needed, taken = (T.arg(name, tirx.Var(name, "int64")) for name in ("needed", "taken"))
        T.func_ret(needed.ty)
        handle = T.call_intrin("handle", "tirx.tvm_static_handle")
        cell = T.Bind(T.reinterpret(T.handle("int64").ty, handle))
        held = T.decl_buffer((1,), "int64", data=cell)
        before = T.Bind(held[0])
        with T.If(taken > before), T.Then():
            T.buffer_store(held, taken, [0])
        rounded = T.Bind(_rounded(needed))
        outgrown = tirx.all(taken == T.int64(0), before > T.int64(0), rounded > before)
        with T.If(outgrown), T.Then():
            T.evaluate(T.call_packed("vm.builtin.memory_manager.clear"))
        T.Return(T.max(rounded, before))
    return builder.get()


def _rounded(needed: tvm.ir.Expr) -> tvm.ir.Expr:
    """A number of bytes, rounded up; binds what it takes."""
    step = T.Bind(T.shift_left(T.int64(1), _shift(needed)))
    return (T.max(needed, T.int64(1)) + step - T.int64(1)) // step * step


def _shift(needed: tvm.ir.Expr) -> tvm.ir.Expr:
    """The logarithm of an eighth of the power of two at or below a number, of a page at least."""
    some = tirx.max(needed, tirx.IntImm("int64", 1))  # there is none of 0, and `clz` is undefined
    highest = 63 - tirx.Cast("int64", tirx.clz(some))
    return tirx.max(highest - _OF_EIGHTH, _PAGE)
