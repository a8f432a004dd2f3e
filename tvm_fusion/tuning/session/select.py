"""Which of the trials of a workload is the kernel to use."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable

from ...check.sequential import STANDARD_ERRORS
from ..measure.trial_record import Trial
from .choices import DEFAULT


def chosen(trials: Iterable[Trial], certain_gain: float) -> Trial | None:
    """The fastest choice of those that are surely faster than the untuned one; else that one.

    Of trials with different numbers of samples those with at least as many as the untuned kernel's
    count: after a final these are the finalists, and the best of many short trials, which looks
    faster than it is, does not win over them. Trials that are not `checked` do not count.

    Parameters
    ----------
    trials : iterable of Trial
        Of one workload, each choice once.
    certain_gain : float
        Share by which a choice must be faster than the untuned one.

    Returns
    -------
    Trial or None
        None where the untuned kernel was not measured and checked.
    """
    ok = {t.text: t for t in trials if t.ok and t.checked}
    untuned = ok.get(DEFAULT)
    if untuned is None:
        return None
    fair = [t for t in ok.values() if len(t.samples_us) >= len(untuned.samples_us)]
    faster = [t for t in fair if is_surely_faster(t, untuned, certain_gain)]
    return min(faster, key=lambda t: (t.us, t.text), default=untuned)


def is_surely_faster(trial: Trial, untuned: Trial, certain_gain: float) -> bool:
    """Whether the median is so much shorter, and the means differ by more than noise explains.

    That is `check.sequential.STANDARD_ERRORS` standard errors of the difference of two means with
    unequal variances (Welch 1947).
    """
    if not trial.us < (1 - certain_gain) * untuned.us:
        return False
    ours, theirs = trial.samples_us, untuned.samples_us
    if min(len(ours), len(theirs)) < 2:
        return False
    error = math.hypot(*(statistics.stdev(s) / math.sqrt(len(s)) for s in (ours, theirs)))
    return statistics.mean(theirs) - statistics.mean(ours) > STANDARD_ERRORS * error
