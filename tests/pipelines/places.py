"""Places in pipelines: what runs before `Fuse`, and what after it, to an executable.

Among them those of mlc-llm's compiler, by the names and the order of its passes: its phases up to
where TVM's fusion stands, and those behind it. Passes of its own that only add functions or
attributes, or match quantised weights or a library, have no effect on modules without them, and
are left out.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import tvm
from tvm import relax
from tvm.relax import transform
from tvm.s_tir import dlight

Passes = Callable[[tvm.target.Target], list[tvm.transform.Pass]]


@dataclass(frozen=True)
class Place:
    """Where `Fuse` stands.

    Attributes
    ----------
    before, after : callable
        The passes around it, for a target.
    whole : bool
        Whether they go down to the VM; else what `tvm.compile` does by default comes behind them.
    """

    before: Passes
    after: Passes
    whole: bool = False


def _nothing(_target: tvm.target.Target) -> list[tvm.transform.Pass]:
    return []


# Passes that do not change what a module computes, in the order in which pipelines have them: those
# of TVM's tutorials, of its default pipelines, and of compilers for language models.
HIGH_LEVEL: dict[str, Callable[[tvm.target.Target], tvm.transform.Pass]] = {
    "Normalize": lambda _: transform.Normalize(),
    "CanonicalizeBindings": lambda _: transform.CanonicalizeBindings(),
    "EliminateCommonSubexpr": lambda _: transform.EliminateCommonSubexpr(),
    "DecomposeOpsForInference": lambda _: transform.DecomposeOpsForInference(),
    "FoldConstant": lambda _: transform.FoldConstant(),
    "CombineParallelMatmul": lambda _: transform.CombineParallelMatmul(),
    "ExpandMatmulOfSum": lambda _: transform.ExpandMatmulOfSum(),
    "ReorderTakeAfterMatmul": lambda _: transform.ReorderTakeAfterMatmul(),
    "ReorderPermuteDimsAfterConcat": lambda _: transform.ReorderPermuteDimsAfterConcat(),
    "ConvertLayout": lambda _: transform.ConvertLayout({"relax.nn.conv2d": ["NHWC", "OHWI"]}),
    "AdjustMatmulOrder": lambda _: transform.AdjustMatmulOrder(),
    "ConvertToDataflow": lambda _: transform.ConvertToDataflow(),
    "DeadCodeElimination": lambda _: transform.DeadCodeElimination(),
    "TopologicalSort": lambda _: transform.TopologicalSort(),
    "DispatchSampling": lambda _: relax.backend.DispatchSampling(),
    "DispatchSortScan": lambda _: relax.backend.DispatchSortScan(),
    "FuseTransposeMatmul": lambda _: transform.FuseTransposeMatmul(),
    "InlinePrivateFunctions": lambda _: transform.InlinePrivateFunctions(),
    "LambdaLift": lambda _: transform.LambdaLift(),
    "RemoveUnusedOutputs": lambda _: transform.RemoveUnusedOutputs(),
    "RemoveUnusedParameters": lambda _: transform.RemoveUnusedParameters(),
    "AttachGlobalSymbol": lambda _: transform.AttachGlobalSymbol(),
    "LegalizeOps": lambda _: transform.LegalizeOps(),
}

LEGALIZED: dict[str, Callable[[tvm.target.Target], tvm.transform.Pass]] = {
    "AnnotateTIROpPattern": lambda _: transform.AnnotateTIROpPattern(),
    "FoldConstant-legalized": lambda _: transform.FoldConstant(),
    "ToNonDataflow": lambda _: transform.ToNonDataflow(),
    "RemovePurityChecking": lambda _: transform.RemovePurityChecking(),
}


def _after_each() -> dict[str, Place]:
    """`Fuse` behind each pass."""
    places = {}
    legal = [transform.LegalizeOps()]
    for name, make in HIGH_LEVEL.items():
        places[f"after-{name}"] = Place(lambda t, m=make: [m(t)], _nothing)
    for name, make in LEGALIZED.items():
        places[f"after-{name}"] = Place(lambda t, m=make: [*legal, m(t)], _nothing)
    return places


def _before_each() -> dict[str, Place]:
    """`Fuse` ahead of each pass."""
    every = {**HIGH_LEVEL, **LEGALIZED, **_FUSED}
    return {
        f"before-{name}": Place(_nothing, lambda t, m=make: [m(t)]) for name, make in every.items()
    }


# Passes that come behind fusion in TVM's pipelines.
_FUSED: dict[str, Callable[[tvm.target.Target], tvm.transform.Pass]] = {
    "FuseOps": lambda _: transform.FuseOps(),
    "FuseTIR": lambda _: transform.FuseTIR(),
    "ApplyDefaultSchedule": lambda t: _scheduled(t),
    "RewriteDataflowReshape": lambda _: transform.RewriteDataflowReshape(),
    "ToMixedPrecision": lambda _: transform.ToMixedPrecision(),
    "SplitLayoutRewritePreproc": lambda _: transform.SplitLayoutRewritePreproc(),
    "AttachAttrLayoutFreeBuffers": lambda _: transform.AttachAttrLayoutFreeBuffers(),
    "LiftTransformParams": lambda _: transform.LiftTransformParams(),
}


def _scheduled(target: tvm.target.Target) -> tvm.transform.Pass:
    if target.kind.name == "llvm":
        return tvm.transform.Sequential([])
    gpu = dlight.gpu
    return dlight.ApplyDefaultSchedule(
        gpu.Matmul(), gpu.GEMV(), gpu.Reduction(), gpu.GeneralReduction(), gpu.Fallback()
    )


def _alone() -> dict[str, Place]:
    stock = [transform.LegalizeOps(), transform.AnnotateTIROpPattern(), transform.FoldConstant()]
    fusion = [transform.FuseOps(), transform.FuseTIR()]
    return {
        "alone": Place(_nothing, _nothing),
        "twice": Place(_nothing, _nothing),
        "before-zero": Place(_nothing, lambda _: [relax.get_pipeline("zero")]),
        "in-place-of-FuseOps": Place(lambda _: stock, _nothing),
        "after-FuseTIR": Place(lambda _: [*stock, *fusion], _nothing),
        "before-fusion": Place(_nothing, lambda _: [*stock, *fusion]),
    }


# ---- mlc-llm: high-level passes, `Fuse`, passes on PrimFuncs, schedules, the VM


@tvm.transform.module_pass(opt_level=0, name="CleanUpTIRAttrs")
class _CleanUpTIRAttrs:
    """Takes `op_pattern` off all PrimFuncs, as that compiler does behind fusion."""

    def transform_module(self, mod: tvm.IRModule, _ctx: tvm.transform.PassContext) -> tvm.IRModule:
        mod = mod.clone()
        for gvar, func in mod.functions_items():
            if isinstance(func, tvm.tirx.PrimFunc) and "op_pattern" in func.attrs:
                mod.update_func(gvar, func.without_attr("op_pattern"))
        return mod


MLC_LLM: dict[str, Callable[[tvm.target.Target], tvm.transform.Pass]] = {
    "BindTarget": lambda t: tvm.tirx.transform.BindTarget(t.with_host(_host(t))),
    "FuseTransposeMatmul": lambda _: transform.FuseTransposeMatmul(),
    "DispatchSampling": lambda _: relax.backend.DispatchSampling(),
    "DispatchSortScan": lambda _: relax.backend.DispatchSortScan(),
    "LegalizeOps": lambda _: transform.LegalizeOps(),
    "AnnotateTIROpPattern": lambda _: transform.AnnotateTIROpPattern(),
    "FoldConstant": lambda _: transform.FoldConstant(),
    "FuseOps": lambda _: transform.FuseOps(),
    "FuseTIR": lambda _: transform.FuseTIR(),
    "DeadCodeElimination": lambda _: transform.DeadCodeElimination(),
    "CleanUpTIRAttrs": lambda _: _CleanUpTIRAttrs(),
    "ApplyDefaultSchedule": lambda t: _scheduled(t),
    "ForceNarrowIndexToInt32": lambda t: _narrowed(t),
    "RewriteDataflowReshape": lambda _: transform.RewriteDataflowReshape(),
    "ToNonDataflow": lambda _: transform.ToNonDataflow(),
    "RemovePurityChecking": lambda _: transform.RemovePurityChecking(),
    "CallTIRRewrite": lambda _: transform.CallTIRRewrite(),
    "StaticPlanBlockMemory": lambda _: transform.StaticPlanBlockMemory(),
    "RewriteCUDAGraph": lambda _: transform.RewriteCUDAGraph(),
    "LowerAllocTensor": lambda _: transform.LowerAllocTensor(),
    "KillAfterLastUse": lambda _: transform.KillAfterLastUse(),
    "LowerRuntimeBuiltin": lambda _: transform.LowerRuntimeBuiltin(),
    "VMShapeLower": lambda _: transform.VMShapeLower(),
    "AttachGlobalSymbol": lambda _: transform.AttachGlobalSymbol(),
}
LAST_PLACE = "FuseTIR"
"""Behind it there are schedules, which leave nothing to fuse."""


def _host(target: tvm.target.Target) -> tvm.target.Target:
    return target.host or tvm.target.Target("llvm")


def _narrowed(target: tvm.target.Target) -> tvm.transform.Pass:
    on_gpu = target.kind.name == "cuda"
    return tvm.transform.Sequential(
        [] if on_gpu else [tvm.tirx.transform.ForceNarrowIndexToInt32()]
    )


def _mlc_llm() -> dict[str, Place]:
    """`Fuse` ahead of that pipeline, and behind each pass of it up to TVM's own fusion, which does
    not run where it has not yet.
    """
    names = list(MLC_LLM)
    places = {}
    for count in range(names.index(LAST_PLACE) + 2):
        before, after = names[:count], names[count:]
        if before[-1:] == ["FuseOps"]:
            continue  # all that FuseOps grouped is meant for FuseTIR
        if "FuseOps" in after:
            after = [n for n in after if n not in ("FuseOps", "FuseTIR")]
        where = f"mlc-llm-after-{names[count - 1]}" if count else "mlc-llm-first"
        places[where] = Place(_mlc_passes(before), _mlc_passes(after), whole=True)
    return places


def _mlc_passes(names: list[str]) -> Passes:
    return lambda target: [MLC_LLM[name](target) for name in names]


PLACES: dict[str, Place] = {**_alone(), **_after_each(), **_before_each(), **_mlc_llm()}
