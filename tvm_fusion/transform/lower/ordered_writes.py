"""OrderedWrites: what is written at places that are data is written in order.

    Before                                      After
    for v in T.parallel(n):                     for v in range(n):
        y[place[v]] = y[place[v]] + x[v]            y[place[v]] = y[place[v]] + x[v]

Two iterations of such a loop may meet: its variable decides where they write through what it loads
only. topi's `index_put` has such loops on a CPU, where additions are lost (and of what is written
the one that counts is the one that came last). A function that says by `DISTINCT_ATTR` that no two
of its stores go to one place is left alone.
"""

from __future__ import annotations

import tvm
import tvm_ffi
from tvm import s_tir, tirx
from tvm.ir import Expr, TensorLoad, Var

DISTINCT_ATTR = "tvm_fusion.distinct_places"


@tvm.transform.module_pass(opt_level=0, name="tvm_fusion.OrderedWrites")
class OrderedWrites:
    """See the module docstring."""

    def transform_module(self, mod: tvm.IRModule, _ctx: tvm.transform.PassContext) -> tvm.IRModule:
        """Rewrite the PrimFuncs of a copy of the module."""
        out = mod.clone()
        for gvar, func in mod.functions_items():
            if isinstance(func, tirx.PrimFunc):
                out.update_func(gvar, _ordered(func))
        return out


def _ordered(func: tirx.PrimFunc) -> tirx.PrimFunc:
    meeting = meeting_loops(func)
    if not meeting:
        return func

    def ordered(loop: tirx.For) -> tirx.For:
        meets = loop.kind == tirx.ForKind.PARALLEL and loop.loop_var in meeting
        return serial(loop) if meets else loop

    return func.with_body(tvm_ffi.structural_map(func.body, [(tirx.For, ordered)]))


def serial(loop: tirx.For) -> tirx.For:
    """The loop in order, in one thread."""
    return tirx.For(loop.loop_var, loop.min, loop.extent, tirx.ForKind.SERIAL, loop.body)


def meeting_loops(func: tirx.PrimFunc) -> set[Var]:
    """The variables of loops whose iterations meet where the same place is loaded twice."""
    if (func.attrs or {}).get(DISTINCT_ATTR):
        return set()
    meaning: dict[Var, Expr] = {}
    stores: list[tirx.BufferStore] = []
    loops: set[Var] = set()

    def realize(node: s_tir.SBlockRealize) -> None:
        for axis, value in zip(node.block.iter_vars, node.iter_values, strict=True):
            meaning[axis.var] = value

    callbacks = [
        (s_tir.SBlockRealize, realize),
        (tirx.Bind, lambda node: meaning.update({node.var: node.value})),
        (tirx.For, lambda node: loops.add(node.loop_var)),
        (tirx.BufferStore, stores.append),
    ]
    tvm_ffi.structural_walk(func.body, callbacks, order="pre")
    return loops & _by_data(stores, meaning)


def _by_data(stores: list[tirx.BufferStore], meaning: dict[Var, Expr]) -> set[Var]:
    """Variables on which the place of a store depends through loads only."""
    found: set[Var] = set()
    for store in stores:
        indices = [_written_out(index, meaning) for index in store.indices]
        found |= {v for i in indices for v in variables_of(i)} - {
            v for i in indices for v in variables_of(_without_loads(i))
        }
    return found


def _written_out(index: Expr, meaning: dict[Var, Expr]) -> Expr:
    """An index in terms of loop variables."""
    while any(var in meaning for var in variables_of(index)):
        index = tvm_ffi.structural_map(index, [(Var, lambda var: meaning.get(var, var))])
    return index


def _without_loads(index: Expr) -> Expr:
    return tvm_ffi.structural_map(index, [(TensorLoad, lambda load: tirx.const(0, str(load.ty)))])


def variables_of(expr: Expr) -> list[Var]:
    """The variables of an expression, each as often as it stands there."""
    found: list[Var] = []
    tvm_ffi.structural_walk(expr, [(Var, found.append)])
    return found
