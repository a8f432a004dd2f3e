"""CUDA source to machine code, with a cache on disk.

`install()` puts `compile_source` behind TVM's `tvm_callback_cuda_compile`, so that every CUDA
module of the process goes through the cache, at build time and when a saved library is loaded.
An entry is keyed by all that it was built from: source, compiler and its version, architecture,
flags. It lives in one file, written under a lock, renamed into place, and checked by size and hash
when read; a damaged entry counts as missing.
"""

import hashlib
import json
import logging
import os
import tempfile
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from contextvars import ContextVar
from functools import cache
from pathlib import Path
from typing import Any

import tvm_ffi

from ..errors import BuildError
from .cuda_compiler import Compiler, DeviceCode, cuda_arch, find_compiler

CACHE_VARIABLE = "TVM_FUSION_CACHE"
_CALLBACK = "tvm_callback_cuda_compile"
_MAGIC = b"tvm_fusion cubin 1\n"
_LOCK_TIMEOUT_S = 600  # the slowest kernel known takes ptxas about a minute
_NO_CODE = b"\x7fELF"
_deferred: ContextVar[list[str] | None] = ContextVar("deferred", default=None)
_log = logging.getLogger(__name__)


def cache_dir() -> Path:
    """Return the folder of the cache: $TVM_FUSION_CACHE, or the platform's cache folder."""
    named = os.environ.get(CACHE_VARIABLE)
    if named:
        return Path(named).expanduser()
    base = os.environ.get("XDG_CACHE_HOME") or os.environ.get("LOCALAPPDATA") or "~/.cache"
    return Path(base).expanduser() / "tvm_fusion"


def entry_key(source: str, arch: str, compiler: Compiler) -> str:
    """Return the name of the cache entry of a source."""
    parts = [source, compiler.kind, compiler.path, compiler.version, *compiler.flags(arch)]
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()


def compile_source(source: str, arch: str | None = None) -> DeviceCode:
    """Compile CUDA source to a cubin, or take it from the cache.

    Parameters
    ----------
    source : str
        CUDA C++ with any number of kernels.
    arch : str, optional
        Such as "sm_90a"; by default that of the current target or device.

    Raises
    ------
    BuildError
        If there is no CUDA compiler, or it refuses the source.
    """
    arch = arch or cuda_arch()
    compiler = find_compiler()
    path = cache_dir() / f"{entry_key(source, arch, compiler)}.cubin"
    if (found := _read(path)) is not None:
        return found
    with _lock(path):
        if (found := _read(path)) is not None:
            return found
        code = compiler.compile(source, arch)
        _write(path, code)
    return code


def cached_code(source: str) -> DeviceCode | None:
    """What the cache has of a source for the current target or device; None without a compiler."""
    try:
        key = entry_key(source, cuda_arch(), find_compiler())
    except (BuildError, ValueError, RuntimeError):  # no compiler, or no device to ask for its arch
        return None
    return _read(cache_dir() / f"{key}.cubin")


def compile_sources(
    sources: Iterable[str], arch: str | None = None, jobs: int | None = None
) -> list[DeviceCode | BuildError]:
    """Compile several sources at a time, each from the moment on that `sources` yields it; the
    error of one leaves the others alone.
    """
    arch = arch or cuda_arch()

    def attempt(source: str) -> DeviceCode | BuildError:
        try:
            return compile_source(source, arch)
        except BuildError as error:
            return error

    with ThreadPoolExecutor(max_workers=jobs or available_cores()) as pool:
        begun = [pool.submit(attempt, source) for source in sources]
        return [future.result() for future in begun]


def available_cores() -> int:
    """Return how many cores this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


@cache
def install() -> None:
    """Send every CUDA source that TVM compiles in this process through the cache."""
    original = tvm_ffi.get_global_func(_CALLBACK)

    def cached_cuda_compile(source: str) -> bytes:
        # nvshmem needs TVM's own link step, and a kernel dump its own files
        if "nvshmem" in source or os.environ.get("TVM_KERNEL_DUMP"):
            return original(source)
        missing = _deferred.get()
        if missing is None:
            return compile_source(source).binary
        found = cached_code(source)
        if found is None:
            missing.append(source)
        return _NO_CODE if found is None else found.binary

    tvm_ffi.register_global_func(_CALLBACK, cached_cuda_compile, override=True)


@contextmanager
def deferred() -> Iterator[list[str]]:
    """Let TVM generate CUDA modules without waiting for a compiler: with machine code where the
    cache has it, else for their source only. Yields a list that the latter sources are put into.
    """
    missing: list[str] = []
    token = _deferred.set(missing)
    try:
        yield missing
    finally:
        _deferred.reset(token)


def _lock(path: Path) -> Any:
    """Return a lock on one entry; none where the cache cannot be written."""
    import filelock

    try:
        (path.parent / "locks").mkdir(parents=True, exist_ok=True)
        lock = filelock.FileLock(path.parent / "locks" / f"{path.stem}.lock")
        return lock.acquire(timeout=_LOCK_TIMEOUT_S)
    except (OSError, filelock.Timeout) as error:
        _log.warning("the CUDA cache %s is not used: %s", path.parent, error)
        return nullcontext()


def _write(path: Path, code: DeviceCode) -> None:
    log = code.log.encode()
    body = code.binary + log
    header = {"binary": len(code.binary), "log": len(log), "sha256": _digest(body)}
    temporary = None
    try:
        with tempfile.NamedTemporaryFile(dir=path.parent, delete=False) as file:
            temporary = Path(file.name)
            file.write(_MAGIC + json.dumps(header).encode() + b"\n" + body)
        temporary.replace(path)
    except OSError as error:
        _log.warning("cannot write the CUDA cache %s: %s", path, error)
        if temporary is not None:
            temporary.unlink(missing_ok=True)


def _read(path: Path) -> DeviceCode | None:
    """Return an entry, or None where it is missing or damaged."""
    try:
        content = path.read_bytes()
    except OSError:
        return None
    magic, found, rest = content.partition(b"\n")
    header, _, body = rest.partition(b"\n")
    try:
        sizes = json.loads(header) if magic + found == _MAGIC else {}
        whole = sizes["binary"] + sizes["log"] == len(body) and sizes["sha256"] == _digest(body)
    except (ValueError, KeyError, TypeError):
        whole = False
    if not whole:
        _log.warning("the CUDA cache entry %s is damaged and gets compiled again", path)
        return None
    cut = sizes["binary"]
    return DeviceCode(body[:cut], body[cut:].decode(errors="replace"))


def _digest(body: bytes) -> str:
    return hashlib.sha256(body).hexdigest()
