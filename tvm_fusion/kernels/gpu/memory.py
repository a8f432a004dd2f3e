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


# Rows of halves that start off 4 bytes, in aligned words of neighbouring columns.
#
# They lie in shared memory in lines of `columns` halves, the 16-byte chunks of a line swizzled as
# in `gemm.mma.plan.Panel` and in a box of the TMA (64 columns). Word i of a line that starts at an
# odd half holds columns 2 i + 1 and 2 i + 2; behind the last column comes the first, which such a
# line has alone.

SWIZZLED = 8
"""Chunks that are swizzled among each other."""
AT_ONCE = 8
"""Words of a thread that are read before the first is stored."""


def row_word(columns: int, place: Expr, lines: Expr, line: Expr, word: Expr) -> Expr:
    """The columns of a line that go to word `word` at `place`, where the line goes to."""
    chunks = columns * 2 // WIDEST
    turn = "row & 7" if chunks >= SWIZZLED else f"row * {chunks} / {SWIZZLED} & {chunks - 1}"
    body = (
        f"const unsigned short* b = (const unsigned short*)s + row * {columns}; int x = {turn}; "
        f"int c = 2 * lane + ((int)((size_t)d >> 1) & 1), e = (c + 1) & {columns - 1}; "
        "unsigned v = b[(((e >> 3) ^ x) << 3) + (e & 7)]; "
        "return v << 16 | b[(((c >> 3) ^ x) << 3) + (c & 7)];"
    )
    arguments = "const void* d, const void* s, int row, int lane"
    name = _of_columns("row_word", columns)
    return device_call("uint32", name, arguments, body, place, lines, line, word)


def words_read() -> Expr:
    """A barrier of the warp between words that are read and stored: the compiler would read each
    where it is stored, one after the other.
    """
    return device_call("void", "words_read", "", "__syncwarp();")


def store_row_word(columns: int, place: Expr, value: Expr, word: Expr, count: Expr) -> Expr:
    """Stores `row_word`, of it the first `count` columns of the line; there is at least one."""
    body = (
        "unsigned short* p = (unsigned short*)d; int odd = (int)((size_t)d >> 1) & 1; "
        "int c = 2 * lane + odd; if (c + 1 < count) *(unsigned*)(p + c) = v; "
        "else if (c < count) p[c] = (unsigned short)v; "
        f"if (odd && lane == {columns // 2 - 1}) p[0] = (unsigned short)(v >> 16);"
    )
    name = _of_columns("store_row_word", columns)
    arguments = "void* d, unsigned v, int lane, int count"
    return device_call("void", name, arguments, body, place, value, word, count)


def _of_columns(name: str, columns: int) -> str:
    return name if columns == SWIZZLED * WIDEST // 2 else f"{name}{columns}"
