"""What a captured call returns: new tensors that it writes, and views of these and of inputs."""

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import tvm
import tvm_ffi

from ..calls.tensors import Kind, from_tvm, is_torch_tensor
from .captured_memory import Output, leaves


@dataclass(frozen=True, slots=True)
class _Place:
    """Stands for an output in the form of a result."""

    number: int


class Results:
    """How results are put together.

    Parameters
    ----------
    outputs : sequence of Output
        The tensors, flattened.
    example : Any
        What the call returned when it was captured.
    device : tvm.runtime.Device
    """

    def __init__(self, outputs: Sequence[Output], example: Any, device: tvm.runtime.Device) -> None:
        self._outputs, self._device = tuple(outputs), device
        self._written = [output for output in outputs if output.is_own]
        self._form = _form(example, iter(range(len(outputs))))
        self._is_one = isinstance(self._form, _Place) and bool(self._written)
        self._torch: list[Callable[[], Any]] = []

    def own(self, example: Any) -> list[Any]:
        """The tensors that the captured call writes, of what it returned."""
        found = zip(leaves([example]), self._outputs, strict=True)
        return [tensor for tensor, output in found if output.is_own]

    def new(self) -> list[tvm.runtime.Tensor]:
        """Memory for what a call writes."""
        return [tvm.runtime.empty(o.shape, o.dtype, self._device) for o in self._written]

    def new_torch(self) -> list[Any]:
        """The same of torch."""
        if not self._torch:
            self._torch = [self._maker(output) for output in self._written]
        return [make() for make in self._torch]

    def of_tvm(self, own: Sequence[Any], inputs: Sequence[Any]) -> Any:
        """The result, given what the call wrote and its inputs."""
        return self._result(own, inputs, _view)

    def of_torch(self, own: Sequence[Any], inputs: Sequence[Any]) -> Any:
        """The same of torch."""
        return self._result(own, inputs, _torch_view)

    def _maker(self, output: Output) -> Callable[[], Any]:
        import torch

        dtype = getattr(torch, output.dtype, None)
        if dtype is None:
            return lambda: from_tvm(
                tvm.runtime.empty(output.shape, output.dtype, self._device), Kind.TORCH, None
            )
        index = None if self._device.type == "cpu" else self._device.index
        device = torch.device(self._device.type, index)
        return functools.partial(torch.empty, output.shape, dtype=dtype, device=device)

    def _result(
        self, own: Sequence[Any], inputs: Sequence[Any], view: Callable[[Any, Output], Any]
    ) -> Any:
        if self._is_one:
            return own[0]
        tensors, remaining = [], iter(own)
        for output in self._outputs:
            if output.is_own:
                tensors.append(next(remaining))
            elif output.of_input is not None:
                tensors.append(view(inputs[output.of_input], output))
            else:
                tensors.append(view(tensors[output.of_output], output))
        return _filled(self._form, tensors)


def copied(tensor: Any) -> Any:
    """A copy of a tensor on its device."""
    if is_torch_tensor(tensor):
        return tensor.detach().clone()
    copy = tvm.runtime.empty(tensor.shape, tensor.dtype, tensor.device)
    tensor.copyto(copy)
    return copy


def _view(base: tvm.runtime.Tensor, output: Output) -> tvm.runtime.Tensor:
    return base._create_view(output.shape, output.dtype, output.offset)


def _torch_view(base: Any, output: Output) -> Any:
    import torch

    flat = base.detach().view(-1).view(torch.uint8)
    part = flat[output.offset : output.offset + output.region.size_bytes]
    return part.view(getattr(torch, output.dtype)).view(output.shape)


def _form(value: Any, numbers: Any) -> Any:
    if isinstance(value, tvm.runtime.Tensor):
        return _Place(next(numbers))
    if isinstance(value, tvm_ffi.Array | tuple | list):
        return tuple(_form(v, numbers) for v in value)
    return value


def _filled(form: Any, tensors: Sequence[Any]) -> Any:
    if isinstance(form, _Place):
        return tensors[form.number]
    return tuple(_filled(f, tensors) for f in form) if isinstance(form, tuple) else form
