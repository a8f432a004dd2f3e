"""Lowering of a module whose PrimFuncs are written kernels: Relax to VM calls, TIR to code.

Relax:
    call_tir / call_dps_packed, reshapes, symbolic shapes
        -> VM calls on planned storage; a pure reshape is a view and launches nothing
TIR:
    s_tir kernels -> pipeline "s_tir",  TIRx kernels -> pipeline "tirx",  merged into one module

`import tvm_fusion` registers the TIR pipeline as `TIR_PIPELINE`, and in place of TVM's "s_tir",
which is the default: a module that holds kernels of this package builds wherever TVM builds one.
"""

from __future__ import annotations

import logging
import math
import struct
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import tvm
import tvm_ffi
from tvm import relax, s_tir, tirx
from tvm.tirx import compilation_pipeline
from tvm.tirx.script.parser import entry

from ...errors import (
    BuildError,
    ConfigError,
    DividedByZero,
    FrontendError,
    InputError,
    NothingTuned,
    OutOfRange,
    PlanError,
    TargetError,
)
from ...ir.blocks import calls_host
from ...ir.graph import COOPERATIVE_ATTR, COPY_ATTR
from ...ir.quick_stacks import quick_stacks
from ...kernels.program.expr import dtype_of, variables
from ...transform.apply.kernel_bodies import APART_ATTR, TIRX_ATTR, has_root, without_root
from ...transform.functions.functions import rewritten, target_kind, with_functions
from ...transform.functions.loop_function import STEPS_ATTR
from ...transform.lower import decode_float8, wrap_integers
from ...transform.lower.ordered_writes import meeting_loops
from ...transform.memory.arenas import KeepArenas, PlanArenas
from ...transform.memory.plan_memory import PlanMemory, PlanMemoryByTVM
from . import hidden_ranges
from .empty_launches import launched_if_filled
from .guards import with_guards
from .hidden_divisions import with_hidden_divisions
from .join_writes import JoinWrites
from .kept_nan import STORED, with_kept_nan
from .plain_schedule import ONE_BLOCK, PLAIN_ATTR, plain_schedule
from .version_names import with_version_names

TIR_PIPELINE = "tvm_fusion"
SCHEDULED_ATTR = "tirx.is_scheduled"
_ENTRY_ATTR = "tirx.is_entry_func"

_log = logging.getLogger(__name__)


def lowering_pipeline(
    target: tvm.target.Target,
    observe: Callable[[tvm.IRModule], Any] | None = None,
    plan_memory: bool = True,
    planned: Sequence[tvm.transform.Pass] = (),
    last: Sequence[tvm.transform.Pass] = (),
    lowered: Sequence[tvm.transform.Pass] = (),
) -> tvm.transform.Pass:
    """Return the Relax passes that turn a module of kernels into VM calls.

    `observe` is given the module once its memory is planned (see `call_memory.planned_memory`): on
    a GPU, and where sizes are symbolic, by this package unless `plan_memory` is False, else by TVM.
    `planned` runs then, `last` when nothing but calls of functions
    is left, `lowered` when the sizes of tensors are read, too.

    Nothing is fused here. Operators that are still high-level get TVM's legalisation, and on a GPU
    PrimFuncs without the attribute "tirx.is_scheduled" get DLight's default schedule, after those
    that write in place are joined.
    """
    on_gpu = "gpu" in target.keys
    passes = [
        relax.backend.DispatchSampling(),
        relax.backend.DispatchSortScan(),
        relax.transform.LegalizeOps(),
        ViewReshapes(),
        *([JoinWrites()] if on_gpu else []),
        relax.transform.DeadCodeElimination(),
        *([ScheduleLeftovers(target)] if on_gpu else []),
        relax.transform.ToNonDataflow(),
        relax.transform.RemovePurityChecking(),
        relax.transform.CallTIRRewrite(),
        *([PlanArenas()] if plan_memory else []),
        PlanMemory() if on_gpu and plan_memory else PlanMemoryByTVM(),
        *([relax.transform.RewriteCUDAGraph()] if on_gpu else []),
        relax.transform.LowerAllocTensor(),
        relax.transform.KillAfterLastUse(),
        *([_Observe(observe)] if observe else []),
        *planned,
        *([KeepArenas()] if plan_memory else []),
        relax.transform.LowerRuntimeBuiltin(),
        relax.transform.ComputePrimValue(),
        *last,
        relax.transform.VMShapeLower(),
        *lowered,
        relax.transform.AttachGlobalSymbol(),
    ]
    return tvm.transform.Sequential(passes, name="tvm_fusion.lowering")


@tvm.transform.module_pass(opt_level=0, name="tvm_fusion.Observe")
class _Observe:
    """Show a module as it is here to a function."""

    def __init__(self, observe: Callable[[tvm.IRModule], Any]) -> None:
        self.observe = observe

    def transform_module(self, mod: tvm.IRModule, _ctx: tvm.transform.PassContext) -> tvm.IRModule:
        """Return `mod`."""
        self.observe(mod)
        return mod


@tvm.transform.module_pass(opt_level=0, name="tvm_fusion.ViewReshapes")
class ViewReshapes:
    """Turn calls of PrimFuncs that only reshape into views of their input.

    As `relax.transform.RewriteDataflowReshape`, which aborts on a PrimFunc whose body is no block
    (every TIRx kernel): those are out of its sight while it runs, and so are copies that are meant.
    """

    def transform_module(self, mod: tvm.IRModule, _ctx: tvm.transform.PassContext) -> tvm.IRModule:
        """Return `mod` with views; PrimFuncs that nothing calls any more stay."""
        functions = dict(mod.functions_items())
        hidden = {
            gv: f
            for gv, f in functions.items()
            if isinstance(f, tirx.PrimFunc)
            and (not isinstance(f.body, s_tir.SBlockRealize) or COPY_ATTR in f.attrs)
        }
        seen = functions | {gv: _without_body(func) for gv, func in hidden.items()}
        viewed = relax.transform.RewriteDataflowReshape()(with_functions(mod, seen))
        return with_functions(viewed, dict(viewed.functions_items()) | hidden)


@tvm.transform.module_pass(opt_level=0, name="tvm_fusion.ScheduleLeftovers")
class ScheduleLeftovers:
    """Give DLight's default GPU schedule to every PrimFunc that has none, or a plain one.

    As `dlight.ApplyDefaultSchedule`, but a rule that raises is a rule that does not apply, none
    applies to what writes at places that are data (`ordered_writes`), none may lose a bound, and
    where none does, `plain_schedule` puts the loops on threads.
    """

    def __init__(self, target: tvm.target.Target, rules: Sequence[Any] | None = None) -> None:
        self.target = target
        self.rules = rules

    def transform_module(self, mod: tvm.IRModule, _ctx: tvm.transform.PassContext) -> tvm.IRModule:
        """Return `mod` with every leftover PrimFunc scheduled."""
        functions = dict(mod.functions_items())
        for gv, func in mod.functions_items():
            if isinstance(func, tirx.PrimFunc) and not _is_scheduled(func):
                functions[gv] = self._schedule(gv.name_hint, func)
        return with_functions(mod, functions)

    def _schedule(self, name: str, func: tirx.PrimFunc) -> tirx.PrimFunc:
        rules = _default_rules() if self.rules is None else self.rules
        ordered = calls_host(func.body) or meeting_loops(func) or STEPS_ATTR in func.attrs
        for rule in () if ordered else rules:
            try:
                with self.target, quick_stacks(entry):  # a rule may import all tensor intrinsics
                    space = rule.apply(func, self.target, False)
            except Exception as error:  # a kernel build: recorded, and the next rule is tried
                _log.info("DLight's %s fails on %s: %s", type(rule).__name__, name, error)
                continue
            if space is not None:
                sch = space if isinstance(space, s_tir.Schedule) else space[0]
                if not _loses_its_bound(sch.mod["main"]):
                    return sch.mod["main"].with_attr(SCHEDULED_ATTR, True)
        plain = plain_schedule(func)
        if plain is not None:
            _log.info("%s runs %s", name, plain.attrs[PLAIN_ATTR])
            return plain.with_attr(SCHEDULED_ATTR, True)
        raise BuildError(
            f"no GPU schedule for the PrimFunc {name}: none of DLight's rules takes it, and it "
            "calls functions of the host, which no kernel can. Schedule it by hand and set its "
            f'attribute "{SCHEDULED_ATTR}", or take the operator out of the model'
        )


def _loses_its_bound(func: tirx.PrimFunc) -> bool:
    """Whether threads beyond the last row would write: TVM's lowering of a reduction across threads
    keeps what its block's predicate says of the terms, not what it says of the rows.
    """
    threads: set[tirx.Var] = set()
    found = False

    def loop(node: tirx.For) -> None:
        tag = node.thread_binding.thread_tag if node.thread_binding is not None else ""
        if tag.startswith("threadIdx"):
            threads.add(node.loop_var)

    def block(node: s_tir.SBlockRealize) -> None:
        nonlocal found
        pairs = zip(node.block.iter_vars, node.iter_values, strict=True)
        reduced = [v for axis, v in pairs if axis.iter_type == tirx.IterVar.CommReduce]
        of_terms = set(variables(*reduced))
        if of_terms & threads:
            found |= not of_terms.issuperset(variables(node.predicate))

    tvm_ffi.structural_walk(
        func.body, [(tirx.For, loop), (s_tir.SBlockRealize, block)], order="pre"
    )
    return found


TIRPipeline = tuple[tvm.transform.Pass, Callable, Callable]


def mixed_tir_pipeline() -> TIRPipeline:
    """Return (lowering, host finalisation, device finalisation) for s_tir and TIRx kernels."""
    lower_s_tir, finalize_host, finalize_device = _STOCK()
    lower_tirx, _, _ = compilation_pipeline.get_tir_pipeline("tirx")

    @tvm.transform.module_pass(opt_level=0, name="tvm_fusion.MixedTIRPipeline")
    def lower(mod: tvm.IRModule, _ctx: tvm.transform.PassContext) -> tvm.IRModule:
        mod = with_hidden_divisions(with_guards(_with_narrow_types(mod)))
        if not _has_ours(mod):
            filled = {gv: launched_if_filled(f) for gv, f in mod.functions_items()}
            mod = tvm.IRModule(filled, attrs=mod.attrs)
            return with_kept_nan(with_exact_doubles(lower_s_tir(mod)))
        bare = {gv: launched_if_filled(without_root(f)) for gv, f in mod.functions_items()}
        written = {gv: f for gv, f in bare.items() if is_tirx(f)}
        scheduled = {gv: f for gv, f in bare.items() if gv not in written}
        apart = {gv: scheduled.pop(gv) for gv, f in list(scheduled.items()) if _is_apart(f)}
        steps = {gv: scheduled.pop(gv) for gv, f in list(scheduled.items()) if _is_in_a_block(f)}
        lowered = {}
        on_gpu = {gv: written.pop(gv) for gv, f in list(written.items()) if _is_on_gpu(f)}
        parts = (
            (scheduled, lower_s_tir),
            (apart, _without_reuse(lower_s_tir)),
            (steps, _without_waits(lower_s_tir)),
        )
        ours = ((on_gpu, _with_float8(lower_tirx)), (written, lower_tirx))
        for functions, passes in (*parts, *ours):
            if functions:
                part = passes(tvm.IRModule(functions, attrs=mod.attrs))
                lowered.update(part.functions_items())
        if any(COOPERATIVE_ATTR in func.attrs for func in (*on_gpu.values(), *written.values())):
            lowered = {gv: _launched_at_once(func) for gv, func in lowered.items()}
        merged = with_exact_doubles(tvm.IRModule(lowered, attrs=mod.attrs))
        merged = with_version_names(mod, with_kept_nan(merged))
        # TVM gives the only function of a module a second symbol, `main`; a part is no module
        return without_entry(merged) if len(mod.functions_items()) > 1 else merged

    return lower, finalize_host, finalize_device


def _launched_at_once(func: tirx.PrimFunc) -> tirx.PrimFunc:
    """A kernel whose blocks wait for each other with the mark of a cooperative launch, which the
    device refuses where not all can run at once.
    """
    params = func.attrs.get(LAUNCH_PARAMS) if func.attrs else None
    if params is None:
        return func

    def visit(call: tvm.ir.Call) -> tvm_ffi.VisitInterrupt | None:
        return tvm_ffi.VisitInterrupt() if call.op.same_as(_GRID_SYNC) else None

    if tvm_ffi.structural_walk(func.body, [(tvm.ir.Call, visit)]) is None:
        return func
    return func.with_attr(LAUNCH_PARAMS, [COOPERATIVE, *params])  # dynamic memory stays the last


LAUNCH_PARAMS, COOPERATIVE = "tirx.kernel_launch_params", "tirx.use_cooperative_launch"
_GRID_SYNC = tvm.ir.Op.get("tirx.cuda.grid_sync")


def _in_place_of_stock() -> TIRPipeline:
    """TVM's own lowering of a module without kernels of this package, ours of any other."""
    lower_ours, finalize_host, finalize_device = mixed_tir_pipeline()
    lower_s_tir, _, _ = _STOCK()

    @tvm.transform.module_pass(opt_level=0, name="tvm_fusion.TIRPipeline")
    def lower(mod: tvm.IRModule, _ctx: tvm.transform.PassContext) -> tvm.IRModule:
        return (lower_ours if _has_ours(mod) else lower_s_tir)(mod)

    return lower, finalize_host, finalize_device


def _with_narrow_types(mod: tvm.IRModule) -> tvm.IRModule:
    """Functions that are bound to a device, with what it gets wrong of narrow types written out."""
    mod = rewritten(mod, decode_float8.RULES, lambda func: target_kind(func) == "llvm")
    mod = rewritten(mod, STORED, lambda func: target_kind(func) == "llvm")
    mod = rewritten(mod, hidden_ranges.RULES, lambda func: target_kind(func) != "")
    return rewritten(mod, wrap_integers.RULES, lambda func: target_kind(func) not in ("", "llvm"))


def _has_ours(mod: tvm.IRModule) -> bool:
    return any(_is_ours(func) for _, func in mod.functions_items())


def _is_ours(func: tirx.PrimFunc) -> bool:
    return is_tirx(func) or _is_apart(func) or _is_in_a_block(func) or has_root(func)


def _is_apart(func: tirx.PrimFunc) -> bool:
    return bool(func.attrs.get(APART_ATTR, False))


def _is_in_a_block(func: tirx.PrimFunc) -> bool:
    """Whether threads of a function wait for each other where they have to."""
    return func.attrs.get(PLAIN_ATTR) == ONE_BLOCK


def _is_on_gpu(func: tirx.PrimFunc) -> bool:
    return target_kind(func) == "cuda"


def _with_float8(passes: tvm.transform.Pass) -> Callable[[tvm.IRModule], tvm.IRModule]:
    """Passes that leave 8-bit floats as they are, which CUDA's headers convert on any architecture:
    before sm_89 TVM 0.27 makes float32 of a kernel's local buffers of them and leaves their
    definitions out.
    """
    return _changed(passes, ("tirx.FP8ComputeLegalize", "tirx.FP8StorageLegalize"), {})


def _without_reuse(passes: tvm.transform.Pass) -> Callable[[tvm.IRModule], tvm.IRModule]:
    """Passes without `StorageRewrite`."""
    return _changed(passes, (), {"tirx.disable_storage_rewrite": True})


def _without_waits(passes: tvm.transform.Pass) -> Callable[[tvm.IRModule], tvm.IRModule]:
    """Passes that add no waits of threads, which TVM's refuse to put into conditions, and that put
    no two tensors in one place.
    """
    without = ("s_tir.ThreadSync", "s_tir.MergeSharedMemoryAllocations")
    return _changed(passes, without, {"tirx.disable_storage_rewrite": True})


def _changed(
    passes: tvm.transform.Pass, without: tuple[str, ...], options: dict[str, bool]
) -> Callable[[tvm.IRModule], tvm.IRModule]:
    """Passes in their context, but without some, and with options."""

    def run(mod: tvm.IRModule) -> tvm.IRModule:
        context = tvm.transform.PassContext.current()
        config = {**context.config, **options}
        required, disabled = list(context.required_pass), [*context.disabled_pass, *without]
        with tvm.transform.PassContext(context.opt_level, required, disabled, config=config):
            return passes(mod)

    return run


def without_entry(mod: tvm.IRModule) -> tvm.IRModule:
    """Take the mark of the entry function off lowered functions."""
    functions = {gv: func.without_attr(_ENTRY_ATTR) for gv, func in mod.functions_items()}
    return tvm.IRModule(functions, attrs=mod.attrs)


def is_tirx(func: tirx.PrimFunc) -> bool:
    """Whether a kernel is written in TIRx and takes its lowering."""
    return bool(func.attrs.get(TIRX_ATTR, False))


@cache
def _default_rules() -> tuple[Any, ...]:
    from tvm.s_tir import dlight  # slow to import, and only PrimFuncs without a schedule need it

    gpu = dlight.gpu
    return gpu.Matmul(), gpu.GEMV(), gpu.Reduction(), gpu.GeneralReduction(), gpu.Fallback()


def _without_body(func: tirx.PrimFunc) -> tirx.PrimFunc:
    block = s_tir.SBlock([], [], [], "root", tirx.Evaluate(0))
    return func.with_body(s_tir.SBlockRealize([], True, block))


def _is_scheduled(func: tirx.PrimFunc) -> bool:
    return bool(func.attrs.get(SCHEDULED_ATTR, False)) or is_tirx(func)


for _error in (
    BuildError,
    ConfigError,
    DividedByZero,
    FrontendError,
    InputError,
    NothingTuned,
    OutOfRange,
    PlanError,
    TargetError,
):
    tvm_ffi.register_error(_error.__name__, _error)  # stays one on its way through a pass of TVM

_STOCK = compilation_pipeline.PIPELINE_MAP["s_tir"]


def register_tir_pipelines() -> None:
    """Register the lowering of kernels by its name, and in place of TVM's default, "s_tir".

    A module without kernels of this package goes through TVM's own passes alone.
    """
    compilation_pipeline.register_tir_pipeline(TIR_PIPELINE, mixed_tir_pipeline)
    compilation_pipeline.register_tir_pipeline("s_tir", _in_place_of_stock)


# ---- Constants of float64 in CUDA kernels, by their bits where TVM would round them.
#
#     y[i] = x[i] * 0.006451612903225806      y[i] = x[i] * __longlong_as_double(4574...)
#
# TVM prints a constant of float64 with fifteen decimals (1 / 155 as 0.006451612903226, 1e-20 as 0),
# those of float32 exactly.

_PRINTED = ".15f"


def with_exact_doubles(mod: tvm.IRModule) -> tvm.IRModule:
    """Return lowered functions in which no kernel of a CUDA device has a rounded constant."""
    return rewritten(mod, [(tirx.FloatImm, _by_bits)], lambda func: target_kind(func) == "cuda")


def _by_bits(constant: tirx.FloatImm) -> tirx.FloatImm | tvm.ir.Call:
    value = float(constant.value)
    if dtype_of(constant) != "float64" or not math.isfinite(value):  # infinities and NaN have names
        return constant
    if float(format(value, _PRINTED)) == value:
        return constant
    (bits,) = struct.unpack("<q", struct.pack("<d", value))
    return tirx.call_pure_extern("float64", "__longlong_as_double", tirx.IntImm("int64", bits))
