"""The JSON file beside a saved library: what the library does not say of itself."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import tvm

from ...errors import InputError

_FORMAT = 1
_OF_SEVERAL = 2  # of several functions, which versions that know of none refuse


def write_sidecar(library: Path, facts: Mapping[str, Any]) -> None:
    """Write facts beside a library; TVM's containers become plain ones."""
    number = _OF_SEVERAL if "functions" in facts else _FORMAT
    facts = {"format": number, "tvm": tvm.__version__, **facts}
    _sidecar(library).write_text(json.dumps(facts, indent=1, default=_plain) + "\n")


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
    try:
        meta = json.loads(sidecar.read_text())
    except ValueError as error:
        raise InputError(f"{sidecar} is no JSON: {error}") from error
    if not isinstance(meta, dict) or meta.get("format") not in (_FORMAT, _OF_SEVERAL):
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
