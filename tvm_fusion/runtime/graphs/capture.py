"""One call of a VM function as a recording: captured once, with its memory, then launched.

The capture records `main` on a stream of its own and runs nothing. Storages come from TVM's pool
and are kept as long as the recording, which writes to them in every launch: the VM shows each one
to an instrument when it is taken. A launch may read other inputs and write other outputs than the
capture did: the kernels' pointers move with them.

A kernel function that launches several kernels may take scratch from a pool that TVM keeps for each
host thread, and gives it back at once. So each call is captured in a host thread of its own, which
then sleeps until the recording is gone: nobody else gets that scratch.
"""

import contextlib
import sys
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import tvm
import tvm_ffi

from .captured_memory import Region, leaves, lies_in, mapped, outputs_of
from .driver import CudaDriver, CudaGraphError

_Storages = list[tuple[Any, set[int]]]  # each with the addresses of the tensors in it


class CapturedCall:
    """A call that is captured; `main` should have run before, which loads its kernels.

    Parameters
    ----------
    vm : relax.VirtualMachine
        Nobody else may run it meanwhile.
    arguments : sequence
        What `main` takes. Launches read these tensors, and write to those that `main` writes to,
        until they are moved.
    device : tvm.runtime.Device
    driver : CudaDriver

    Attributes
    ----------
    outputs : Any
        What `main` returned, tensors that launches write until they are moved; None once they are
        released.
    results : tuple of Output
        The tensors among the outputs, flattened.

    Raises
    ------
    CudaGraphError
        The call cannot be captured.
    Exception
        Whatever the call raises.
    """

    def __init__(
        self,
        vm: Any,
        arguments: Sequence[Any],
        device: tvm.runtime.Device,
        driver: CudaDriver,
        function: str = "main",
    ) -> None:
        self._driver = driver
        apart = _apart(list(arguments), device)
        keeper = _Keeper()
        try:
            recording, self.outputs, self._storages = keeper.run(
                lambda: _capture(vm, function, apart, device, driver)
            )
        except BaseException:
            keeper.stop()
            raise
        inputs = [Region.of(tensor) for tensor in leaves(apart)]
        self._recording = recording
        self._finalizer = weakref.finalize(self, _close, driver, recording, keeper)
        self.results = outputs_of(self.outputs, inputs)
        self._stream: int | None = None
        self._event: int | None = None
        own = [r.region for r in self.results if r.is_own]
        self._slots = [_slots(recording.addresses, region) for region in (*inputs, *own)]
        self._at = [region.address for region in (*inputs, *own)]
        with driver.current():
            self.move([Region.of(tensor).address for tensor in leaves(arguments)])

    def move(self, inputs: Sequence[int], outputs: Sequence[int] | None = None) -> None:
        """Let later launches read inputs at these addresses, in the order of their tensors, and
        write the outputs that are `is_own` at these.
        """
        wanted = [*inputs, *(self._at[len(inputs) :] if outputs is None else outputs)]
        if wanted == self._at:
            return
        for number, (old, new) in enumerate(zip(self._at, wanted, strict=True)):
            if old != new:
                for index, offset in self._slots[number]:
                    self._recording.move(index, new + offset)
        self._at = wanted
        self._recording.commit()

    def reads(self, number: int) -> bool:
        """Whether a kernel or an output has to do with an input, of this number of its tensors."""
        return bool(self._slots[number]) or any(r.of_input == number for r in self.results)

    def launch(self, stream: int) -> None:
        """Launch it on a stream, after its earlier launches on whatever streams."""
        recording = self._recording
        if recording.is_graph:
            recording.launch(stream)
            return
        if self._stream != stream and self._stream is not None:
            self._follow(stream)
        self._stream = stream
        recording.launch(stream)
        if self._event is not None:
            self._driver.record(self._event, stream)

    def release_outputs(self) -> None:
        """Give the memory of the outputs back; they have to be moved before the next launch."""
        own = [r.region for r in self.results if r.is_own]
        self._storages = [
            (storage, addresses)
            for storage, addresses in self._storages
            if not addresses
            or not all(any(lies_in(a, region) for region in own) for a in addresses)
        ]
        self.outputs = None

    def close(self) -> None:
        """Wait for the last launch and destroy the recording; its memory goes back to TVM's pool
        when no one holds an output any more.
        """
        self._finalizer()

    def _follow(self, stream: int) -> None:
        """Let a stream wait for the launches on another. An event is recorded after each launch
        from the first change of stream on: most callers never need one.
        """
        if self._event is None:
            self._driver.synchronize()
            self._event = self._driver.new_event()
            weakref.finalize(self, _destroy_event, self._driver, self._event)
        else:
            self._driver.wait(stream, self._event)


def torch_captures() -> bool:
    """Whether the caller captures torch's current stream himself (`torch.cuda.graph`)."""
    torch = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_initialized():
        return False
    return torch.cuda.is_current_stream_capturing()


class CallersCaptures:
    """Calls within captures of the caller, whose graphs write to the memory of a call whenever they
    are launched: it is kept from the pools, which would lend it to others and, when an arena grows,
    give it back to the device.
    """

    def __init__(self) -> None:
        self._storages: _Storages = []

    @contextlib.contextmanager
    def one(self, vm: Any, device: tvm.runtime.Device) -> Iterator[None]:
        """Keep what the VM takes within as long as this object lives. The pools may be without it:
        torch forbids threads that capture to take memory of their own.
        """
        with CudaDriver(device.index).relaxed(), _kept_storages(vm) as storages:
            try:
                yield
            finally:
                self._storages += storages


class _Keeper:
    """A host thread that runs one function and sleeps until it is told to stop."""

    def __init__(self) -> None:
        self._stopped = threading.Event()

    def run(self, work: Callable[[], Any]) -> Any:
        """Run a function in a new thread, which stays; return its result or raise its error."""
        done, box = threading.Event(), []
        stopped = self._stopped  # the thread refers to nothing else: it would never be collected

        def keep(pending: list[Callable[[], Any]]) -> None:
            try:
                box.append((True, pending.pop()()))
            except BaseException as error:  # raised again by the caller
                box.append((False, error))
            done.set()
            stopped.wait()

        threading.Thread(target=keep, args=([work],), daemon=True, name="tvm_fusion graph").start()
        del work
        done.wait()
        succeeded, result = box.pop()
        if not succeeded:
            raise result
        return result

    def stop(self) -> None:
        """Let the thread end, and with it its scratch."""
        self._stopped.set()


def _capture(
    vm: Any,
    function: str,
    arguments: Sequence[Any],
    device: tvm.runtime.Device,
    driver: CudaDriver,
) -> tuple[Any, Any, _Storages]:
    """Return the recording of a call, its outputs, and its storages."""
    main = vm[function]
    with driver.current():
        driver.synchronize()  # what the pool gives out may still be in use on another stream
        stream = driver.new_stream()
        try:
            with tvm_ffi.use_raw_stream(device, stream):
                return _record(vm, main, arguments, driver, stream)
        finally:
            driver.destroy_stream(stream)


def _record(
    vm: Any, main: Callable[..., Any], arguments: Sequence[Any], driver: CudaDriver, stream: int
) -> tuple[Any, Any, _Storages]:
    driver.begin_capture(stream)
    try:
        with _kept_storages(vm) as storages:
            outputs = main(*arguments)
    except Exception as error:
        driver.abandon_capture(stream)
        raise CudaGraphError(f"the call cannot be captured: {_first_line(error)}") from error
    return driver.end_capture(stream), outputs, storages


@contextlib.contextmanager
def _kept_storages(vm: Any) -> Iterator[_Storages]:
    """The storages that the VM takes within, kept from its pool; afterwards they are the caller's.

    Storages whose tensors die early in the call are not used again within it, unless the module's
    memory is planned: that of functions with branches is not.
    """
    storages: _Storages = []

    def note(_function: Any, name: str, before: bool, result: Any, *arguments: Any) -> None:
        if before:
            return
        if name == "vm.builtin.alloc_storage":
            storages.append((result, set()))
        elif name == "vm.builtin.alloc_tensor":
            for storage, addresses in storages:
                if storage.same_as(arguments[0]):
                    addresses.add(int(result.data_ptr()))

    vm.set_instrument(note)
    try:
        yield storages
    finally:
        vm._set_instrument(None)  # VirtualMachine.set_instrument takes functions only


def _apart(arguments: list[Any], device: tvm.runtime.Device) -> list[Any]:
    """Arguments whose memory nowhere overlaps, so that each pointer tells whose it is: a tensor in
    the memory of an earlier one is replaced. Nothing reads the values.
    """
    taken: list[Region] = []

    def own(tensor: tvm.runtime.Tensor) -> tvm.runtime.Tensor:
        region = Region.of(tensor)
        if any(region.overlaps(other) for other in taken):
            tensor = tvm.runtime.empty(tensor.shape, tensor.dtype, device)
            region = Region.of(tensor)
        taken.append(region)
        return tensor

    return [mapped(argument, own, list) for argument in arguments]


def _slots(addresses: Sequence[int], region: Region) -> list[tuple[int, int]]:
    """The addresses within a region: their indices and offsets."""
    return [(i, a - region.address) for i, a in enumerate(addresses) if lies_in(a, region)]


def _close(driver: CudaDriver, recording: Any, keeper: _Keeper) -> None:
    # Also at exit, before the interpreter takes the driver's functions away
    try:
        with driver.current():
            driver.synchronize()
            recording.destroy()
    finally:
        keeper.stop()


def _destroy_event(driver: CudaDriver, event: int) -> None:
    with driver.current():
        driver.destroy_event(event)


def _first_line(error: Exception) -> str:
    lines = (line.strip() for line in str(error).splitlines())
    return next((line for line in lines if line), type(error).__name__)
