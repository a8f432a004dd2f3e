"""Limits on the time that one compiler may take."""

import contextlib
import time

import pytest

from tvm_fusion.bench.patience import within


def test_patience_ends_code_that_catches_every_exception():
    def endless():
        with within(0.05):
            while True:
                with contextlib.suppress(Exception):
                    time.sleep(0.01)

    with pytest.raises(TimeoutError, match=r"within 0\.05 s"):
        endless()
    with within(0.05):
        pass
    time.sleep(0.1)  # the clock was stopped
