"""The search strategy of one task: which of its choices are measured next.

    generate_measure_candidates    the untuned kernel, favourites of kernels like it, configurations
                                   of its class as the cost model and what was measured rank them;
                                   then batches of schedules (`evolve`)
    notify_runner_results          what came of them

A task ends, as far as MetaSchedule is concerned, when no trial is expected to save enough, or when
the session ends.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import tvm
from tvm import s_tir, tirx
from tvm.ir.utils import derived_object
from tvm.s_tir import meta_schedule as ms
from tvm.s_tir.meta_schedule.search_strategy import MeasureCandidate

from ...errors import Unsupported
from ...kernels.cpu.contraction.panels import without_constants
from ..database.replay import module_of
from ..session.choices import TRACE_CHOICE, Choice
from ..session.settings import Settings
from ..session.task_state import TaskState
from ..session.tasks import without_stamps
from .evolve import Evolved, arguments
from .space import annotate

logger = logging.getLogger(__name__)


class Session(Protocol):
    """What a search knows of the session: what a trial has to save, when to end, what came of
    candidates.
    """

    settings: Settings

    @property
    def left(self) -> int: ...

    @property
    def is_over(self) -> bool: ...

    @property
    def least_us(self) -> float: ...

    def is_late_for(self, seconds: float) -> bool: ...

    def guarded(self, function: Callable, *arguments: Any) -> Any: ...

    def proposed(self, state: Any, choice: Choice, candidate: MeasureCandidate) -> Any: ...

    def measured(self, mod: tvm.IRModule, result: Any) -> None: ...


@derived_object
class TaskSearch(ms.search_strategy.PySearchStrategy):
    """See the module docstring.

    Parameters
    ----------
    state : TaskState
    session : Session
    """

    def __init__(self, state: TaskState, session: Session) -> None:
        super().__init__()
        self.state, self.session = state, session
        self._evolved: Evolved | None = None
        self._batch = 1
        self._model: Any = None
        self._schedules: list[str] = []  # of the last batch, and the best time before it
        self._before_us: float | None = None

    def _initialize_with_tune_context(self, context: ms.TuneContext) -> None:
        self._target = context.target

    def pre_tuning(
        self,
        max_trials: int,
        num_trials_per_iter: int,
        design_spaces: Sequence[s_tir.Schedule],
        database: Any = None,
        cost_model: Any = None,
    ) -> None:
        """Takes the size of a batch and the model that ranks schedules."""
        self._batch, self._model = num_trials_per_iter, cost_model

    def post_tuning(self) -> None:
        """Nothing."""

    def generate_measure_candidates(self) -> list[MeasureCandidate] | None:
        """The next batch; None at the end."""
        return self.session.guarded(self._next) or None

    def notify_runner_results(
        self, candidates: Sequence[MeasureCandidate], results: Sequence[Any]
    ) -> None:
        """Takes what came of a batch."""
        self.session.guarded(self._tell, candidates, results)

    def clone(self) -> TaskSearch:
        """Another search of the same task."""
        return TaskSearch(self.state, self.session)

    def _next(self) -> list[MeasureCandidate]:
        session, count = self.session, min(self._batch, self.session.left)
        if session.is_over or count < 1:
            return []
        choices = self.state.next_choices(count, session.least_us)
        found = [(choice, self._configuration(choice)) for choice in choices]
        return [session.proposed(self.state, *one) for one in found or self._evolve(count)]

    def _configuration(self, choice: Choice) -> MeasureCandidate:
        sch = s_tir.Schedule(module_of(self.state.task.workload))
        annotate(sch, len(self.state.choices), self.state.choices.index(choice))
        return MeasureCandidate(sch, arguments(sch))

    def _evolve(self, count: int) -> list[tuple[Choice, MeasureCandidate]]:
        """A batch of schedules, where that is worth its time."""
        state, session = self.state, self.session
        self._schedules = []
        gain_us = state.evolved_gain_us(self._batch)
        if gain_us < session.least_us or not gain_us or session.is_late_for(self._took_s):
            return []
        try:
            if self._evolved is None:
                self._evolved = self._search()
            proposed = self._evolved.next(min(count, state.left))
        except Unsupported as why:
            logger.info("%s: no schedules: %s", state.task.name, why)
            proposed = []
        if not proposed or self._took_s > session.settings.evolve_timeout_s:
            state.evolved_share = 0.0
        self._schedules = [text for text, _ in proposed]
        self._before_us = state.best_us
        return [(Choice(TRACE_CHOICE, text), candidate) for text, candidate in proposed]

    @property
    def _took_s(self) -> float:
        return self._evolved.seconds if self._evolved is not None else 0.0

    def _search(self) -> Evolved:
        state = self.state
        return Evolved(
            function_of(state.task.workload),
            self._target,
            self._model,
            known=state.schedules,
            seeds=state.seeds,
            trials=state.settings.trials_per_task,
            batch=self._batch,
            seed=state.settings.seed,
        )

    def _tell(self, candidates: Sequence[MeasureCandidate], results: Sequence[Any]) -> None:
        for candidate, result in zip(candidates, results, strict=True):
            self.session.measured(candidate.sch.mod, result)
        if self._schedules and self._evolved is not None:
            self._evolved.tell([(t, us) for t, us in self.state.schedules if t in self._schedules])
            self.state.judge(self._schedules, self._before_us)
            self._schedules = []


def function_of(workload: tirx.PrimFunc) -> tirx.PrimFunc:
    """The function that schedules of a workload are of."""
    return without_constants(without_stamps(workload))
