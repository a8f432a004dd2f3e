"""Device functions of the mma.sync GEMM: asynchronous copies, ldmatrix, mma.sync, odd addresses.

`tests/cuda_emulator/mma.h` has a stand-in for every one that holds inline assembly.
"""

from __future__ import annotations

from collections.abc import Sequence

from tvm.ir import Expr
from tvm.script import tirx as T

from ...gpu.intrinsics import device_call
from ...program.expr import dtype_of

CHUNK = 16
"""Bytes of the widest copy, and of a row of the 8 x 8 matrices of ldmatrix."""

_SHARED = '"r"((unsigned)__cvta_generic_to_shared({}))'


def copy_async(
    size: int, target: Expr, source: Expr, at: Expr, inside: Expr | None, count: Expr | None = None
) -> Expr:
    """Starts the copy of `size` bytes from `at` bytes behind `source`; zeros if not `inside`, and
    behind the first `count` bytes.
    """
    # Only 16 bytes can bypass the first-level cache.
    cache = "cg.shared.global.L2::128B" if size == CHUNK else "ca.shared.global"
    taken = "" if count is None and inside is None else ", %2"
    ptx = f"cp.async.{cache} [%0], [%1], {size}{taken};"
    values = f'{_SHARED.format("d")}, "l"((const char*)s + at)'
    if count is None and inside is None:
        body = f'asm volatile("{ptx}" :: {values} : "memory");'
        arguments = "void* d, const void* s, long long at"
        return device_call("void", f"async{size}", arguments, body, target, source, at)
    body = f'asm volatile("{ptx}" :: {values}, "r"(n) : "memory");'
    arguments = "void* d, const void* s, long long at, int n"
    count = T.int32(size) if count is None else count
    count = count if inside is None else T.Select(inside, count, T.int32(0))
    return device_call("void", f"async{size}_if", arguments, body, target, source, at, count)


def commit_async() -> Expr:
    """Ends a group of copies."""
    return device_call("void", "async_commit", "", 'asm volatile("cp.async.commit_group;");')


def wait_async(groups: int) -> Expr:
    """Waits until no more than the last `groups` groups of this thread are under way."""
    body = f'asm volatile("cp.async.wait_group {groups};" ::: "memory");'
    return device_call("void", f"async_wait{groups}", "", body)


def load_matrices(registers: Expr, place: Expr, transposed: bool) -> Expr:
    """Four 8 x 8 matrices of 16-bit elements from shared memory, one 16-byte row a thread."""
    name, suffix = ("matrices_trans", ".trans") if transposed else ("matrices", "")
    body = (
        "unsigned* r = (unsigned*)d; "
        f'asm volatile("ldmatrix.sync.aligned.m8n8.x4{suffix}.shared.b16 {{%0, %1, %2, %3}}, [%4];"'
        f' : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]) : {_SHARED.format("s")});'
    )
    return device_call("void", name, "void* d, const void* s", body, registers, place)


# PTX names of the dtypes, by what an element of shared memory is.
PTX_DTYPES = {
    "float16": "f16",
    "bfloat16": "bf16",
    "int8": "s8",
    "uint8": "u8",
    "float8_e4m3fn": "e4m3",
    "float8_e5m2": "e5m2",
    "float32": "tf32",
}


def multiply(a_dtype: str, b_dtype: str, terms: int, sums: Expr, a: Expr, b: Expr) -> Expr:
    """``sums (16 x 8) += a (16 x terms) b (terms x 8)``, spread over the registers of a warp."""
    left, right = PTX_DTYPES[a_dtype], PTX_DTYPES[b_dtype]
    kind, ctype, code = ("s32", "int", "r") if left in ("s8", "u8") else ("f32", "float", "f")
    ptx = (
        f"mma.sync.aligned.m16n8k{terms}.row.col.{kind}.{left}.{right}.{kind} "
        "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
    )
    sums_out = ", ".join(f'"+{code}"(x[{i}])' for i in range(4))
    inputs = ", ".join([*(f'"r"(y[{i}])' for i in range(4)), '"r"(z[0]), "r"(z[1])'])
    body = (
        f"{ctype}* x = ({ctype}*)d; const unsigned* y = (const unsigned*)a; "
        f'const unsigned* z = (const unsigned*)b; asm("{ptx}" : {sums_out} : {inputs});'
    )
    arguments = "void* d, const void* a, const void* b"
    return device_call("void", f"mma_{left}_{right}", arguments, body, sums, a, b)


def round_tf32(registers: Expr) -> Expr:
    """Rounds a float32 to the 10 bits of mantissa that tensor cores read; they would cut it off."""
    body = (
        "unsigned* r = (unsigned*)d; "
        'asm("cvt.rna.tf32.f32 %0, %1;" : "=r"(r[0]) : "f"(__uint_as_float(r[0])));'
    )
    return device_call("void", "round_tf32", "void* d", body, registers)


def split_float32(parts: Sequence[Expr], first: Expr, second: Expr) -> Expr:
    """Splits two float32 into three bfloat16 each, whose sum they are: what is cut off behind 8
    bits, the nearest of 8 bits to the rest, and what is left, which has no more. Nothing is rounded
    up in the first, which would make the largest numbers infinite. Each of the three parts is a
    register for both. The rests of an infinity or NaN are NaN. Of numbers below 2^-103 what is
    below 2^-126, the smallest normal number, is lost.
    """
    near = 'asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"({}) : "f"(v), "f"(u)); '
    body = (
        "unsigned high = __byte_perm(x, y, 0x7632), middle, low; "
        "float u = __uint_as_float(x) - __uint_as_float(high << 16); "
        "float v = __uint_as_float(y) - __uint_as_float(high & 0xffff0000u); "
        + near.format("middle")
        + "u -= __uint_as_float(middle << 16); v -= __uint_as_float(middle & 0xffff0000u); "
        + near.format("low")
        + "*(unsigned*)h = high; *(unsigned*)m = middle; *(unsigned*)l = low;"
    )
    arguments = "void* h, void* m, void* l, unsigned x, unsigned y"
    return device_call("void", "split_float32", arguments, body, *parts, first, second)


def at_least(x: Expr, least: Expr) -> Expr:
    """The larger one; `least` where `x` is NaN, unlike `tirx.Max`."""
    body = "return fmaxf(x, least);"
    return device_call("float32", "at_least", "float x, float least", body, x, least)


# Where the 16 bytes `at` start: the aligned vectors that hold them are at `low` and behind it, and
# can be read whole if they end before `end`.
_ALIGNED = "const char* p = (const char*)s; {0} low = at & ~({0})15; int move = (int)(at & 15); "


def _offsets(at: Expr) -> tuple[str, str]:
    """C type of offsets in bytes, and the suffix of the functions that take it."""
    return ("int", "") if dtype_of(at) == "int32" else ("long long", "_far")


def load_pair(registers: Expr, source: Expr, at: Expr, end: Expr, valid: Expr) -> Expr:
    """Starts the loads of the two aligned vectors that hold 16 bytes from `at` behind `source`.

    Those that reach beyond `end`, and those that hold none of `valid` bytes, are left 0.
    """

    def load(first: int, condition: str, offset: int) -> str:
        names = ", ".join(f"%{i}" for i in range(4))
        zeros = "".join(f"mov.b32 %{i}, 0; " for i in range(4))
        out = ", ".join(f'"=&r"(r[{first + i}])' for i in range(4))
        return (
            f'asm volatile("{{ .reg .pred q; setp.ne.s32 q, %5, 0; {zeros}'
            f'@q ld.global.nc.v4.u32 {{{names}}}, [%4]; }}" : {out} '
            f': "l"(p + low + {offset}), "r"((int)({condition}))); '
        )

    ctype, suffix = _offsets(at)
    body = (
        f"unsigned* r = (unsigned*)d; {_ALIGNED.format(ctype)}"
        + load(0, "valid > 0 && low + 16 <= end", 0)
        + load(4, "valid > 16 - move && low + 32 <= end", 16)
    )
    arguments = f"void* d, const void* s, {ctype} at, {ctype} end, int valid"
    name = f"load_pair{suffix}"
    return device_call("void", name, arguments, body, registers, source, at, end, valid)


def shift_pair(
    unit: int, words: Expr, registers: Expr, source: Expr, at: Expr, end: Expr, valid: Expr
) -> Expr:
    """The 16 bytes within what `load_pair` loaded: `valid` bytes, then zeros.

    `unit` is the number of bytes (1 or 2) that `at` is a multiple of. The vector at the end of the
    parameter, which cannot be read whole, is read here.
    """
    element = {1: "unsigned char", 2: "unsigned short"}[unit]
    ctype, suffix = _offsets(at)
    each = 4 // unit
    body = (
        "unsigned w[9]; const unsigned* r = (const unsigned*)d; unsigned* o = (unsigned*)out; "
        f"{_ALIGNED.format(ctype)} int over = valid + move; "
        '_Pragma("unroll") for (int i = 0; i < 8; ++i) w[i] = r[i]; w[8] = 0; '
        "if (valid > 0 && low + (over > 16 ? 32 : 16) > end) { "
        '_Pragma("unroll") for (int i = 0; i < 8; ++i) if (low + (i < 4 ? 16 : 32) > end) { '
        f'unsigned v = 0; _Pragma("unroll") for (int e = 0; e < {each}; ++e) '
        f"if (low + 4 * i + {unit} * e < end) "
        f"v |= (unsigned)__ldg((const {element}*)(p + low) + i * {each} + e) << ({8 * unit} * e); "
        "w[i] = v; } } "
        "bool far = move & 8, near = move & 4; int bits = (move & 3) * 8; "
        '_Pragma("unroll") for (int i = 0; i < 6; ++i) w[i] = far ? w[i + 2] : w[i]; '
        '_Pragma("unroll") for (int i = 0; i < 5; ++i) w[i] = near ? w[i + 1] : w[i]; '
        '_Pragma("unroll") for (int i = 0; i < 4; ++i) '
        "w[i] = __funnelshift_r(w[i], w[i + 1], bits); "
        'if (valid < 16) { _Pragma("unroll") for (int i = 0; i < 4; ++i) { '
        "int left = valid - 4 * i; "
        "w[i] &= left >= 4 ? ~0u : left <= 0 ? 0u : (1u << (8 * left)) - 1; } } "
        '_Pragma("unroll") for (int i = 0; i < 4; ++i) o[i] = w[i];'
    )
    arguments = f"void* out, const void* d, const void* s, {ctype} at, {ctype} end, int valid"
    name = f"shift_pair{unit}{suffix}"
    return device_call("void", name, arguments, body, words, registers, source, at, end, valid)


_ELEMENTS = {1: ("u8", "h", "char"), 2: ("u16", "h", "short"), 4: ("u32", "r", "int")}


def load_if(size: int, register: Expr, source: Expr, at: Expr, mask: Expr, bits: Expr) -> Expr:
    """Loads element number `at` of `size` bytes, or 0 unless the mask has all `bits`."""
    kind, code, name = _ELEMENTS[size]
    own = f"unsigned {name}"
    wide = "unsigned short" if size == 1 else own
    ctype, suffix = _offsets(at)
    body = (
        f"{wide} v; "
        'asm volatile("{ .reg .pred q; .reg .b32 t; and.b32 t, %2, %3; setp.eq.s32 q, t, %3; '
        f'mov.b{max(16, 8 * size)} %0, 0; @q ld.global.nc.{kind} %0, [%1]; }}" : "=&{code}"(v) '
        f': "l"((const {own}*)s + at), "r"(mask), "r"(bits)); *({own}*)d = ({own})v;'
    )
    arguments = f"void* d, const void* s, {ctype} at, int mask, int bits"
    name = f"load_if{size}{suffix}"
    return device_call("void", name, arguments, body, register, source, at, mask, bits)


def store_integers(place: Expr, low: Expr, high: Expr) -> Expr:
    """Stores two neighbouring int32 at the aligned `place`."""
    body = "*(int2*)p = make_int2(low, high);"
    arguments = "void* p, int low, int high"
    return device_call("void", "pair_of_ints", arguments, body, place, low, high)


def store_shared(place: Expr, word: Expr) -> Expr:
    """Stores 4 bytes to shared memory."""
    body = "*(unsigned*)p = v;"
    return device_call("void", "put_word", "void* p, unsigned v", body, place, word)


def shared_word(place: Expr) -> Expr:
    """The 4 bytes at `place` of shared memory."""
    return device_call("uint32", "get_word", "const void* p", "return *(const unsigned*)p;", place)


def warp_sync() -> Expr:
    """What a warp's threads wrote to shared memory is there for all of them."""
    return device_call("void", "warp_sync", "", "__syncwarp();")
