"""What a capture recorded: kernels whose pointers can be moved from one launch to the next.

The parameters of each kernel are copied from the graph, and what is an address among them is told
by its size: 8 bytes, or the 128 of a tensor map (`CUtensorMap`), which holds the address of the
tensor that it describes. Whose memory an address is in, the caller knows.

A recording of one kernel is launched as that kernel: a graph of one node takes longer to start.
"""

import ctypes
from collections.abc import Iterator
from ctypes import byref, c_char, c_int, c_size_t, c_uint, c_ulonglong, c_void_p
from dataclasses import dataclass

from .driver import CudaDriver, CudaGraphError

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
