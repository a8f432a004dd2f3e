"""Which memory the tensors of a captured call are in, and how its outputs come from it."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import tvm
import tvm_ffi

from ...plan.group_view import dtype_bytes
from ..calls.tensors import is_torch_tensor
from .driver import CudaGraphError


@dataclass(frozen=True, slots=True)
class Region:
    """A stretch of memory."""

    address: int
    size_bytes: int

    @classmethod
    def of(cls, tensor: Any) -> "Region":
        """The memory of a contiguous tensor."""
        size = tensor.numel() * dtype_bytes(str(tensor.dtype).removeprefix("torch."))
        return cls(int(tensor.data_ptr()), size)

    @property
    def end(self) -> int:
        """The address behind it."""
        return self.address + self.size_bytes

    def overlaps(self, other: "Region") -> bool:
        """Whether there is a byte in both."""
        return self.address < other.end and other.address < self.end

    def holds(self, other: "Region") -> bool:
        """Whether all of another is within."""
        return self.address <= other.address and other.end <= self.end


def lies_in(address: int, region: Region) -> bool:
    """Whether an address is one of a region's bytes."""
    return region.address <= address < region.end


@dataclass(frozen=True, slots=True)
class Output:
    """A tensor that a call returns.

    Attributes
    ----------
    region : Region
        Where the captured call wrote it.
    shape : tuple of int
    dtype : str
        TVM's name.
    of_input, of_output : int or None
        The number of the input, or of the output before it, that it is a view of.
    offset : int
        Bytes from there.
    """

    region: Region
    shape: tuple[int, ...]
    dtype: str
    of_input: int | None = None
    of_output: int | None = None
    offset: int = 0

    @property
    def is_own(self) -> bool:
        """Whether it is no view."""
        return self.of_input is None and self.of_output is None


def outputs_of(value: Any, inputs: Sequence[Region]) -> tuple[Output, ...]:
    """The tensors among what a call returned, given the regions of its inputs."""
    found: list[Output] = []
    for tensor in leaves([value]):
        region = Region.of(tensor)
        shape, dtype = tuple(map(int, tensor.shape)), str(tensor.dtype)
        found.append(Output(region, shape, dtype, **_origin(region, inputs, found)))
    return tuple(found)


def _origin(region: Region, inputs: Sequence[Region], before: Sequence[Output]) -> dict[str, int]:
    """The arguments of `Output` that say what a region is a view of."""
    groups = {"of_input": list(inputs), "of_output": [output.region for output in before]}
    for name, regions in groups.items():
        for number, other in enumerate(regions):
            if region.size_bytes and region.overlaps(other):
                if not other.holds(region):
                    raise CudaGraphError("an output overlaps another tensor in part")
                return {name: number, "offset": region.address - other.address}
    return {}


def leaves(values: Sequence[Any]) -> Iterator[Any]:
    """The tensors among values, those in tuples and lists too."""
    for value in values:
        if isinstance(value, tvm_ffi.Array | list | tuple):
            yield from leaves(value)
        elif isinstance(value, tvm.runtime.Tensor) or is_torch_tensor(value):
            yield value


def mapped(
    value: Any, function: Callable[[Any], Any], container: Callable[[Any], Any] = tuple
) -> Any:
    """A value with a function applied to its tensors."""
    if isinstance(value, tvm_ffi.Shape):
        return tuple(value) if container is tuple else value
    if isinstance(value, tvm_ffi.Array | tuple | list):
        return container(mapped(v, function, container) for v in value)
    is_tensor = isinstance(value, tvm.runtime.Tensor) or is_torch_tensor(value)
    return function(value) if is_tensor else value
