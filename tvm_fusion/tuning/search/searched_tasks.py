"""For which tasks MetaSchedule evolves schedules, and what it starts with."""

from __future__ import annotations

from collections.abc import Sequence

import tvm

from ...config import HardwareProfile
from ...kernels.cpu.contraction.panels import without_constants
from ..measure.trial_record import Trial
from ..session.choices import TRACE_CHOICE
from ..session.settings import Settings
from ..session.tasks import Task, without_stamps
from .task_schedules import Evolution, Search

BATCH = 8
LEFT_TO_TVM = ("fallback", "stock")  # classes whose kernels are TVM's own schedules on a GPU


def evolution_of(
    task: Task, hw: HardwareProfile, settings: Settings, known: Sequence[Trial]
) -> Evolution | None:
    """The schedules that compete with a task's untuned kernel; None where nothing is evolved.

    On a GPU these are for the operators that no kernel class of this package writes; on a CPU for
    all.
    """
    spaces = [space for space in ("own", "stock") if space in settings.spaces]
    if not spaces or (hw.kind == "cuda" and task.kernel_class not in LEFT_TO_TVM):
        return None
    workload = tvm.ir.save_json(without_constants(without_stamps(task.workload)))
    traces = [t for t in known if t.kind == TRACE_CHOICE]
    tried = [(t.text, t.us) for t in traces if t.checked]
    unchecked = sorted((t for t in traces if not t.checked), key=lambda t: (t.us, t.text))
    seeds = [(t.text, t.us) for t in unchecked[:BATCH]]
    searches = [
        Search(
            workload,
            space,
            seed=settings.seed,
            seeds=seeds if space == spaces[0] else (),
            known=tried,
            trials=settings.trials_per_task,
            batch=BATCH,
        )
        for space in spaces
    ]
    return Evolution(searches, settings.evolved_gain)
