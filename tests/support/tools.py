"""What tests run beside the package: without it they are skipped, and fail where CI is "true"."""

import importlib
import os
import shutil
from types import ModuleType
from typing import NoReturn

import pytest


def require(program: str) -> str:
    """The path of a program, without which a test cannot run."""
    path = shutil.which(program)
    if path is None:
        _do_without(f"there is no {program} on PATH")
    return path


def require_module(name: str) -> ModuleType:
    """A module, without which a test cannot run."""
    try:
        return importlib.import_module(name)
    except ImportError as error:
        _do_without(f"there is no module {name}: {error}")


def _do_without(why: str) -> NoReturn:
    if os.environ.get("CI") == "true":
        pytest.fail(f"{why}: CI has to run what needs it")
    pytest.skip(why)
