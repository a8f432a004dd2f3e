"""One call of a VM function as a CUDA graph: captured once, with its memory, then launched.

The capture runs `main` twice on a stream of its own. The first time runs: it loads kernels and
fills TVM's pool. The second is recorded and runs nothing; its storages come from the pool, so
nothing is allocated then. They are kept as long as the graph, which writes to them in every launch:
the VM shows each one to an instrument when it is taken.

A kernel function that launches several kernels may take scratch from a pool that TVM keeps for each
host thread, and gives it back at once. So each graph is captured in a host thread of its own, which
then sleeps until the graph is gone: nobody else gets that scratch.
"""

import contextlib
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import tvm
import tvm_ffi

from .cuda_graph_driver import CudaDriver, CudaGraphError


class CapturedCall:
    """A call captured into a graph.

    Parameters
    ----------
    vm : relax.VirtualMachine
        Nobody else may run it meanwhile.
    arguments : sequence
        What `main` takes. The graph reads these tensors in every launch, wherever they are lent
        from; they are kept.
    device : tvm.runtime.Device
    driver : CudaDriver

    Attributes
    ----------
    arguments : tuple
    outputs : Any
        What `main` returned: tensors that every launch writes.

    Raises
    ------
    CudaGraphError
        The call runs, but it cannot be captured.
    Exception
        Whatever the call raises.
    """

    def __init__(
        self, vm: Any, arguments: Sequence[Any], device: tvm.runtime.Device, driver: CudaDriver
    ) -> None:
        self.arguments = tuple(arguments)
        self._driver = driver
        keeper = _Keeper()
        try:
            self._launchable, self.outputs, self._storages = keeper.run(
                lambda: _capture(vm, self.arguments, device, driver)
            )
        except BaseException:
            keeper.stop()
            raise
        with driver.current():
            self._event = driver.new_event()
        self._stream: int | None = None
        # Also at exit, before the interpreter takes the driver's functions away
        self._finalizer = weakref.finalize(
            self, _close, driver, self._launchable, self._event, keeper
        )

    @contextlib.contextmanager
    def on(self, stream: int) -> Iterator[Callable[[], None]]:
        """Give a function that launches the graph on a stream; what is done on the stream within
        is ordered after earlier launches, and before later ones, on whatever streams.
        """
        driver = self._driver
        if self._stream is not None and self._stream != stream:
            driver.wait(stream, self._event)
        try:
            yield lambda: driver.launch(self._launchable, stream)
        finally:
            driver.record(self._event, stream)
            self._stream = stream

    def close(self) -> None:
        """Wait for the last launch and destroy the graph; its memory goes back to TVM's pool when
        no one holds an output any more.
        """
        self._finalizer()


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
    vm: Any, arguments: Sequence[Any], device: tvm.runtime.Device, driver: CudaDriver
) -> tuple[int, Any, list[Any]]:
    """Return what launches the call, its outputs, and its storages."""
    main = vm["main"]
    with driver.current():
        driver.synchronize()  # what the pool gives out may still be in use on another stream
        stream = driver.new_stream()
        try:
            with tvm_ffi.use_raw_stream(device, stream):
                with _kept_storages(vm):
                    main(*arguments)
                driver.synchronize()
                return _record(vm, main, arguments, driver, stream)
        finally:
            driver.destroy_stream(stream)


def _record(
    vm: Any, main: Callable[..., Any], arguments: Sequence[Any], driver: CudaDriver, stream: int
) -> tuple[int, Any, list[Any]]:
    driver.begin_capture(stream)
    try:
        with _kept_storages(vm) as storages:
            outputs = main(*arguments)
    except Exception as error:
        driver.abandon_capture(stream)
        raise CudaGraphError(f"the call cannot be captured: {_first_line(error)}") from error
    return driver.end_capture(stream), outputs, list(storages)


@contextlib.contextmanager
def _kept_storages(vm: Any) -> Iterator[list[Any]]:
    """The storages that the VM takes within, kept from its pool; afterwards they are the caller's.

    Storages whose tensors die early in the call are not used again within it, unless the module's
    memory is planned: that of symbolic shapes is not.
    """
    storages: list[Any] = []

    def note(_function: Any, name: str, before: bool, result: Any, *_: Any) -> None:
        if name == "vm.builtin.alloc_storage" and not before:
            storages.append(result)

    vm.set_instrument(note)
    try:
        yield storages
    finally:
        vm._set_instrument(None)  # VirtualMachine.set_instrument takes functions only


def _close(driver: CudaDriver, launchable: int, event: int, keeper: _Keeper) -> None:
    try:
        with driver.current():
            driver.wait_for_event(event)
            driver.destroy(launchable)
            driver.destroy_event(event)
    finally:
        keeper.stop()


def _first_line(error: Exception) -> str:
    lines = (line.strip() for line in str(error).splitlines())
    return next((line for line in lines if line), type(error).__name__)
