"""Keeps the launches that `--measure` timed, for `calibrate --refit`.

They go to `samples/<device>.jsonl` in the user's cache folder (that of compiled kernels:
$TVM_FUSION_CACHE, or `tvm_fusion` in the platform's cache folder), one line a launch as
`cost.learned.samples` describes it: the numbers of the work and its times, no names of the model
and none of its data. With TVM_FUSION_KEEP_SAMPLES=0 nothing is kept.
"""

from __future__ import annotations

import datetime
import json
import logging
import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import tvm
from filelock import FileLock

from ..config import HardwareProfile
from ..cost.learned.samples import SAMPLES_VERSION, work_of
from ..host.cache_folder import cache_dir, make_folder
from ..plan.group_view import GroupView
from ..plan.legality import Evaluator
from ..plan.refusal import Refusal

if TYPE_CHECKING:
    from ..runtime.timing.launch_kernels import LaunchSpec
    from ..runtime.timing.plan_timing import PlanTimes
    from .plan_runner import PlanRunner

logger = logging.getLogger(__name__)

KEEP_VARIABLE = "TVM_FUSION_KEEP_SAMPLES"
MOST_BYTES = 16 << 20  # about 20,000 launches; then nothing more is kept


def samples_file(hw: HardwareProfile) -> Path:
    """Where the launches that were timed on a device are kept."""
    return cache_dir() / "samples" / f"{hw.name}.jsonl"


def keep(runner: PlanRunner, plans: Sequence[Any], times: Sequence[PlanTimes]) -> None:
    """Adds the launches of some plans to the file; a folder that cannot be written to is a warning.

    Parameters
    ----------
    runner : PlanRunner
        Which timed them.
    plans, times
        The plans and their times.
    """
    if os.environ.get(KEEP_VARIABLE, "1") in ("", "0"):
        return
    evaluator = Evaluator(runner.graph, runner.hw, runner.policy)
    lines = [
        line
        for plan, timed in zip(plans, times, strict=True)
        for line in _lines(runner, evaluator, runner.specs(plan), timed)
    ]
    file = samples_file(runner.hw)
    try:
        make_folder(file.parent)
        with FileLock(f"{file}.lock"):
            _append(file, lines, runner)
    except OSError as error:
        logger.warning("the times measured are not kept: %s", error)


def _append(file: Path, lines: Sequence[dict[str, Any]], runner: PlanRunner) -> None:
    size = file.stat().st_size if file.exists() else 0
    if size > MOST_BYTES:
        logger.info("%s is full: the times measured are not kept", file)
        return
    every = lines if size else [_header(runner), *lines]
    with file.open("a", encoding="utf-8") as out:
        out.write("".join(json.dumps(x, separators=(",", ":")) + "\n" for x in every))


def _lines(
    runner: PlanRunner, evaluator: Evaluator, specs: Sequence[LaunchSpec], times: PlanTimes
) -> list[dict[str, Any]]:
    """One line for each launch whose class the model asks as it was run."""
    found, written = [], set()
    for spec, us, spread in zip(specs, times.launches_us, times.launch_spread, strict=True):
        view = GroupView(runner.graph, spec.ops, spec.stores)
        fresh, written = len(written & set(view.inputs)), written | set(spec.stores)
        costed = evaluator.group(spec.ops, spec.stores)
        if isinstance(costed, Refusal) or costed.kernel.name != spec.kernel_class or us <= 0:
            continue
        kernel, hw = costed.kernel, runner.hw
        traffic = kernel.traffic(view, costed.fit, hw)
        resources = kernel.resources(view, costed.fit, hw)
        found.append(
            {
                "graph": f"measured:{runner.graph.fingerprint()}",
                "class": spec.kernel_class,
                "us": round(us, 4),
                "spread": round(spread, 4),
                "context": fresh,
                "work": work_of(costed.fit, traffic, resources),
            }
        )
    return found


def _header(runner: PlanRunner) -> dict[str, Any]:
    cuda = runner.device.type == "cuda"
    return {
        "version": SAMPLES_VERSION,
        "device": runner.hw.name,
        "date": datetime.date.today().isoformat(),
        "driver": _driver() if cuda else None,
        "cuda": runner.device.compute_version if cuda else None,
        "tvm": tvm.__version__,
        "command": "compile --measure",
    }


def _driver() -> str | None:
    """The version of the NVIDIA driver, where the system tells it."""
    try:
        words = Path("/proc/driver/nvidia/version").read_text().split()
    except OSError:
        return None
    return next((w for w in words if w[:1].isdigit() and "." in w), None)
