"""What becomes of a test whose program is missing."""

import pytest

from .tools import require


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
