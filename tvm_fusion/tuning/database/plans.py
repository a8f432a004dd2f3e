"""Plans beside the trials: ``plans/<key>.json``, each with a checksum."""

from __future__ import annotations

import json
import re
from contextlib import suppress
from pathlib import Path
from typing import Any

from ...errors import InputError
from ...host.atomic_files import replace_file
from .files import PLANS, free_name
from .folder_state import Problem
from .lines import canonical, digest

_KEY = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,199}")


def plan_file(folder: Path, key: str) -> Path:
    """Where a plan lies; ValueError for a key that is no name of a file."""
    if not _KEY.fullmatch(key):
        raise ValueError(f"{key!r} is no key of a plan: letters, digits, '.', '_' and '-'")
    return folder / PLANS / f"{key}.json"


def plan_keys(folder: Path) -> list[str]:
    """The keys of the plans in a folder, sorted."""
    try:
        names = [path.name for path in (folder / PLANS).iterdir()]
    except OSError:
        return []
    keys = [name.removesuffix(".json") for name in names if name.endswith(".json")]
    return sorted(key for key in keys if _KEY.fullmatch(key))


def write_plan(folder: Path, key: str, data: dict[str, Any]) -> None:
    """Write a plan in one step; ValueError if it is not JSON of finite numbers."""
    path = plan_file(folder, key)
    body = {"v": 1, "key": key, "plan": json.loads(json.dumps(data, allow_nan=False))}
    text = json.dumps({**body, "checksum": digest(canonical(body))})
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(f"cannot write {path}: {error.strerror or error}") from error
    replace_file(path, text + "\n")


def read_plan(folder: Path, key: str) -> tuple[dict[str, Any] | None, Problem | None]:
    """A plan, or None; with what is wrong with its file."""
    path = plan_file(folder, key)
    try:
        body = json.loads(path.read_text(encoding="utf-8"))
        checksum = body.pop("checksum")
        if checksum == digest(canonical(body)) and (body["v"], body["key"]) == (1, key):
            return body["plan"], None
        why = "the checksum is wrong, or it is the plan of another key"
    except FileNotFoundError:
        return None, None
    except OSError as error:
        why = error.strerror or str(error)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        why = "not a plan"
    return None, Problem(f"{PLANS}/{key}.json", why, "moved to the quarantine")


def set_aside(folder: Path, key: str) -> bool:
    """Move the file of a damaged plan to the quarantine; whether the folder could be written."""
    with suppress(OSError):
        plan_file(folder, key).replace(free_name(folder, f"plan_{key}", ".json"))
        return True
    return False
