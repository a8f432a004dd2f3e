"""Relax passes: everything that changes IR.

Decompose -> (LegalizeOps) -> Materialize -> WriteKernels; `Fuse` is all of it as one pass.
"""

from .decompose import Decompose
from .pipeline import Fuse, fusion_pipeline, register

__all__ = ["Decompose", "Fuse", "fusion_pipeline", "register"]
