"""Wide copies between global memory, shared memory and register arrays."""

from __future__ import annotations

from collections.abc import Callable

from tvm.ir import Expr
from tvm.script import tirx as T
from tvm.tirx.script.builder import ir as builder

from ...ir.quick_stacks import quick_stacks
from .intrinsics import device_call

# TVM's pool of shared memory, made quickly.


def shared_pool() -> T.SMEMPool:
    """An empty pool of the kernel that is being written. TVM notes the line that makes it, for its
    messages, and takes longer for that than for the rest of many a kernel.
    """
    with quick_stacks(builder):
        return T.SMEMPool()


Place = Callable[[int], Expr]
"""Address of what lies a number of bytes behind a fixed start."""

WIDEST = 16
"""Bytes of the widest load and store (LDG.128)."""

_WORD = {1: "unsigned char", 2: "unsigned short", 4: "unsigned", 8: "uint2", 16: "uint4"}
_PTX = {
    1: ("unsigned short", "u8", '"=h"(r)', "%0", "%1"),
    2: ("unsigned short", "u16", '"=h"(r)', "%0", "%1"),
    4: ("unsigned", "u32", '"=r"(r)', "%0", "%1"),
    8: ("uint2", "v2.u32", '"=r"(r.x), "=r"(r.y)', "{%0,%1}", "%2"),
    16: (
        "uint4",
        "v4.u32",
        '"=r"(r.x), "=r"(r.y), "=r"(r.z), "=r"(r.w)',
        "{%0,%1,%2,%3}",
        "%4",
    ),
}
_LOAD = {
    "nc": "ld.global.nc",
    "cs": "ld.global.cs",
    "na": "ld.global.nc.L1::no_allocate",
    "again": "ld.global.nc",
    "ahead": "ld.global.nc.L1::no_allocate",
}
"""Instruction of each load hint; "again" and "ahead" are volatile: not hoisted out of a loop over
rows, not put off until behind a wait."""


def copy_in(target: Place, source: Place, size: int, piece: int, hint: str = "nc") -> None:
    """`size` bytes from global memory to registers, `piece` bytes an access."""
    for start in range(0, size, piece):
        ctype, suffix, outputs, names, address = _PTX[piece]
        volatile = " volatile" if hint in ("again", "ahead") else ""
        body = (
            f'{ctype} r; asm{volatile}("{_LOAD[hint]}.{suffix} {names}, [{address}];" '
            f': {outputs} : "l"(s)); *({_WORD[piece]}*)d = ({_WORD[piece]})r;'
        )
        name = f"load{piece}_{hint}"
        arguments = "void* d, const void* s"
        T.evaluate(device_call("void", name, arguments, body, target(start), source(start)))


def copy_behind(target: Expr, source: Expr, offset: int, size: int) -> None:
    """`size` bytes, one access, to registers from `offset` bytes behind an address that loads have
    in common: sums of indices of 32 bits are not always told apart from their constants.
    """
    ctype, suffix, outputs, names, address = _PTX[size]
    body = (
        f'{ctype} r; asm("ld.global.nc.{suffix} {names}, [{address}];" '
        f': {outputs} : "l"((const char*)s + offset)); *({_WORD[size]}*)d = ({_WORD[size]})r;'
    )
    arguments = "void* d, const void* s, int offset"
    call = device_call("void", f"load{size}_behind", arguments, body, target, source, offset)
    T.evaluate(call)


def copy_out(target: Place, source: Place, size: int, piece: int, hint: str = "wb") -> None:
    """`size` bytes from registers to global memory, `piece` bytes an access."""
    word = _WORD[piece]
    store = f"__stcs(({word}*)d, *(const {word}*)s);"
    body = store if hint == "cs" else f"*({word}*)d = *(const {word}*)s;"
    for start in range(0, size, piece):
        name = f"store{piece}_{hint}"
        arguments = "void* d, const void* s"
        T.evaluate(device_call("void", name, arguments, body, target(start), source(start)))


def copy_registers(target: Place, source: Place, size: int) -> None:
    """`size` bytes between register arrays, or from shared memory; aligned as `size` is."""
    piece = next(width for width in (16, 8, 4, 2, 1) if size % width == 0)
    for start in range(0, size, piece):
        _move(target(start), source(start), piece, piece)


def copy_words(target: Place, source: Place, size: int, piece: int) -> None:
    """`size` bytes between registers and shared memory, aligned as `piece` is, `piece` bytes an
    access; those of one number stay together, for no index names a part of it.
    """
    _move(target(0), source(0), size, piece)


def _move(target: Expr, source: Expr, size: int, piece: int) -> None:
    word = _WORD[piece]
    moves = (f"(({word}*)d)[{i}] = ((const {word}*)s)[{i}];" for i in range(size // piece))
    body = " ".join(moves) if size > piece else f"*({word}*)d = *(const {word}*)s;"
    name = f"move{size}" if size == piece else f"words{size}_{piece}"
    T.evaluate(device_call("void", name, "void* d, const void* s", body, target, source))
