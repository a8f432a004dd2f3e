"""Reading files of users' whole: what cannot be read is an error that says why, and what to do."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from ..errors import InputError


def read_text(path: str | Path, what: str, error: type[InputError] = InputError) -> str:
    """The text of a file.

    Parameters
    ----------
    path : str or Path
    what : str
        What the file is to be, for messages: "plan".
    error : type
        Of what is raised.

    Raises
    ------
    InputError
        There is no such file, it is a folder, may not be read, or is no text in UTF-8.
    """
    try:
        return Path(path).read_text(encoding="utf-8")
    except FileNotFoundError:
        raise error(f"{path}: there is no such {what} file") from None
    except IsADirectoryError:
        raise error(f"{path} is a folder, no {what}: name a file in it") from None
    except UnicodeDecodeError as found:
        raise error(
            f"{path}: no {what}, and no text in UTF-8: byte {found.start} is "
            f"{found.object[found.start]:#04x}; name another file"
        ) from None
    except OSError as found:
        raise error(
            f"{path}: the {what} cannot be read: {found.strerror}; make it readable"
        ) from found


def read_json(path: str | Path, what: str, error: type[InputError] = InputError) -> Any:
    """The value of a JSON file; raises as `read_text`, and where it is empty or broken."""
    text = read_text(path, what, error)
    if not text.strip():
        raise error(f"{path}: the {what} is empty: write it again")
    try:
        return json.loads(text)
    except json.JSONDecodeError as found:
        where = f"line {found.lineno}, column {found.colno}"
        raise error(
            f"{path}: not JSON, so no {what}: {found.msg} at {where}; mend it, or write it again"
        ) from found
    except RecursionError:
        raise error(
            f"{path}: no {what}: its lists are nested too deep; name another file"
        ) from None


def refuse_unwritable(path: str | Path, what: str) -> None:
    """Raises InputError where a file cannot be written, before what it is to hold is made."""
    path = Path(path)
    folder = path.absolute().parent
    if path.is_dir():
        raise InputError(f"cannot write the {what} {path}: it is a folder; name a file in it")
    if not folder.is_dir():
        raise InputError(f"cannot write the {what} {path}: there is no such directory")
    if not os.access(path if path.exists() else folder, os.W_OK):
        raise InputError(f"cannot write the {what} {path}: no permission; name another folder")
