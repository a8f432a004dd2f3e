"""Where measurements run: tensors, libraries and times on a device of this process."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import tvm

from ...check.inputs import numpy_dtype
from ...check.plan_runner import wall_samples
from ...errors import TargetError
from ...host.threads import kernel_threads
from ...runtime.build import cubin_cache
from ...runtime.calls.signature import load_library
from ...runtime.timing.plan_timing import device_samples
from ...runtime.timing.timing import device_works, has_torch_cuda

POISON = 0xFF  # bytes of NaN in every float
WARMUP = 2
SHARE = 0.4  # of the memory that tensors of former tasks may keep

Seed = tuple[int, int]


class Call:
    """A function of a library on some tensors."""

    def __init__(self, library: Any, symbol: str, tensors: tuple) -> None:
        self.library, self.symbol, self.tensors = library, symbol, tensors
        self._function = library[symbol]

    def __call__(self) -> None:
        self._function(*self.tensors)


class Site:
    """A device, and how values get there and back. A value is an array of NumPy, which is copied;
    at a GPU of this process one of torch.

    Attributes
    ----------
    device : Device
    room_bytes : float
        That tensors of former tasks may keep.
    """

    def __init__(self, device: Any) -> None:
        self.device = device
        self.room_bytes = SHARE * os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")

    def draw(self, shape: tuple[int, ...], dtype: str, seed: Seed) -> np.ndarray:
        """Normal floats, or integers and booleans of 0 and 1."""
        rng = np.random.default_rng(seed)
        if "float" in dtype:
            return rng.standard_normal(shape, "float32").astype(numpy_dtype(dtype))
        return rng.integers(0, 2, shape).astype(dtype)

    def tensor(self, value: Any) -> Any:
        """A tensor on the device with the numbers of a value, or of a NumPy array."""
        return tvm.runtime.tensor(value, self.device)

    def value(self, value: np.ndarray, tensor: Any) -> np.ndarray:
        """What a tensor holds; `value` is what it was made from."""
        return tensor.numpy()

    def poison(self, value: np.ndarray, tensor: Any) -> None:
        """Fills a tensor with bytes that are NaN in every float."""
        poison = np.full(value.nbytes, POISON, "uint8").view(value.dtype)
        tensor.copyfrom(poison.reshape(value.shape))

    def load(self, path: Path) -> Any:
        """A library."""
        return load_library(path)

    def samples(
        self, calls: Sequence[Call], kernels: Sequence[int], repeats: int
    ) -> list[list[float]]:
        """Microseconds of each call, interleaved; `kernels` are how many each launches."""
        raise NotImplementedError


class Here(Site):
    """The CPU of this process."""

    @classmethod
    def of(cls, target: tvm.target.Target) -> Here:
        """The site for a target.

        Raises
        ------
        TargetError
            There is no such device, or no torch to time kernels on it.
        """
        device = tvm.runtime.device_from_target(target)
        if not device.exist:
            raise TargetError(
                f"this machine has no {target.kind.name} device to tune on"
                "; tune where there is one, or with --rpc"
            )
        if device.type == "cpu":
            kernel_threads()
        return HereOnGpu(device) if device.type == "cuda" else cls(device)

    def samples(
        self, calls: Sequence[Call], kernels: Sequence[int], repeats: int
    ) -> list[list[float]]:
        for call in calls:
            for _ in range(WARMUP):
                call()
        self.device.sync()
        return _spans(self._timed([[call] for call in calls], [[n] for n in kernels], repeats))

    def _timed(self, plans: list, kernels: list, repeats: int) -> list:
        return wall_samples(plans, repeats, self.device.sync)


class HereOnGpu(Here):
    """A GPU of this process; values are torch's, on the device."""

    def __init__(self, device: Any) -> None:
        if not has_torch_cuda():
            raise TargetError("kernels are timed through torch's profiler: install torch for CUDA")
        import torch

        self.device = device
        self.room_bytes = SHARE * torch.cuda.mem_get_info()[1]

    def draw(self, shape: tuple[int, ...], dtype: str, seed: Seed) -> Any:
        import torch

        generator = torch.Generator(device="cuda")
        generator.manual_seed(seed[0] * 1000 + seed[1])
        kind = getattr(torch, dtype)
        options = {"generator": generator, "device": "cuda"}
        if "float" not in dtype:
            return torch.randint(0, 2, shape, **options).to(kind)
        drawn = kind if kind.itemsize > 1 else torch.float32
        return torch.randn(shape, dtype=drawn, **options).to(kind)

    def tensor(self, value: Any) -> Any:
        import torch

        return tvm.runtime.from_dlpack(torch.as_tensor(value, device="cuda"))

    def value(self, value: Any, tensor: Any) -> Any:
        return value.clone()

    def poison(self, value: Any, tensor: Any) -> None:
        import torch

        value.reshape(-1).view(torch.uint8).fill_(POISON)

    def load(self, path: Path) -> Any:
        """A library; one that was built without a CUDA driver is compiled here."""
        cubin_cache.install()
        return super().load(path)

    def _timed(self, plans: list, kernels: list, repeats: int) -> list:
        return device_samples(plans, kernels, repeats)


def _spans(timed: Sequence[Sequence[Sequence[tuple[float, float]]]]) -> list[list[float]]:
    return [[sample[-1][1] - sample[0][0] for sample in samples] for samples in timed]


@contextmanager
def ends_with_device(target: tvm.target.Target) -> Iterator[None]:
    """Ends the process where an error, such as that of a kernel, takes its device."""
    try:
        yield
    except Exception as error:
        if target.kind.name == "cuda" and not device_works():
            print(f"the device is lost for the process: {error}", file=sys.stderr, flush=True)
            os._exit(1)
        raise
