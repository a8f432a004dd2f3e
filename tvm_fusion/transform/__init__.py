"""Relax passes: everything that changes IR.

Decompose -> (LegalizeOps) -> Materialize -> WriteKernels; `Fuse` is all of it as one pass.
"""

from .decompose import Decompose
from .pipeline import Fuse, FusedFunction, fusion_pipeline, register

__all__ = ["Decompose", "Fuse", "FusedFunction", "fusion_pipeline", "register"]
