"""The few functions of the CUDA driver that capturing and replaying a graph takes, by ctypes.

The driver library comes with the GPU's kernel module, so nothing else has to be installed; streams
and pointers of the runtime API (torch's, TVM's) are the driver's own. All calls are made in the
device's primary context, which torch and TVM use, and leave the caller's context as it was.
"""

import contextlib
import ctypes
from collections.abc import Callable, Iterator
from ctypes import byref, c_int, c_size_t, c_uint, c_ulonglong, c_void_p
from functools import cache
from typing import TYPE_CHECKING

from ...errors import TargetError, TvmFusionError

if TYPE_CHECKING:
    from .recording import Recording

_LIBRARY = "libcuda.so.1"
_NON_BLOCKING = 1  # CU_STREAM_NON_BLOCKING: the legacy default stream does not wait for it
_RELAXED = (
    2  # CU_STREAM_CAPTURE_MODE_RELAXED: neither we nor other threads are kept from cudaMalloc
)
_CAPTURE_IMPLICIT = 906  # the default stream, while a stream that it waits for is captured
_NO_TIMING = 2  # CU_EVENT_DISABLE_TIMING

_SIGNATURES = {
    "cuInit": (c_uint,),
    "cuDevicePrimaryCtxRetain": (c_void_p, c_int),
    "cuCtxPushCurrent_v2": (c_void_p,),
    "cuCtxPopCurrent_v2": (c_void_p,),
    "cuCtxGetCurrent": (c_void_p,),
    "cuCtxSynchronize": (),
    "cuStreamCreate": (c_void_p, c_uint),
    "cuStreamDestroy_v2": (c_void_p,),
    "cuStreamSynchronize": (c_void_p,),
    "cuStreamIsCapturing": (c_void_p, c_void_p),
    "cuStreamWaitEvent": (c_void_p, c_void_p, c_uint),
    "cuStreamBeginCapture_v2": (c_void_p, c_int),
    "cuStreamEndCapture": (c_void_p, c_void_p),
    "cuGraphGetNodes": (c_void_p, c_void_p, c_void_p),
    "cuGraphNodeGetType": (c_void_p, c_void_p),
    "cuGraphKernelNodeGetParams_v2": (c_void_p, c_void_p),
    "cuGraphKernelNodeGetAttribute": (c_void_p, c_int, c_void_p),
    "cuGraphExecKernelNodeSetParams_v2": (c_void_p, c_void_p, c_void_p),
    "cuKernelGetFunction": (c_void_p, c_void_p),
    "cuFuncGetParamInfo": (c_void_p, c_size_t, c_void_p, c_void_p),
    "cuTensorMapReplaceAddress": (c_void_p, c_void_p),
    "cuLaunchKernel": (c_void_p, *[c_uint] * 7, c_void_p, c_void_p, c_void_p),
    "cuGraphInstantiateWithFlags": (c_void_p, c_void_p, c_ulonglong),
    "cuGraphLaunch": (c_void_p, c_void_p),
    "cuGraphDestroy": (c_void_p,),
    "cuGraphExecDestroy": (c_void_p,),
    "cuEventCreate": (c_void_p, c_uint),
    "cuEventRecord": (c_void_p, c_void_p),
    "cuEventSynchronize": (c_void_p,),
    "cuEventDestroy_v2": (c_void_p,),
    "cuMemGetInfo_v2": (c_void_p, c_void_p),
}


class CudaGraphError(TvmFusionError):
    """The CUDA driver refused a call, or the work of a call cannot be captured."""


@cache
def _library() -> ctypes.CDLL:
    try:
        library = ctypes.CDLL(_LIBRARY)
    except OSError as error:
        raise TargetError(
            f"CUDA graphs need the driver library {_LIBRARY}: {error}. Run on a machine with an "
            "NVIDIA GPU, or compile without cuda_graph"
        ) from error
    for name, arguments in _SIGNATURES.items():
        if hasattr(library, name):
            getattr(library, name).argtypes = arguments
    library.cuGetErrorString.argtypes = (c_int, c_void_p)
    return library


class CudaDriver:
    """The driver's functions on one device.

    Parameters
    ----------
    index : int
        The device, as torch and TVM number it.

    Raises
    ------
    TargetError
        If this machine has no CUDA driver.
    CudaGraphError
        From every method, if the driver refuses.
    """

    def __init__(self, index: int) -> None:
        self._cuda = _library()
        self._check("cuInit", self._cuda.cuInit(0))
        self._context = c_void_p()
        code = self._cuda.cuDevicePrimaryCtxRetain(byref(self._context), index)
        self._check("cuDevicePrimaryCtxRetain", code)

    def is_current(self) -> bool:
        """Whether the device's primary context is the current one already."""
        found = c_void_p()
        self._cuda.cuCtxGetCurrent(byref(found))
        return found.value == self._context.value

    @contextlib.contextmanager
    def current(self) -> Iterator[None]:
        """Make the device's primary context the current one; the other methods need it."""
        self.call("cuCtxPushCurrent_v2", self._context)
        try:
            yield
        finally:
            self._cuda.cuCtxPopCurrent_v2(byref(c_void_p()))

    def synchronize(self) -> None:
        """Wait for everything on the device."""
        self.call("cuCtxSynchronize")

    def free_bytes(self) -> int:
        """Memory that nothing has taken."""
        free, total = c_size_t(), c_size_t()
        self.call("cuMemGetInfo_v2", byref(free), byref(total))
        return free.value

    def new_stream(self) -> int:
        """A stream of its own."""
        stream = c_void_p()
        self.call("cuStreamCreate", byref(stream), _NON_BLOCKING)
        return stream.value

    def destroy_stream(self, stream: int) -> None:
        """Destroy what `new_stream` made."""
        self.call("cuStreamDestroy_v2", stream)

    def wait_for_stream(self, stream: int) -> None:
        """Block until a stream's work is done."""
        self.call("cuStreamSynchronize", stream)

    def is_capturing(self, stream: int) -> bool:
        """Whether someone captures a stream: what is launched there does not run now."""
        status = c_int()
        code = self._cuda.cuStreamIsCapturing(stream, byref(status))
        if code == _CAPTURE_IMPLICIT:
            return True
        self._check("cuStreamIsCapturing", code)
        return status.value != 0

    def begin_capture(self, stream: int) -> None:
        """Record what is launched on a stream from now on, and do not run it."""
        self.call("cuStreamBeginCapture_v2", stream, _RELAXED)

    def end_capture(self, stream: int) -> "Recording":
        """End the recording, and return it."""
        from .recording import Recording

        graph = c_void_p()
        self.call("cuStreamEndCapture", stream, byref(graph))
        try:
            return Recording(self, graph)
        except BaseException:
            self._cuda.cuGraphDestroy(graph)
            raise

    def abandon_capture(self, stream: int) -> None:
        """End the recording of a stream, whatever state it is in, and forget it."""
        graph = c_void_p()
        self._cuda.cuStreamEndCapture(stream, byref(graph))
        if graph.value:
            self._cuda.cuGraphDestroy(graph)

    def new_event(self) -> int:
        """An event, which counts as past until it is recorded."""
        event = c_void_p()
        self.call("cuEventCreate", byref(event), _NO_TIMING)
        return event.value

    def record(self, event: int, stream: int) -> None:
        """Let an event stand for all work given to a stream so far."""
        self.call("cuEventRecord", event, stream)

    def wait(self, stream: int, event: int) -> None:
        """Let a stream's later work wait for an event."""
        self.call("cuStreamWaitEvent", stream, event, 0)

    def wait_for_event(self, event: int) -> None:
        """Block until an event is past."""
        self.call("cuEventSynchronize", event)

    def destroy_event(self, event: int) -> None:
        """Destroy what `new_event` made."""
        self.call("cuEventDestroy_v2", event)

    def function(self, name: str) -> Callable[..., int]:
        """A function of the driver, as it is: it returns an error's number, 0 for none.

        Raises
        ------
        CudaGraphError
            If this driver has no such function.
        """
        try:
            return getattr(self._cuda, name)
        except AttributeError:
            raise CudaGraphError(
                f"this driver has no {name}; that of CUDA 12.4 or later has it"
            ) from None

    def call(self, name: str, *arguments: object) -> None:
        """Call a function of the driver."""
        code = self.function(name)(*arguments)
        if code:
            self._check(name, code)

    def refused(self, name: str, code: int) -> CudaGraphError:
        """The error that a number stands for."""
        text = ctypes.c_char_p()
        self._cuda.cuGetErrorString(code, byref(text))
        said = text.value.decode() if text.value else "unknown error"
        return CudaGraphError(f"{name}: {said} (CUDA error {code})")

    def _check(self, name: str, code: int) -> None:
        if code:
            raise self.refused(name, code)
