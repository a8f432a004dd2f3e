"""Code of kernels that were written before, on disk: a PrimFunc is written and lowered once.

    <cache folder>/kernels/<key>.json

An entry holds the host code and the CUDA sources of one PrimFunc; its machine code lies in the
cubin cache, by the hash of the source, and weights lie in neither. The key holds all that decides
the code: the PrimFunc with its name, its kernel class, what tuning chose for it, the target, the
numbers of the device, the policy, this package (each of its files by size and time), TVM, the
options of its passes, and which kernels are launched early.
Nothing is kept while a kernel class of the user's is registered. A damaged entry counts as missing.
Files are never removed, and may be at any time: the folder can be deleted to make room.
`TVM_FUSION_KERNEL_CACHE=0` writes each kernel again.
"""

from __future__ import annotations

import hashlib
import logging
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tvm
from tvm import tirx
from tvm_ffi.serialization import to_json_graph_str

from ..config import HardwareProfile, Policy
from ..config.digest import digest
from ..errors import InputError
from ..host.atomic_files import replace_file
from ..host.cache_folder import cache_dir, make_folder
from ..kernels.gpu.ahead import asked
from ..runtime.build.kernel_code import KernelCode, code_of, code_text
from .plan_cache import all_ours, surroundings

VARIABLE = "TVM_FUSION_KERNEL_CACHE"
_FORMAT = 1
logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class KernelCache:
    """The kernels for one device and policy.

    Attributes
    ----------
    folder : Path
    surroundings : str
        What all of them depend on.
    """

    folder: Path
    surroundings: str

    @classmethod
    def of(
        cls, target: tvm.target.Target, hw: HardwareProfile, policy: Policy
    ) -> KernelCache | None:
        """The cache; None where kernels are not kept."""
        if os.environ.get(VARIABLE) == "0" or not all_ours(hw):
            return None
        parts = [_FORMAT, *surroundings(target, hw, policy), _pass_options(), asked()]
        return cls(cache_dir() / "kernels", digest(parts))

    def path(self, name: str, func: tirx.PrimFunc, class_name: str, choice: str = "") -> Path:
        """Where the code of a PrimFunc lies: of what it computes, before its class writes it.
        `choice` is what tuning chose, empty for the untuned kernel.
        """
        key = digest([self.surroundings, name, class_name, choice, to_json_graph_str(func)])
        return self.folder / f"{key}.json"

    def read(self, path: Path) -> KernelCode | None:
        """The code that lies there; None where there is none, or a damaged one."""
        try:
            check, _, text = path.read_text(encoding="utf-8").partition("\n")
        except FileNotFoundError:
            return None
        except (OSError, ValueError) as error:
            logger.warning("the kernel %s cannot be read and is written again: %s", path, error)
            return None
        if check != _checksum(text):
            logger.warning("the kernel %s is damaged and is written again", path)
            return None
        return code_of(text)

    def keep(self, path: Path, code: KernelCode) -> None:
        """Write an entry; a folder that cannot be written is left alone."""
        keep_text(path, code_text(code))


def keep_text(path: Path, text: str) -> None:
    """As `KernelCache.keep`, of code as text."""
    try:
        make_folder(path.parent)
        replace_file(path, f"{_checksum(text)}\n{text}")
    except (OSError, InputError) as error:
        logger.warning("cannot keep the kernel %s: %s", path, error)


def _pass_options() -> list[Any]:
    context = tvm.transform.PassContext.current()
    config = sorted((str(k), str(v)) for k, v in context.config.items())
    return [int(context.opt_level), config, sorted(map(str, context.disabled_pass))]


def _checksum(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()
