"""A saved library, and the JSON file beside it: what the library does not say of itself."""

import contextlib
import json
import os
import struct
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import tvm
from tvm.support import cc

from ...errors import BuildError, InputError
from ...host.atomic_files import replace_bytes, replace_file
from ...host.text_files import read_json, refuse_unwritable

# ---- Lines of TVM's C++ on standard error that say nothing to a user.


_STANDARD_ERROR = threading.RLock()


@contextlib.contextmanager
def without_lines(containing: str) -> Iterator[None]:
    """Hold back what is written to the file descriptor 2, and pass on all but some lines; for one
    thread at a time, as a process has one such.
    """
    with _STANDARD_ERROR, tempfile.TemporaryFile() as held:
        sys.stderr.flush()
        kept = os.dup(2)
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
_WITH_CONVENTION = 4  # of what stays between calls, which versions that know of none refuse
_FORMATS = (_FORMAT, _OF_SEVERAL, _WITH_FORMATS, _WITH_CONVENTION)

# A warning for each constant of a module that has run: its virtual machine asked for their memory
# scopes by the operator [] of a map, which made an empty entry for each
_SCOPES = "Warning: Scope Saving:"


def export_executable(executable: Any, path: Path) -> None:
    """Write an executable as a shared library; raises InputError where the file cannot be written,
    BuildError where there is no compiler.
    """
    refuse_unwritable(path, "module")
    library_of(executable, path)(path)


def library_of(executable: Any, place: Path) -> Callable[[Path], None]:
    """What writes an executable as a shared library: on any thread, if its virtual machine was made
    on this one.

    Parameters
    ----------
    executable : VMExecutable
    place : Path
        Where it will lie in the end, for errors.

    Raises
    ------
    BuildError
        As `export_executable`; so does what is returned.
    """
    if cc.get_cc() is None:
        raise BuildError(
            f"cannot write the library {place}: no C++ compiler (g++ or clang++) on PATH; install "
            "one, or name one in CXX"
        )
    if not isinstance(executable, tvm.runtime.Executable):
        raise BuildError("a loaded module cannot be saved again: copy its file and its .json")
    with _build_errors(place):
        pack = _packed_imports(executable.mod)

    def write(path: Path) -> None:
        with _build_errors(place):
            executable.export_library(str(path), fpack_imports=pack)

    return write


def _packed_imports(mod: Any) -> Callable[..., str] | None:
    """The imports of a module for `export_library`; None where that packs them itself."""
    host = next((m for m in mod._collect_dso_modules() if m.kind == "llvm"), None)
    if host is None:
        return None
    pack = tvm.get_global_func("runtime.ModulePackImportsToLLVM")
    with without_lines(containing=_SCOPES):
        packed = pack(mod, False, host["_get_target_string"](), "")

    def write(_mod: Any, _is_system: bool, prefix: str, folder: str) -> str:
        path = str(Path(folder, f"{prefix}devc.o"))
        packed.write_to_file(path)
        return path

    return write


@contextlib.contextmanager
def _build_errors(place: Path) -> Iterator[None]:
    try:
        yield
    except (OSError, RuntimeError) as error:
        raise BuildError(
            f"cannot write the library {place}: {error}. It takes a writable folder and a C++ "
            "compiler (g++ or clang++) on PATH"
        ) from error


def write_sidecar(library: Path, facts: Mapping[str, Any]) -> None:
    """Write facts beside a library; TVM's containers become plain ones."""
    number = _OF_SEVERAL if "functions" in facts else _FORMAT
    if any(one.get("formats") for one in facts.get("functions", {"main": facts}).values()):
        number = _WITH_FORMATS
    if facts.get("convention"):
        number = _WITH_CONVENTION
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
    if meta.get("tvm") != tvm.__version__:
        raise InputError(
            f"{path} was built with TVM {meta.get('tvm')}, this is TVM {tvm.__version__}: compile "
            "and save again"
        )
    return meta


def refuse_cut(library: Path) -> None:
    """Raise InputError for a library that ends before its headers say: mapping what is not there
    would end the process.
    """
    with library.open("rb") as file:
        head = file.read(64)
    end = 0  # of what is no library, loading it tells
    if len(head) == 64 and head[:5] == b"\x7fELF\x02":  # of 64 bits
        offset, (size, count) = (
            struct.unpack_from("<Q", head, 40),
            struct.unpack_from("<HH", head, 58),
        )
        end = offset[0] + size * count
    if library.stat().st_size < end:
        raise InputError(
            f"{library} is damaged: it ends after {library.stat().st_size} bytes of {end}; copy it "
            "again, or save the module again"
        )


@contextlib.contextmanager
def damage_named(library: Path) -> Iterator[None]:
    """What cannot be made of the facts beside a library is an InputError that names their file."""
    try:
        yield
    except InputError:
        raise
    except (LookupError, TypeError, ValueError, AttributeError, SyntaxError, RuntimeError) as error:
        what = f"{type(error).__name__}: {error}".splitlines()[0]
        raise InputError(
            f"{_sidecar(library)} is damaged ({what}): save the module again, or copy the file "
            "again from where the library came from"
        ) from error


def write_state(library: Path, values: Mapping[str, Any]) -> None:
    """Write tensors beside a library, as `tvm.runtime.save_param_dict` does."""
    tensors = {name: tvm.runtime.from_dlpack(value) for name, value in values.items()}
    replace_bytes(_state(library), bytes(tvm.runtime.save_param_dict(tensors)))


def read_state(library: Path) -> dict[str, Any]:
    """Read what `write_state` wrote; raises InputError where that is missing or damaged."""
    path = _state(library)
    try:
        return dict(tvm.runtime.load_param_dict(path.read_bytes()).items())
    except (OSError, RuntimeError, ValueError) as error:
        raise InputError(
            f"{path}: the tensors that the module keeps between calls cannot be read: {error}; "
            "CompiledModule.save writes them beside the library: copy the file too, or save again"
        ) from error


def _state(library: Path) -> Path:
    return library.with_name(library.name + ".params")


def _sidecar(path: Path) -> Path:
    return path.with_name(path.name + ".json")


def _plain(value: Any) -> Any:
    """Turn TVM's containers into plain ones, for JSON."""
    if isinstance(value, tvm.ir.Map):
        return dict(value.items())
    return list(value) if isinstance(value, tvm.ir.Array) else str(value)
