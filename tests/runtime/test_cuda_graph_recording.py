"""Parameters of recorded kernels: read, told apart, moved, launched with; by a driver of ours."""

import ctypes
from ctypes import c_size_t, c_uint, c_ulonglong, c_void_p

import pytest

from tvm_fusion.runtime.graphs.driver import CudaGraphError, KernelParameters, Recording

GRAPH, LAUNCHABLE = 1000, 2000


class Kernel:
    """A node: the bytes of each parameter."""

    def __init__(self, *values: bytes, cluster: int = 0, kind: int = 0) -> None:
        self.values = [ctypes.create_string_buffer(value, len(value)) for value in values]
        self.pointers = (c_void_p * max(1, len(values)))(*map(ctypes.addressof, self.values))
        self.cluster, self.kind = cluster, kind


class Driver:
    """As much of `CudaDriver` as a recording asks for; launches note what the kernels get."""

    def __init__(self, *kernels: Kernel, lacks: str = "") -> None:
        self.kernels, self.lacks = kernels, lacks
        self.executable = [[bytes(v) for v in kernel.values] for kernel in kernels]
        self.launched: list[tuple[int, list]] = []
        self.log: list[str] = []

    def function(self, name):
        if name == self.lacks:
            raise CudaGraphError(f"this driver has no {name}")
        self.log.append(name)
        return getattr(self, name)

    def call(self, name, *arguments):
        if code := self.function(name)(*arguments):
            raise self.refused(name, code)

    def refused(self, name, code):
        return CudaGraphError(f"{name}: {code}")

    def cuGraphGetNodes(self, _graph, nodes, count):
        count._obj.value = len(self.kernels)
        if nodes is not None:
            nodes[: len(self.kernels)] = range(1, len(self.kernels) + 1)
        return 0

    def cuGraphNodeGetType(self, node, kind):
        kind._obj.value = self.kernels[node - 1].kind
        return 0

    def cuGraphKernelNodeGetParams_v2(self, node, found):
        parameters: KernelParameters = found._obj
        parameters.func = node
        parameters.grid, parameters.block = (c_uint * 3)(2, 1, 1), (c_uint * 3)(64, 1, 1)
        values = self.kernels[node - 1].pointers
        parameters.values = ctypes.cast(values, ctypes.POINTER(c_void_p))
        return 0

    def cuFuncGetParamInfo(self, function, number, _offset, size):
        values = self.kernels[function - 1].values
        if number >= len(values):
            return 1
        size._obj.value = len(values[number])
        return 0

    def cuGraphKernelNodeGetAttribute(self, node, number, value):
        value._obj[0] = self.kernels[node - 1].cluster if number == 4 else 0
        return 0

    def cuTensorMapReplaceAddress(self, tensor_map, address):
        c_ulonglong.from_address(tensor_map + 16).value = address
        return 0

    def cuGraphInstantiateWithFlags(self, launchable, _graph, _flags):
        launchable._obj.value = LAUNCHABLE
        return 0

    def cuGraphExecKernelNodeSetParams_v2(self, launchable, node, parameters):
        assert launchable.value == LAUNCHABLE
        values = parameters._obj.values
        sizes = [len(v) for v in self.kernels[node - 1].values]
        self.executable[node - 1] = [ctypes.string_at(values[i], n) for i, n in enumerate(sizes)]
        return 0

    def cuGraphLaunch(self, _launchable, stream):
        self.launched.append((stream, [list(values) for values in self.executable]))
        return 0

    def cuLaunchKernel(self, function, *rest):
        *shape, stream, values, _extra = rest
        assert shape == [2, 1, 1, 64, 1, 1, 0]
        sizes = [len(v) for v in self.kernels[function - 1].values]
        given = [ctypes.string_at(values[i], n) for i, n in enumerate(sizes)]
        self.launched.append((stream, [given]))
        return 0

    def cuGraphExecDestroy(self, _launchable):
        return 0

    def cuGraphDestroy(self, _graph):
        return 0


def pointer(address: int) -> bytes:
    return address.to_bytes(8, "little")


def tensor_map(address: int) -> bytes:
    return b"\x07" * 16 + pointer(address) + b"\x09" * 104


def recorded(*kernels: Kernel) -> tuple[Recording, Driver]:
    driver = Driver(*kernels)
    return Recording(driver, c_void_p(GRAPH)), driver


def test_pointers_and_the_addresses_in_tensor_maps_move_and_nothing_else_does():
    first = Kernel(pointer(0x7000), b"\x05\0\0\0", tensor_map(0x9100))
    second = Kernel(tensor_map(0x7040), b"\x01", pointer(0xA000))
    recording, driver = recorded(first, second)
    assert recording.is_graph
    assert recording.addresses == [0x7000, 0x9100, 0x7040, 0xA000]
    recording.move(0, 0x8000)
    recording.move(2, 0x8040)
    recording.launch(3)
    recording.commit()
    recording.launch(4)
    before, after = driver.launched
    assert before == (3, [[bytes(v) for v in k.values] for k in (first, second)])
    assert after[0] == 4
    assert after[1] == [
        [pointer(0x8000), b"\x05\0\0\0", tensor_map(0x9100)],
        [tensor_map(0x8040), b"\x01", pointer(0xA000)],
    ]
    assert recording.addresses == [0x8000, 0x9100, 0x8040, 0xA000]


def test_only_kernels_that_change_are_set_and_only_once():
    recording, driver = recorded(Kernel(pointer(1)), Kernel(pointer(2), pointer(3)))
    recording.move(1, 20)
    recording.move(2, 30)
    recording.commit()
    recording.commit()
    assert driver.log.count("cuGraphExecKernelNodeSetParams_v2") == 1


def test_one_kernel_is_launched_as_itself_with_parameters_as_they_are():
    recording, driver = recorded(Kernel(pointer(0x7000), tensor_map(0x8000)))
    assert not recording.is_graph
    recording.move(1, 0x8800)
    recording.commit()
    recording.launch(5)
    assert driver.launched == [(5, [[pointer(0x7000), tensor_map(0x8800)]])]
    recording.destroy()
    assert "cuGraphInstantiateWithFlags" not in driver.log
    assert "cuGraphExecDestroy" not in driver.log


def test_one_kernel_with_clusters_stays_a_graph():
    recording, driver = recorded(Kernel(pointer(0x7000), cluster=2))
    assert recording.is_graph
    recording.launch(5)
    recording.destroy()
    assert driver.log[-2:] == ["cuGraphExecDestroy", "cuGraphDestroy"]


def test_the_parameters_are_aligned_as_tensor_maps_have_to_be():
    recording, _ = recorded(Kernel(b"\x01", tensor_map(0x40), pointer(8), tensor_map(0x80)))
    assert [place.position % 64 for place in recording._places] == [0] * 3


@pytest.mark.parametrize(
    ("kernels", "lacks", "message"),
    [
        ([], "", "launched nothing on the stream"),
        ([Kernel(kind=1)], "", "more than launch kernels .node type 1."),
        ([Kernel(kind=5)], "", "launched nothing"),
        ([Kernel(b"abc")], "", "a parameter of 3 bytes"),
        ([Kernel(pointer(1))], "cuFuncGetParamInfo", "this driver has no cuFuncGetParamInfo"),
    ],
)
def test_what_cannot_be_moved_refuses_the_capture(kernels, lacks, message):
    with pytest.raises(CudaGraphError, match=message):
        Recording(Driver(*kernels, lacks=lacks), c_void_p(GRAPH))


def test_a_tensor_map_of_another_form_refuses_the_capture():
    class Hashed(Driver):
        def cuTensorMapReplaceAddress(self, tensor_map, address):
            c_size_t.from_address(tensor_map).value = address ^ 0xFF
            return 0

    with pytest.raises(CudaGraphError, match="the address of a tensor map in another form"):
        Recording(Hashed(Kernel(tensor_map(0x40))), c_void_p(GRAPH))
