"""Small modules for the runtime's tests."""

import sys

import tvm
from tvm import relax, s_tir, te, tirx
from tvm.script import tirx as T

from tvm_fusion.runtime.build.lowering import SCHEDULED_ATTR, TIRX_ATTR

H200_CONFIG = {
    "kind": "cuda",
    "arch": "sm_90a",
    "max_threads_per_block": 1024,
    "max_num_threads": 1024,
    "thread_warp_size": 32,
    "max_shared_memory_per_block": 232448,
    "host": {"kind": "llvm"},
}
H200 = tvm.target.Target(H200_CONFIG)
LLVM = tvm.target.Target({"kind": "llvm", "num-cores": 2})


def relax_module(emit, *inputs) -> tvm.IRModule:
    """Build `main` with `emit(block_builder, *vars)`; inputs are (name, shape, dtype)."""
    bb = relax.BlockBuilder()
    params = [relax.Var(name, relax.TensorType(shape, dtype)) for name, shape, dtype in inputs]
    with bb.function("main", params):
        with bb.dataflow():
            out = bb.emit_output(emit(bb, *params))
        bb.emit_func_output(out)
    return bb.get()


def softmax_reshape_relu(rows=128, columns=256, dtype="float32") -> tvm.IRModule:
    """Two operators that compute, with a reshape between them that need not."""

    def emit(bb, x):
        y = bb.emit(relax.op.reshape(bb.emit(relax.op.nn.softmax(x)), (columns, rows)))
        return relax.op.nn.relu(y)

    return relax_module(emit, ("x", (rows, columns), dtype))


def symbolic_sum() -> tvm.IRModule:
    """Outputs (softmax(x), (row sums of y,)) for x: (n, 8) and y: (n, m)."""
    n, m = tirx.Var("n", "int64"), tirx.Var("m", "int64")

    def emit(bb, x, y):
        sums = bb.emit(relax.op.sum(y, axis=1))
        return relax.Tuple([bb.emit(relax.op.nn.softmax(x)), relax.Tuple([sums])])

    return relax_module(emit, ("x", (n, 8), "float32"), ("y", (n, m), "float32"))


def two_kernel_prim_func(size: int = 1024) -> tirx.PrimFunc:
    """Two loops over a vector, each bound to blocks of its own: two kernels on a GPU."""
    a = te.placeholder((size,), "float32", name="a")
    first = te.compute((size,), lambda i: a[i] + 1.0, name="first")
    second = te.compute((size,), lambda i: first[size - 1 - i] * 2.0, name="second")
    schedule = s_tir.Schedule(te.create_prim_func([a, second]))
    for name in ("first", "second"):
        (loop,) = schedule.get_loops(schedule.get_sblock(name))
        schedule.bind(loop, "blockIdx.x")
    return schedule.mod["main"].with_attr(SCHEDULED_ATTR, True)


def unscheduled_prim_func(size: int = 1024) -> tirx.PrimFunc:
    """A loop that is bound to nothing."""
    a = te.placeholder((size,), "float32", name="a")
    return te.create_prim_func([a, te.compute((size,), lambda i: a[i] + 1.0, name="b")])


def double_in_tirx(size: int = 1024) -> tirx.PrimFunc:
    """A TIRx kernel: y = 2 x."""
    threads = 128

    @T.prim_func
    def double(x: T.Buffer((size,), "float32"), y: T.Buffer((size,), "float32")):
        T.device_entry()
        bx = T.cta_id([size // threads])
        tx = T.thread_id([threads])
        y[bx * threads + tx] = x[bx * threads + tx] * T.float32(2)

    return double.with_attr(TIRX_ATTR, True).with_attr(SCHEDULED_ATTR, True)


def extern_in_tirx(name: str, size: int = 1024) -> tirx.PrimFunc:
    """A TIRx kernel that calls a CUDA function: y = name(x)."""
    threads = 128

    @T.prim_func
    def call(x: T.Buffer((size,), "float32"), y: T.Buffer((size,), "float32")):
        T.device_entry()
        bx = T.cta_id([size // threads])
        tx = T.thread_id([threads])
        y[bx * threads + tx] = T.call_extern("float32", name, x[bx * threads + tx])

    return call.with_attr(TIRX_ATTR, True).with_attr(SCHEDULED_ATTR, True)


def call_in_sequence(prim_funcs: dict[str, tirx.PrimFunc], size: int = 1024) -> tvm.IRModule:
    """Build `main`: relu, then each PrimFunc in turn, over one float32 vector."""
    bb = relax.BlockBuilder()
    ty = relax.TensorType((size,), "float32")
    globals_ = {
        name: bb.add_func(func.with_attr("global_symbol", name), name)
        for name, func in prim_funcs.items()
    }
    x = relax.Var("x", ty)
    with bb.function("main", [x]):
        with bb.dataflow():
            value = bb.emit(relax.op.nn.relu(x))
            for gv in globals_.values():
                value = bb.emit(relax.call_tir(gv, [value], out_ty=ty))
            out = bb.emit_output(value)
        bb.emit_func_output(out)
    return bb.get()


def without_compilers(monkeypatch, empty) -> None:
    """Takes nvcc and NVRTC away; `empty` is a folder without programs."""
    monkeypatch.setenv("PATH", str(empty))
    monkeypatch.setitem(sys.modules, "cuda.bindings", None)
