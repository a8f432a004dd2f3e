"""Kernels as TVM's Relax passes expect PrimFuncs: with a root block that holds a block.

`RewriteDataflowReshape` and other readers of reshapes abort on a PrimFunc whose body is no block,
as that of every kernel here, `SplitLayoutRewritePreproc` on one whose root holds none. Two blocks
around the body keep them quiet; `without_root` takes them off again before the kernel is lowered.
The inner one says nothing but whom a tuner of TVM is to ask for schedules (`tuner_warning`).

Kernels that only this package lowers begin with a store to a storage scope that TVM does not know:
in a process that did not import `tvm_fusion` the build of a saved module then stops with "unknown
storage scope", and the scope's name says what to do. Those in TIRx lose their layouts meanwhile
(`with_plain_scalars`), so that the module reads back from its script as it is.
"""

from __future__ import annotations

import tvm
import tvm_ffi
from tvm import s_tir, tirx
from tvm.ir import TensorLoad, Var
from tvm.tirx.buffer import BufferType
from tvm.tirx.layout import S, TileLayout

from ..functions.functions import with_functions
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


# ---- Kernels in TIRx in a form that TVMScript prints and reads back as it was.
#
# Before                                  After
#     s_tir = False                           s_tir = True, attribute "tvm_fusion.without_layout"
#     a: Buffer((7, 33), layout=S[7, 33])     a: Buffer((7, 33))
#     b: Buffer((231,), layout=S[231])        b: Buffer((231,))           # a view of a
#     c: Buffer((4,))                         c: Buffer((4,))             # number 2 of the
# attribute # TVM's printer leaves layouts out. The parser then gives each buffer the default layout
# of its shape, but a view (which is printed as `a.view(231)`) that of what it is a view of; in a
# function of the dialect s_tir it gives none. Kernels have blocks around them (`kernel_bodies`),
# which TVM's check of what was read allows in s_tir only.

S_TIR_ATTR = "s_tir"

WITHOUT_ATTR = "tvm_fusion.without_layout"
"""The buffers that had no layout, by number, in the order of `_buffers`."""


def without_layouts(func: tirx.PrimFunc) -> tirx.PrimFunc:
    """The kernel without layouts, as a function of s_tir; itself where a layout is no default."""
    buffers = _buffers(func)
    bare = [number for number, buffer in enumerate(buffers) if buffer.ty.layout is None]
    given = [buffer for buffer in buffers if buffer.ty.layout is not None]
    if S_TIR_ATTR in func.attrs or not all(map(_is_default, given)):
        return func
    changed = _with_types(func, {buffer: _with_layout(buffer, None) for buffer in given})
    changed = changed.with_attr(WITHOUT_ATTR, bare) if bare else changed
    return changed.with_attr(S_TIR_ATTR, True)


def with_layouts(func: tirx.PrimFunc) -> tirx.PrimFunc:
    """The kernel that `without_layouts` was given."""
    if S_TIR_ATTR not in func.attrs:
        return func
    bare = set(map(int, func.attrs.get(WITHOUT_ATTR, ())))
    buffers = (b for number, b in enumerate(_buffers(func)) if number not in bare)
    changed = _with_types(func, {b: _with_layout(b, _default_layout(b)) for b in buffers})
    for name in (S_TIR_ATTR, WITHOUT_ATTR):
        changed = changed.without_attr(name) if name in changed.attrs else changed
    return changed


def with_plain_scalars(func: tirx.PrimFunc) -> tirx.PrimFunc:
    """The function with the index 0 of buffers of one element, which are printed without theirs."""

    def load(node: TensorLoad) -> TensorLoad:
        return tirx.BufferLoad(node.source, _zeros(node)) if _hides(node.source, node) else node

    def store(node: tirx.BufferStore) -> tirx.BufferStore:
        if not _hides(node.buffer, node):
            return node
        return tirx.BufferStore(node.buffer, node.value, _zeros(node))

    rules = [(TensorLoad, load), (tirx.BufferStore, store)]
    return func.with_body(tvm_ffi.structural_map(func.body, rules))


def _hides(buffer: Var, node: TensorLoad | tirx.BufferStore) -> bool:
    """Whether an access of a buffer has one place only, and does not say so."""
    is_one = isinstance(buffer.ty, BufferType) and all(_is_one(e) for e in buffer.ty.shape)
    return is_one and not all(isinstance(i, tirx.IntImm) for i in node.indices)


def _is_one(extent: object) -> bool:
    return isinstance(extent, tirx.IntImm) and int(extent) == 1


def _zeros(node: TensorLoad | tirx.BufferStore) -> list[tirx.IntImm]:
    return [tirx.IntImm("int32", 0) for _ in node.indices]


def _buffers(func: tirx.PrimFunc) -> list[Var]:
    """The buffers of a function, each once: parameters, then as they occur."""
    found: dict[Var, None] = {}

    def look(var: Var) -> None:
        if isinstance(var.ty, BufferType):
            found[var] = None

    for param in func.params:
        look(param)
    tvm_ffi.structural_walk(func.body, [(Var, look)])
    return list(found)


def _with_types(func: tirx.PrimFunc, renewed: dict[Var, Var]) -> tirx.PrimFunc:
    """The function with other variables in the place of some."""
    body = tvm_ffi.structural_map(func.body, [(Var, lambda var: renewed.get(var, var))])
    params = [renewed.get(param, param) for param in func.params]
    return tirx.PrimFunc(params, body, func.ret_type, attrs=func.attrs)


def _with_layout(buffer: Var, layout: TileLayout | None) -> Var:
    ty = buffer.ty
    place = (ty.elem_offset, ty.data_alignment, ty.offset_factor)
    of = (ty.dtype, ty.storage_scope, ty.shape, ty.strides, *place, layout, ty.allocated_addr)
    return Var(buffer.name, BufferType(*of))


def _default_layout(buffer: Var) -> TileLayout:
    return TileLayout(S[tuple(buffer.ty.shape)])


def _is_default(buffer: Var) -> bool:
    return tvm_ffi.structural_equal(buffer.ty.layout, _default_layout(buffer), map_free_vars=True)
