"""Kernels as TVM's Relax passes expect PrimFuncs: with a root block that holds a block.

`RewriteDataflowReshape` and other readers of reshapes abort on a PrimFunc whose body is no block,
as that of every kernel here, `SplitLayoutRewritePreproc` on one whose root holds none. Two blocks
around the body, which say nothing, keep them quiet; `without_root` takes them off again before the
kernel is lowered.
"""

from __future__ import annotations

import tvm
from tvm import s_tir, tirx

from .functions import with_functions

ROOT = "tvm_fusion_kernel"
"""Name of the inner block: no other one has it, so that only these are taken off."""


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
    """The function without the block of `with_roots`; itself where it has none."""
    if not has_root(func):
        return func
    return func.with_body(func.body.block.body.block.body)


def has_root(func: tirx.PrimFunc) -> bool:
    """Whether a function has the blocks of `with_roots`."""
    inner = func.body.block.body if isinstance(func.body, s_tir.SBlockRealize) else None
    return isinstance(inner, s_tir.SBlockRealize) and inner.block.name_hint == ROOT


def _with_root(func: tirx.PrimFunc) -> tirx.PrimFunc:
    body = func.body
    for name in (ROOT, "root"):
        body = s_tir.SBlockRealize([], True, s_tir.SBlock([], [], [], name, body))
    return func.with_body(body)
