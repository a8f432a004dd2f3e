"""Work that is counted in place of seconds, which a busy machine stretches."""

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from cProfile import Profile
from typing import Any

from tvm_fusion.plan.legality import Evaluator


def calls_of(function: Callable[[], Any]) -> int:
    """Calls of functions, in Python and into C, that a call makes; the same in every run that finds
    the same caches.
    """
    with Profile() as profile:
        function()
    return sum(entry.callcount for entry in profile.getstats())


@contextmanager
def searched(monkeypatch) -> Iterator[Counter]:
    """What a plan search does: `asked`, groups that it asks about, and `costed`, those whose kernel
    class and time are found out because no equal group is known.
    """
    counts: Counter = Counter()
    group, evaluate = Evaluator.group, Evaluator._evaluate

    def asking(self, *arguments, **options):
        counts["asked"] += 1
        return group(self, *arguments, **options)

    def costing(self, *arguments, **options):
        counts["costed"] += 1
        return evaluate(self, *arguments, **options)

    with monkeypatch.context() as patch:
        patch.setattr(Evaluator, "group", asking)
        patch.setattr(Evaluator, "_evaluate", costing)
        yield counts
