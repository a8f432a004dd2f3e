"""Storages of a module whose shapes are all known.

Before:
    a = R.builtin.alloc_tensor(R.shape([4, 8]), ...)
    first(x, a)
    b = R.builtin.alloc_tensor(R.shape([4, 4]), ...)
    second(a, b)

After:
    storage = R.memory.alloc_storage(R.shape([256]), ...)
    a = R.memory.alloc_tensor(storage, 0, R.shape([4, 8]), ...)
    first(x, a)
    ...

As `relax.transform.StaticPlanBlockMemory`, but tensors share a storage side by side, and a storage
ends with the last tensor in it. Parts of a join (`apply.place_parts`) lie within the whole, and
its call is left out:

    a = R.builtin.alloc_tensor(R.shape([4, 8]), ...)      a = ... alloc_tensor(storage, 0, ...)
    first(x, a)                                           first(x, a)
    b = R.builtin.alloc_tensor(R.shape([4, 8]), ...)      b = ... alloc_tensor(storage, 16, ...)
    second(x, b)                                          second(x, b)
    c = R.builtin.alloc_tensor(R.shape([4, 8]), ...)      c = ... alloc_tensor(storage, 0, ...)
    join(a, b, c)      # of 4 columns each
    third(c, d)                                           third(c, d)

Modules with symbolic shapes (but see `arenas`), branches, several Relax functions or
several virtual devices get that pass, functions with branches excepted.

TVM's tensors at an offset carry it beside the pointer of the storage, and kernels take no offset:
`settle_offset`, called on each, moves it into the pointer.
"""

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache

import tvm
from tvm import relax, tirx
from tvm.script import tirx as T
from tvm.script.ir_builder import IRBuilder
from tvm.tirx.script.builder import ir as B

from ...ir.extents import UPPER_BOUNDS_ATTR
from ...ir.graph import PLACED_ATTR
from ...plan.group_view import dtype_bytes
from ..functions.functions import PLAN_MEMORY, ModulePass, has_branches, with_functions
from .storage_plan import Life, Place, StoragePlan, plan_storages

SETTLE = "settle_offset"
_ALLOCATE = "relax.builtin.alloc_tensor"
_DATA, _BYTE_OFFSET = 1, 8  # of TVMStructFieldKind

_NAMES = (relax.Var, relax.Tuple, relax.TupleGetItem)  # expressions that compute nothing

_Tensors = frozenset[int]  # numbers of allocations


@tvm.transform.module_pass(opt_level=0, name=PLAN_MEMORY)
class PlanMemory(ModulePass):
    """Give the intermediates of a function their storages; outputs keep allocations of their own.

    Examples
    --------
    Before::

        @I.ir_module
        class Before:
            @T.prim_func(private=True, s_tir=True)
            def double(x: T.Buffer((8,)), y: T.Buffer((8,))):
                for i in range(8):
                    y[i] = x[i] * T.float32(2)

            @R.function(pure=False)
            def main(x: R.Tensor((8,), "float32")) -> R.Tensor((8,), "float32"):
                cls = Before
                a = R.builtin.alloc_tensor(R.shape([8]), R.dtype("float32"), 0, R.str("global"))
                cls.double(x, a)
                b = R.builtin.alloc_tensor(R.shape([8]), R.dtype("float32"), 0, R.str("global"))
                cls.double(a, b)
                return b

    After ``PlanMemory()``::

        @I.ir_module
        class After:
            @T.prim_func(private=True, s_tir=True)
            def double(x: T.Buffer((8,)), y: T.Buffer((8,))):
                for i in range(8):
                    y[i] = x[i] * T.float32(2)

            @R.function(pure=False)
            def main(x: R.Tensor((8,), "float32")) -> R.Tensor((8,), "float32"):
                cls = After
                storage = R.memory.alloc_storage(
                    R.shape([256]), 0, R.str("global"), R.dtype("uint8")
                )
                a = R.memory.alloc_tensor(storage, 0, R.shape([8]), R.dtype("float32"))
                cls.double(x, a)
                b = R.builtin.alloc_tensor(R.shape([8]), R.dtype("float32"), 0, R.str("global"))
                cls.double(a, b)
                return b
    """

    def transform_module(self, mod: tvm.IRModule, _ctx: tvm.transform.PassContext) -> tvm.IRModule:
        """Return `mod` with planned memory."""
        mod = without_dead_tuples(mod)
        lives = Lives.of(mod)
        if lives is None:
            return PlanMemoryByTVM()(mod)
        inner = [i for i in range(len(lives.found)) if i not in lives.outputs]
        roots = [i for i in inner if i not in lives.parts]
        plan = plan_storages(
            [lives.found[i] for i in roots], [lives.found[i] for i in sorted(lives.outputs)]
        )
        places = dict(zip(roots, plan.places, strict=True))
        for part, (whole, offset) in reversed(lives.parts.items()):  # wholes before their parts
            place = places[whole]
            places[part] = Place(place.storage, place.offset + offset)
        return _rewritten(mod, plan, places, lives.dropped)


@tvm.transform.module_pass(opt_level=0, name="tvm_fusion.PlanMemoryByTVM")
class PlanMemoryByTVM:
    """`relax.transform.StaticPlanBlockMemory`, but for functions with branches, which stay, and for
    bounds of symbolic sizes.

    In branches TVM allocates storages that it uses in the other one and behind both: calls end the
    process, or write where they may not. A storage whose size has a bound is as large as the bound
    in TVM (scores of 16,384 queries and keys, whatever a call has); here its size is an expression,
    and what it holds are tensors of that very size.
    """

    def transform_module(self, mod: tvm.IRModule, _ctx: tvm.transform.PassContext) -> tvm.IRModule:
        """Return `mod` with planned memory."""
        planned = _with_bounds_of(mod, relax.transform.StaticPlanBlockMemory()(unbounded(mod)))
        kept = {
            gvar: func
            for gvar, func in mod.functions_items()
            if isinstance(func, relax.Function) and has_branches(func)
        }
        if not kept:
            return planned
        return with_functions(planned, dict(planned.functions_items()) | kept)


def unbounded(mod: tvm.IRModule) -> tvm.IRModule:
    """The module without upper bounds of its symbolic sizes."""
    bounded = _bounds(mod)
    if not bounded:
        return mod
    functions = dict(mod.functions_items())
    freed = {gvar: functions[gvar].without_attr(UPPER_BOUNDS_ATTR) for gvar in bounded}
    return with_functions(mod, functions | freed)


def _with_bounds_of(mod: tvm.IRModule, planned: tvm.IRModule) -> tvm.IRModule:
    """A planned module with the upper bounds of `mod`."""
    bounded = _bounds(mod)
    if not bounded:
        return planned
    functions = dict(planned.functions_items())
    bound = {
        gvar: functions[gvar].with_attr(UPPER_BOUNDS_ATTR, bounds)
        for gvar, bounds in bounded.items()
    }
    return with_functions(planned, functions | bound)


def _bounds(mod: tvm.IRModule) -> dict[tvm.ir.GlobalVar, object]:
    """The upper bounds of symbolic sizes that functions have, by function."""
    return {
        gvar: func.attrs[UPPER_BOUNDS_ATTR]
        for gvar, func in mod.functions_items()
        if isinstance(func, relax.Function) and func.attrs and UPPER_BOUNDS_ATTR in func.attrs
    }


class Lives:
    """The allocations of a function in order, and when they are used.

    Attributes
    ----------
    found : list of Life
        The life of a whole is that of its parts, too.
    outputs : set of int
        Those that the function returns.
    parts : dict of int to (int, int)
        Of those that lie within another one, that one and the byte at which they begin: wholes
        behind their parts.
    dropped : set of int
        The steps that join parts that lie where they belong.
    """

    def __init__(self) -> None:
        self.found: list[Life] = []
        self.outputs: _Tensors = frozenset()
        self.parts: dict[int, tuple[int, int]] = {}
        self.dropped: set[int] = set()

    @classmethod
    def of(cls, mod: tvm.IRModule) -> "Lives | None":
        """None where `PlanMemory` does not apply."""
        functions = [f for _, f in mod.functions_items() if isinstance(f, relax.Function)]
        return cls.of_function(mod, functions[0]) if len(functions) == 1 else None

    @classmethod
    def of_function(
        cls, mod: tvm.IRModule, func: relax.Function, symbolic: bool = False
    ) -> "Lives | None":
        """None where there are branches, memory of several devices, or sizes that are not known;
        where such are `symbolic`, they count as 0, and no part is put into its whole.
        """
        if not isinstance(func.body, relax.SeqExpr):
            return None
        lives, body = cls(), func.body
        held: dict[relax.Var, _Tensors] = {}
        allocated: dict[relax.Var, int] = {}
        joins: list[tuple[int, relax.Call, Sequence[int]]] = []
        step = 0
        for step, binding in enumerate(_bindings(body)):
            value = binding.value
            if isinstance(value, relax.If | relax.Function):
                return None
            if is_allocation(value):
                size = _size_bytes(value)
                if (size is None and not symbolic) or int(value.args[2].value) != 0:
                    return None
                held[binding.var] = frozenset([len(lives.found)])
                allocated[binding.var] = len(lives.found)
                lives.found.append(Life(size or 0, step, step))
                continue
            if isinstance(value, relax.Var) and value in allocated:
                allocated[binding.var] = allocated[value]
            offsets = None if symbolic else _placed_at(mod, value)
            if offsets is not None:
                joins.append((step, value, offsets))
            used = lives._uses(value, held, step)
            held[binding.var] = used if _holds_tensors(binding.var.ty) else frozenset()
        lives.outputs = lives._uses(body.body, held, step + 1)
        for join in joins:
            lives._join(*join, allocated)
        return lives

    def _join(
        self, step: int, call: relax.Call, offsets: Sequence[int], allocated: dict[relax.Var, int]
    ) -> None:
        """Put parts into their whole, if all of them are tensors that can lie there."""
        *parts, whole = (allocated.get(a) for a in call.args)
        taken = {*self.parts, *self.outputs, None, whole}
        if whole is None or whole in self.outputs or taken & set(parts):
            return
        if len(set(parts)) < len(parts):
            return
        life, end = self.found[whole], self.found[whole].size_bytes
        for part, offset in zip(parts, offsets, strict=True):
            self.parts[part] = whole, offset
            own = self.found[part]
            end = max(end, offset + own.size_bytes)
            life = Life(end, min(life.first, own.first), max(life.last, own.last))
        self.found[whole] = life
        self.dropped.add(step)

    def _uses(self, value: relax.Expr, held: dict[relax.Var, _Tensors], step: int) -> _Tensors:
        """Note that a step uses what an expression refers to."""
        variables: set[relax.Var] = set()
        _note_vars(value, variables)
        used = frozenset().union(*(held.get(v, frozenset()) for v in variables))
        for number in used:
            life = self.found[number]
            self.found[number] = Life(life.size_bytes, life.first, step)
        return used


def _placed_at(mod: tvm.IRModule, value: relax.Expr) -> Sequence[int] | None:
    """Where the parts of a join lie in its result, in bytes; None for what is no join."""
    if not isinstance(value, relax.Call) or not isinstance(value.op, tvm.ir.GlobalVar):
        return None
    attrs = mod[value.op].attrs
    return None if not attrs or PLACED_ATTR not in attrs else list(map(int, attrs[PLACED_ATTR]))


def _rewritten(
    mod: tvm.IRModule, plan: StoragePlan, places: dict[int, Place], dropped: set[int]
) -> tvm.IRModule:
    """The module with storages: `places` has those of allocations; `dropped` steps are left out."""
    builder = relax.BlockBuilder(mod)
    [(gvar, func)] = [(g, f) for g, f in mod.functions_items() if isinstance(f, relax.Function)]
    storages: dict[int, relax.Var] = {}
    settle = None
    blocks, count, step = [], 0, -1
    for block in func.body.blocks:
        bindings: list[relax.Binding] = []

        def emit(var: relax.Var, value: relax.Expr, to: list = bindings) -> None:
            to.append(relax.VarBinding(var, value))

        for binding in block.bindings:
            step += 1
            if step in dropped:
                continue
            if not is_allocation(binding.value):
                bindings.append(binding)
                continue
            place = places.get(count)
            count += 1
            if place is None:
                bindings.append(binding)
                continue
            if place.storage not in storages:
                size = plan.storages[place.storage].size_bytes
                storage = builder.normalize(_storage(size))
                var = relax.Var(f"storage{place.storage}", storage.ty)
                storages[place.storage] = var
                emit(var, storage)
            shape, dtype = binding.value.args[0], binding.value.args[1]
            offset = relax.prim_value(place.offset)
            tensor = relax.op.memory.alloc_tensor(storages[place.storage], offset, shape, dtype)
            emit(binding.var, builder.normalize(tensor))
            if place.offset:
                settle = settle or builder.add_func(settle_offset(), SETTLE)
                nothing = relax.TupleType([])
                call = relax.Call(settle, [binding.var], ty_args=[nothing])
                emit(relax.Var("_", nothing), builder.normalize(call))
        blocks.append(relax.BindingBlock(bindings))
    builder.update_func(gvar, with_body(func, relax.SeqExpr(blocks, func.body.body)))
    return builder.get()


def without_dead_tuples(mod: tvm.IRModule) -> tvm.IRModule:
    """The module without tuples that nothing reads: the VM would hold their tensors to the end."""
    functions = dict(mod.functions_items())
    for gvar, func in mod.functions_items():
        if isinstance(func, relax.Function) and isinstance(func.body, relax.SeqExpr):
            functions[gvar] = with_body(func, without_dead_names(func.body))
    return with_functions(mod, functions)


def without_dead_names(body: relax.SeqExpr) -> relax.SeqExpr:
    """A body without names and tuples that nothing reads."""
    fields: dict[relax.Var, Sequence[relax.Expr]] = {}
    blocks: list[list[relax.Binding]] = []
    for block in body.blocks:
        blocks.append([])
        for binding in block.bindings:
            value = getattr(binding, "value", None)
            if isinstance(value, relax.Tuple):
                fields[binding.var] = value.fields
            elif isinstance(value, relax.TupleGetItem) and value.tuple_value in fields:
                field = fields[value.tuple_value][value.index]
                binding = relax.VarBinding(binding.var, field)
            blocks[-1].append(binding)
    used: set[relax.Var] = set()
    kept: list[relax.BindingBlock] = []
    _note_vars(body.body, used)
    for bindings in reversed(blocks):
        alive = []
        for binding in reversed(bindings):
            is_name = isinstance(binding, relax.VarBinding) and isinstance(binding.value, _NAMES)
            if is_name and binding.var not in used:
                continue
            _note_vars(binding.value, used)
            alive.append(binding)
        kept.append(relax.BindingBlock(alive[::-1]))
    return relax.SeqExpr(kept[::-1], body.body)


def _note_vars(expr: relax.Expr, found: set[relax.Var]) -> None:
    """Add the variables of an expression."""

    def visit(inner: relax.Expr) -> None:
        if isinstance(inner, relax.Var):
            found.add(inner)

    relax.analysis.post_order_visit(expr, visit)


def _storage(size: int) -> relax.Call:
    shape = relax.ShapeExpr([size])
    return relax.op.memory.alloc_storage(shape, relax.prim_value(0), "global", "uint8")


@cache  # reading a script takes 0.3 CPU s
def settle_offset() -> tirx.PrimFunc:
    """A function of the host that adds a tensor's offset to its pointer."""
    with host_function(SETTLE) as builder:
        tensor = T.arg("tensor", T.handle())
        data = T.Bind(T.tvm_struct_get(tensor, 0, _DATA, T.handle().ty))
        offset = T.Bind(T.tvm_struct_get(tensor, 0, _BYTE_OFFSET, "uint64"))
        moved = T.Bind(T.handle_add_byte_offset(data, T.Cast("int64", offset)))
        T.evaluate(T.tvm_struct_set(tensor, 0, _DATA, moved))
        T.evaluate(T.tvm_struct_set(tensor, 0, _BYTE_OFFSET, T.uint64(0)))
    return builder.get()


@contextmanager
def host_function(name: str) -> Iterator[IRBuilder]:
    """Builds a function of the host. As a script it would take 0.1 to 0.3 CPU s: the parser looks
    for the source of all modules that there are.
    """
    with IRBuilder() as builder, B.prim_func(s_tir=True):
        T.func_name(name)
        T.func_attr({"tirx.is_host_func": True, "tirx.is_scheduled": True})
        yield builder


def with_body(func: relax.Function, body: relax.Expr) -> relax.Function:
    relax.expr._update_type(body, func.body.ty)
    return relax.Function(func.params, body, func.ret_ty, func.is_pure, func.attrs)


def _bindings(body: relax.SeqExpr) -> Iterator[relax.Binding]:
    for block in body.blocks:
        yield from block.bindings


def is_allocation(value: relax.Expr) -> bool:
    is_operator = isinstance(value, relax.Call) and isinstance(value.op, tvm.ir.Op)
    return is_operator and value.op.name == _ALLOCATE


def _size_bytes(allocation: relax.Call) -> int | None:
    """None for a symbolic extent."""
    extents = allocation.args[0].values
    if not all(isinstance(e, tirx.IntImm) for e in extents):
        return None
    dtype = str(allocation.ty.dtype)
    return math.prod(map(int, extents)) * dtype_bytes(dtype)


def _holds_tensors(ty: object) -> bool:
    """Whether a variable may refer to tensors; kernels that fill their arguments give ()."""
    return bool(ty.fields) if isinstance(ty, relax.TupleType) else True
