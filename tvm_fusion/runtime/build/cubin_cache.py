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
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from contextvars import ContextVar
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Self

import tvm_ffi

from ...errors import BuildError, InputError
from ...host.atomic_files import replace_bytes
from ...host.cache_folder import cache_dir, make_folder
from ...host.cores import available_cores, use_all_cores
from ...host.logs import topic
from .cuda_compiler import Compiler, DeviceCode, cuda_arch, find_compiler, kernel_names

_COMPILE = "tvm_callback_cuda_compile"
_CHANGE = "tvm_callback_cuda_postproc"
_MAGIC = b"tvm_fusion cubin 1\n"
_LOCK_TIMEOUT_S = 600  # the slowest kernel known takes ptxas about a minute
_NO_CODE = b"\x7fELF"
_log = logging.getLogger(__name__)
kernel_log = topic("kernels")


@dataclass(frozen=True, slots=True)
class _Given:
    """What a CUDA module gets: a source in place of the generated one, if any, and its code."""

    source: str | None
    binary: bytes


_given: ContextVar[_Given | None] = ContextVar("given", default=None)


def entry_key(source: str, arch: str, compiler: Compiler) -> str:
    """Return the name of the cache entry of a source."""
    made_by = compiler.kind, compiler.path, compiler.version
    parts = [source, arch, *made_by, *compiler.flags(arch)]
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
        began = time.monotonic()
        code = compiler.compile(source, arch)
        took = time.monotonic() - began
        kernel_log.info("%s: %s took %.2f s", kernel_names(source)[:1], compiler.kind, took)
        _write(path, code)
    return code


_jobs: int | None = None


def compile_by(jobs: int) -> None:
    """Has this process run so many compilers at a time, where nothing else is asked for."""
    global _jobs
    _jobs = jobs


class Compiling:
    """CUDA sources that are compiled side by side, each from the moment on that it is given.

    A context manager: what has not begun when it is left is dropped.

    Parameters
    ----------
    arch : str
        Such as "sm_90a".
    jobs : int, optional
        Compilers at a time; one a core by default (`compile_by`).
    """

    def __init__(self, arch: str, jobs: int | None = None) -> None:
        self._arch, self._lock = arch, threading.Lock()
        self._begun: dict[str, Future[DeviceCode | BuildError]] = {}
        self._pool = ThreadPoolExecutor(
            jobs or _jobs or available_cores(), initializer=use_all_cores
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_exception: object) -> None:
        self._pool.shutdown(wait=False, cancel_futures=True)

    def begin(self, source: str) -> "Future[DeviceCode | BuildError]":
        """Compile a source in a thread of its own, or take it from the cache; what was given before
        is not compiled again. Its error is a result, and leaves the other sources alone.
        """
        with self._lock:
            if source not in self._begun:
                self._begun[source] = self._pool.submit(self._attempt, source)
            return self._begun[source]

    def _attempt(self, source: str) -> DeviceCode | BuildError:
        try:
            return compile_source(source, self._arch)
        except BuildError as error:
            return error


@cache
def install() -> None:
    """Send every CUDA source that TVM compiles in this process through the cache."""
    original = tvm_ffi.get_global_func(_COMPILE)
    changed = tvm_ffi.get_global_func(_CHANGE, allow_missing=True)

    def cached_cuda_compile(source: str) -> bytes:
        # nvshmem needs TVM's own link step, and a kernel dump its own files
        if "nvshmem" in source or os.environ.get("TVM_KERNEL_DUMP"):
            return original(source)
        given = _given.get()
        return compile_source(source).binary if given is None else given.binary

    def given_cuda_source(source: str, target: Any) -> str:
        given = _given.get()
        if given is not None and given.source is not None:
            return given.source
        return source if changed is None else changed(source, target)

    tvm_ffi.register_global_func(_COMPILE, cached_cuda_compile, override=True)
    tvm_ffi.register_global_func(_CHANGE, given_cuda_source, override=True)


@contextmanager
def source_only() -> Iterator[None]:
    """Let TVM generate CUDA modules for their source, without machine code."""
    with _giving(_Given(None, _NO_CODE)):
        yield


@contextmanager
def given_code(source: str, binary: bytes) -> Iterator[None]:
    """Let TVM generate a CUDA module of a source and machine code that are known, whatever the
    bodies of its kernels are.
    """
    with _giving(_Given(source, binary)):
        yield


@contextmanager
def _giving(given: _Given) -> Iterator[None]:
    install()
    token = _given.set(given)
    try:
        yield
    finally:
        _given.reset(token)


def _lock(path: Path) -> Any:
    """Return a lock on one entry; none where the cache cannot be written."""
    import filelock

    try:
        make_folder(path.parent / "locks")
        lock = filelock.FileLock(path.parent / "locks" / f"{path.stem}.lock")
        return lock.acquire(timeout=_LOCK_TIMEOUT_S)
    except (OSError, filelock.Timeout) as error:
        _log.warning("the CUDA cache %s is not used: %s", path.parent, error)
        return nullcontext()


def _write(path: Path, code: DeviceCode) -> None:
    log = code.log.encode()
    body = code.binary + log
    header = {"binary": len(code.binary), "log": len(log), "sha256": _digest(body)}
    try:
        replace_bytes(path, _MAGIC + json.dumps(header).encode() + b"\n" + body)
    except InputError as error:
        _log.warning("cannot write the CUDA cache: %s", error)


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
