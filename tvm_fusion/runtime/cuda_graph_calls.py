"""Calls of a compiled module as launches of CUDA graphs: a graph for each list of input shapes.

A call copies its inputs into the graph's own input buffers, launches the graph, and copies its
outputs out, all on the caller's stream. An input that is its buffer already is not copied.
"""

import logging
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import tvm
import tvm_ffi

from ..errors import InputError
from ..kernels.base import dtype_bytes
from .cuda_graph import CapturedCall
from .cuda_graph_driver import CudaDriver, CudaGraphError
from .cuda_graph_rules import CudaGraphOptions
from .signature import Signature
from .tensors import (
    Kind,
    describe,
    from_tvm,
    is_torch_tensor,
    kind_of,
    raw_stream,
    to_argument,
    to_tvm,
)

_log = logging.getLogger(__name__)

Key = tuple[Any, ...]  # dtypes and shapes of the inputs, and the values of those that are no tensor


class GraphedCalls:
    """The graphs of one compiled module; its calls hold the module's lock.

    Parameters
    ----------
    vm : relax.VirtualMachine
    device : tvm.runtime.Device
    signature : Signature
    options : CudaGraphOptions
    driver : CudaDriver

    Attributes
    ----------
    refusal : str or None
        Why calls are not captured, once a capture has failed; they then run launch by launch.
    """

    def __init__(
        self,
        vm: Any,
        device: tvm.runtime.Device,
        signature: Signature,
        options: CudaGraphOptions,
        driver: CudaDriver,
    ) -> None:
        self.refusal: str | None = None
        self._vm, self._device, self._signature = vm, device, signature
        self._options, self._driver = options, driver
        self._graphs: OrderedDict[Key, _Graph] = OrderedDict()
        self._by_torch: dict[Key, Key] = {}

    def known(self, inputs: Sequence[Any]) -> "_Graph | None":
        """The graph for torch tensors on the device, found without checking them again."""
        key = self._by_torch.get(self._torch_key(inputs))
        if key is not None:
            self._graphs.move_to_end(key)
        return self._graphs.get(key)

    def graph(self, inputs: Sequence[Any]) -> "_Graph":
        """The graph for inputs that fit the signature; captured, if there is none.

        Raises
        ------
        CudaGraphError
            The call cannot be captured; `refusal` says why from now on.
        """
        key = tuple(_described(value) for value in inputs)
        graph = self._graphs.get(key)
        if graph is None:
            graph = self._graphs[key] = self._capture(inputs)
            while len(self._graphs) > self._options.max_shapes:
                self._drop(next(iter(self._graphs)))
        self._graphs.move_to_end(key)
        if (torch_key := self._torch_key(inputs)) is not None:
            self._by_torch[torch_key] = key
        return graph

    def captured(self, arguments: Sequence[Any]) -> CapturedCall:
        """A graph that reads the given TVM tensors themselves; it is not kept here."""
        try:
            return CapturedCall(self._vm, arguments, self._device, self._driver)
        except RuntimeError as error:
            self._signature.name_refused(error, arguments)
            raise
        except CudaGraphError as error:
            self.refusal = str(error)
            _log.warning("no CUDA graph, calls run launch by launch: %s", error)
            raise

    def bound(self, arguments: Sequence[Any]) -> Callable[[], Any]:
        """A function that launches a graph over the given TVM tensors on TVM's current stream, and
        returns the graph's own outputs.
        """
        captured = self.captured(arguments)

        def launch_again() -> Any:
            stream = raw_stream(self._device, Kind.TVM)
            with self._driver.current(), captured.on(stream) as launch:
                launch()
            return captured.outputs

        return launch_again

    def call(self, graph: "_Graph", inputs: Sequence[Any], kind: Kind, like: Any) -> Any:
        """Run a graph on inputs of the shapes that it has; outputs as `tensors.from_tvm`.
        NotImplemented if the caller captures his stream himself: only plain launches can go there.
        """
        stream = raw_stream(self._device, kind)
        with self._driver.current():
            if self._driver.is_capturing(stream):
                return NotImplemented
            with graph.captured.on(stream) as launch:
                graph.fill(leaves(inputs), stream)
                launch()
                return self._results(graph, kind, like, stream)

    def is_in_capture(self, kind: Kind) -> bool:
        """Whether the caller captures his stream himself."""
        with self._driver.current():
            return self._driver.is_capturing(raw_stream(self._device, kind))

    def clear(self) -> None:
        """Destroy all graphs."""
        for key in list(self._graphs):
            self._drop(key)

    def _capture(self, inputs: Sequence[Any]) -> "_Graph":
        buffers = iter(self._filled_buffers(leaves(inputs)))
        own = [_replaced(value, buffers) for value in inputs]
        pairs = zip(own, self._signature.inputs, strict=True)
        captured = self.captured([to_argument(v, self._device, spec) for v, spec in pairs])
        return _Graph(captured, list(leaves(own)), self._driver)

    def _filled_buffers(self, values: Iterator[Any]) -> list[tvm.runtime.Tensor]:
        """Memory for inputs, with their values: a captured call's first run computes with them."""
        given = [to_tvm(value, self._device, "input") for value in values]
        with self._driver.current():
            self._driver.synchronize()  # they may come from another stream than TVM copies on
        buffers = [tvm.runtime.empty(x.shape, x.dtype, self._device) for x in given]
        for source, buffer in zip(given, buffers, strict=True):
            source.copyto(buffer)
        return buffers

    def _results(self, graph: "_Graph", kind: Kind, like: Any, stream: int) -> Any:
        if kind is Kind.TORCH:
            return graph.torch_outputs(like, copied=not self._options.static_outputs)
        if kind is Kind.NUMPY:
            self._driver.wait_for_stream(stream)
            return from_tvm(graph.captured.outputs, kind, like)
        if self._options.static_outputs:
            return from_tvm(graph.captured.outputs, kind, like)
        return from_tvm(graph.copied_outputs(self._device, stream), kind, like)

    def _torch_key(self, inputs: Sequence[Any]) -> Key | None:
        if not all(is_torch_tensor(v) and _lies_on(v, self._device) for v in inputs):
            return None
        return tuple((value.dtype, value.shape) for value in inputs)

    def _drop(self, key: Key) -> None:
        self._graphs.pop(key).captured.close()
        self._by_torch = {t: k for t, k in self._by_torch.items() if k != key}


class _Graph:
    """A captured call with input buffers of its own."""

    def __init__(
        self, captured: CapturedCall, buffers: Sequence[tvm.runtime.Tensor], driver: CudaDriver
    ) -> None:
        self.captured = captured
        self.buffers = buffers
        self._slots = [(b, int(b.data_ptr()), _size_bytes(b)) for b in buffers]
        self._driver = driver
        self._torch_outputs: Any = None

    def fill(self, values: Iterator[Any], stream: int) -> None:
        """Copy inputs into the buffers, on a stream."""
        from_host = False
        for (buffer, target, size), value in zip(self._slots, values, strict=True):
            if is_torch_tensor(value) and value.device.type == buffer.device.type:
                if not value.is_contiguous() or not _lies_on(value, buffer.device):
                    from_tvm(buffer, Kind.TORCH, None).copy_(value.detach())
                    continue
                source = value.data_ptr()
            else:
                value, source = _address(value, buffer.device)
                if value is not None and size:
                    self._driver.copy_from_host(target, source, size, stream)
                    from_host = True
                    continue
            if size and source != target:
                self._driver.copy(target, source, size, stream)
        if from_host:
            self._driver.wait_for_stream(stream)  # the caller may change what he gave

    def torch_outputs(self, like: Any, copied: bool) -> Any:
        """The outputs as torch tensors on the device `like`: copies, or the graph's own memory."""
        if self._torch_outputs is None:
            self._torch_outputs = from_tvm(self.captured.outputs, Kind.TORCH, None)
        return _mapped(self._torch_outputs, lambda t: _given_out(t, like, copied))

    def copied_outputs(self, device: tvm.runtime.Device, stream: int) -> Any:
        """The outputs as new TVM tensors."""

        def copy(output: tvm.runtime.Tensor) -> tvm.runtime.Tensor:
            new = tvm.runtime.empty(output.shape, output.dtype, device)
            if size := _size_bytes(output):
                self._driver.copy(int(new.data_ptr()), int(output.data_ptr()), size, stream)
            return new

        return _mapped(self.captured.outputs, copy)


def leaves(values: Sequence[Any]) -> Iterator[Any]:
    """The tensors among inputs, those in tuples and lists too."""
    for value in values:
        if isinstance(value, list | tuple):
            yield from leaves(value)
        elif not isinstance(value, int | float):
            yield value


def _described(value: Any) -> Any:
    if isinstance(value, list | tuple):
        return tuple(_described(v) for v in value)
    return value if isinstance(value, int | float) else describe(value)


def _replaced(value: Any, buffers: Iterator[Any]) -> Any:
    """A value with the buffers in place of its tensors."""
    if isinstance(value, list | tuple):
        return [_replaced(v, buffers) for v in value]
    return value if isinstance(value, int | float) else next(buffers)


def _mapped(value: Any, function: Callable[[Any], Any]) -> Any:
    """Outputs with a function applied to their tensors."""
    if isinstance(value, tvm_ffi.Array | tuple | list):
        return tuple(_mapped(v, function) for v in value)
    is_tensor = isinstance(value, tvm.runtime.Tensor) or is_torch_tensor(value)
    return function(value) if is_tensor else value


def _given_out(output: Any, like: Any, copied: bool) -> Any:
    if like is not None and output.device != like:
        return output.to(like)
    return output.clone() if copied else output


def _address(value: Any, device: tvm.runtime.Device) -> tuple[Any, int]:
    """What lies in host memory, contiguous, and where; None and the address for what lies on the
    device.
    """
    kind = kind_of(value)
    if kind is Kind.TORCH:
        value = value.detach().cpu().contiguous()
        return value, value.data_ptr()
    if kind is Kind.NUMPY:
        value = np.ascontiguousarray(value.astype(value.dtype.newbyteorder("="), copy=False))
        return value, value.ctypes.data
    if not value.is_contiguous() or value.device.type not in ("cpu", device.type):
        raise InputError(
            f"an input on {value.device} is not contiguous, or not of the module's "
            "kind of device: copy it first"
        )
    if value.device == device:
        return None, int(value.data_ptr())
    value = value if value.device.type == "cpu" else value.copyto(tvm.cpu())
    return value, int(value.data_ptr())


def _lies_on(value: Any, device: tvm.runtime.Device) -> bool:
    """Whether a torch tensor is on a device of TVM."""
    same = value.device.type == device.type
    return same and (device.type == "cpu" or value.device.index == device.index)


def _size_bytes(tensor: tvm.runtime.Tensor) -> int:
    return tensor.numel() * dtype_bytes(str(tensor.dtype))
