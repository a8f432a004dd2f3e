"""NVTX ranges: what a profiler of NVIDIA shows above kernels.

The package `nvtx` (the extra "profile") makes them, or the library of CUDA's toolkit or of one of
the packages `nvidia-nvtx*`; without any of these there are none, and nothing fails.
"""

from __future__ import annotations

import ctypes
import ctypes.util
import functools
import logging
import sysconfig
from collections.abc import Callable, Iterator
from pathlib import Path

logger = logging.getLogger(__name__)

LIBRARIES = ("nvToolsExt", "nvtx3interop")


class Ranges:
    """Pushes and pops ranges of the calling thread."""

    def __init__(self) -> None:
        self.push, self._pop = _functions()

    def pop(self) -> None:
        """Ends the last range that was begun."""
        self._pop()


@functools.cache
def _functions() -> tuple[Callable[[str], object], Callable[[], object]]:
    try:
        import nvtx

        return nvtx.push_range, nvtx.pop_range
    except ImportError:
        pass
    for path in _libraries():
        try:
            library = ctypes.CDLL(path)
            push, pop = library.nvtxRangePushA, library.nvtxRangePop
        except (OSError, AttributeError):
            continue
        return functools.partial(_push, push), pop
    logger.info("no NVTX ranges: pip install 'tvm_fusion[profile]' brings the package nvtx")
    return (lambda text: None), (lambda: None)


def _push(function: Callable[[bytes], object], text: str) -> None:
    function(text.encode())


def _libraries() -> Iterator[str]:
    """Where libraries of NVTX may be: the loader's folders, and those of NVIDIA's packages."""
    for name in LIBRARIES:
        found = ctypes.util.find_library(name)
        if found:
            yield found
        folder = Path(sysconfig.get_path("purelib"), "nvidia")
        yield from map(str, sorted(folder.glob(f"*/lib/lib{name}.so*")))
