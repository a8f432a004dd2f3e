"""JoinWrites: what is written into several tensors at alike places is one launch.

    Before                                              After
    keys1 = R.call_tir_inplace(write, (keys, i, k))     pair = R.call_tir_inplace(both,
    values1 = R.call_tir_inplace(write, (values, i, v))     (keys, i, k, values, i, v))
                                                        keys1, values1 = pair[0], pair[1]

The keys and values of a layer's cache, which take as long as a launch takes: a text of one token
writes a kilobyte into each. A write waits for the next one over the same region, if nothing reads
what it gives before, and nothing else reads what both write into: these are inputs of the function.
The nests of both become one, which is scheduled with the other leftovers.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import tvm
import tvm_ffi
from tvm import relax, s_tir, tirx
from tvm.ir import Call, GlobalVar, Var
from tvm.relax import Expr, VarBinding
from tvm.relax.expr_functor import PyExprMutator, mutator

from ...ir.blocks import has_threads
from ...transform.lower.ordered_writes import DISTINCT_ATTR

_IN_PLACE = [tvm.ir.Op.get(f"relax.{n}") for n in ("call_tir_inplace", "call_inplace_packed")]

JOINED_ATTR = "tvm_fusion.joined_writes"
"""On a joint function: the names of those that it is; it takes the arguments of each in turn."""

MOST = 8
"""Tensors that a launch writes into, each with what it takes: their pointers are parameters."""


@dataclass(frozen=True, slots=True)
class _Write:
    """A PrimFunc that stores one value at each place of a region.

    Attributes
    ----------
    func : tirx.PrimFunc
    target : int
        The parameter that it writes into.
    loops : tuple of tirx.For
        From the outermost.
    block : s_tir.SBlock
        Its variables are those of the loops, in their order.
    store : tirx.BufferStore
    """

    func: tirx.PrimFunc
    target: int
    loops: tuple[tirx.For, ...]
    block: s_tir.SBlock
    store: tirx.BufferStore

    @classmethod
    def of(cls, func: object) -> _Write | None:
        """The write that a function is; None where it is none."""
        if not isinstance(func, tirx.PrimFunc) or not isinstance(func.body, s_tir.SBlockRealize):
            return None
        stmt, loops = func.body.block.body, []
        while isinstance(stmt, tirx.For):
            loops.append(stmt)
            stmt = stmt.body
        if not isinstance(stmt, s_tir.SBlockRealize) or has_threads(func.body):
            return None
        block, values = stmt.block, list(stmt.iter_values)
        is_plain = not block.alloc_buffers and not func.body.block.alloc_buffers
        if not is_plain or not isinstance(block.body, tirx.BufferStore):
            return None
        if len(values) != len(loops) or not all(
            value.same_as(loop.loop_var) for value, loop in zip(values, loops, strict=True)
        ):
            return None
        written = [i for i, p in enumerate(func.params) if p.same_as(block.body.buffer)]
        is_distinct = bool((func.attrs or {}).get(DISTINCT_ATTR))
        return (
            cls(func, written[0], tuple(loops), block, block.body)
            if written and is_distinct
            else None
        )

    @property
    def region(self) -> tuple[int, ...] | None:
        """The extents of its loops; None where they are no numbers that begin at 0."""
        found = [(loop.min, loop.extent) for loop in self.loops]
        if not all(isinstance(n, tirx.IntImm) for pair in found for n in pair):
            return None
        return None if any(int(low) for low, _ in found) else tuple(int(n) for _, n in found)


@tvm.transform.module_pass(opt_level=0, name="tvm_fusion.JoinWrites")
class JoinWrites:
    """See the module docstring."""

    def transform_module(self, mod: tvm.IRModule, _ctx: tvm.transform.PassContext) -> tvm.IRModule:
        """Return `mod` with joint writes; functions that nothing calls any more stay."""
        found = {gvar: write for gvar, func in mod.functions_items() if (write := _Write.of(func))}
        if not found:
            return mod
        joiner = _Joiner(mod, found)
        for gvar, func in mod.functions_items():
            if isinstance(func, relax.Function):
                joiner.join(gvar, func)
        return joiner.builder_.finalize()


def _groups(func: relax.Function, writes: Mapping[GlobalVar, _Write]) -> list[list[VarBinding]]:
    """The bindings that are one launch, which is made where the last one is."""
    bindings = [binding for block in func.body.blocks for binding in block.bindings]
    uses: Counter[Var] = Counter()
    for value in (func.body.body, *(binding.value for binding in bindings)):
        uses.update(relax.analysis.free_vars(value))
    given = set(func.params)
    groups: list[list[VarBinding]] = []
    for block in func.body.blocks:
        members: list[VarBinding] = []  # of the group that the next one may join
        for binding in block.bindings if isinstance(block, relax.DataflowBlock) else ():
            call = binding.value
            if {one.var for one in members}.intersection(relax.analysis.free_vars(call)):
                members = []
            if not isinstance(call, Call) or call.op not in _IN_PLACE:
                continue
            write = writes.get(call.args[0])
            target = None if write is None else _arguments(call)[write.target]
            if target not in given or uses[target] > 1 or write.region is None:
                members = []
                continue
            regions = {writes[one.value.args[0]].region for one in members}
            if regions != {write.region} or len(members) == MOST:
                members = []
                groups.append(members)
            members.append(binding)
    return [members for members in groups if len(members) > 1]


def _arguments(call: Call) -> list[Expr]:
    """What a call takes, that of `call_tir` one by one."""
    return [
        field
        for given in call.args
        for field in (given.fields if isinstance(given, relax.Tuple) else [given])
        if not isinstance(field, GlobalVar)
    ]


@mutator
class _Joiner(PyExprMutator):
    """Puts one call in the place of the last of a group."""

    def __init__(self, mod: tvm.IRModule, writes: Mapping[GlobalVar, _Write]) -> None:
        super().__init__(mod)
        self.writes = writes
        self.known: dict[tuple[GlobalVar, ...], GlobalVar] = {}
        self.groups: dict[Var, list[VarBinding]] = {}  # by the variable of the last
        self.others: set[Var] = set()

    def join(self, gvar: GlobalVar, func: relax.Function) -> None:
        """Rewrite a function of the module."""
        groups = _groups(func, self.writes)
        self.groups = {group[-1].var: group for group in groups}
        self.others = {one.var for group in groups for one in group[:-1]}
        if groups:
            self.builder_.update_func(gvar, self.visit_expr(func))

    def visit_var_binding_(self, binding: VarBinding) -> None:
        if binding.var in self.others:
            return
        group = self.groups.get(binding.var)
        if group is None:
            super().visit_var_binding_(binding)
            return
        joint = self.builder_.emit(self._call(group), "written")
        for number, one in enumerate(group):
            value = self.builder_.normalize(relax.TupleGetItem(joint, number))
            self.builder_.emit_normalized(VarBinding(one.var, value))

    def _call(self, group: Sequence[VarBinding]) -> Call:
        gvars = tuple(binding.value.args[0] for binding in group)
        if gvars not in self.known:
            func = _joint([self.writes[gvar] for gvar in gvars])
            func = func.with_attr(JOINED_ATTR, [gvar.name_hint for gvar in gvars])
            self.known[gvars] = self.builder_.add_func(func, "writes")
        given, places = [], []
        for binding, gvar in zip(group, gvars, strict=True):
            places.append(len(given) + self.writes[gvar].target)
            given += [self.visit_expr(value) for value in _arguments(binding.value)]
        types = [binding.value.ty for binding in group]
        return relax.op.call_tir_inplace(self.known[gvars], given, places, types)


def _joint(writes: Sequence[_Write]) -> tirx.PrimFunc:
    """All of them, at each place of their region one after the other."""
    first, params, stores = writes[0], [], []
    reads, written = [], []
    for number, write in enumerate(writes):
        own = [Var(f"{p.name}_{number}", p.ty) for p in write.func.params]
        params += own
        lets = dict(zip(write.func.params, own, strict=True))
        for axis, other in zip(first.block.iter_vars, write.block.iter_vars, strict=True):
            lets[other.var] = axis.var

        def put(node, lets=lets):
            return tvm_ffi.structural_map(node, (Var, lambda v: lets.get(v, v)))

        store = write.store
        places = [put(index) for index in store.indices]
        stores.append(tirx.BufferStore(lets[store.buffer], put(store.value), places))
        reads += map(put, write.block.reads)
        written += map(put, write.block.writes)
    block = first.block
    body = s_tir.SBlock(block.iter_vars, reads, written, "writes", tirx.SeqStmt(stores))
    stmt = s_tir.SBlockRealize([loop.loop_var for loop in first.loops], True, body)
    for loop in reversed(first.loops):
        stmt = tirx.For(loop.loop_var, loop.min, loop.extent, loop.kind, stmt)
    root = s_tir.SBlock([], [], [], "root", stmt)
    func = first.func.without_attr("global_symbol")
    return tirx.PrimFunc(
        params, s_tir.SBlockRealize([], True, root), func.ret_type, attrs=func.attrs
    )
