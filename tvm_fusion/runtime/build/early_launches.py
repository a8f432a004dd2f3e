"""Kernels of a module that are launched before the kernel in front of them has ended.

    kernel(...) {                            kernel(...) {
      first weights                            first weights       (`kernels.gpu.ahead`)
      before_wait                              griddepcontrol.wait
      body                                     griddepcontrol.launch_dependents
    }                                          pointers = behind the wait
                                               body
                                             }

On devices of compute capability 9.0 and later (programmatic dependent launch). The contract:

1. *A kernel lets the next one start when its own wait is over*: the kernel in front of it has ended
   then, and what that wrote can be read. So while a kernel runs, all in front of it have ended but
   one, for which every thread waits before it reads or writes memory; memory that is used again is
   safe. Blocks that wait take no place from the kernel in front, whose blocks have all begun.
2. *In front of the wait stand indices, registers, and loads ahead of weights*, which no launch of a
   call writes. Where a writer's statements are more than that (`_is_allowed`), the kernel waits at
   its start; where a parameter that is read ahead is no weight in some call, it is launched late
   (`Calls`).
3. *What others launch* may have written weights (an optimizer's step), or ended before what is in
   front of it, as a kernel that never waits. So the first launch of each function is late, and the
   first behind another function, of a library or of Relax. A late launch starts when all in front
   has ended. Where it may be left out (`empty_launches`), what reads ahead is late up to the first
   that is not. Late are, too, kernels whose blocks wait for each other: all need places at once.
4. *No compiler takes a load across the wait.* Loads of what no thread writes (`ld.global.nc`, or
   through a `__restrict__` pointer) may be moved, and may find old values in a cache: constant is
   what does not change while a kernel runs, and this one runs while its operands are computed. So
   such loads become plain ones, and each pointer is made anew behind the wait, so that all that is
   loaded depends on it.

Copies, events, and kernels of other libraries end before ours start, and start when ours have
ended: their launches ask for nothing else. Whoever replays captured kernels one by one launches
them late. Which are to be early says the cost model (`cost.analytic.pays_early`), or
`TVM_FUSION_EARLY_LAUNCHES`. What profilers say of a kernel's time holds its wait;
`timing.apart` takes that out. Us a call, CUDA graphs but for the streams:

                                                          late   where it pays   all
    H100 (2026-11-28)
      eight transformer blocks of one token              202.7       171.2      172.4
      a layer of Llama 3 8B, cache of 2048, batch 1      172.8       166.0      164.9
        on a stream                                      181.0       172.3
        sixteen of them, each                            169.6       166.4
      batch 16                                           214.1       213.4      219.2
        on a stream                                      227.0       221.9
        sixteen of them, each                            215.2       213.2
    H200 (2026-11-28, `tests/results/early_launches_h200.json`)
      a layer of Llama 3 8B, cache of 2048, batch 1      125.2       118.4      117.4
        on a stream                                      131.5       121.2      120.2
      batch 16                                           162.5       160.9      164.3
        on a stream                                      170.9       166.7      170.9
    H200, without loads ahead (2026-11-27)
      four blocks of 512 tokens                          187.0                  183.0
      ResNet-50, 32 images                               782.7                  786.9
      sorts and scans of 1000 x 1000                     298.0                  299.4

Bitwise the same: outputs and caches of 1,000 steps of these layers (`tests/gpu/check_early.py`),
200 calls of the others. At batch 16 all but attention, which takes 44 us, take 212.1, at batch 1
169.0 (168.7 late in that run). Tried and left out, on an H100 in which the layer took 174.7 late
and the blocks 201.0: letting others start before the wait, 182.8 and 191.2.
Requests of weights into the L2 in front of the wait (`cp.async.bulk.prefetch.L2`, of all blocks
that run at once), on an H200: 119.5, 124.2 and 131.5 for the layer with an eighth, a third and two
thirds of the L2, which took 123.6 late. At batch 16, where it took 156.6 late and 155.6 by default:
rings of Hopper products filled ahead, 162.8; with small kernels that trigger before they wait,
152.7, which cost 1.3 at batch 1. There: keys asked for ahead, 115.7, where the default took 116.9.
compute-sanitizer's racecheck finds nothing in small layers.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field
from typing import Self

import tvm
import tvm_ffi
from tvm import relax, tirx
from tvm.backend.cuda.op import cuda_func_call
from tvm.ir import Call, Expr, StringImm, TensorLoad, Var

from ...config.targets import architecture_of
from ...ir.weights import Weight
from ...kernels.gpu.ahead import LOADS_AHEAD, MARK, READS_AHEAD
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

ANOTHER = "another function"
"""Stands for functions of libraries, and of Relax, among the names of PrimFuncs."""

_START = 'asm volatile("griddepcontrol.wait; griddepcontrol.launch_dependents;" ::: "memory");'
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


def launched_early(
    kernels: tvm.IRModule, target: tvm.target.Target, early: Sequence[str]
) -> tvm.IRModule:
    """Lowered kernels, of which those of the PrimFuncs `early` are launched early and wait; the
    same on devices that cannot.
    """
    if not early or not architecture_of(target).has_dependent_launch:
        return kernels
    functions = {
        gvar: _early(func) if any(is_kernel_of(gvar.name_hint, name) for name in early) else func
        for gvar, func in kernels.functions_items()
    }
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
        For each Relax function the PrimFuncs that it calls, in order, and whether always;
        `ANOTHER` stands for what it calls else.
    weights : dict of str to set of int
        By PrimFunc, the parameters that are a weight in each call: no launch of a call writes it.
    """

    orders: tuple[tuple[tuple[str, bool], ...], ...]
    weights: Mapping[str, Set[int]]

    @classmethod
    def of(cls, mod: tvm.IRModule, weights: Mapping[str, Sequence[Weight]]) -> Calls:
        """Those of a lowered module, the last parameters of whose functions are their `weights`."""
        orders, found = [], {}
        functions = {g: f for g, f in mod.functions_items() if isinstance(f, relax.Function)}
        apart = {gvar.name_hint for gvar in functions}
        for gvar, func in functions.items():
            count = len(weights.get(gvar.name_hint, ()))
            own = set(func.params[len(func.params) - count :])
            order: list[tuple[str, bool]] = []
            for name, arguments, always in _calls(func.body, True):
                order.append((ANOTHER if name in apart else name, always))
                here = {i for i, arg in enumerate(arguments) if arg in own}
                found[name] = found.get(name, here) & here
            orders.append(tuple(order))
        return cls(tuple(orders), found)

    def late(self, reads: Mapping[str, Sequence[int]], sure: Set[str]) -> set[str]:
        """The PrimFuncs to launch late: what is called before, or as, the first of each function,
        or behind another one, that is `sure` to launch kernels, and what reads ahead of what is no
        weight. `reads` has the parameters that each which launches kernels reads ahead; one that
        is not sure to, and reads none, is no reason for a late launch.
        """
        found = {
            name
            for name, read in reads.items()
            if not self.weights.get(name, set()).issuperset(read)
        }
        for order in self.orders:
            behind_others = True
            for name, always in order:
                if name == ANOTHER:
                    behind_others = True
                elif behind_others and always and name in sure:
                    found.add(name)
                    behind_others = False
                elif behind_others and (not always or reads.get(name, True)):
                    found.add(name)
        return found


@dataclass(frozen=True, slots=True)
class LaunchTimes:
    """Kernels that wait, with those launched late that have to be; `late` names PrimFuncs, and
    `early` takes the names of the kernels that are early.
    """

    late: Set[str]
    early: set[str] = field(default_factory=set)

    @classmethod
    def of(cls, host: tvm.IRModule, calls: Calls | None, early: set[str] | None = None) -> Self:
        """From the host functions of a module, which launch its kernels."""
        reads = {
            gvar.name_hint: [int(number) for number in func.attrs.get(READS_AHEAD, ())]
            for gvar, func in host.functions_items()
            if _launches(func.body)
        }
        sure = {gvar.name_hint for gvar, func in host.functions_items() if _is_sure(func.body)}
        late = frozenset(calls.late(reads, sure) if calls else reads)
        return cls(late, set() if early is None else early)

    def __call__(self, kernels: tvm.IRModule) -> tvm.IRModule:
        """The kernels of one launch: late, if that is to be."""
        functions = {
            gvar: self._on_time(gvar.name_hint, func) for gvar, func in kernels.functions_items()
        }
        return tvm.IRModule(functions, attrs=kernels.attrs)

    def _on_time(self, kernel: str, func: tirx.PrimFunc) -> tirx.PrimFunc:
        names = [str(name) for name in func.attrs.get(LAUNCH_PARAMS, ())]
        is_late = any(is_kernel_of(kernel, name) for name in self.late)
        if EARLY not in names:
            return func
        if not is_late:
            self.early.add(kernel)
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


def _calls(body: relax.Expr, always: bool) -> Iterator[tuple[str, Sequence[relax.Expr], bool]]:
    """Calls of functions in order: the name, the arguments, and whether each takes place in each
    call of the function.
    """
    if not isinstance(body, relax.SeqExpr):
        return
    for block in body.blocks:
        for binding in block.bindings:
            value = binding.value
            if isinstance(value, relax.If):
                yield from _calls(value.true_branch, False)
                yield from _calls(value.false_branch, False)
            elif isinstance(value, Call) and isinstance(value.op, tvm.ir.GlobalVar):
                yield value.op.name_hint, value.args, always
            elif isinstance(value, Call) and _is_of_library(value):
                yield ANOTHER, (), always


def _is_of_library(call: relax.Call) -> bool:
    """Whether a function that is not of the VM is called: it may launch kernels."""
    if not isinstance(call.op, relax.ExternFunc):
        return False
    return not str(call.op.global_symbol).startswith("vm.builtin.")
