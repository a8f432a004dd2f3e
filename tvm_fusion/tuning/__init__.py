"""Tuning: measured choices for the kernels of a plan, kept in a database.

tvm_fusion.tune(model, target, database="tuned")
compiled = tvm_fusion.compile(model, target, database="tuned")
"""

from __future__ import annotations

from typing import Any


def tune(model: Any, target: Any = None, **options: Any) -> Any:
    """See `tuning.run.tune`, which is imported when it is first needed."""
    from .run import tune as run

    return run(model, target, **options)
