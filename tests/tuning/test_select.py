"""Which choice is taken: one that is surely faster than the untuned kernel."""

import random
from statistics import median

import pytest

from tvm_fusion.tuning.database.trial import Trial
from tvm_fusion.tuning.session.choices import CLASS_CHOICE, DEFAULT, chosen

FAST = "Way(way=fast)"


def trial(text, us, spread=0.0, count=45, error=0.0):
    """A trial whose samples have this mean and standard deviation."""
    draw = random.Random(text)
    samples = tuple(draw.gauss(us, spread) for _ in range(count)) if spread else (us,) * count
    return Trial(CLASS_CHOICE, text, "ok", median(samples), 0.0, samples, error)


@pytest.mark.parametrize(
    ("us", "spread", "taken"),
    [
        (9.0, 0.1, FAST),
        (9.95, 0.0, DEFAULT),  # faster by less than is asked for
        (9.8, 1.0, DEFAULT),  # the noise explains it
        (9.8, 0.1, FAST),
        (11.0, 0.1, DEFAULT),
    ],
)
def test_a_choice_has_to_be_surely_faster(us, spread, taken):
    trials = [trial(DEFAULT, 10.0, spread), trial(FAST, us, spread)]
    assert chosen(trials, 0.01).text == taken


def test_the_fastest_of_those_that_surely_are():
    trials = [trial(DEFAULT, 10.0, 0.1), trial(FAST, 9.5, 0.1), trial("Way(way=noisy)", 9.4, 2.0)]
    assert chosen(trials, 0.01).text == FAST


def test_finalists_count_and_short_trials_do_not():
    trials = [trial(DEFAULT, 10.0), trial(FAST, 5.0, count=9), trial("Way(way=final)", 9.0)]
    assert chosen(trials, 0.01).text == "Way(way=final)"


def test_one_sample_is_not_sure():
    trials = [trial(DEFAULT, 10.0, count=1), trial(FAST, 5.0, count=1)]
    assert chosen(trials, 0.01).text == DEFAULT


def test_numbers_that_nobody_compared_do_not_count():
    assert chosen([trial(DEFAULT, 10.0), trial(FAST, 5.0, error=None)], 0.01).text == DEFAULT
    assert chosen([trial(DEFAULT, 10.0, error=None), trial(FAST, 5.0)], 0.01) is None
    assert chosen([trial(FAST, 5.0)], 0.01) is None


def test_only_times_without_a_comparison_are_unchecked():
    found = [trial(FAST, 5.0), trial(FAST, 5.0, error=None), Trial(CLASS_CHOICE, FAST, "crash")]
    assert [t.checked for t in found] == [True, False, True]
