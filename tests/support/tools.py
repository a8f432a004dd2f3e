"""Programs that tests run: without one they are skipped, and fail where CI is "true"."""

import os
import shutil

import pytest


def require(program: str) -> str:
    """The path of a program, without which a test cannot run."""
    path = shutil.which(program)
    if path is None:
        why = f"there is no {program} on PATH"
        if os.environ.get("CI") == "true":
            pytest.fail(f"{why}: CI has to run what needs it")
        pytest.skip(why)
    return path
