"""Device functions that generated kernels call: approximate math, packing, clusters, bulk copies.

Each is `__device__` source that goes into the CUDA module once. `tests/support/cuda_on_cpu.py` has
a stand-in for every one that holds inline assembly.
"""

from __future__ import annotations

from tvm.ir import Expr
from tvm.script import tirx as T

PREFIX = "tvmf_"
CTYPES = {
    "float32": "float",
    "float64": "double",
    "int32": "int",
    "uint32": "unsigned",
    "void": "void",
}


def device_call(result: str, name: str, arguments: str, body: str, *args: Expr) -> Expr:
    """Call of the device function ``result name(arguments) { body }``."""
    ctype = CTYPES[result]
    name = PREFIX + name
    source = f"__device__ __forceinline__ {ctype} {name}({arguments}) {{ {body} }}"
    return T.cuda.func_call(name, *args, source_code=source, return_type=result)


# ---- math on float32


def _approximate(name: str, instruction: str, x: Expr) -> Expr:
    body = f'float r; asm("{instruction} %0, %1;" : "=f"(r) : "f"(x)); return r;'
    return device_call("float32", name, "float x", body, x)


def ex2(x: Expr) -> Expr:
    """2 to the power of `x`, 2 ulp."""
    return _approximate("ex2", "ex2.approx.ftz.f32", x)


def rcp(x: Expr) -> Expr:
    """1 / `x`, 1 ulp, without the branch that `__frcp_rn` has."""
    return _approximate("rcp", "rcp.approx.ftz.f32", x)


def fma(a: Expr, b: Expr, c: Expr) -> Expr:
    """``a * b + c``, rounded once."""
    return device_call(
        "float32", "fma", "float a, float b, float c", "return fmaf(a, b, c);", a, b, c
    )


# Turns are taken off in three steps (Cody-Waite), so that large angles keep their precision: what
# `sinf` becomes under fast math loses |x| * 1e-7.
_TURNS = (
    "float k = rintf(x * 0.15915494309189535f); "
    "x = fmaf(-k, 6.28125f, x); x = fmaf(-k, 1.9340515136718750e-3f, x); "
    "x = fmaf(-k, 1.2556659146e-6f, x); "
)
# Quarter turns are, and what is left has a polynomial: those of S. L. Moshier, Cephes, `sinf.c`.
# Of angles whose turns a float32 cannot count 0 is left (of infinities NaN): no sine is above 1.
_QUARTERS = (
    "x = fabsf(x) < 1e7f ? x : x - x; "
    "float k = rintf(x * 0.63661977236758134f); "
    "x = fmaf(-k, 1.5703125f, x); x = fmaf(-k, 4.8351287841796875e-4f, x); "
    "x = fmaf(-k, 3.1391647865e-7f, x); "
    "float s = x * x; "
    "float a = fmaf(fmaf(-1.9515295891e-4f, s, 8.3321608736e-3f), s, -1.6666654611e-1f); "
    "a = fmaf(a * s, x, x); "
    "float b = fmaf(fmaf(2.443315711809948e-5f, s, -1.388731625493765e-3f), s, "
    "4.166664568298827e-2f); b = fmaf(b * s, s, fmaf(-0.5f, s, 1.0f)); "
)


def sin(x: Expr) -> Expr:
    """Sine, absolute error 1e-7 for angles up to 1e5; 0 from 1e7 on."""
    body = _QUARTERS + (
        "int q = __float2int_rn(k); float r = q & 1 ? b : a; return q & 2 ? -r : r;"
    )
    return device_call("float32", "sin", "float x", body, x)


def cos(x: Expr) -> Expr:
    """Cosine, absolute error 1e-7 for angles up to 1e5; 1 from 1e7 on."""
    body = _QUARTERS + (
        "int q = __float2int_rn(k); float r = q & 1 ? a : b; return (q + 1) & 2 ? -r : r;"
    )
    return device_call("float32", "cos", "float x", body, x)


def sin_to_half(x: Expr) -> Expr:
    """Sine, absolute error 1e-6 for angles up to 1e5."""
    return device_call("float32", "sin_to_half", "float x", _TURNS + "return __sinf(x);", x)


def cos_to_half(x: Expr) -> Expr:
    """Cosine, absolute error 1e-6 for angles up to 1e5."""
    return device_call("float32", "cos_to_half", "float x", _TURNS + "return __cosf(x);", x)


def power(x: Expr, y: Expr) -> Expr:
    """`x` to the power `y`, also of negative `x` (which fast-math `powf` turns into NaN)."""
    body = (
        "float r = exp2f(y * log2f(fabsf(x))); if (y == 0.0f) r = 1.0f; "
        "if (x >= 0.0f) return r; float h = 0.5f * y; "
        'return rintf(y) != y ? nanf("") : rintf(h) == h ? r : -r;'
    )
    return device_call("float32", "pow", "float x, float y", body, x, y)


def log_add(a: Expr, b: Expr) -> Expr:
    """``log(exp(a) + exp(b))``, absolute error 2e-7 beyond what the result is rounded by; NaN where
    one is NaN, and the infinity of two that are equal.
    """
    body = (
        "float h = fmaxf(a, b), d = -fabsf(a - b); "
        "return h + (a == b ? 0.69314718f : __logf(1.0f + __expf(d)));"
    )
    return device_call("float32", "log_add", "float a, float b", body, a, b)


def whole_power(x: Expr, exponent: int) -> Expr:
    """`x` to the power of a small whole number, by products."""
    body = f"return {' * '.join(['x'] * exponent)};"
    return device_call("float32", f"pow{exponent}", "float x", body, x)


def round_to_int(x: Expr) -> Expr:
    """The whole number nearest to `x`, the even one of two; NaN becomes 0."""
    return device_call("int32", "round_to_int", "float x", "return __float2int_rn(x);", x)


def pack_halves(dtype: str, low: Expr, high: Expr) -> Expr:
    """Two float32 rounded to half precision, in one 32-bit register."""
    kind = {"float16": "f16x2", "bfloat16": "bf16x2"}[dtype]
    convert = f'"cvt.rn.{kind}.f32 %0, %1, %2;" : "=r"(r) : "f"(high), "f"(low)'
    body = f"unsigned r; asm({convert}); return r;"
    return device_call("uint32", f"pack_{kind}", "float low, float high", body, low, high)


# ---- thread block clusters


def cluster_arrive() -> Expr:
    """First half of a cluster barrier, at the start of the kernel."""
    body = 'asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory");'
    return device_call("void", "cluster_arrive", "", body)


def cluster_wait() -> Expr:
    """Second half, before the first remote store: by then every block of the cluster runs."""
    body = 'asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");'
    return device_call("void", "cluster_wait", "", body)


def cluster_sync() -> Expr:
    """Barrier over all threads of the cluster."""
    body = (
        'asm volatile("barrier.cluster.arrive.release.aligned;\\n'
        'barrier.cluster.wait.acquire.aligned;" ::: "memory");'
    )
    return device_call("void", "cluster_sync", "", body)


def cluster_store(place: Expr, value: Expr, rank: Expr) -> Expr:
    """Stores a float32 at the same shared-memory `place` of the cluster's block `rank`."""
    body = (
        "unsigned a = (unsigned)__cvta_generic_to_shared(p), r; "
        'asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(r) : "r"(a), "r"(rank)); '
        'asm volatile("st.shared::cluster.f32 [%0], %1;" :: "r"(r), "f"(v) : "memory");'
    )
    arguments = "void* p, float v, int rank"
    return device_call("void", "cluster_store", arguments, body, place, value, rank)


# ---- bulk copies and their barriers


def barrier_init(barrier: Expr) -> Expr:
    """A barrier that one arrival completes."""
    body = (
        'asm volatile("mbarrier.init.shared.b64 [%0], 1;" '
        ':: "r"((unsigned)__cvta_generic_to_shared(p)) : "memory");'
    )
    return device_call("void", "barrier_init", "void* p", body, barrier)


def barrier_fence() -> Expr:
    """Makes initialised barriers visible to bulk copies."""
    body = (
        'asm volatile("fence.mbarrier_init.release.cluster;\\n'
        'fence.proxy.async.shared::cta;" ::: "memory");'
    )
    return device_call("void", "barrier_fence", "", body)


def barrier_expect(barrier: Expr, size: int) -> Expr:
    """Arrives at `barrier`, which then waits for `size` bytes."""
    body = (
        'asm volatile("mbarrier.arrive.expect_tx.shared.b64 _, [%0], %1;" '
        ':: "r"((unsigned)__cvta_generic_to_shared(p)), "r"(n) : "memory");'
    )
    arguments = "void* p, unsigned n"
    return device_call("void", "barrier_expect", arguments, body, barrier, T.uint32(size))


def barrier_wait(barrier: Expr, parity: Expr) -> Expr:
    """Waits until the phase of `parity` is complete."""
    body = (
        "unsigned a = (unsigned)__cvta_generic_to_shared(p), ok; "
        'do { asm volatile("{ .reg .pred q; mbarrier.try_wait.parity.shared.b64 q, [%1], %2; '
        'selp.u32 %0, 1, 0, q; }" : "=r"(ok) : "r"(a), "r"(parity) : "memory"); } while (!ok);'
    )
    return device_call("void", "barrier_wait", "void* p, int parity", body, barrier, parity)


def bulk_copy(target: Expr, source: Expr, size: int, barrier: Expr) -> Expr:
    """Global to shared memory, `size` bytes (a multiple of 16), counted by `barrier`."""
    body = (
        'asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes '
        '[%0], [%1], %2, [%3];" :: "r"((unsigned)__cvta_generic_to_shared(d)), "l"(s), "r"(n), '
        '"r"((unsigned)__cvta_generic_to_shared(b)) : "memory");'
    )
    arguments = "void* d, const void* s, unsigned n, void* b"
    return device_call(
        "void", "bulk_copy", arguments, body, target, source, T.uint32(size), barrier
    )
