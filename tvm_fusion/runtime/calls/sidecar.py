"""A saved library, and the JSON file beside it: what the library does not say of itself."""

import contextlib
import json
import os
import sys
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import tvm
from tvm.support import cc

from ...errors import BuildError, InputError
from ...host.atomic_files import replace_file
from ...host.text_files import read_json, refuse_unwritable

# ---- Lines of TVM's C++ on standard error that say nothing to a user.


@contextlib.contextmanager
def without_lines(containing: str) -> Iterator[None]:
    """Hold back what is written to the file descriptor 2, and pass on all but some lines."""
    sys.stderr.flush()
    kept = os.dup(2)
    with tempfile.TemporaryFile() as held:
        os.dup2(held.fileno(), 2)
        try:
            yield
        finally:
            sys.stderr.flush()
            os.dup2(kept, 2)
            os.close(kept)
            held.seek(0)
            lines = held.read().splitlines(keepends=True)
            rest = b"".join(line for line in lines if containing.encode() not in line)
            if rest:
                os.write(2, rest)


# ----
_FORMAT = 1
_OF_SEVERAL = 2  # of several functions, which versions that know of none refuse
_WITH_FORMATS = 3  # of tensors with channels last, which versions that know of none refuse
_FORMATS = (_FORMAT, _OF_SEVERAL, _WITH_FORMATS)

# A warning for each constant of a module that has run: its virtual machine asked for their memory
# scopes by the operator [] of a map, which made an empty entry for each
_SCOPES = "Warning: Scope Saving:"


def export_executable(executable: Any, path: Path) -> None:
    """Write an executable as a shared library; raises InputError where the file cannot be written,
    BuildError where there is no compiler.
    """
    refuse_unwritable(path, "module")
    if cc.get_cc() is None:
        raise BuildError(
            f"cannot write the library {path}: no C++ compiler (g++ or clang++) on PATH; install "
            "one, or name one in CXX"
        )
    if not isinstance(executable, tvm.runtime.Executable):
        raise BuildError("a loaded module cannot be saved again: copy its file and its .json")
    try:
        with without_lines(containing=_SCOPES):
            executable.export_library(str(path))
    except (OSError, RuntimeError) as error:
        raise BuildError(
            f"cannot write the library {path}: {error}. It takes a writable folder and a C++ "
            "compiler (g++ or clang++) on PATH"
        ) from error


def write_sidecar(library: Path, facts: Mapping[str, Any]) -> None:
    """Write facts beside a library; TVM's containers become plain ones."""
    number = _OF_SEVERAL if "functions" in facts else _FORMAT
    if any(one.get("formats") for one in facts.get("functions", {"main": facts}).values()):
        number = _WITH_FORMATS
    facts = {"format": number, "tvm": tvm.__version__, **facts}
    replace_file(_sidecar(library), json.dumps(facts, indent=1, default=_plain) + "\n")


def read_sidecar(path: Path) -> dict[str, Any]:
    """Read what `write_sidecar` wrote beside a library.

    Raises
    ------
    InputError
        If a file is missing, broken, or of another version.
    """
    sidecar = _sidecar(path)
    for file in (path, sidecar):
        if not file.is_file():
            raise InputError(f"there is no file {file}; CompiledModule.save writes both")
    meta = read_json(sidecar, "description of a module")
    if not isinstance(meta, dict) or meta.get("format") not in _FORMATS:
        raise InputError(f"{sidecar} has not the format {_FORMAT}: compile and save again")
    if meta["tvm"] != tvm.__version__:
        raise InputError(
            f"{path} was built with TVM {meta['tvm']}, this is TVM {tvm.__version__}: compile and "
            "save again"
        )
    return meta


def _sidecar(path: Path) -> Path:
    return path.with_name(path.name + ".json")


def _plain(value: Any) -> Any:
    """Turn TVM's containers into plain ones, for JSON."""
    if isinstance(value, tvm.ir.Map):
        return dict(value.items())
    return list(value) if isinstance(value, tvm.ir.Array) else str(value)
