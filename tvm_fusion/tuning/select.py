"""Which of the trials of a workload is the kernel to use."""

from __future__ import annotations

from collections.abc import Iterable

from .choices import DEFAULT
from .trial_record import Trial


def chosen(trials: Iterable[Trial], certain_gain: float) -> Trial | None:
    """The fastest choice, if it is surely faster than the untuned one; else the untuned one.

    Of trials with different numbers of samples those with at least as many as the untuned kernel's
    count: after a final these are the finalists, and the best of many short trials, which looks
    faster than it is, does not win over them. Trials whose numbers nobody compared (of another
    tuner) do not count.

    Parameters
    ----------
    trials : iterable of Trial
        Of one workload, each choice once.
    certain_gain : float
        Share by which a choice must be faster than the untuned one.

    Returns
    -------
    Trial or None
        None where the untuned kernel was not measured.
    """
    ok = {t.text: t for t in trials if t.us is not None and t.error is not None}
    untuned = ok.get(DEFAULT)
    if untuned is None:
        return None
    fair = [t for t in ok.values() if len(t.samples_us) >= len(untuned.samples_us)]
    best = min(fair, key=lambda t: (t.us, t.text))
    return best if best.us < (1 - certain_gain) * untuned.us else untuned
