"""Launch counts, read off built modules."""

import pytest
import tvm
from tvm import relax, te, tirx

from tvm_fusion.errors import BuildError
from tvm_fusion.runtime.build.build import build
from tvm_fusion.runtime.calls.launch_count import (
    call_sites,
    count_launches,
    host_launches,
    kernels_per_function,
)

from ..support.runtime_cases import (
    H200,
    LLVM,
    call_in_sequence,
    double_in_tirx,
    relax_module,
    softmax_reshape_relu,
    symbolic_sum,
    two_kernel_prim_func,
)


@pytest.mark.parametrize("target", [LLVM, H200], ids=["llvm", "cuda"])
def test_views_and_builtins_are_no_launches(target):
    mod = softmax_reshape_relu()
    assert count_launches(build(mod, target, compile_kernels=False)) == 2
    assert count_launches(tvm.compile(mod, target)) == 2


def test_a_prim_func_of_two_kernels_counts_two():
    mod = call_in_sequence({"two": two_kernel_prim_func()})
    built = build(mod, H200, compile_kernels=False)
    assert built.kernels["two"] == ("two_kernel", "two_kernel_1")
    assert count_launches(built) == 3
    assert kernels_per_function(built) == built.launches


def test_a_function_called_twice_counts_twice():
    double = double_in_tirx()
    mod = call_in_sequence({"double": double})
    gv = mod.get_global_var("double")
    bb = relax.BlockBuilder(tvm.IRModule({gv: mod["double"]}))
    ty = relax.TensorType((1024,), "float32")
    x = relax.Var("x", ty)
    with bb.function("main", [x]):
        with bb.dataflow():
            y = bb.emit(relax.call_tir(gv, [x], out_ty=ty))
            out = bb.emit_output(relax.call_tir(gv, [y], out_ty=ty))
        bb.emit_func_output(out)
    built = build(bb.get(), H200, compile_kernels=False)
    assert built.launches == {"double": 1}
    assert count_launches(built) == 2


@pytest.mark.parametrize("target", [LLVM, H200], ids=["llvm", "cuda"])
def test_functions_that_compute_shapes_are_no_launches(target):
    n = tirx.Var("n", "int64")

    def emit(bb, x):
        return relax.op.nn.relu(bb.emit(relax.op.concat([x, x], axis=0)))

    built = build(relax_module(emit, ("x", (n, 8), "float32")), target, compile_kernels=False)
    assert "shape_func" in built.executable.as_text()
    assert count_launches(built) == 2


@pytest.mark.parametrize("target", [LLVM, H200], ids=["llvm", "cuda"])
def test_symbolic_extents_passed_to_kernels_do_not_hide_launches(target):
    n = tirx.Var("n", "int64")

    def emit(bb, x):
        return bb.emit_te(
            lambda a, k: te.compute(a.shape, lambda i: a[i] + k.astype("float32")), x, n
        )

    mod = relax_module(emit, ("x", (n,), "float32"))
    assert count_launches(build(mod, target, compile_kernels=False)) == 1
    assert count_launches(build(symbolic_sum(), target, compile_kernels=False)) == 2


def test_calls_of_other_vm_functions_are_followed_and_libraries_count_one():
    bb = relax.BlockBuilder()
    ty = relax.TensorType((8,), "float32")
    u, x = relax.Var("u", ty), relax.Var("x", ty)
    with bb.function("twice", [u]):
        with bb.dataflow():
            out = bb.emit_output(relax.op.nn.relu(bb.emit(relax.op.add(u, u))))
        bb.emit_func_output(out)
    twice = bb.get().get_global_var("twice")
    with bb.function("main", [x]):
        y = bb.emit(relax.Call(twice, [x]))
        z = bb.emit(relax.Call(twice, [y]))
        bb.emit_func_output(bb.emit(relax.call_dps_packed("some.library", [z], out_ty=ty)))
    executable = tvm.compile(bb.get(), LLVM)
    assert call_sites(executable) == {"add": 2, "relu": 2, "some.library": 1}
    assert count_launches(executable) == 5
    assert count_launches(executable, "twice") == 2


def test_a_missing_function_is_named():
    with pytest.raises(BuildError, match="nothing_of_the_sort"):
        count_launches(build(softmax_reshape_relu(), LLVM), "nothing_of_the_sort")


HOST = """
define dllexport i32 @__tvm_ffi_f(ptr %a) #0 {
  %1 = tail call fastcc i32 @f_compute_(ptr %a), !dbg !1
  ret i32 %1
}
define internal fastcc i32 @f_compute_(ptr %a) {
  %1 = load ptr, ptr @.tvm_func.__tvm_set_device, align 8
  %2 = tail call i32 %19(ptr @.tvm_func.f_kernel, ptr @__tvm_func_handle_init.f_kernel)
  %3 = load ptr, ptr @.tvm_func.f_kernel, align 8, !dbg !133
  %4 = load ptr, ptr @.tvm_func.f_kernel_1, align 8
  %5 = load ptr, ptr @.tvm_func.f_kernel, align 8
  ret i32 %2
}
define dllexport i32 @__tvm_ffi_sort(ptr %a) {
  %1 = load ptr, ptr @.tvm_func.runtime.cuTensorMapEncodeTiled, align 8
  %2 = load ptr, ptr @.tvm_func.tvm.contrib.thrust.sort, align 8
}
define dllexport i32 @__tvm_ffi_shape(ptr %a) {
  ret i32 0
}
"""


def test_host_code_tells_which_function_launches_which_kernels():
    assert host_launches(HOST, {"f_kernel", "f_kernel_1"}) == {
        "f": ["f_kernel", "f_kernel_1", "f_kernel"],
        "sort": ["tvm.contrib.thrust.sort"],
        "shape": [],
    }
