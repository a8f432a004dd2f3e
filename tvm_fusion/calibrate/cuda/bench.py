"""Micro-benchmarks on a CUDA device: built side by side, called on two buffers, timed.

Times are those of kernels (CUPTI, through torch's profiler) where torch with CUDA is installed,
else between CUDA events. Events also see the start of a kernel: benchmarks compare two lengths of a
loop, which takes it out, or run for a millisecond.
"""

from __future__ import annotations

import functools
import logging
import statistics
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import tvm
from tvm import relax, tirx
from tvm.ir import Expr, Var
from tvm.script import tirx as T
from tvm.script.ir_builder import IRBuilder
from tvm.tirx.script.builder import ir as B

from ...config import HardwareProfile
from ...kernels.gpu.frame import OPAQUE, then
from ...kernels.gpu.intrinsics import device_call
from ...runtime.build.build import Built, KernelBuildError, build
from ...runtime.calls.compiled_module import CompiledModule
from ...runtime.timing.timing import has_torch_cuda, kernel_times, l2_cleaner
from ..findings import NotMeasured

# The shell of a micro-benchmark on CUDA: a TIRx kernel of one signature for all of them.
#
#     kernel(x: float32[n], y: float32[m], blocks: int32, trips: int32, count: int64, extra: int32)
#
# `trips` is the length of the timed loop, `count` the vectors of 16 bytes to be moved, `extra` what
# the benchmark makes of it. The result of all work reaches a store that is never taken (`keep`), so
# that the compiler cannot drop it.

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


LARGEST_BUFFER = 4 << 30
BUFFER_SHARE = 16
"""A buffer takes at most this part of the device's memory."""

CHAIN = 64
"""Launches in one call of the virtual machine."""

REPEATS = 5
VECTOR = 16

FILL = """
float4* to = (float4*)y;
float4 v = make_float4(1.0f + thread * 1e-3f, 1.5f, 1.25f, 1.0f + block * 1e-4f);
for (long long i = (long long)block * 256 + thread; i < count; i += (long long)blocks * 256)
  to[i] = v;
"""

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Call:
    """A kernel of the common signature, on the bench's buffers; see `kernels`."""

    kernel: str
    blocks: int
    trips: int = 1
    count: int = 0
    extra: int = 0


class CudaBench:
    """Built micro-benchmarks and the buffers they run on.

    Parameters
    ----------
    hw : HardwareProfile
    kernels : Mapping[str, tirx.PrimFunc]
        By name, which is their global symbol too. Those that do not compile are left out; asking
        for one raises NotMeasured with the compiler's words.
    by_events : bool
        Without torch, whose import takes longer than some benchmarks.
    """

    def __init__(
        self, hw: HardwareProfile, kernels: Mapping[str, tirx.PrimFunc], by_events: bool = False
    ) -> None:
        self.hw = hw
        self.device = tvm.cuda(0)
        self.with_torch = not by_events and has_torch_cuda()
        self.built, self.failures = build_kernels(hw, kernels)
        self.module = CompiledModule.of(self.built)
        self.library = self.built.executable.mod.imports[0]
        self.bytes, self.x, self.y = self._buffers()
        for target in (self.x, self.y):
            fill = self.function("mb_fill")
            fill(target, target, 4 * hw.num_sms, 1, self.bytes // VECTOR, 0)
        self.device.sync()

    def _buffers(self) -> tuple[int, Any, Any]:
        """The largest two buffers that fit."""
        size = min(LARGEST_BUFFER, self.hw.memory_bytes // BUFFER_SHARE) // (1 << 20) << 20
        while True:
            try:
                x, y = (tvm.runtime.empty((size // 4,), "float32", self.device) for _ in range(2))
                return size, x, y
            except Exception as error:  # the device is shared, and its memory too
                if size <= 4 * self.hw.l2_bytes:
                    raise NotMeasured(f"no memory for buffers of {size} bytes: {error}") from error
                size //= 2

    def function(self, name: str) -> Any:
        """The host function that launches a kernel."""
        if name in self.failures:
            raise NotMeasured(f"{name} does not compile: {self.failures[name]}")
        return self.library.get_function(name)

    def arguments(self, call: Call) -> tuple[Any, ...]:
        """What the kernel of a call gets."""
        return self.x, self.y, call.blocks, call.trips, call.count, call.extra

    def times(self, calls: Mapping[Any, Call], repeats: int = REPEATS) -> dict[Any, float]:
        """Median seconds of each call, interleaved, the L2 cleaned before each."""
        prepared = {key: (c.kernel, self.arguments(c)) for key, c in calls.items()}
        return self.kernel_seconds(prepared, repeats)

    def kernel_seconds(
        self, calls: Mapping[Any, tuple[str, tuple[Any, ...]]], repeats: int = REPEATS
    ) -> dict[Any, float]:
        """As `times`, for kernels of any signature: name and arguments of each."""
        if not self.with_torch:
            return self._event_seconds(calls, repeats)
        bound = {k: functools.partial(self.function(n), *args) for k, (n, args) in calls.items()}
        found = kernel_times(bound, repeats, warmup=1)
        if not all(timing.median_us > 0 for timing in found.values()):
            raise NotMeasured("torch's profiler does not see the kernels (CUPTI missing or in use)")
        return {key: timing.median_us * 1e-6 for key, timing in found.items()}

    def _event_seconds(
        self, calls: Mapping[Any, tuple[str, tuple[Any, ...]]], repeats: int
    ) -> dict[Any, float]:
        samples: dict[Any, list[float]] = {key: [] for key in calls}
        evaluators = {}
        for key, (name, args) in calls.items():
            self.function(name)(*args)
            evaluate = self.library.time_evaluator(
                name, self.device, number=1, repeat=1, f_preproc=l2_cleaner(self.device)
            )
            evaluators[key] = functools.partial(evaluate, *args)
        for _ in range(repeats):
            for key, evaluate in evaluators.items():
                samples[key].append(evaluate().median)
        return {key: statistics.median(values) for key, values in samples.items()}

    def slopes(
        self, calls: Mapping[Any, tuple[Call, Call]], repeats: int = REPEATS
    ) -> dict[Any, float]:
        """Seconds a trip, from two lengths of each loop (the first the shorter)."""
        flat = {(key, i): call for key, pair in calls.items() for i, call in enumerate(pair)}
        seconds = self.times(flat, repeats)
        found = {}
        for key, (short, long) in calls.items():
            taken = seconds[key, 1] - seconds[key, 0]
            if taken <= 0:
                raise NotMeasured(f"{long.kernel}: a longer loop took no longer")
            found[key] = taken / (long.trips - short.trips)
        return found


def build_kernels(
    hw: HardwareProfile, kernels: Mapping[str, tirx.PrimFunc]
) -> tuple[Built, dict[str, str]]:
    """Build kernels and a `main` that launches `CHAIN` tiny ones; those that fail are left out."""
    left = {**kernels, "mb_fill": inline_kernel("mb_fill", 256, FILL), "mb_link": _link()}
    failures: dict[str, str] = {}
    while True:
        try:
            return build(_chain(left), hw=hw), failures
        except KernelBuildError as error:
            if not set(error.failures) & set(kernels):
                raise
            failures |= error.failures
            left = {name: func for name, func in left.items() if name not in failures}
            for name, why in error.failures.items():
                _log.warning("%s does not compile: %s", name, why)


def _chain(kernels: Mapping[str, tirx.PrimFunc]) -> tvm.IRModule:
    """A module of kernels whose `main` is a chain of tiny launches."""
    bb = relax.BlockBuilder()
    x = relax.Var("x", relax.TensorType((32,), "float32"))
    link = bb.add_func(kernels["mb_link"], "mb_link")
    with bb.function("main", [x]):
        with bb.dataflow():
            value = x
            for _ in range(CHAIN):
                call = relax.call_tir(link, (value,), relax.TensorType((32,), "float32"))
                value = bb.emit(call)
            out = bb.emit_output(value)
        bb.emit_func_output(out)
    mod = bb.get()
    for name, func in kernels.items():
        if name != "mb_link":
            mod[name] = func
    return mod


def _link() -> tirx.PrimFunc:
    """One warp adds one to 32 numbers."""
    with IRBuilder() as builder, B.prim_func():
        T.func_name("main")
        x = T.arg("x", T.buffer((32,), "float32"))
        y = T.arg("y", T.buffer((32,), "float32"))
        T.func_attr({"tirx.noalias": True})
        T.device_entry()
        T.cta_id([1])
        lane = T.thread_id([32])
        T.buffer_store(y, x[lane] + tirx.FloatImm("float32", 1.0), [lane])
    attrs = {"tirx.is_scheduled": True, "op_pattern": 8, "tvm_fusion.tirx": True}
    return builder.get().with_attr(attrs | {"global_symbol": "mb_link"})
