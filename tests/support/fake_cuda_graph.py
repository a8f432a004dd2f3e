"""A stand-in for the CUDA driver on the CPU: what a graph would repeat is repeated.

Between `begin_capture` and `end_capture` the VM's calls of kernels are recorded with the tensors
that they were given, and do not run; a launch makes the same calls. What else the VM does in a call
(taking memory, computing shapes) is not repeated, as in a real graph.
"""

import contextlib
import ctypes
import itertools
import math
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
import tvm
from tvm import relax

from tvm_fusion.runtime.build.build import build
from tvm_fusion.runtime.calls.compiled_module import CompiledModule
from tvm_fusion.runtime.graphs import captured_calls as cuda_graph_calls
from tvm_fusion.runtime.graphs import mode as cuda_graph_mode
from tvm_fusion.runtime.graphs.driver import CudaGraphError

from .runtime_cases import LLVM


class Address(NamedTuple):
    """A tensor as a graph knows it: memory that it does not own."""

    pointer: int
    shape: tuple[int, ...]
    dtype: str

    @classmethod
    def of(cls, value: Any) -> Any:
        """The address of a tensor; anything else as it is."""
        if not isinstance(value, tvm.runtime.Tensor):
            return value
        return cls(int(value.data_ptr()), tuple(value.shape), str(value.dtype))


def _lent(address: Address) -> tvm.runtime.Tensor:
    size = math.prod(address.shape) * np.dtype(address.dtype).itemsize
    memory = (ctypes.c_byte * size).from_address(address.pointer)
    return tvm.runtime.from_dlpack(np.frombuffer(memory, address.dtype).reshape(address.shape))


class FakeRecording:
    """As `Recording`: the recorded calls of kernels, with addresses that can be moved."""

    def __init__(self, driver: "FakeDriver", number: int, calls: list) -> None:
        self.number, self.is_graph = number, len(calls) > 1
        self._driver, self._calls = driver, calls
        self._places = [
            (call, position)
            for call, (_, arguments) in enumerate(calls)
            for position, argument in enumerate(arguments)
            if isinstance(argument, Address)
        ]
        self.addresses = [calls[call][1][position].pointer for call, position in self._places]
        self._moved: set[int] = set()

    def move(self, index: int, address: int) -> None:
        call, position = self._places[index]
        arguments = self._calls[call][1]
        arguments[position] = arguments[position]._replace(pointer=address)
        self.addresses[index] = address
        self._moved.add(call)

    def commit(self) -> None:
        self._driver.log.append(("commit", len(self._moved)))
        self._moved.clear()

    def launch(self, stream: int) -> None:
        self._driver.log.append(("launch", self.number, stream))
        for function, arguments in self._calls:
            function(*(_lent(a) if isinstance(a, Address) else a for a in arguments))

    def destroy(self) -> None:
        del self._driver.graphs[self.number]


class FakeDriver:
    """As `CudaDriver`; `log` lists what was asked of it."""

    def __init__(self, index: int = 0) -> None:
        self.log: list[tuple] = []
        self.recording: list | None = None
        self.refuses: str | None = None
        self.captured_by_caller = False
        self.stream = 7  # the caller's
        self.graphs: dict[int, FakeRecording] = {}
        self._numbers = itertools.count(100)

    @contextlib.contextmanager
    def current(self) -> Iterator[None]:
        yield

    def is_current(self) -> bool:
        return True

    def synchronize(self) -> None:
        self.log.append(("synchronize",))

    def free_bytes(self) -> int:
        return 0

    def new_stream(self) -> int:
        return next(self._numbers)

    def destroy_stream(self, stream: int) -> None:
        self.log.append(("destroy stream", stream))

    def wait_for_stream(self, stream: int) -> None:
        self.log.append(("wait for stream", stream))

    def is_capturing(self, stream: int) -> bool:
        return self.captured_by_caller

    def begin_capture(self, stream: int) -> None:
        assert self.recording is None
        self.recording = []

    @contextlib.contextmanager
    def relaxed(self) -> Iterator[None]:
        self.log.append(("relaxed",))
        yield

    def end_capture(self, stream: int) -> FakeRecording:
        calls, self.recording = self.recording, None
        if self.refuses:
            raise CudaGraphError(self.refuses)
        number = next(self._numbers)
        self.graphs[number] = FakeRecording(self, number, calls)
        self.log.append(("capture", number))
        return self.graphs[number]

    def abandon_capture(self, stream: int) -> None:
        self.recording = None
        self.log.append(("abandon",))

    def new_event(self) -> int:
        return next(self._numbers)

    def record(self, event: int, stream: int) -> None:
        self.log.append(("record", event, stream))

    def wait(self, stream: int, event: int) -> None:
        self.log.append(("wait", stream, event))

    def destroy_event(self, event: int) -> None:
        pass

    def said(self, what: str) -> list[tuple]:
        """The entries of one kind."""
        return [entry for entry in self.log if entry[0] == what]


class RecordingVM:
    """A VM whose instrument records the calls of kernels while the driver captures."""

    def __init__(self, vm: relax.VirtualMachine, driver: FakeDriver) -> None:
        self._vm, self._driver = vm, driver

    def __getitem__(self, name: str):
        return self._vm[name]

    def set_instrument(self, instrument) -> None:
        def both(function, name, before, result, *arguments):
            on_host = ("vm.builtin.", "shape_func", "round_bytes", "keep_arena")
            builtin = name.startswith(on_host)
            instrument(function, name, before, result, *arguments)
            if before and not builtin and self._driver.recording is not None:
                kept = [Address.of(a) for a in arguments]
                self._driver.recording.append((function, kept))
                return relax.VMInstrumentReturnKind.SKIP_RUN
            return relax.VMInstrumentReturnKind.NO_OP

        self._vm.set_instrument(both)

    def _set_instrument(self, instrument) -> None:
        self._vm._set_instrument(instrument)


def captured_on_cpu(
    monkeypatch, mod: tvm.IRModule, options=True
) -> tuple[CompiledModule, FakeDriver]:
    """A module for the CPU whose calls are "captured" by a fake driver."""
    compiled = CompiledModule.of(build(mod, LLVM))
    return compiled, capture_on_cpu(monkeypatch, compiled, options)


def capture_on_cpu(monkeypatch, compiled: CompiledModule, options=True) -> FakeDriver:
    """Have calls of a compiled module that was not called yet "captured"; returns the driver."""
    driver = FakeDriver()
    monkeypatch.setattr(cuda_graph_mode, "CudaDriver", lambda index: driver)
    monkeypatch.setattr(cuda_graph_calls, "raw_stream", lambda device, kind: driver.stream)
    monkeypatch.setattr(cuda_graph_mode, "CAPTURED_TARGETS", ("cuda", "llvm"))
    compiled.vm = RecordingVM(compiled.vm, driver)
    compiled.uncapturable = None
    compiled.cuda_graph = options
    return driver
