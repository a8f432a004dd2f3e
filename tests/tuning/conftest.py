"""What tests of tuning share."""

import pytest

from ..support.tune_database import copy_of_sound


@pytest.fixture
def folder(tmp_path):
    """A sound database of one device, with `trials_of_all`."""
    return copy_of_sound(tmp_path / "D")
