"""What becomes of a test whose program is missing, and which of the cases of a test run always."""

import pytest

from .support.tools import require, require_module


def test_a_program_that_is_there_is_found(tmp_path, monkeypatch):
    program = tmp_path / "nvcc"
    program.write_text("#!/bin/sh\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert require("nvcc") == str(program)


@pytest.mark.parametrize(
    ("variable", "outcome"),
    [
        ("", pytest.skip.Exception),
        ("false", pytest.skip.Exception),
        ("true", pytest.fail.Exception),
    ],
)
def test_without_it_a_test_is_skipped_and_fails_in_ci(tmp_path, monkeypatch, variable, outcome):
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("CI", variable)
    with pytest.raises(outcome, match="there is no nvcc on PATH"):
        require("nvcc")
    with pytest.raises(outcome, match="there is no module no_such_module"):
        require_module("no_such_module")


@pytest.mark.one_in(3)
@pytest.mark.parametrize(("row", "twice"), [pytest.param(n, 2 * n, id=f"{n}") for n in range(5)])
@pytest.mark.parametrize("column", range(4))
def test_of_cases_one_in_three_runs_always_and_the_others_nightly(request, row, twice, column):
    nightly = request.node.get_closest_marker("nightly") is not None
    assert nightly == ((row + column) % 3 != 0)
    assert twice == 2 * row  # a list of tuples counts once
