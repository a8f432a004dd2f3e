"""NumPy, torch and TVM tensors in and out of a compiled module, without a copy where possible."""

import sys
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from enum import Enum
from typing import Any

import numpy as np
import tvm
import tvm_ffi

from ...errors import InputError
from .signature import InputSpec

NATIVE = frozenset(
    ["float16", "float32", "float64"]
    + [f"{sign}int{bits}" for sign in ("", "u") for bits in (8, 16, 32, 64)]
)
ALIGNMENT = 64  # bytes; TVM's generated code assumes it (kAllocAlignment)


class Kind(Enum):
    """Whose tensors a call was given, and returns."""

    NUMPY = "NumPy"
    TORCH = "torch"
    TVM = "TVM"


def kind_of(value: Any) -> Kind:
    """Return whose tensor a value is; raises InputError for anything else."""
    if isinstance(value, np.ndarray):
        return Kind.NUMPY
    if isinstance(value, tvm.runtime.Tensor):
        return Kind.TVM
    if is_torch_tensor(value):
        return Kind.TORCH
    raise InputError(
        f"an input is a {type(value).__name__}; expected a NumPy array, a torch tensor or a TVM "
        "tensor (wrap a number with numpy.asarray and the right dtype)"
    )


def result_kind(kinds: Sequence[Kind]) -> Kind:
    """Return whose tensors the outputs are: torch if any input is, NumPy if all are, else TVM."""
    if Kind.TORCH in kinds:
        return Kind.TORCH
    return Kind.NUMPY if kinds and all(k is Kind.NUMPY for k in kinds) else Kind.TVM


def describe(value: Any) -> tuple[str, tuple[int, ...]]:
    """Return dtype (TVM's name) and shape of a tensor of any kind."""
    dtype = value.dtype.name if isinstance(value, np.ndarray) else name_of(value.dtype)
    return dtype, tuple(map(int, value.shape))


def name_of(dtype: Any) -> str:
    """TVM's name of a dtype of torch or TVM."""
    return str(dtype).removeprefix("torch.")


TorchInput = tuple[Any, Any, Any]  # dtype, shape and device


def describe_torch(values: Sequence[Any], device: tvm.runtime.Device) -> tuple[TorchInput, ...]:
    """Return what to expect of torch tensors that are on `device`; () unless all are such."""
    torch = sys.modules.get("torch")
    if torch is None or not values:
        return ()
    index = None if device.type == "cpu" else device.index
    wanted = torch.device(device.type, index)
    for value in values:
        if type(value) not in (torch.Tensor, torch.nn.Parameter) or value.device != wanted:
            return ()
    return tuple((value.dtype, value.shape, value.device) for value in values)


def to_tvm(value: Any, device: tvm.runtime.Device, name: str) -> tvm.runtime.Tensor:
    """Return a contiguous, aligned TVM tensor on `device`: the same memory, or a copy of it."""
    kind = kind_of(value)
    if kind is not Kind.TVM and 0 in value.shape:  # its strides are not those that kernels ask for
        dtype, shape = describe(value)
        return tvm.runtime.empty(shape, dtype, device)
    if kind is Kind.NUMPY:
        return _from_numpy(value, device)
    if kind is Kind.TORCH:
        return _from_torch(value, device, name)
    if value.device == device:
        return value
    return value.copyto(device)


def to_argument(value: Any, device: tvm.runtime.Device, spec: InputSpec) -> Any:
    """Return a value as the VM takes it; what is no tensor goes through, tensors within it too."""
    if spec.dtype is not None:
        return to_tvm(value, device, spec.name)
    if isinstance(value, list | tuple):
        if all(isinstance(v, int) for v in value):
            return tvm_ffi.Shape(value)
        return [to_argument(v, device, spec) for v in value]
    is_object = isinstance(value, tvm_ffi.Object) and not isinstance(value, tvm.runtime.Tensor)
    if is_object or isinstance(value, int | float):  # a cache, an array of tensors
        return value
    return to_tvm(value, device, spec.name)


def from_tvm(value: Any, kind: Kind, like: Any, own: Sequence[bool] = ()) -> Any:
    """Return outputs as tensors of `kind`, tuples as tuples; `like` is an input's torch device.

    NumPy arrays are copies, but where `own`, in the order of the tensors, says that a tensor's
    memory is no one else's.
    """
    return _converted(value, kind, like, iter(own))


def _converted(value: Any, kind: Kind, like: Any, own: Iterator[bool]) -> Any:
    if isinstance(value, tvm.runtime.Tensor):
        lent = next(own, False)
        if kind is Kind.NUMPY:
            return _to_numpy(value, lent)
        if kind is Kind.TORCH:
            import torch

            return torch.from_dlpack(value).to(like)
        return value
    if isinstance(value, tvm_ffi.Array | tuple | list):
        return tuple(_converted(v, kind, like, own) for v in value)
    return value


def torch_stream(device: tvm.runtime.Device, kind: Kind) -> AbstractContextManager:
    """Return a context in which TVM launches on torch's current stream, where torch is in play."""
    if kind is not Kind.TORCH or device.type != "cuda":
        return nullcontext()
    import torch

    return tvm_ffi.use_raw_stream(device, torch._C._cuda_getCurrentRawStream(device.index))


def is_torch_tensor(value: Any) -> bool:
    """Whether a value is a tensor of torch."""
    torch = sys.modules.get("torch")  # whoever holds a torch tensor has imported it
    return torch is not None and isinstance(value, torch.Tensor)


def leaves_of(inputs: Sequence[Any]) -> Sequence[Any]:
    """Inputs without the tuples, lists and dicts around them; torch knows more such classes."""
    if not any(isinstance(x, tuple | list | dict) for x in inputs):
        return inputs
    torch = sys.modules.get("torch")
    if torch is not None:
        return torch.utils._pytree.tree_leaves(inputs)
    found: list[Any] = []
    for x in inputs:
        nested = x.values() if isinstance(x, dict) else x
        found.extend(leaves_of(nested) if isinstance(x, tuple | list | dict) else [x])
    return found


def are_negated(values: Sequence[Any]) -> bool:
    """Whether torch only marks the sign of one, and memory has another: imaginary parts of
    conjugates.
    """
    torch = sys.modules.get("torch")
    if torch is None:
        return False
    try:
        return any(map(torch.Tensor.is_neg, values))
    except TypeError:  # others among them
        return any(isinstance(x, torch.Tensor) and x.is_neg() for x in values)


def raw_stream(device: tvm.runtime.Device, kind: Kind) -> int:
    """Return the CUDA stream that the caller works on: torch's current one if his tensors are
    torch's, else TVM's.
    """
    if kind is Kind.TORCH:
        import torch

        if device.type == "cuda":
            return torch._C._cuda_getCurrentRawStream(device.index)
        return 0
    return tvm_ffi.core._env_get_current_stream(device.dlpack_device_type(), device.index)


def _to_numpy(value: tvm.runtime.Tensor, lent: bool) -> np.ndarray:
    """A tensor as an array: its memory, which the array then keeps alive, or a copy."""
    if lent and value.device.type == "cpu" and value.dtype in NATIVE:
        array = np.from_dlpack(value)
        if array.flags.writeable:  # older releases of NumPy lend nothing to write to
            return array
    return value.numpy()


def _from_numpy(value: np.ndarray, device: tvm.runtime.Device) -> tvm.runtime.Tensor:
    on_cpu = device.type == "cpu"
    if on_cpu and _is_shareable(value):
        return tvm.runtime.from_dlpack(value)
    native = value.astype(value.dtype.newbyteorder("="), copy=False)
    return tvm.runtime.tensor(np.asarray(native, order="C"), device)


def _is_shareable(value: np.ndarray) -> bool:
    return (
        value.flags.c_contiguous
        and value.size > 0  # NumPy's strides of an empty array are not those TVM expects
        and value.flags.writeable  # NumPy lends no read-only memory
        and value.dtype.isnative
        and value.dtype.isbuiltin == 1
        and value.ctypes.data % ALIGNMENT == 0
    )


def _from_torch(value: Any, device: tvm.runtime.Device, name: str) -> tvm.runtime.Tensor:
    if device.type == "cpu" and value.device.type != "cpu":
        raise InputError(
            f"input {name} is on {value.device}, but the module runs on the CPU: pass "
            "tensor.cpu(), or compile for the target cuda"
        )
    wanted = "cpu" if device.type == "cpu" else f"{device.type}:{device.index}"
    tensor = value.detach().to(wanted).resolve_conj().resolve_neg().contiguous()
    if tensor.data_ptr() % ALIGNMENT:
        tensor = tensor.clone()
    return tvm.runtime.from_dlpack(tensor)
