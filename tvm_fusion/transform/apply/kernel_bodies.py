"""Kernels as TVM's Relax passes expect PrimFuncs: with a root block that holds a block.

`RewriteDataflowReshape` and other readers of reshapes abort on a PrimFunc whose body is no block,
as that of every kernel here, `SplitLayoutRewritePreproc` on one whose root holds none. Two blocks
around the body keep them quiet; `without_root` takes them off again before the kernel is lowered.
The inner one says nothing but whom a tuner of TVM is to ask for schedules (`tuner_warning`).

Kernels that only this package lowers begin with a store to a storage scope that TVM does not know:
in a process that did not import `tvm_fusion` the build of a saved module then stops with "unknown
storage scope", and the scope's name says what to do. Those in TIRx lose their layouts meanwhile
(`script_form`), so that the module reads back from its script as it is.
"""

from __future__ import annotations

import tvm
from tvm import s_tir, tirx

from ..functions.functions import with_functions
from .script_form import with_layouts, without_layouts
from .tuner_warning import RULE

ROOT = "tvm_fusion_kernel"
"""Name of the inner block: no other one has it, so that only these are taken off."""

TIRX_ATTR = "tvm_fusion.tirx"
"""Of kernels that are written in TIRx, and take its lowering."""

APART_ATTR = "tvm_fusion.buffers_apart"
"""Of functions with tensor intrinsics: `StorageRewrite` gives a buffer of one dtype the memory of
one of another, but leaves the dtype in the pointers that intrinsics take. Shared memory is used
again by `MergeSharedMemoryAllocations`, which comes later."""

UNKNOWN_SCOPE = "tvm_fusion (import tvm_fusion before building this module)"


def with_roots(mod: tvm.IRModule) -> tvm.IRModule:
    """The module with a root block in each PrimFunc; itself where all have one."""
    bare = {
        gvar: _with_root(func)
        for gvar, func in mod.functions_items()
        if isinstance(func, tirx.PrimFunc) and not isinstance(func.body, s_tir.SBlockRealize)
    }
    if not bare:
        return mod
    functions = dict(mod.functions_items()) | bare
    return with_functions(mod, functions)


def without_root(func: tirx.PrimFunc) -> tirx.PrimFunc:
    """The function without what `with_roots` put around it; itself where that is nothing."""
    if not has_root(func):
        return func
    body = func.body.block.body.block.body
    if not _is_ours_alone(func):
        return func.with_body(body)
    rest = body.seq[len(_unknown()) :]
    func = func.with_body(rest[0] if len(rest) == 1 else tirx.SeqStmt(rest))
    return with_layouts(func) if func.attrs.get(TIRX_ATTR, False) else func


def has_root(func: tirx.PrimFunc) -> bool:
    """Whether a function has the blocks of `with_roots`."""
    inner = func.body.block.body if isinstance(func.body, s_tir.SBlockRealize) else None
    return isinstance(inner, s_tir.SBlockRealize) and inner.block.name_hint == ROOT


def _with_root(func: tirx.PrimFunc) -> tirx.PrimFunc:
    if func.attrs.get(TIRX_ATTR, False):
        func = without_layouts(func)
    body = func.body
    if _is_ours_alone(func):
        body = tirx.SeqStmt(
            [*_unknown(), *(body.seq if isinstance(body, tirx.SeqStmt) else [body])]
        )
    asked = {"schedule_rule": RULE}
    inner = s_tir.SBlock([], [], [], ROOT, body, annotations=asked)
    outer = s_tir.SBlock([], [], [], "root", s_tir.SBlockRealize([], True, inner))
    return func.with_body(s_tir.SBlockRealize([], True, outer))


def _is_ours_alone(func: tirx.PrimFunc) -> bool:
    """Whether TVM's own lowering would fail, or make something wrong of it."""
    return any(bool(func.attrs.get(name, False)) for name in (TIRX_ATTR, APART_ATTR))


def _unknown() -> list[tirx.Stmt]:
    """A store that TVM stops at."""
    # TVMScript writes a buffer of one element without its scope
    needs = tirx.decl_buffer((2,), "uint8", "needs", scope=UNKNOWN_SCOPE, layout=None)
    return [tirx.AllocBuffer(needs), tirx.BufferStore(needs, tirx.const(0, "uint8"), [0])]
