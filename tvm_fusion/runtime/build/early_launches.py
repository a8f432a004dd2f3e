"""Kernels of a module that are launched before the kernel in front of them has ended.

    kernel(...) {                            kernel(...) {
      first weights                            first weights       (`kernels.gpu.ahead`)
      before_wait                              griddepcontrol.launch_dependents
      body                                     griddepcontrol.wait
    }                                          pointers = behind the wait
                                               body
                                             }

On devices of compute capability 9.0 and later (programmatic dependent launch). The contract:

1. *Every thread of a kernel that is launched early waits before it reads or writes memory*, but for
   2. The wait is over when the kernel in front has ended and what it wrote can be read. That one
   waited, too, before it could end, or was launched late, which is to wait: so all kernels before
   it have ended, whenever their threads let others start. Memory that is used again is safe for the
   same reason: who writes to it has waited for all who read it.
2. *In front of the wait stand indices, registers, and loads ahead of weights*, which no launch of a
   call writes. Where a writer's statements are more than that (`_is_allowed`), the kernel waits at
   its start; where a parameter that is read ahead is no weight in some call, it is launched late
   (`Calls`). Who wrote weights before the call (an optimizer's step) may still be about to end when
   the next kernel is launched early: so the first launch of each function is late, and all others
   start when that one has. Where that one may be left out (`empty_launches`), what reads ahead is
   late up to the first that is not.
3. *No compiler takes a load across the wait.* Loads of what no thread writes (`ld.global.nc`, or
   through a `__restrict__` pointer) may be moved, and may find old values in a cache: constant is
   what does not change while a kernel runs, and this one runs while its operands are computed. So
   such loads become plain ones, and each pointer is made anew behind the wait, so that all that is
   loaded depends on it.
4. *A kernel of somebody else* neither waits nor lets others start: one behind ours is launched late
   and starts when ours have ended; ours behind it start when it ends. So it is with copies, and
   with kernels whose blocks wait for each other: all need places at once, they are launched late.

Asked for by `TVM_FUSION_EARLY_LAUNCHES=1`. What profilers say of a kernel's time holds its wait
then; `timing.apart` takes that out. On an H200, CUDA graphs, us a call, late and early:

    wait, then let others start (2026-11-27)
      eight transformer blocks of one token              180.2   159.8
      four blocks of 512 tokens                          187.0   183.0
      ResNet-50, 32 images                               782.7   786.9
      sorts and scans of 1000 x 1000                     298.0   299.4
    let others start, then wait (2026-11-28)
      a layer of Llama 3 8B, cache of 2048, batch 1      123.6   122.6
      batch 16                                           157.7   159.9

Requests of weights into the L2 in front of the wait (`cp.async.bulk.prefetch.L2`, of all blocks
that run at once) were taken out again. Of that layer, an eighth, a third and two thirds of the L2:
119.5, 124.2 and 131.5 us at batch 1, 160.1, 164.0 and 170.2 at batch 16; of the eight blocks, a
third: 177.3 for 179.7. Loads ahead into registers are not timed yet.

Bitwise the same, in 100 steps of these layers with their caches and 200 calls of the others, in
CUDA graphs and on a stream. What was not, the blocks of one token on a stream, had been planned for
what launches cost there: 34 of its 112 groups are others (scores are scaled, and rounded, by
another kernel), and none of 200 calls is bitwise the graph's; with the graph's plan all are.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import dataclass

import tvm
import tvm_ffi
from tvm import relax, tirx
from tvm.backend.cuda.op import cuda_func_call
from tvm.ir import Call, Expr, StringImm, TensorLoad, Var

from ...config.targets import architecture_of
from ...ir.weights import Weight
from ...kernels.gpu.ahead import LOADS_AHEAD, MARK, READS_AHEAD, launches_early
from ...kernels.gpu.intrinsics import PREFIX, device_call
from .lowering import COOPERATIVE, LAUNCH_PARAMS
from .version_names import is_kernel_of

DYNAMIC_SMEM = "tirx.use_dyn_shared_memory"
"""The launch parameter of a kernel with shared memory of a size that the launch tells: the last."""
EARLY = "tirx.use_programtic_dependent_launch"
WAIT = "wait_for_kernels_before"
"""The device function that waits, without its prefix."""

LAUNCH = "call_ffi_kernel"
"""How the name of the operator ends that launches a kernel in a host function."""

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
    """The body with the wait behind the statements that are marked, on each way through it; None
    where a way has no mark, or more than `_is_allowed` would stand in front of it.
    """
    if isinstance(body, tirx.AttrStmt):
        if body.attr_key == MARK:
            return tirx.SeqStmt([body.body, *wait]) if _is_allowed(body.body) else None
        inner = _with_wait(body.body, wait)
        return None if inner is None else tirx.AttrStmt(body.node, body.attr_key, body.value, inner)
    if isinstance(body, tirx.IfThenElse) and body.else_case is not None:
        cases = [_with_wait(case, wait) for case in (body.then_case, body.else_case)]
        if None in cases or not _is_allowed(tirx.Evaluate(body.condition)):
            return None
        return tirx.IfThenElse(body.condition, *cases)
    if not isinstance(body, tirx.SeqStmt):
        return None
    for place, statement in enumerate(body.seq):
        inner = _with_wait(statement, wait)
        if inner is not None:
            return tirx.SeqStmt([*body.seq[:place], inner, *body.seq[place + 1 :]])
        if not _is_allowed(statement):
            return None
    return None


def _is_allowed(statement: tirx.Stmt) -> bool:
    """Whether a statement computes indices and registers, makes room, asks for bytes, or loads what
    the kernel says that it reads ahead, and does nothing else.
    """
    found = False
    rest = tvm_ffi.structural_map(statement, [(Call, _without_loads_ahead)])

    def call(node: Call) -> None:
        nonlocal found
        kind = node.op.get_attr("TCallEffectKind") if isinstance(node.op, tvm.ir.Op) else None
        found |= not (node.op.same_as(_SHUFFLE) or (kind is not None and int(kind) <= _PURE))

    def load(node: TensorLoad) -> None:
        nonlocal found
        found |= node.source.scope() != "local"

    def store(node: tirx.BufferStore) -> None:
        nonlocal found
        found |= node.buffer.scope() != "local"

    tvm_ffi.structural_walk(rest, [(Call, call), (TensorLoad, load), (tirx.BufferStore, store)])
    return not found


def _without_loads_ahead(call: Call) -> Expr:
    is_ahead = call.op.same_as(_FUNC_CALL) and str(call.args[0].value) in LOADS_AHEAD
    return tirx.IntImm("int32", 0) if is_ahead else call


# ---- which launches have to be late


@dataclass(frozen=True, slots=True)
class Calls:
    """How Relax functions call PrimFuncs.

    Attributes
    ----------
    orders : tuple of tuple of (str, bool)
        For each Relax function the PrimFuncs that it calls, in order, and whether always.
    weights : dict of str to set of int
        By PrimFunc, the parameters that are a weight in each call: no launch of a call writes it.
    """

    orders: tuple[tuple[tuple[str, bool], ...], ...]
    weights: Mapping[str, Set[int]]

    @classmethod
    def of(cls, mod: tvm.IRModule, weights: Mapping[str, Sequence[Weight]]) -> Calls:
        """Those of a lowered module, the last parameters of whose functions are their `weights`."""
        orders, found = [], {}
        for gvar, func in mod.functions_items():
            if not isinstance(func, relax.Function):
                continue
            count = len(weights.get(gvar.name_hint, ()))
            own = set(func.params[len(func.params) - count :])
            order: list[tuple[str, bool]] = []
            for call, always in _calls(func.body, True):
                order.append((call.op.name_hint, always))
                here = {i for i, arg in enumerate(call.args) if arg in own}
                found[call.op.name_hint] = found.get(call.op.name_hint, here) & here
            orders.append(tuple(order))
        return cls(tuple(orders), found)

    def late(self, reads: Mapping[str, Sequence[int]], sure: Set[str]) -> set[str]:
        """The PrimFuncs to launch late: what is called before, or as, the first of each function
        that is `sure` to launch kernels, and what reads ahead of what is no weight. `reads` has the
        parameters that each which launches kernels reads ahead; one that is not sure to, and reads
        none, is no reason for a late launch.
        """
        found = {
            name
            for name, read in reads.items()
            if not self.weights.get(name, set()).issuperset(read)
        }
        for order in self.orders:
            for name, always in order:
                if always and name in sure:
                    found.add(name)
                    break
                if not always or reads.get(name, True):
                    found.add(name)
        return found


@dataclass(frozen=True, slots=True)
class LaunchTimes:
    """Kernels that wait, with those launched late that have to be; `late` names PrimFuncs."""

    late: Set[str]

    @classmethod
    def of(cls, host: tvm.IRModule, calls: Calls | None) -> LaunchTimes:
        """From the host functions of a module, which launch its kernels."""
        reads = {
            gvar.name_hint: [int(number) for number in func.attrs.get(READS_AHEAD, ())]
            for gvar, func in host.functions_items()
            if _launches(func.body)
        }
        sure = {gvar.name_hint for gvar, func in host.functions_items() if _is_sure(func.body)}
        return cls(frozenset(calls.late(reads, sure) if calls else reads))

    def __call__(self, kernels: tvm.IRModule) -> tvm.IRModule:
        """The kernels of one launch: late, if that is to be."""
        functions = {
            gvar: self._on_time(gvar.name_hint, func) for gvar, func in kernels.functions_items()
        }
        return tvm.IRModule(functions, attrs=kernels.attrs)

    def _on_time(self, kernel: str, func: tirx.PrimFunc) -> tirx.PrimFunc:
        names = [str(name) for name in func.attrs.get(LAUNCH_PARAMS, ())]
        is_late = any(is_kernel_of(kernel, name) for name in self.late)
        if EARLY not in names or not is_late:
            return func
        return func.with_attr(LAUNCH_PARAMS, [name for name in names if name != EARLY])


def _is_sure(body: tirx.Stmt) -> bool:
    """Whether each call of a host function launches a kernel: not where outputs may have no
    elements (`empty_launches`).
    """
    if isinstance(body, tirx.IfThenElse):
        cases = body.then_case, body.else_case
        return all(case is not None and _is_sure(case) for case in cases)
    if isinstance(body, tirx.SeqStmt):
        return any(map(_is_sure, body.seq))
    if isinstance(body, tirx.AttrStmt):
        return _is_sure(body.body)
    return isinstance(body, tirx.Evaluate) and _launches(body)


def _launches(body: tirx.Stmt) -> bool:
    """Whether statements of a host function launch kernels."""

    def visit(call: Call) -> tvm_ffi.VisitInterrupt | None:
        launches = str(getattr(call.op, "name", "")).endswith(LAUNCH)
        return tvm_ffi.VisitInterrupt() if launches else None

    return tvm_ffi.structural_walk(body, [(Call, visit)]) is not None


def _calls(body: relax.Expr, always: bool) -> Iterator[tuple[relax.Call, bool]]:
    """Calls of PrimFuncs in order, and whether each takes place in each call of the function."""
    if not isinstance(body, relax.SeqExpr):
        return
    for block in body.blocks:
        for binding in block.bindings:
            value = binding.value
            if isinstance(value, relax.If):
                yield from _calls(value.true_branch, False)
                yield from _calls(value.false_branch, False)
            elif isinstance(value, Call) and isinstance(value.op, tvm.ir.GlobalVar):
                yield value, always
