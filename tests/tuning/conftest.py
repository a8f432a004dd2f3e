"""What tests of tuning share."""

import pytest

from tvm_fusion.tuning.measure.processes import stop_all

from ..support.tune_database import copy_of_sound
from ..support.tune_sessions import BUILDERS, MEASURER, STARTED, end_time_of_what_hangs, several


@pytest.fixture
def folder(tmp_path):
    """A sound database of one device, with `trials_of_all`."""
    return copy_of_sound(tmp_path / "D")


@pytest.fixture(autouse=True)
def no_process_stays():
    """Of those that a test started beside the shared ones."""
    yield
    shared = (*BUILDERS, MEASURER)
    stop_all([w for w in STARTED if w.busy or w not in shared])
    STARTED[:] = shared


@pytest.fixture(autouse=True, scope="session")
def no_process_stays_on():
    yield
    stop_all([*BUILDERS, MEASURER])


@pytest.fixture
def tested(monkeypatch, tmp_path_factory):
    """The class `Several` with all its ways."""
    end_time_of_what_hangs(monkeypatch, tmp_path_factory)
    with several():
        yield


@pytest.fixture
def two_ways():
    """The class `Several` with a way that is slow and one that is fast."""
    with several(("plain", "fast")):
        yield
