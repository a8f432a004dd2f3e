"""Kernels in TIRx in a form that TVMScript prints and reads back as it was.

Before                                  After
    s_tir = False                           s_tir = True, attribute "tvm_fusion.without_layout"
    a: Buffer((7, 33), layout=S[7, 33])     a: Buffer((7, 33))
    b: Buffer((231,), layout=S[231])        b: Buffer((231,))           # a view of a
    c: Buffer((4,))                         c: Buffer((4,))             # number 2 of the attribute

TVM's printer leaves layouts out. The parser then gives each buffer the default layout of its shape,
but a view (which is printed as `a.view(231)`) that of what it is a view of; in a function of the
dialect s_tir it gives none. Kernels have blocks around them (`kernel_bodies`), which TVM's check of
what was read allows in s_tir only.
"""

from __future__ import annotations

import tvm_ffi
from tvm import tirx
from tvm.ir import TensorLoad, Var
from tvm.tirx.buffer import BufferType
from tvm.tirx.layout import S, TileLayout

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
