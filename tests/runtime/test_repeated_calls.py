"""Calls like one that was checked: what they take, and what they leave to the check."""

import threading

import numpy as np
import pytest
import torch
import tvm
from tvm import relax

import tvm_fusion
from tvm_fusion.errors import InputError
from tvm_fusion.runtime.build.build import build
from tvm_fusion.runtime.calls.compiled_module import CompiledModule
from tvm_fusion.runtime.calls.repeated_calls import MOST_STAGED_BYTES, Repeated

from ..support.runtime_cases import LLVM, relax_module

WRAPPED = {"numpy": lambda a: a, "torch": torch.from_numpy, "tvm": tvm.runtime.tensor}


def module_of(emit, *inputs) -> CompiledModule:
    return CompiledModule.of(build(relax_module(emit, *inputs), LLVM))


@pytest.fixture(scope="module")
def difference() -> CompiledModule:
    """x - y of 3 x 1 x 5 and 5."""
    return module_of(
        lambda bb, x, y: relax.op.subtract(x, y),
        ("x", (3, 1, 5), "float32"),
        ("y", (5,), "float32"),
    )


def repeated(module) -> Repeated:
    return Repeated(module.vm["main"], threading.Lock(), True, module.own, False)


def call_like(module, *inputs):
    kind, _ = module.check(inputs)
    return repeated(module).call(inputs, module.arguments(inputs), kind)


def inputs(seed=0):
    rng = np.random.default_rng(seed)
    return [rng.standard_normal(s).astype("float32") for s in ((3, 1, 5), (5,))]


def aligned(array, by=64):
    """A copy that begins at a multiple of 64 bytes, and `by` bytes further."""
    room = np.empty(array.nbytes + 128, "uint8")
    start = -room.ctypes.data % 64 + by
    copy = room[start : start + array.nbytes].view(array.dtype).reshape(array.shape)
    copy[...] = array
    return copy


def tensors(seed=0):
    return [torch.from_numpy(aligned(a)) for a in inputs(seed)]


@pytest.mark.parametrize("kind", ["numpy", "torch", "tvm"])
def test_other_inputs_of_the_same_kind_are_taken(difference, kind):
    wrap = WRAPPED[kind]
    call = call_like(difference, *(wrap(aligned(a)) for a in inputs()))
    for seed in range(3):
        x, y = inputs(seed)
        result = call([wrap(aligned(x)), wrap(aligned(y))])
        assert type(result) is type(wrap(x))
        np.testing.assert_array_equal(result if kind == "numpy" else result.numpy(), x - y)


REFUSED = {
    "another dtype": lambda x: x.double(),
    "integers of as many bits": lambda x: x.int(),
    "another extent": lambda x: x[:2],
    "a rank less": lambda x: x[:, 0],
    "a rank more": lambda x: x[None],
    "swapped extents": lambda x: x.transpose(0, 1).contiguous(),
    "strides": lambda x: torch.cat([x, x], -1)[..., ::2],
    "turned strides": lambda x: x.permute(2, 1, 0).contiguous().permute(2, 1, 0),
    "an expanded axis": lambda x: x[:1].expand(3, 1, 5),
    "an unaligned start": lambda x: torch.from_numpy(aligned(x.numpy(), by=68)),
    "no memory": lambda x: torch.empty_like(x, device="meta"),
    "sparse memory": lambda x: x.to_sparse(),
    "a list": lambda x: x.tolist(),
    "a number": lambda x: 3.0,
    "None": lambda x: None,
}


@pytest.mark.parametrize("change", REFUSED)
def test_what_the_check_has_to_see_is_left_to_it(difference, change):
    x, y = tensors()
    call = call_like(difference, x, y)
    assert call([REFUSED[change](x), y]) is None
    assert torch.equal(call([x, y]), x - y)


@pytest.mark.parametrize("count", [0, 1, 3])
def test_another_number_of_inputs_is_left_to_the_check(difference, count):
    call = call_like(difference, *tensors())
    assert call([*tensors(), *tensors()][:count]) is None


def test_strides_along_one_element_do_not_matter(difference):
    x, y = tensors()
    odd = torch.as_strided(x, (3, 1, 5), (5, 77, 1))
    assert torch.equal(call_like(difference, x, y)([odd, y]), x - y)


def test_parameters_and_tensors_with_gradients_are_taken(difference):
    x, y = tensors()
    call = call_like(difference, x, y)
    for same in (torch.nn.Parameter(x), x.clone().requires_grad_()):
        result = call([same, y])
        assert not result.requires_grad
        assert torch.equal(result, x - y)


def test_outputs_are_of_the_kind_that_belongs_to_the_inputs(difference):
    x, y = tensors()
    call = call_like(difference, x, y)
    assert isinstance(call([x.numpy(), y]), torch.Tensor)
    assert isinstance(call([x.numpy(), y.numpy()]), np.ndarray)
    assert isinstance(call([x.numpy(), tvm.runtime.tensor(y.numpy())]), tvm.runtime.Tensor)


NUMPY_REFUSED = {
    "float64": lambda x: x.astype("float64"),
    "another order of bytes": lambda x: x.astype(">f4"),
    "an extent": lambda x: x[1:],
    "a class of its own": lambda x: np.ma.masked_array(x),
    "a tensor": torch.from_numpy,
}


@pytest.mark.parametrize("change", NUMPY_REFUSED)
def test_arrays_that_cannot_be_copied_as_they_are_are_left_to_the_check(difference, change):
    x, y = inputs()
    call = call_like(difference, x, y)
    assert call([NUMPY_REFUSED[change](x), y]) is None
    assert call([x]) is None


def test_arrays_may_have_strides_or_be_read_only(difference):
    x, y = inputs()
    call = call_like(difference, x, y)
    read_only = x.copy()
    read_only.flags.writeable = False
    for same in (read_only, np.repeat(x, 2, axis=-1)[..., ::2], np.asfortranarray(x)):
        np.testing.assert_array_equal(call([same, y]), x - y)


def test_outputs_survive_later_calls(difference):
    for make in (inputs, tensors):
        x, y = make(0)
        call = call_like(difference, x, y)
        first = call([x, y])
        kept = first.copy() if make is inputs else first.clone()
        for seed in range(1, 4):
            call(make(seed))
        assert (first == kept).all()


def test_an_output_that_is_an_input_is_no_view_of_the_kept_memory():
    module = module_of(
        lambda bb, x: relax.Tuple([x, bb.emit(relax.op.abs(x))]), ("x", (7,), "float32")
    )
    call = call_like(module, np.ones(7, "float32"))
    same, _ = call([np.full(7, -2, "float32")])
    call([np.zeros(7, "float32")])
    np.testing.assert_array_equal(same, np.full(7, -2, "float32"))


def test_large_arrays_and_empty_ones_are_not_copied_to_kept_memory():
    for rows in (0, MOST_STAGED_BYTES // 4 + 1):
        module = module_of(lambda bb, x: relax.op.abs(x), ("x", (rows,), "float32"))
        assert call_like(module, np.zeros(rows, "float32")) is None
        assert module(np.zeros(rows, "float32")).shape == (rows,)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "int8", "bool", "float64", "int64"])
def test_every_dtype_is_told_from_every_other(dtype):
    module = module_of(lambda bb, x: relax.op.reshape(x, (3, 5)), ("x", (15,), dtype))
    given = torch.arange(15).to(getattr(torch, dtype))
    call = call_like(module, given)
    assert torch.equal(call([given]), given.reshape(3, 5))
    for other in (torch.float32, torch.uint8, torch.int16, torch.complex64):
        assert call([torch.zeros(15, dtype=other)]) is None


def test_an_error_of_a_kernel_is_raised_once_and_calls_go_on():
    calls = []

    @tvm.register_global_func("tests.refuses_negative_numbers", override=True)
    def refuses(x, out):
        calls.append(1)
        if x.numpy().min() < 0:
            raise ValueError("negative")
        out.copyfrom(x.numpy())

    module = module_of(
        lambda bb, x: relax.op.call_dps_packed(
            "tests.refuses_negative_numbers", [x], relax.TensorType((4,), "float32")
        ),
        ("x", (4,), "float32"),
    )
    x = torch.ones(4)
    module(x)
    with pytest.raises(ValueError, match="negative"):
        module(-x)
    assert len(calls) == 2
    assert torch.equal(module(x), x)


def test_wrong_inputs_after_right_ones_are_named(difference):
    x, y = tensors()
    difference(x, y)
    for wrong, message in (
        ((x.double(), y), "input x: expected dtype float32, got float64"),
        ((x, y[:3]), r"input y: expected shape \(5\)"),
        ((x,), "expected 2 inputs"),
        ((x, [1.0]), "an input is a list"),
    ):
        with pytest.raises(InputError, match=message):
            difference(*wrong)
        assert torch.equal(difference(x, y), x - y)


def test_threads_that_call_at_once_get_their_own_numbers(difference):
    failures = []

    def work(make, seed):
        given = make(seed)
        want = given[0] - given[1]
        for _ in range(200):
            if not (difference(*given) == want).all():
                failures.append(seed)

    threads = [threading.Thread(target=work, args=(inputs, seed)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures


@pytest.mark.one_in(2)
@pytest.mark.parametrize("extent", [1, 2, 7, 13])
def test_a_compiled_product_of_odd_size_is_right_in_every_call(extent):
    x, w = torch.randn(extent, 2 * extent + 1), torch.randn(2 * extent + 1, extent)
    product = tvm_fusion.compile(_Product(), target="llvm", example_inputs=(x, w), verify=False)
    for _ in range(3):
        x, w = torch.randn_like(x), torch.randn_like(w)
        want = x.double() @ w.double()
        np.testing.assert_allclose(product(x, w), want, rtol=1e-5, atol=1e-5)
        np.testing.assert_allclose(product(x.numpy(), w.numpy()), want, rtol=1e-5, atol=1e-5)


class _Product(torch.nn.Module):
    def forward(self, x, w):
        return x @ w
