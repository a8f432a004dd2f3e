"""The shell of a micro-benchmark on CUDA: a TIRx kernel of one signature for all of them.

    kernel(x: float32[n], y: float32[m], blocks: int32, trips: int32, count: int64, extra: int32)

`trips` is the length of the timed loop, `count` the vectors of 16 bytes to be moved, `extra` what
the benchmark makes of it. The result of all work reaches a store that is never taken (`keep`), so
that the compiler cannot drop it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from tvm import tirx
from tvm.ir import Expr, Var
from tvm.script import tirx as T
from tvm.script.ir_builder import IRBuilder
from tvm.tirx.script.builder import ir as B

from ...kernels.gpu.frame import OPAQUE, then
from ...kernels.gpu.intrinsics import device_call

UNLIKELY = 1.2345678e30


@dataclass(frozen=True, slots=True, eq=False)
class Shell:
    """What the body of a micro-benchmark starts from."""

    x: Var
    y: Var
    block: Expr
    thread: Expr
    blocks: Expr
    trips: Expr
    count: Expr
    extra: Expr

    @property
    def source(self) -> Expr:
        """Address of `x`."""
        return T.address_of(self.x[0])

    @property
    def target(self) -> Expr:
        """Address of `y`."""
        return T.address_of(self.y[0])

    def keep(self, value: Expr) -> None:
        """Use a float32 in a way that the compiler has to take for possible."""
        with then(tirx.EQ(value, tirx.FloatImm("float32", UNLIKELY))):
            T.buffer_store(self.y, value, [0])


def micro_kernel(name: str, threads: int, body: Callable[[Shell], None]) -> tirx.PrimFunc:
    """Write a micro-benchmark whose blocks have `threads` threads."""
    with IRBuilder() as builder, B.prim_func():
        T.func_name("main")
        n, m = tirx.Var("n", "int64"), tirx.Var("m", "int64")
        x = T.arg("x", T.buffer((n,), "float32"))
        y = T.arg("y", T.buffer((m,), "float32"))
        blocks = T.arg("blocks", T.int32())
        trips = T.arg("trips", T.int32())
        count = T.arg("count", T.int64())
        extra = T.arg("extra", T.int32())
        T.func_attr({"tirx.noalias": True})
        T.device_entry()
        block = T.cta_id([blocks])
        thread = T.thread_id([threads])
        body(Shell(x, y, block, thread, blocks, trips, count, extra))
    return builder.get().with_attr(
        {
            "tirx.is_scheduled": True,
            "tirx.noalias": True,
            "op_pattern": OPAQUE,
            "tvm_fusion.tirx": True,
            "global_symbol": name,
        }
    )


def inline_kernel(name: str, threads: int, code: str) -> tirx.PrimFunc:
    """Write a micro-benchmark as CUDA C.

    `code` sees ``const float* x, float* y, int block, int thread, int blocks, int trips,
    long long count, int extra`` and leaves its result in ``float sum``, which is declared.
    """
    arguments = (
        "const float* x, float* y, int block, int thread, int blocks, int trips, "
        "long long count, int extra"
    )
    body = f"float sum = 0.0f;\n{code}\nif (sum == {UNLIKELY!r}f) y[0] = sum;"

    def emit(s: Shell) -> None:
        values = (s.source, s.target, s.block, s.thread, s.blocks, s.trips, s.count, s.extra)
        T.evaluate(device_call("void", name, arguments, body, *values))

    return micro_kernel(name, threads, emit)
