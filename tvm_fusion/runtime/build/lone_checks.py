"""The checks of a function alone: what of it says whether an index is out of range.

    for i, j in ...:                          for i in ...:
        y[i, j] = x[ids[i], j]                    assert 0 <= ids[i] < n, "... out of range"

It takes what the indices are made of, and nothing else. With it indices can be checked where the
function itself runs on a device that raises nothing (`check.index_checks`).

Does not handle: an index that is read from what the function itself gives.
"""

from __future__ import annotations

from dataclasses import dataclass

import tvm_ffi
from tvm import s_tir, tirx
from tvm.ir import TensorLoad, Var

from ...kernels.cpu.loops import seq
from ...kernels.program.expr import number, variables
from .guards import index_guarded


@dataclass(frozen=True, slots=True)
class LoneChecks:
    """The checks of a PrimFunc.

    Attributes
    ----------
    func : PrimFunc
        Takes some parameters of that PrimFunc, then `sizes`.
    given : tuple of int
        Which parameters, by position.
    sizes : tuple of Var
        Sizes of the others, as the PrimFunc calls them.
    """

    func: tirx.PrimFunc
    given: tuple[int, ...]
    sizes: tuple[Var, ...]


def lone_checks(name: str, func: tirx.PrimFunc) -> LoneChecks | None:
    """The checks of indices that are data; None of a PrimFunc that needs none."""
    guarded = index_guarded(name, func)
    needed: set[Var] = set()
    while True:
        body = None if guarded is None else _kept(guarded, needed)
        if body is None:
            return None
        more = _used(body) - needed
        if not more:
            break
        needed |= more
    given = tuple(i for i, param in enumerate(func.params) if param in needed)
    kept = [func.params[i] for i in given]
    known = {v for param in kept for v in _shape(param) if isinstance(v, Var)}
    wanted = needed | {v for param in kept for extent in _shape(param) for v in variables(extent)}
    every = {v: None for param in func.params for e in _shape(param) for v in variables(e)}
    sizes = tuple(v for v in every if v in wanted and v not in known and v not in kept)
    made = tirx.PrimFunc([*kept, *sizes], body, func.ret_type, func.attrs)
    return LoneChecks(made.with_attr("global_symbol", name), given, sizes)


def _shape(param: Var) -> list:
    return list(getattr(param.ty, "shape", ()))


def _used(stmt: tirx.Stmt) -> set[Var]:
    """What a statement reads, variables and buffers."""
    found: set[Var] = set()
    kinds = [(Var, found.add), (TensorLoad, lambda load: found.add(load.source))]
    tvm_ffi.structural_walk(stmt, kinds)
    return found


def _kept(stmt: tirx.Stmt | None, needed: set[Var]) -> tirx.Stmt | None:
    """A statement with its checks, and what gives the variables and buffers that are needed."""
    if isinstance(stmt, tirx.SeqStmt):
        parts = [part for part in (_kept(part, needed) for part in stmt.seq) if part is not None]
        return seq(*parts) if parts else None
    if isinstance(stmt, tirx.IfThenElse):
        sides = [_kept(side, needed) for side in (stmt.then_case, stmt.else_case)]
        if sides == [None, None]:
            return None
        return tirx.IfThenElse(stmt.condition, sides[0] or tirx.Evaluate(0), sides[1])
    if isinstance(stmt, tirx.For):
        return _kept_loop(stmt, needed)
    if isinstance(stmt, s_tir.SBlockRealize):
        return _kept_block(stmt, needed)
    if isinstance(stmt, tirx.AttrStmt):
        return _kept(stmt.body, needed)  # how loops are run is of no account
    if isinstance(stmt, tirx.While):
        body = _kept(stmt.body, needed)
        return body and tirx.While(stmt.condition, body)
    if isinstance(stmt, tirx.BufferStore | tirx.AllocBuffer | tirx.DeclBuffer):
        return stmt if stmt.buffer in needed else None
    if isinstance(stmt, tirx.Bind):
        return stmt if stmt.var in needed else None
    return stmt if isinstance(stmt, tirx.AssertStmt) else None


def _kept_loop(loop: tirx.For, needed: set[Var]) -> tirx.Stmt | None:
    body = _kept(loop.body, needed)
    if body is None:
        return None
    if loop.loop_var not in _used(body) and number(loop.extent):
        return body
    return tirx.For(loop.loop_var, loop.min, loop.extent, tirx.ForKind.SERIAL, body, step=loop.step)


def _kept_block(realize: s_tir.SBlockRealize, needed: set[Var]) -> tirx.Stmt | None:
    block = realize.block
    body, init = _kept(block.body, needed), _kept(block.init, needed)
    if body is None and init is None:
        return None
    used = set().union(*(_used(part) for part in (body, init) if part is not None))
    pairs = zip(block.iter_vars, realize.iter_values, strict=True)
    axes = [(axis, value) for axis, value in pairs if axis.var in used]
    reads, writes = ([r for r in rs if r.source in needed] for rs in (block.reads, block.writes))
    allocated = [buffer for buffer in block.alloc_buffers if buffer in needed]
    rest = (init, allocated, block.match_buffers, block.annotations)
    head = ([axis for axis, _ in axes], reads, writes, block.name_hint)
    made = s_tir.SBlock(*head, body or tirx.Evaluate(0), *rest)
    return s_tir.SBlockRealize([value for _, value in axes], realize.predicate, made)
