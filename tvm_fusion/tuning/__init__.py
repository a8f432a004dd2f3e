"""Tuning: measured choices for the kernels of a plan, kept in a database.

tvm_fusion.tune(model, target, database="tuned")
compiled = tvm_fusion.compile(model, target, database="tuned")
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .measure.building import build_candidate

__all__ = ["build_candidate"]


def __getattr__(name: str) -> Any:
    """Processes that measure import this package: what needs more is imported when asked for."""
    if name == "build_candidate":
        from .measure.building import build_candidate

        return build_candidate
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
