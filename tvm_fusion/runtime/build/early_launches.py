"""Kernels of a module that are launched before the kernel in front of them has ended.

    kernel(...) {                            kernel(...) {
      before_wait: requests                    requests            (`kernels.gpu.ahead`)
      body                                     griddepcontrol.launch_dependents
    }                                          griddepcontrol.wait
                                               pointers = behind the wait
                                               body
                                             }

On devices of compute capability 9.0 and later (programmatic dependent launch). The contract:

1. *Every thread of a kernel that is launched early waits before it reads or writes memory.* The
   wait is over when the kernel in front has ended and what it wrote can be read. That one waited,
   too, before it could end, or was launched late, which is to wait: so all kernels before it have
   ended, whenever their threads let others start. Memory that is used again is safe for the same
   reason: who writes to it has waited for all who read it.
2. *In front of the wait stand indices, and requests of bytes into the L2*, whose values nobody sees
   there. Not even weights are read: so it does not matter who wrote them, and when (an optimizer's
   step in front of the call, the kernel in front). Where a writer's statements are more than that
   (`_asks_only`), the kernel waits at its start.
3. *No compiler takes a load across the wait.* Loads of what no thread writes (`ld.global.nc`, or
   through a `__restrict__` pointer) may be moved, and may find old values in a cache: constant is
   what does not change while a kernel runs, and this one runs while its operands are computed. So
   such loads become plain ones, and each pointer is made anew behind the wait, so that all that is
   loaded depends on it.
4. *A kernel of somebody else* neither waits nor lets others start: one behind ours is launched late
   and starts when ours have ended; ours behind it start when it ends. So it is with copies, and
   with kernels whose blocks wait for each other: all need places at once, they are launched late.

Asked for by `TVM_FUSION_EARLY_LAUNCHES=1`. What profilers say of a kernel's time holds its wait
then; `timing.apart` takes that out. On an H200 (2026-11-27, wait and then trigger at the start, no
requests; CUDA graphs, us a call, without and with it): eight transformer blocks of one token 180.2
and 159.8, four of 512 tokens 187.0 and 183.0, ResNet-50 of 32 images 782.7 and 786.9, sorts and
scans of 1000 x 1000 298.0 and 299.4. Short kernels gain, long ones do not. 200 calls of each were
bitwise those without it. On a stream 100 calls of the blocks of one token were not: they had been
compiled with launches at a stream's cost, with which 34 of their 112 groups are others (scores are
scaled, and rounded, by another kernel), and were compared with the plan for CUDA graphs.
"""

from __future__ import annotations

from collections.abc import Sequence

import tvm
import tvm_ffi
from tvm import tirx
from tvm.backend.cuda.op import cuda_func_call
from tvm.ir import Call, Expr, StringImm, TensorLoad, Var

from ...config.targets import architecture_of
from ...kernels.gpu.ahead import MARK, REQUESTS, launches_early
from ...kernels.gpu.intrinsics import PREFIX, device_call
from .lowering import COOPERATIVE, LAUNCH_PARAMS

DYNAMIC_SMEM = "tirx.use_dyn_shared_memory"
"""The launch parameter of a kernel with shared memory of a size that the launch tells: the last."""
EARLY = "tirx.use_programtic_dependent_launch"
WAIT = "wait_for_kernels_before"
"""The device function that waits, without its prefix."""

_START = 'asm volatile("griddepcontrol.launch_dependents; griddepcontrol.wait;" ::: "memory");'
_BEHIND = (  # an address of global memory, as before: else loads would ask where it points
    f"template <typename T> __device__ __forceinline__ void {PREFIX}behind_wait(T& p) "
    '{ size_t a = __cvta_generic_to_global(p); asm volatile("" : "+l"(a) :: "memory"); '
    "p = (T)__cvta_global_to_generic(a); }"
)
_PLAIN_LOADS = {"ld.global.nc": "ld.global", "__ldg(": "*("}
"""Loads of what is constant while a kernel runs, and those of memory that others write."""
_FUNC_CALL = tvm.ir.Op.get("tirx.cuda.func_call")
_SHUFFLE = tvm.ir.Op.get("tirx.cuda.__shfl_sync")  # TVM asks for the number of the warp
_PURE = 1  # tvm::tirx::CallEffectKind::kPure


def launched_early(kernels: tvm.IRModule, target: tvm.target.Target) -> tvm.IRModule:
    """Lowered kernels that are launched early and wait; the same on devices that cannot, and where
    they are not to.
    """
    if not launches_early() or not architecture_of(target).has_dependent_launch:
        return kernels
    functions = {gvar: _early(func) for gvar, func in kernels.functions_items()}
    return tvm.IRModule(functions, attrs=kernels.attrs)


def _early(func: tirx.PrimFunc) -> tirx.PrimFunc:
    """A kernel that waits at its start; as it is what is no kernel, and one whose blocks wait for
    each other, which all have to have places at once.
    """
    names = [str(name) for name in func.attrs.get(LAUNCH_PARAMS, ())]
    if not names or COOPERATIVE in names:
        return func
    last = [name for name in names if name == DYNAMIC_SMEM]
    others = [name for name in names if name != DYNAMIC_SMEM]
    pointers = [param for param in func.params if _is_pointer(param)]
    body = tvm_ffi.structural_map(func.body, [(Call, _with_plain_loads)])
    wait = [
        tirx.Evaluate(device_call("void", WAIT, "", _START)),
        *(tirx.Evaluate(_behind(pointer)) for pointer in pointers),
    ]
    behind = _with_wait(body, wait)
    func = func.with_body(behind or tirx.SeqStmt([*wait, body]))
    return func.with_attr(LAUNCH_PARAMS, [*others, EARLY, *last])


def _is_pointer(param: Var) -> bool:
    """Whether a parameter is memory that the kernel addresses; descriptions of tensors are none."""
    pointed = getattr(param.ty, "element_type", None)
    return isinstance(pointed, tvm.ir.PrimType)


def _behind(pointer: Var) -> Call:
    name = f"{PREFIX}behind_wait"
    return cuda_func_call(name, pointer, source_code=_BEHIND, return_type="void")


def _with_plain_loads(call: Call) -> Call:
    """A call of a device function that reads memory as any other, where it took it for constant."""
    if not call.op.same_as(_FUNC_CALL):
        return call
    *arguments, source = call.args
    plain = str(source.value)
    for constant, load in _PLAIN_LOADS.items():
        plain = plain.replace(constant, load)
    if plain == source.value:
        return call
    arguments.append(StringImm(plain))
    return Call(call.op, arguments, call.attrs, call.ty_args, call.span, call.ty)


# ---- where a kernel says what stands in front of its wait


def _with_wait(body: tirx.Stmt, wait: Sequence[tirx.Stmt]) -> tirx.Stmt | None:
    """The body with the wait behind the statements that are marked; None where none are, or where
    more than indices and requests would stand before it.
    """
    if isinstance(body, tirx.AttrStmt):
        if body.attr_key == MARK:
            allowed = _asks_only(body.body)
            return tirx.SeqStmt([body.body, *wait]) if allowed else None
        inner = _with_wait(body.body, wait)
        return None if inner is None else tirx.AttrStmt(body.node, body.attr_key, body.value, inner)
    if not isinstance(body, tirx.SeqStmt):
        return None
    for place, statement in enumerate(body.seq):
        inner = _with_wait(statement, wait)
        if inner is not None:
            return tirx.SeqStmt([*body.seq[:place], inner, *body.seq[place + 1 :]])
        if not _asks_only(statement):
            return None
    return None


def _asks_only(statement: tirx.Stmt) -> bool:
    """Whether a statement computes indices, makes room or asks for bytes, and nothing else."""
    found = False
    rest = tvm_ffi.structural_map(statement, [(Call, _without_request)])

    def call(node: Call) -> None:
        nonlocal found
        kind = node.op.get_attr("TCallEffectKind") if isinstance(node.op, tvm.ir.Op) else None
        found |= not (node.op.same_as(_SHUFFLE) or (kind is not None and int(kind) <= _PURE))

    def load(node: TensorLoad) -> None:
        nonlocal found
        found |= node.source.scope() in ("", "global")

    def other(_node: tirx.BufferStore) -> None:
        nonlocal found
        found = True

    tvm_ffi.structural_walk(rest, [(Call, call), (TensorLoad, load), (tirx.BufferStore, other)])
    return not found


def _without_request(call: Call) -> Expr:
    is_request = call.op.same_as(_FUNC_CALL) and str(call.args[0].value) in REQUESTS
    return tirx.IntImm("int32", 0) if is_request else call
