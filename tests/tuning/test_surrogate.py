"""Beliefs about choices that were not tried."""

import math

import numpy as np
import pytest

from tvm_fusion.tuning.search.surrogate import Spread, Surrogate, expected_gain
from tvm_fusion.tuning.session.choices import fields_of, text_of

SPREAD = Spread(rank=0.1, task=0.15, noise=0.01, length=2.0)
TEXTS = [f"C(threads={t},unroll={u})" for t in (64, 128, 256, 512) for u in (1, 2, 4)]


def surrogate(predicted=None):
    return Surrogate(TEXTS, predicted or [100.0] * len(TEXTS), SPREAD)


def test_without_measurements_the_prediction_is_the_belief():
    mean, deviation = surrogate([90.0 + i for i in range(12)]).beliefs({})
    assert np.exp(mean) == pytest.approx([90.0 + i for i in range(12)])
    assert deviation == pytest.approx([math.hypot(0.1, 0.15)] * 12)


def test_a_measurement_moves_all_choices_and_those_like_it_most():
    mean, deviation = surrogate().beliefs({0: 80.0})
    assert math.exp(mean[0]) == pytest.approx(80.0, rel=0.01)
    assert deviation[0] < 0.011
    moved = math.log(100) - mean
    assert moved.min() > 0.1  # the error that all predictions of a task share
    near, far = TEXTS.index("C(threads=64,unroll=2)"), TEXTS.index("C(threads=512,unroll=4)")
    assert moved[near] > moved[far]
    assert deviation[near] < deviation[far]


def test_all_beliefs_are_exact_where_everything_was_measured():
    times = {i: 50.0 + 7 * i for i in range(12)}
    mean, deviation = surrogate().beliefs(times)
    assert np.exp(mean) == pytest.approx(list(times.values()), rel=0.05)
    assert deviation.max() < 0.011


def test_choices_that_take_no_time_have_finite_beliefs():
    mean, _ = Surrogate(TEXTS, [0.0] * 12, SPREAD).beliefs({0: 1.0})
    assert np.isfinite(mean).all()


@pytest.mark.parametrize(("mean_us", "deviation"), [(100.0, 0.1), (90.0, 0.05), (130.0, 0.2)])
def test_the_expected_gain_is_that_of_draws(mean_us, deviation):
    draws = np.exp(np.random.default_rng(0).normal(math.log(mean_us), deviation, 400_000))
    wanted = np.maximum(0.0, 100.0 - draws).mean()
    assert expected_gain(math.log(mean_us), deviation, 100.0) == pytest.approx(wanted, rel=0.02)


def test_a_certain_choice_gains_the_difference_or_nothing():
    assert expected_gain(math.log(80.0), 0.0, 100.0) == pytest.approx(20.0)
    assert expected_gain(math.log(120.0), 0.0, 100.0) == 0.0


def test_texts_have_the_fields_of_configurations():
    from tvm_fusion.kernels.row.config import Form, RowConfig

    fields = fields_of(text_of(RowConfig(Form.LOOP, threads=128, prefetch=True)))
    assert fields["type"] == "RowConfig"
    assert (fields["form"], fields["threads"], fields["prefetch"]) == ("loop", "128", "True")
    assert text_of(None) == "default"
    assert fields_of("default") == {"type": "default"}
