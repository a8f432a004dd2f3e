"""What was best for kernels like this one: tried early."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING

from .choices import DEFAULT, Choice
from .select import chosen
from .tasks import CLASS, Task

if TYPE_CHECKING:
    from ..database import Database

MOST = 2


def favourites(task: Task, keeper: Database, choices: Sequence[Choice]) -> tuple[str, ...]:
    """The choices that won most often for other workloads of the same kernel class, of those that
    are offered here.
    """
    offered = {choice.text for choice in choices}
    won: Counter[str] = Counter()
    for workload in keeper.workloads():
        if str(workload.attrs.get(CLASS, "")) != task.kernel_class:
            continue
        trial = chosen(keeper.trials(workload), 0.0)
        if trial is not None and trial.text != DEFAULT and trial.text in offered:
            won[trial.text] += 1
    return tuple(text for text, _ in sorted(won.items(), key=lambda x: (-x[1], x[0]))[:MOST])
