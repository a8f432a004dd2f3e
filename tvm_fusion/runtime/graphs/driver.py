"""The few functions of the CUDA driver that capturing and replaying a graph takes, by ctypes, and
what a capture recorded.

The driver library comes with the GPU's kernel module, so nothing else has to be installed; streams
and pointers of the runtime API (torch's, TVM's) are the driver's own. All calls are made in the
device's primary context, which torch and TVM use, and leave the caller's context as it was.
"""

import contextlib
import ctypes
from collections.abc import Callable, Iterator
from ctypes import byref, c_char, c_float, c_int, c_size_t, c_uint, c_ulonglong, c_void_p
from dataclasses import dataclass
from functools import cache

from ...errors import TargetError, TvmFusionError
from ...host.gpu_driver import LIBRARY

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
    "cuThreadExchangeStreamCaptureMode": (c_void_p,),
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
    "cuEventDestroy_v2": (c_void_p,),
    "cuEventElapsedTime": (c_void_p, c_void_p, c_void_p),
    "cuProfilerStart": (),
    "cuProfilerStop": (),
    "cuMemGetInfo_v2": (c_void_p, c_void_p),
}


class CudaGraphError(TvmFusionError):
    """The CUDA driver refused a call, or the work of a call cannot be captured."""


@cache
def _library() -> ctypes.CDLL:
    try:
        library = ctypes.CDLL(LIBRARY)
    except OSError as error:
        raise TargetError(
            f"CUDA graphs need the driver library {LIBRARY}: {error}. Run on a machine with an "
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

    @contextlib.contextmanager
    def relaxed(self) -> Iterator[None]:
        """Let this thread take and give back memory while a stream is captured."""
        mode = c_int(_RELAXED)
        self.call("cuThreadExchangeStreamCaptureMode", byref(mode))
        try:
            yield
        finally:
            self.call("cuThreadExchangeStreamCaptureMode", byref(mode))

    def end_capture(self, stream: int) -> "Recording":
        """End the recording, and return it."""
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

    def new_event(self, timed: bool = False) -> int:
        """An event, which counts as past until it is recorded."""
        event = c_void_p()
        self.call("cuEventCreate", byref(event), 0 if timed else _NO_TIMING)
        return event.value

    def elapsed_us(self, first: int, second: int) -> float:
        """Microseconds between two timed events that are past."""
        found = c_float()
        self.call("cuEventElapsedTime", byref(found), first, second)
        return found.value * 1e3

    def record(self, event: int, stream: int) -> None:
        """Let an event stand for all work given to a stream so far."""
        self.call("cuEventRecord", event, stream)

    def wait(self, stream: int, event: int) -> None:
        """Let a stream's later work wait for an event."""
        self.call("cuStreamWaitEvent", stream, event, 0)

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


# ---- What a capture recorded: kernels whose pointers can be moved from one launch to the next.
#
# The parameters of each kernel are copied from the graph, and what is an address among them is told
# by its size: 8 bytes, or the 128 of a tensor map (`CUtensorMap`), which holds the address of the
# tensor that it describes. Whose memory an address is in, the caller knows.
#
# A recording of one kernel is launched as that kernel: a graph of one node takes longer to start.

_INVALID_VALUE = 1  # CUDA_ERROR_INVALID_VALUE
_KERNEL, _EMPTY = 0, 5  # CUgraphNodeType
_COOPERATIVE, _CLUSTER_DIMENSION = 2, 4  # CUlaunchAttributeID
_ATTRIBUTE_BYTES = 64  # of a CUlaunchAttributeValue
_POINTER_BYTES, _MAP_BYTES = 8, 128
_SCALAR_BYTES = (1, 2, 4)
_MAP_ALIGNMENT = 64
_MOST_PARAMETERS = 4096  # a kernel has 32,764 bytes of them at most


class KernelParameters(ctypes.Structure):
    """CUDA_KERNEL_NODE_PARAMS_v2."""

    _fields_ = (
        ("func", c_void_p),
        ("grid", c_uint * 3),
        ("block", c_uint * 3),
        ("shared_memory", c_uint),
        ("values", ctypes.POINTER(c_void_p)),
        ("extra", c_void_p),
        ("kern", c_void_p),
        ("context", c_void_p),
    )


@dataclass(frozen=True, slots=True)
class _Address:
    """An address among the parameters: a kernel's number, where it is, and whether in a map."""

    kernel: int
    position: int
    in_map: bool


class Recording:
    """Kernels in the order of a captured stream.

    Parameters
    ----------
    driver : CudaDriver
    graph : c_void_p
        It is the recording's from now on, unless that raises.

    Attributes
    ----------
    addresses : list of int
        What may be an address among the parameters, in a fixed order.
    is_graph : bool
        Whether it is launched as a graph, whose launches never overlap, on whatever streams.

    Raises
    ------
    CudaGraphError
        If nothing was recorded, or something whose pointers are not known.
    """

    def __init__(self, driver: CudaDriver, graph: c_void_p) -> None:
        self._driver, self._graph = driver, graph
        nodes = list(_nodes(driver, graph))
        if not nodes:
            raise CudaGraphError("the call launched nothing on the stream it was given")
        self._kernels = [_Kernel(driver, node) for node in nodes]
        self._places = [
            _Address(number, position, in_map)
            for number, kernel in enumerate(self._kernels)
            for position, in_map in kernel.pointers
        ]
        self.addresses = [self._read(place) for place in self._places]
        self._changed: set[int] = set()
        self._launchable = c_void_p()
        self.is_graph = len(nodes) > 1 or not self._kernels[0].is_plain
        if self.is_graph:
            driver.call("cuGraphInstantiateWithFlags", byref(self._launchable), graph, 0)
            self._start = driver.function("cuGraphLaunch")
        else:
            self._start = driver.function("cuLaunchKernel")

    def move(self, index: int, address: int) -> None:
        """Give an address another value, which holds after `commit`."""
        place = self._places[index]
        if place.in_map:
            self._driver.call("cuTensorMapReplaceAddress", place.position, address)
        else:
            c_ulonglong.from_address(place.position).value = address
        self.addresses[index] = address
        self._changed.add(place.kernel)

    def commit(self) -> None:
        """Let later launches have the addresses; launches that are under way keep theirs."""
        if self.is_graph:
            for number in sorted(self._changed):
                kernel = self._kernels[number]
                self._driver.call(
                    "cuGraphExecKernelNodeSetParams_v2",
                    self._launchable,
                    kernel.node,
                    byref(kernel.parameters),
                )
        self._changed.clear()

    def launch(self, stream: int) -> None:
        """Launch it on a stream."""
        if self.is_graph:
            code = self._start(self._launchable, stream)
        else:
            kernel = self._kernels[0]
            code = self._start(*kernel.shape, stream, kernel.values, None)
        if code:
            raise self._driver.refused("launch of a recording", code)

    def destroy(self) -> None:
        """Destroy it; no launch may be under way."""
        if self.is_graph:
            self._driver.call("cuGraphExecDestroy", self._launchable)
        self._driver.call("cuGraphDestroy", self._graph)

    def _read(self, place: _Address) -> int:
        if not place.in_map:
            return c_ulonglong.from_address(place.position).value
        offset = _address_in_map(self._driver, place.position)
        return c_ulonglong.from_address(place.position + offset).value


class _Kernel:
    """A node of a kernel, with parameters of its own."""

    def __init__(self, driver: CudaDriver, node: int) -> None:
        self.node = node
        found = KernelParameters()
        driver.call("cuGraphKernelNodeGetParams_v2", node, byref(found))
        if not found.func:
            function = c_void_p()
            driver.call("cuKernelGetFunction", byref(function), found.kern)
            found.func = function.value
        if not found.values and found.extra:
            raise CudaGraphError("a kernel was given its parameters in one piece")
        sizes = list(_sizes(driver, found.func))
        self._memory = (c_char * (_MAP_ALIGNMENT + sum(map(_aligned, sizes))))()
        self.values = (c_void_p * max(1, len(sizes)))()
        self.pointers: list[tuple[int, bool]] = []
        position = _aligned(ctypes.addressof(self._memory))
        for number, size in enumerate(sizes):
            ctypes.memmove(position, found.values[number], size)
            self.values[number] = position
            if size in (_POINTER_BYTES, _MAP_BYTES):
                self.pointers.append((position, size == _MAP_BYTES))
            elif size not in _SCALAR_BYTES:
                raise CudaGraphError(f"a kernel has a parameter of {size} bytes")
            position += _aligned(size)
        found.values = ctypes.cast(self.values, ctypes.POINTER(c_void_p))
        self.parameters = found
        self.shape = (found.func, *found.grid, *found.block, found.shared_memory)
        attributes = (_COOPERATIVE, _CLUSTER_DIMENSION)
        self.is_plain = not any(_attribute(driver, node, number) for number in attributes)


def _nodes(driver: CudaDriver, graph: c_void_p) -> Iterator[int]:
    """The kernels of a graph."""
    count = c_size_t()
    driver.call("cuGraphGetNodes", graph, None, byref(count))
    nodes = (c_void_p * max(1, count.value))()
    driver.call("cuGraphGetNodes", graph, nodes, byref(count))
    for node in nodes[: count.value]:
        kind = c_int()
        driver.call("cuGraphNodeGetType", node, byref(kind))
        if kind.value == _KERNEL:
            yield node
        elif kind.value != _EMPTY:
            raise CudaGraphError(f"the call does more than launch kernels (node type {kind.value})")


def _sizes(driver: CudaDriver, function: int) -> Iterator[int]:
    """Bytes of each parameter of a kernel."""
    info = driver.function("cuFuncGetParamInfo")
    offset, size = c_size_t(), c_size_t()
    for number in range(_MOST_PARAMETERS):
        code = info(function, number, byref(offset), byref(size))
        if code == _INVALID_VALUE:  # there are no more
            return
        if code:
            raise driver.refused("cuFuncGetParamInfo", code)
        yield size.value


def _attribute(driver: CudaDriver, node: int, number: int) -> bool:
    """Whether an attribute of a node is set."""
    value = (c_uint * (_ATTRIBUTE_BYTES // 4))()
    driver.call("cuGraphKernelNodeGetAttribute", node, number, byref(value))
    return any(dimension > 1 for dimension in value[:3]) or (number == _COOPERATIVE and value[0])


def _address_in_map(driver: CudaDriver, tensor_map: int) -> int:
    """Where in a tensor map the address is: the bytes that change with it."""
    marks = (0x7A5A_3C00_1000, 0x2B96_D200_2000)
    copies = []
    for mark in marks:
        memory = (c_char * (_MAP_ALIGNMENT + _MAP_BYTES))()
        copy = _aligned(ctypes.addressof(memory))
        ctypes.memmove(copy, tensor_map, _MAP_BYTES)
        driver.call("cuTensorMapReplaceAddress", copy, mark)
        copies.append(ctypes.string_at(copy, _MAP_BYTES))
    for offset in range(0, _MAP_BYTES, 8):
        end = offset + 8
        found = [int.from_bytes(copy[offset:end], "little") for copy in copies]
        rest = {copy[:offset] + copy[end:] for copy in copies}
        if tuple(found) == marks and len(rest) == 1:
            return offset
    raise CudaGraphError("this driver keeps the address of a tensor map in another form")


def _aligned(size: int) -> int:
    return -(-size // _MAP_ALIGNMENT) * _MAP_ALIGNMENT
