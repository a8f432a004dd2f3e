"""The TVM versions that this package runs on, checked at import.

TVM renames its Python API from release to release, and its wheel accepts tvm-ffi versions with
which `save_json`, `Schedule.tensorize` and every MetaSchedule database write crash the process.
Neither may surface as a puzzle somewhere in a compilation.

``setup.py`` reads the requirements from this file.
"""

import re

TVM_VERSION = "0.27.0.post1"
TVM_FFI_LOWEST = "0.1.14.post0"
TVM_FFI_BELOW = "0.1.15"

TVM_REQUIREMENTS = (
    f"apache-tvm[popen-pool]=={TVM_VERSION}",
    f"apache-tvm-ffi>={TVM_FFI_LOWEST},<{TVM_FFI_BELOW}",
)


def check() -> None:
    """Raise ImportError, with the command that repairs it, unless TVM and tvm-ffi are as pinned."""
    tvm, ffi = _installed("apache-tvm"), _installed("apache-tvm-ffi")
    if tvm == TVM_VERSION and ffi is not None and _ffi_fits(ffi):
        return
    requirements = " ".join(f"'{requirement}'" for requirement in TVM_REQUIREMENTS)
    raise ImportError(
        f"tvm_fusion needs apache-tvm {TVM_VERSION} and apache-tvm-ffi >= {TVM_FFI_LOWEST}, "
        f"< {TVM_FFI_BELOW}; found apache-tvm {tvm or 'not installed'}, "
        f"apache-tvm-ffi {ffi or 'not installed'}. Repair: python -m pip install {requirements}"
    )


def _installed(distribution: str) -> str | None:
    from importlib import metadata  # takes longer than all else that `--version` needs

    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None


def _ffi_fits(version: str) -> bool:
    return _key(TVM_FFI_LOWEST) <= _key(version) and _key(version)[:3] < _key(TVM_FFI_BELOW)[:3]


def _key(version: str) -> tuple[int, ...]:
    """Major, minor, patch and post release; a version without a post release sorts first."""
    match = re.match(r"(\d+)\.(\d+)\.(\d+)(?:\.post(\d+))?", version)
    return tuple(-1 if part is None else int(part) for part in match.groups()) if match else ()
