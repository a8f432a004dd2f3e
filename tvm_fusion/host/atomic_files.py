"""Writing files that others may read at the same time."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable
from pathlib import Path

from ..errors import InputError


def replace_file(path: Path, text: str, check: Callable[[Path], object] | None = None) -> None:
    """As `replace_bytes`, of a text in UTF-8."""
    replace_bytes(path, text.encode(), check)


def replace_bytes(
    path: Path, content: bytes, check: Callable[[Path], object] | None = None
) -> None:
    """Write a file so that it is the old one or the new one at any time, never a part.

    Parameters
    ----------
    path : Path
        Its permissions stay; a new file has those that the umask leaves.
    content : bytes
    check : callable, optional
        Gets the new file before it takes the place of the old one; what it raises leaves the old
        one where it is.

    Raises
    ------
    InputError
        The folder cannot be written.
    """
    temporary = None
    try:
        with tempfile.NamedTemporaryFile(
            dir=path.parent, prefix=f".{path.name}.", delete=False
        ) as file:
            temporary = Path(file.name)
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        if check is not None:
            check(temporary)
        temporary.chmod(path.stat().st_mode & 0o777 if path.exists() else 0o666 & ~umask())
        os.replace(temporary, path)
    except BaseException as error:
        if temporary is not None:
            temporary.unlink(missing_ok=True)
        if isinstance(error, OSError):
            raise InputError(
                f"cannot write {path}: {error.strerror}; make the folder writable, or name another"
            ) from error
        raise


def umask() -> int:
    """The mask of this process; setting it to read it would be seen by other threads."""
    try:
        lines = Path("/proc/self/status").read_text().splitlines()
    except OSError:  # no Linux
        lines = []
    for line in lines:
        if line.startswith("Umask:"):
            return int(line.split()[1], 8)
    return 0o077  # a kernel before 4.7, or another system
