"""Device functions for blocks of a cluster that write to each other's shared memory.

`tests/cuda_emulator/hopper.h` has a stand-in for each.
"""

from __future__ import annotations

from collections.abc import Sequence

from tvm.ir import Expr

from ...gpu.intrinsics import device_call

_MAP = (
    "unsigned a = (unsigned)__cvta_generic_to_shared(p), r; "
    'asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(r) : "r"(a), "r"(rank)); '
)


def place_in(place: Expr, rank: Expr) -> Expr:
    """The address of the same shared-memory `place` of the cluster's block `rank`."""
    return device_call("uint32", "place_in", "void* p, int rank", _MAP + "return r;", place, rank)


def send_to(address: Expr, values: Sequence[Expr], barrier: Expr) -> Expr:
    """Stores four float32 at a 16-byte aligned address; the barrier there counts the bytes.

    Both addresses are from `place_in`. Nobody waits for the store but who waits for the barrier.
    """
    body = (
        'asm volatile("st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.v4.f32 '
        '[%0], {%1, %2, %3, %4}, [%5];" '
        ':: "r"(r), "f"(a), "f"(b), "f"(c), "f"(d), "r"(m) : "memory");'
    )
    arguments = "unsigned r, float a, float b, float c, float d, unsigned m"
    return device_call("void", "send_to", arguments, body, address, *values, barrier)


def arrive_at(barrier: Expr, rank: Expr) -> Expr:
    """Arrives at the same barrier of block `rank`, to say that memory there is free.

    It orders no stores to the other block: that takes a release in the scope of the cluster, for
    which ptxas emits a barrier for all memory of the device (at every step of a product of
    4096^3: 250 us instead of 174 on an H200, 2026-11-20).
    """
    body = _MAP + (
        'asm volatile("mbarrier.arrive.shared::cluster.b64 _, [%0];" :: "r"(r) : "memory");'
    )
    return device_call("void", "arrive_at", "void* p, int rank", body, barrier, rank)


def add_floats(source: Expr, target: Expr) -> Expr:
    """Adds the four float32 at a 16-byte aligned place to four in registers."""
    body = (
        "float4 v = *(const float4*)p; float* s = (float*)q; "
        "s[0] += v.x; s[1] += v.y; s[2] += v.z; s[3] += v.w;"
    )
    return device_call("void", "add_floats", "const void* p, void* q", body, source, target)
