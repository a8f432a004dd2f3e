"""Calls of a compiled module as launches of recordings: one for each list of input shapes.

A launch reads the caller's tensors and writes the outputs that he gets, where they are: the
pointers of the kernels move when those of the tensors do. Nothing is copied.
"""

import functools
import logging
import operator
from collections import OrderedDict
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import tvm
import tvm_ffi

from ..calls.checked_tensors import CheckedTensors, can_check
from ..calls.new_tensors import maker
from ..calls.signature import Signature
from ..calls.tensors import (
    Kind,
    TorchInput,
    describe,
    describe_torch,
    from_tvm,
    is_torch_tensor,
    name_of,
    raw_stream,
)
from .capture import CapturedCall
from .capture_rules import CudaGraphOptions
from .captured_memory import Output, Region, leaves
from .driver import CudaDriver, CudaGraphError

_log = logging.getLogger(__name__)

_REMEMBERED = 4  # sizes that were called once, for each graph that may be kept

Key = tuple[Any, ...]  # dtypes and shapes of the inputs, and the values of those that are no tensor


class GraphedCalls:
    """The captured calls of one compiled module; it is used under the module's lock.

    Parameters
    ----------
    vm : relax.VirtualMachine
    device : tvm.runtime.Device
    signature : Signature
    options : CudaGraphOptions
    driver : CudaDriver
    unread : container of int
        Outputs that are None where inputs are torch's.
    renewed : mapping of int to int
        Outputs that are new values of inputs, which launches may write there: see
        `CompiledModule.renewed`.

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
        unread: Container[int] = (),
        renewed: Mapping[int, int] | None = None,
    ) -> None:
        self.refusal: str | None = None
        self._vm, self._device, self._signature = vm, device, signature
        self._options, self._driver = options, driver
        self._unread, self._renewed = unread, renewed or {}
        self._graphs: OrderedDict[Key, _Graph] = OrderedDict()
        self._by_torch: dict[tuple[TorchInput, ...], Key] = {}
        self._met: OrderedDict[Key, None] = OrderedDict()  # called once, and not long ago
        self._last: _Graph | None = None

    def again(self, inputs: Sequence[Any]) -> Any:
        """Call the graph for torch tensors on the device that another call was captured for, and
        return its outputs as torch's. NotImplemented where there is none, or the caller captures
        his stream himself: only plain launches can go there.
        """
        graph = self._last
        pointers = graph and graph.addresses_of(inputs)
        if pointers is None:
            graph = self._known(inputs)
            pointers = graph and graph.addresses_of(inputs)
            if pointers is None:
                return NotImplemented
        stream = raw_stream(self._device, Kind.TORCH)
        with self._current():
            if self._driver.is_capturing(stream):
                return NotImplemented
            return graph.on_torch(inputs, pointers, stream)

    def find(self, arguments: Sequence[Any]) -> "_Graph | None":
        """The graph for arguments as the VM takes them."""
        key = _key(arguments)
        if key in self._graphs:
            self._graphs.move_to_end(key)
        return self._graphs.get(key)

    def is_due(self, arguments: Sequence[Any]) -> bool:
        """Whether a call that ran launch by launch is to be captured. Where sizes are symbolic that
        is the second one of a size among the last few sizes: of a size that comes once, or of so
        many sizes that no graph would be launched before it goes, none is worth its capture.
        """
        if not self._signature.is_symbolic:
            return True
        key = _key(arguments)
        if key in self._met:
            del self._met[key]
            return True
        self._met[key] = None
        if len(self._met) > _REMEMBERED * self._options.max_shapes:
            self._met.popitem(last=False)
        return False

    def add(self, arguments: Sequence[Any], inputs: Sequence[Any], outputs: Any) -> Any:
        """Capture calls of arguments like these, which come from these inputs.

        Returns
        -------
        Any
            What this call gave, as TVM tensors: `outputs`, or the same in their static memory.

        Raises
        ------
        CudaGraphError
            The call cannot be captured; `refusal` says why from now on.
        """
        key = _key(arguments)
        captured = self.captured(arguments)
        torch_inputs = describe_torch(inputs, self._device)
        static = self._options.static_outputs
        graph = _Graph(captured, torch_inputs, static, self._device, self._unread, self._renewed)
        self._graphs[key] = self._last = graph
        if torch_inputs:
            self._by_torch[torch_inputs] = key
        while len(self._graphs) > self._options.max_shapes:
            self._drop(next(iter(self._graphs)))
        return graph.taken(arguments, outputs)

    def captured(self, arguments: Sequence[Any]) -> CapturedCall:
        """A captured call of these TVM tensors, with its outputs; it is not kept here."""
        function = self._signature.function
        try:
            return CapturedCall(self._vm, arguments, self._device, self._driver, function)
        except RuntimeError as error:
            self._signature.name_refused(error, arguments)
            raise
        except CudaGraphError as error:
            self.refusal = str(error)
            _log.warning("no CUDA graph, calls run launch by launch: %s", error)
            raise

    def bound(self, arguments: Sequence[Any]) -> Callable[[], Any]:
        """A function that launches a captured call over the given TVM tensors on TVM's current
        stream, and returns the same outputs every time.
        """
        captured, kept = self.captured(arguments), list(arguments)

        def launch_again(_kept: Any = kept) -> Any:
            with self._current():
                captured.launch(raw_stream(self._device, Kind.TVM))
            return captured.outputs

        return launch_again

    def call(self, graph: "_Graph", arguments: Sequence[Any], kind: Kind, like: Any) -> Any:
        """Launch a graph on arguments as it was captured for; outputs as `tensors.from_tvm`."""
        stream = raw_stream(self._device, kind)
        with self._current():
            outputs = graph.on_tvm(arguments, stream)
            if kind is Kind.NUMPY:
                self._driver.wait_for_stream(stream)
        return from_tvm(outputs, kind, like)

    def is_in_capture(self, kind: Kind) -> bool:
        """Whether the caller captures his stream himself."""
        with self._current():
            return self._driver.is_capturing(raw_stream(self._device, kind))

    def clear(self) -> None:
        """Destroy all graphs."""
        for key in list(self._graphs):
            self._drop(key)

    def _known(self, inputs: Sequence[Any]) -> "_Graph | None":
        described = describe_torch(inputs, self._device)
        key = self._by_torch.get(described) if described else None
        if key is None:
            return None
        self._graphs.move_to_end(key)
        self._last = self._graphs[key]
        return self._last

    def _current(self) -> AbstractContextManager[None]:
        return _AS_IT_IS if self._driver.is_current() else self._driver.current()

    def _drop(self, key: Key) -> None:
        graph = self._graphs.pop(key)
        self._by_torch = {t: k for t, k in self._by_torch.items() if k != key}
        if self._last is graph:
            self._last = None
        graph.captured.close()


_AS_IT_IS = nullcontext()


class _Graph:
    """A captured call whose inputs and outputs move with the caller's tensors.

    Attributes
    ----------
    captured : CapturedCall
    """

    def __init__(
        self,
        captured: CapturedCall,
        torch_inputs: tuple[TorchInput, ...],
        static: bool,
        device: tvm.runtime.Device,
        unread: Container[int],
        renewed: Mapping[int, int],
    ) -> None:
        self.captured = captured
        like = [(device, shape, name_of(dtype)) for dtype, shape, _ in torch_inputs]
        self._checked = CheckedTensors(like) if like and can_check() else None
        renewed = {} if static else {o: i for o, i in renewed.items() if not captured.reads(i)}
        self._results = Results(captured.results, captured.outputs, device, unread, renewed)
        self._static = self._results.own(captured.outputs) if static else None
        self._static_torch: list[Any] = []
        self._regions = [Region.of(tensor) for tensor in self._static or ()]
        if not static:
            captured.release_outputs()

    def addresses_of(self, inputs: Sequence[Any]) -> list[int] | None:
        """Where torch tensors lie that it was captured for and whose memory can be lent as it is;
        None for others.
        """
        if self._checked is None or not _torch_types().issuperset(map(type, inputs)):
            return None
        try:
            found = self._checked.call(*inputs)
        except Exception:  # no tensor of TVM's can be made of one
            return None
        return None if found is None else self._checked.addresses()

    def on_torch(self, inputs: Sequence[Any], pointers: list[int], stream: int) -> Any:
        """Launch it on contiguous torch tensors on its device; outputs are torch's."""
        results, captured = self._results, self.captured
        if self._static is None:
            own = tuple(results.new_torch())
            captured.move(pointers, results.addresses(own, pointers))
        else:
            if not self._static_torch:
                self._static_torch = [from_tvm(t, Kind.TORCH, None) for t in self._static]
            own = self._static_torch
            pairs = zip(inputs, pointers, strict=True)
            inputs = [self._apart(x, Region(pointer, x.nbytes)) for x, pointer in pairs]
            captured.move([x.data_ptr() for x in inputs])
        captured.launch(stream)
        return results.of_torch(own, inputs)

    def on_tvm(self, arguments: Sequence[Any], stream: int) -> Any:
        """Launch it on TVM tensors on its device; outputs are TVM's."""
        results, inputs = self._results, list(leaves(arguments))
        if self._static is None:
            own = results.new()
            addresses = [int(tensor.data_ptr()) for tensor in own]
        else:
            own, addresses = self._static, None
            inputs = [self._apart(x, Region.of(x)) for x in inputs]
        self.captured.move([int(tensor.data_ptr()) for tensor in inputs], addresses)
        self.captured.launch(stream)
        return results.of_tvm(own, inputs)

    def taken(self, arguments: Sequence[Any], outputs: Any) -> Any:
        """Outputs of a plain call as those of a launch."""
        if self._static is None:
            return outputs
        for target, source in zip(self._static, self._results.own(outputs), strict=True):
            source.copyto(target)
        return self._results.of_tvm(self._static, list(leaves(arguments)))

    def _apart(self, tensor: Any, region: Region) -> Any:
        """An input, or a copy of it if it is in the memory of the outputs."""
        if not any(region.overlaps(other) for other in self._regions):
            return tensor
        return copied(tensor)


@functools.cache
def _torch_types() -> frozenset[type]:
    import torch

    return frozenset([torch.Tensor, torch.nn.Parameter])


def _key(arguments: Sequence[Any]) -> Key:
    return tuple(_described(value) for value in arguments)


def _described(value: Any) -> Any:
    if isinstance(value, tvm.runtime.Tensor):
        return describe(value)
    return tuple(map(_described, value)) if isinstance(value, list | tuple) else value


# ---- What a captured call returns: new tensors that it writes, and views of these and of inputs.


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
    unread : container of int
        Outputs that are None among those of torch, unless they are new tensors.
    renewed : mapping of int to int
        Outputs that are written into the memory of an input that nothing reads, and are None among
        those of torch, unless they are views or others are views of them.
    """

    def __init__(
        self,
        outputs: Sequence[Output],
        example: Any,
        device: tvm.runtime.Device,
        unread: Container[int] = (),
        renewed: Mapping[int, int] | None = None,
    ) -> None:
        self._outputs, self._device = tuple(outputs), device
        self._written = [output for output in outputs if output.is_own]
        self._form = _form(example, iter(range(len(outputs))))
        self._is_one = isinstance(self._form, _Place) and bool(self._written)
        is_flat = isinstance(self._form, tuple) and all(isinstance(f, _Place) for f in self._form)
        self._unread = frozenset(i for i in range(len(outputs)) if is_flat and i in unread)
        bases = {output.of_output for output in outputs}
        self._inputs = {  # by the output that is written there
            number: given
            for number, given in (renewed or {}).items()
            if is_flat and outputs[number].is_own and number not in bases
        }
        numbers = [number for number, output in enumerate(outputs) if output.is_own]
        self._into = [self._inputs.get(number) for number in numbers]
        new = [number for number in numbers if number not in self._inputs]
        self._pick = self._picked(new) if is_flat else None

    def _picked(self, new: Sequence[int]) -> Callable[[Sequence[Any]], tuple[Any, ...]] | None:
        """What makes the result of the new tensors and a None behind them, which takes a
        microsecond; None where views have to be made.
        """
        place = {number: i for i, number in enumerate(new)}
        left_out = self._unread | self._inputs.keys()
        if len(self._outputs) < 2 or not left_out.issuperset(
            range(len(self._outputs)) - place.keys()
        ):
            return None
        return operator.itemgetter(*(place.get(i, len(new)) for i in range(len(self._outputs))))

    def own(self, example: Any) -> list[Any]:
        """The tensors that the captured call writes, of what it returned."""
        found = zip(leaves([example]), self._outputs, strict=True)
        return [tensor for tensor, output in found if output.is_own]

    def new(self) -> list[tvm.runtime.Tensor]:
        """Memory for what a call writes."""
        return [tvm.runtime.empty(o.shape, o.dtype, self._device) for o in self._written]

    @functools.cached_property
    def new_torch(self) -> Callable[[], Iterable[Any]]:
        """A function that makes the same of torch."""
        pairs = zip(self._written, self._into, strict=True)
        return maker([(o.shape, o.dtype) for o, into in pairs if into is None], self._device)

    def addresses(self, new: Sequence[Any], inputs: Sequence[int]) -> list[int]:
        """Where a call writes, given these tensors and where the inputs lie."""
        if not self._inputs:
            return [tensor.data_ptr() for tensor in new]
        left = iter(new)
        return [next(left).data_ptr() if i is None else inputs[i] for i in self._into]

    def of_tvm(self, own: Sequence[Any], inputs: Sequence[Any]) -> Any:
        """The result, given what the call wrote and its inputs."""
        return self._result(own, inputs, _view, frozenset())

    def of_torch(self, own: Sequence[Any], inputs: Sequence[Any]) -> Any:
        """The same of torch; a call wrote these and what it writes into inputs."""
        if self._pick is not None:
            return self._pick((*own, None))
        left = iter(own)
        written = [next(left) if i is None else None for i in self._into] if self._inputs else own
        return self._result(written, inputs, _torch_view, self._unread)

    def _result(
        self,
        own: Sequence[Any],
        inputs: Sequence[Any],
        view: Callable[[Any, Output], Any],
        unread: frozenset[int],
    ) -> Any:
        if self._is_one:
            return own[0]
        tensors, remaining = [], iter(own)
        for number, output in enumerate(self._outputs):
            if output.is_own:
                tensors.append(next(remaining))
            elif number in unread:
                tensors.append(None)
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

    dtype, base = getattr(torch, output.dtype), base.detach()
    if base.dtype is dtype and base.shape == output.shape and not output.offset:
        return base
    flat = base.view(-1).view(torch.uint8)
    part = flat[output.offset : output.offset + output.region.size_bytes]
    return part.view(dtype).view(output.shape)


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
