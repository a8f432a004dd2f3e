"""What the planner makes of workloads, and how far that is from the limit: no device is needed.

    python -m tests.benchmarks --suite held_classes --seed 0 --predict --target nvidia_h200

The limit is that of `rows.together`, each input and output moved once, or the matrix products, and
one launch.
Functions that no class of ours writes are counted as "others"; such a row's ratio is marked with +,
since the model knows nothing of them (those that no class reads), or little.
"""

from __future__ import annotations

import math
import statistics
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from torch.utils.flop_counter import FlopCounterMode

from tvm_fusion.bench.apart import reason
from tvm_fusion.config import HardwareProfile, resolve_target
from tvm_fusion.flow.functions import planned_function
from tvm_fusion.flow.planned import Planned
from tvm_fusion.plan.plan import FALLBACK, FREE, STOCK

from . import workloads
from .rows.together import limit_us
from .workloads.held import CLASSES, class_of

_OPAQUE = "opaque"
_OTHERS = (_OPAQUE, FALLBACK, STOCK)


@dataclass(frozen=True, slots=True)
class Predicted:
    """A workload with its plan.

    Attributes
    ----------
    launches : int
        Those of our kernels, and of functions that no class reads.
    classes : dict of str to int
        Launches by kernel class.
    others : dict of str to int
        Functions written by no class of ours, by operator.
    predicted_us, limit_us : float
        The first without those of `others` that are opaque.
    failure : str
        Why there is no plan.
    """

    name: str
    shape: str = ""
    dtype: str = ""
    launches: int = 0
    classes: dict[str, int] = field(default_factory=dict)
    others: dict[str, int] = field(default_factory=dict)
    predicted_us: float = math.nan
    limit_us: float = math.nan
    failure: str = ""
    spent_s: float = 0.0

    @property
    def over_limit(self) -> float:
        """Predicted time over the limit."""
        return self.predicted_us / self.limit_us


def predict(
    names: Sequence[str],
    target: Any,
    dtype: str | None = None,
    scale: float = 1.0,
    tell: Callable[[Predicted], None] = lambda row: None,
) -> list[Predicted]:
    """Plan workloads for a device, without one and without the values of their inputs.

    Parameters
    ----------
    names : sequence of str
        Workloads.
    target : Any
        See `tvm_fusion.config.resolve_target`.
    dtype : str, optional
        Of all; by default each workload's own, else float16.
    scale : float
        Factor on the extents.
    tell : Callable
        Is given each row.
    """
    _, hw = resolve_target(target)
    rows = []
    for name in names:
        start = time.monotonic()
        try:
            found = _predicted(name, target, hw, dtype, scale)
        except Exception as error:  # a trial: recorded, and the next workload follows
            found = {"failure": reason(error)}
        rows.append(Predicted(name, **found, spent_s=round(time.monotonic() - start, 1)))
        tell(rows[-1])
    return rows


def _predicted(
    name: str, target: Any, hw: HardwareProfile, dtype: str | None, scale: float
) -> dict[str, Any]:
    kind = dtype or workloads.dtype_of(name, "float16")
    with torch.no_grad():
        instance = workloads.make(name, "meta", kind, scale)
        with FlopCounterMode(display=False) as counter:
            outputs = instance.module(*instance.inputs)
        outputs = outputs if isinstance(outputs, tuple) else (outputs,)
        planned = planned_function((instance.module, instance.inputs), target)
    flop = round(counter.get_total_flops() * instance.flop_share)
    return {
        **_of_plan(planned),
        "shape": instance.shape,
        "dtype": instance.dtype,
        "limit_us": limit_us(instance, outputs, flop, hw) + hw.launch_us,
    }


def _of_plan(planned: Planned) -> dict[str, Any]:
    plan, graph = planned.plan, planned.lowered.graph
    functions = {op.name: op.func or op.name for op in graph.ops}
    launches = [g for g in plan.groups if g.kernel_class not in FREE or g.kernel_class == _OPAQUE]
    others = [g for g in launches if g.kernel_class in _OTHERS]
    ours = Counter(g.kernel_class for g in launches if g.kernel_class not in _OTHERS)
    return {
        "launches": len(launches),
        "classes": dict(ours),
        "others": dict(Counter(functions[g.ops[0]] for g in others)),
        "predicted_us": plan.predicted_us,
    }


# ---- as text


def text(rows: Sequence[Predicted]) -> str:
    """A table of the rows, and of the classes of `held_classes`."""
    cells = [("workload", "dtype", "launches", "us", "limit", "of limit", "kernels", "others")]
    for row in rows:
        cells.append(
            (
                row.name,
                row.dtype,
                str(row.launches),
                f"{row.predicted_us:.1f}",
                f"{row.limit_us:.1f}",
                _ratio(row),
                row.failure or _counts(row.classes),
                _counts(row.others),
            )
        )
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    lines = ["  ".join(c.ljust(w) for c, w in zip(line, widths, strict=True)) for line in cells]
    return "\n".join([*(line.rstrip() for line in lines), "", *_by_class(rows)])


def _by_class(rows: Sequence[Predicted]) -> list[str]:
    """A line for each class that was drawn, and one for all."""
    held = {row.name: of for row in rows if (of := class_of(row.name))}
    lines = []
    for of in (*CLASSES, "all"):
        found = [r for r in rows if of == "all" or held.get(r.name) == of]
        ratios = [r.over_limit for r in found if not r.failure and r.predicted_us > 0]
        if not ratios:  # failures, and programs that the model knows nothing of
            continue
        others = sum((Counter(row.others) for row in found), Counter())
        lines.append(
            f"{of:20} {len(found):4} programs, predicted over limit: geometric mean "
            f"{statistics.geometric_mean(ratios):6.2f}, most {max(ratios):6.2f}; "
            f"launches {statistics.fmean(r.launches for r in found):5.2f} each; "
            f"{others.total()} by no class of ours{': ' if others else ''}{_counts(others)}"
        )
    return lines


def _ratio(row: Predicted) -> str:
    return f"{row.over_limit:.2f}{'+' if row.others else ''}"


def _counts(found: dict[str, int]) -> str:
    return ", ".join(f"{name} {n}" if n > 1 else name for name, n in sorted(found.items()))


def result(rows: Sequence[Predicted], target: Any, scale: float) -> dict[str, Any]:
    """The rows as JSON."""
    _, hw = resolve_target(target)
    told = [{k: v if v == v else None for k, v in asdict(row).items()} for row in rows]
    return {"profile": hw.name, "scale": scale, "rows": told}
