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


def test_a_compiler_that_takes_it_for_its_own_failure_is_stopped_as_well():
    def does_without():
        with within(0.05), contextlib.suppress(RuntimeError):
            try:
                time.sleep(5)
            except BaseException as error:  # as a callback of TVM passes it on
                raise RuntimeError from error

    with pytest.raises(TimeoutError, match=r"within 0\.05 s"):
        does_without()


def test_errors_of_the_body_are_its_own():
    with pytest.raises(ValueError, match="mine"), within(5):
        raise ValueError("mine")
