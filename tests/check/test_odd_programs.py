"""Programs of benchmarks at odd sizes; results of all are in `tests/results/odd_programs.json`."""

import pytest

from tests.right_programs import judged
from tests.support.odd_programs import PROGRAMS, every, odd_program


def assert_right(name, change):
    outcome = judged(odd_program(name, change))
    assert outcome.near <= 1, f"{outcome} is wrong: torch says so"
    assert outcome.called_wrong == "", outcome


@pytest.mark.one_in(4)
@pytest.mark.parametrize("name", ["deep product", "batch norm", "largest of windows"])
def test_a_few_are_right_at_odd_sizes(name):
    assert_right(name, "x 5 / 7")


@pytest.mark.nightly
@pytest.mark.parametrize(("name", "change"), list(every()))
def test_all_are_right_at_odd_sizes(name, change):
    assert_right(name, change)


def test_each_extent_is_changed():
    one = odd_program("group norm", "+ 1")
    assert [tuple(x.shape) for x in one.inputs] == [(3, 5 * 5, 17, 17)]
    assert len(PROGRAMS) >= 60
