"""Places in pipelines: what runs before `Fuse`, and what after it, to an executable."""

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
        The passes around it, for a target; what `tvm.compile` does by default comes behind them.
    """

    before: Passes
    after: Passes


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


PLACES: dict[str, Place] = {**_alone(), **_after_each(), **_before_each()}
