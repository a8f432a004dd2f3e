"""The cost model that ranks the candidates of a search: the analytic guess, later a learned one."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from tvm.ir.utils import derived_object
from tvm.s_tir import meta_schedule as ms

from .schedule_features import Features, guess_us

EARLY_STOPPING_ROUNDS = 20
LEAST_SCORE = 1e-3  # the model's scores are not bounded; a time needs one above 0


@derived_object
class Judge(ms.cost_model.PyCostModel):
    """Scores candidates: 1 for the best measured one, 0 for the worst thinkable.

    Scores are those of `XGBModel` on `Features`, once it has `warm` measurements; before that, the
    ratio of the smallest analytic time among the candidates to each one's.

    Parameters
    ----------
    extractor : Features
    warm : int
    seed : int
    """

    def __init__(self, extractor: Features, warm: int, seed: int) -> None:
        super().__init__()
        self.extractor = extractor
        self.warm = warm
        self.best_us = float("inf")
        self.measured = 0
        config = ms.cost_model.xgb_model.XGBConfig(seed=seed, nthread=1)
        self.learned = ms.cost_model.XGBModel(
            extractor=extractor,
            config=config,
            num_warmup_samples=0,
            early_stopping_rounds=EARLY_STOPPING_ROUNDS,
            verbose_eval=0,
        )

    def load(self, path: str) -> None:
        """Reads the learned model."""
        self.learned.load(path)

    def save(self, path: str) -> None:
        """Writes the learned model."""
        self.learned.save(path)

    def update(
        self,
        context: ms.TuneContext,
        candidates: list[ms.MeasureCandidate],
        results: list[ms.runner.RunnerResult],
    ) -> None:
        """Learns from measurements; all of them have a time."""
        if not candidates:
            return
        times = [float(np.median([float(s) for s in r.run_secs])) for r in results]
        self.best_us = min(self.best_us, *(t * 1e6 for t in times))
        self.measured += len(candidates)
        self.learned.update(context, candidates, results)

    def predict(self, context: ms.TuneContext, candidates: list[ms.MeasureCandidate]) -> np.ndarray:
        """A score for each candidate."""
        if self.is_warm():
            return self.learned.predict(context, candidates)
        guesses = self._guesses(candidates)
        return guesses.min() / guesses

    def predicted_us(
        self, context: ms.TuneContext, candidates: list[ms.MeasureCandidate]
    ) -> list[float]:
        """Microseconds of each candidate."""
        if not self.is_warm():
            return self._guesses(candidates).tolist()
        scores = self.learned.predict(context, candidates)
        return [self.best_us / max(LEAST_SCORE, float(score)) for score in scores]

    def is_warm(self) -> bool:
        """Whether the learned model is the one that answers."""
        return self.measured >= self.warm and self.learned.booster is not None

    def _guesses(self, candidates: Sequence[ms.MeasureCandidate]) -> np.ndarray:
        guesses = [guess_us(self.extractor.columns(c)) for c in candidates]
        return np.maximum(1e-3, guesses)
