"""What a compiled function takes: names, dtypes and shapes, checked before every call."""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import tvm
from tvm import relax, tirx

from ...errors import InputError
from ...host import threads as _threads
from ...host.team import install
from ...ir.extents import Bounds, bounds_of
from ...transform.layouts.memory_formats import MemoryFormats, channels_first
from ...transform.layouts.orders import ordered
from .sidecar import without_lines

# Functions of built modules, ready to be called from any thread: on a CPU their parallel loops run
# on the threads that `host.threads` and `host.team` say.


def entry_of(executable: Any, device: tvm.runtime.Device, name: str = "main") -> Callable[..., Any]:
    """Make a virtual machine and return one of its functions."""
    return function_of(virtual_machine(executable, device), name, device)


def virtual_machine(
    executable: Any, device: tvm.runtime.Device, weights: Any = None
) -> relax.VirtualMachine:
    """Make a virtual machine; its functions take their `WeightValues` by themselves."""
    install()
    return (
        _Machine(executable, device, weights)
        if weights
        else relax.VirtualMachine(executable, device)
    )


class _Machine(relax.VirtualMachine):
    """A virtual machine whose functions are called with their inputs, and take weights behind."""

    def __init__(self, executable: Any, device: tvm.runtime.Device, weights: Any) -> None:
        super().__init__(executable, device)
        self._bound = {name for name, own in weights.weights.items() if own}
        for name in self._bound:
            self.save_function(name, _with_weights(name), *weights.of(name))

    def __getitem__(self, key: str) -> Callable[..., Any]:
        return super().__getitem__(_with_weights(key) if key in self._bound else key)


def _with_weights(name: str) -> str:
    return f"{name} with weights"


def load_library(path: str | Path) -> tvm.runtime.Module:
    """Load a shared library of kernels, or of an executable."""
    install()
    with without_lines(containing="Warning: Scope Loaded:"):  # one for each constant, as saved
        return tvm.runtime.load_module(str(path))


def function_of(owner: Any, name: str, device: tvm.runtime.Device) -> Callable[..., Any]:
    """Return a function of a virtual machine or a library. On a CPU, every thread that calls it has
    its `kernel_threads()`.
    """
    install()
    function = owner[name]
    if device.type != "cpu":
        return function

    def call(*arguments: Any) -> Any:
        if not _threads.settled:
            _threads.kernel_threads()
        return function(*arguments)

    return call


@dataclass(frozen=True, slots=True)
class InputSpec:
    """One input.

    Attributes
    ----------
    name : str
        The parameter's name.
    dtype : str or None
        Such as "float16"; None for what is no tensor (a shape, a number, a tuple), which only the
        built module itself checks.
    shape : tuple of int or str, or None
        An extent, the name of a symbolic extent, or an expression (in parentheses) that only the
        built module itself checks; None where the rank is unknown.
    """

    name: str
    dtype: str | None
    shape: tuple[int | str, ...] | None

    def with_channels_first(self) -> "InputSpec":
        """The same with the last axis as axis 1."""
        return replace(self, shape=tuple(ordered(self.shape, channels_first(len(self.shape)))))

    def __str__(self) -> str:
        if self.dtype is None:
            return f"{self.name}: no tensor"
        if self.shape is None:
            return f"{self.name}: {self.dtype} of any shape"
        return f"{self.name}: {self.dtype} ({', '.join(map(str, self.shape))})"


@dataclass(frozen=True, slots=True)
class Signature:
    """What a function takes.

    Attributes
    ----------
    inputs : tuple of InputSpec
        In order; shapes are those of the model.
    bounds : mapping of str to Bounds
        Of symbolic extents by their names in `inputs`, as far as they have any.
    function : str
        Its name in the executable.
    formats : MemoryFormats or None
        What it takes and gives with the channels as last axis: torch tensors in channels_last as
        they lie (see `channels_last`). None where all are contiguous.
    """

    inputs: tuple[InputSpec, ...]
    function: str = "main"
    formats: MemoryFormats | None = None
    bounds: Mapping[str, Bounds] = field(default_factory=dict)

    @property
    def is_symbolic(self) -> bool:
        """Whether there are sizes that only a call tells."""
        shapes = [spec.shape for spec in self.inputs]
        return any(shape is None or any(isinstance(e, str) for e in shape) for shape in shapes)

    @property
    def telling(self) -> tuple[int, ...]:
        """Inputs whose shapes tell all symbolic sizes."""
        known: set[str] = set()
        found = []
        for number, spec in enumerate(self.inputs):
            symbols = {extent for extent in spec.shape or () if isinstance(extent, str)}
            if spec.dtype is not None and (spec.shape is None or symbols - known):
                found.append(number)
                known |= symbols
        return tuple(found)

    @classmethod
    def of(cls, mod: tvm.IRModule, function: str = "main") -> "Signature":
        """Return the signature of a Relax function, its symbolic extents named apart."""
        names, func = _ExtentNames(), mod[function]
        inputs = tuple(_input_spec(param, names) for param in func.params)
        return cls(inputs, function, bounds=_bounds_of(func, names))

    def in_formats(self, formats: MemoryFormats | None) -> "Signature":
        """The signature of a function with channels last as callers see it, with the shapes of the
        model.
        """
        if formats is None:
            return self
        pairs = zip(self.inputs, formats.inputs, strict=True)
        inputs = tuple(spec.with_channels_first() if last else spec for spec, last in pairs)
        return replace(self, inputs=inputs, formats=formats)

    def check(self, given: Sequence[tuple[str, Sequence[int]] | None]) -> dict[str, int]:
        """Check (dtype, shape) of every tensor, and return the values of the symbolic extents.

        Raises
        ------
        InputError
            Naming the input, what was expected and what was given.
        """
        extents: dict[str, int] = {}
        for spec, tensor in zip(self.inputs, given, strict=True):
            if spec.dtype is not None:
                dtype, shape = tensor
                try:
                    _check_input(spec, dtype, tuple(shape), extents, self.bounds)
                except InputError as error:
                    raise InputError(f"{self._where}{error}") from None
        return extents

    def check_count(self, count: int) -> None:
        """Raise InputError unless `count` inputs are as many as there are."""
        if count != len(self.inputs):
            expected = "; ".join(map(str, self.inputs))
            raise InputError(
                f"{self._where}expected {len(self.inputs)} inputs ({expected}), got {count}"
            )

    def name_refused(self, error: Exception, arguments: Sequence[Any]) -> None:
        """Raise InputError if an error is the VM's refusal of one of the arguments."""
        function = re.escape(self.function)
        refused = re.search(rf"ErrorContext\(fn={function}, loc=param\[(\d+)\]", str(error))
        if refused is not None:
            number = int(refused[1])
            shape = tuple(map(int, arguments[number].shape))
            expected = f"{self._where}expected {self.inputs[number]}"
            raise InputError(f"{expected}, got {shape}") from error

    @property
    def _where(self) -> str:
        """What errors begin with: a function of any name of its own is called by it."""
        return "" if self.function == "main" else f"{self.function}: "

    def to_json(self) -> list[dict[str, Any]]:
        """Return plain values for `from_json`, the inputs."""
        return [{"name": s.name, "dtype": s.dtype, "shape": s.shape} for s in self.inputs]

    def bounds_to_json(self) -> dict[str, list[int | None]]:
        """Return plain values for `from_json`, the bounds."""
        return {name: [b.least, b.most, b.multiple] for name, b in self.bounds.items()}

    @classmethod
    def from_json(
        cls,
        values: Sequence[Mapping[str, Any]],
        function: str = "main",
        formats: Mapping[str, Any] | None = None,
        bounds: Mapping[str, Sequence[int | None]] | None = None,
    ) -> "Signature":
        """Inverse of `to_json` and `bounds_to_json`, for the function of that name and
        `MemoryFormats.to_json`; raises KeyError, TypeError or ValueError for other values.
        """
        specs = tuple(_spec_of(value) for value in values)
        if not isinstance(function, str):
            raise TypeError(f"the function's name is {function!r}")
        found = {str(name): Bounds(*value) for name, value in (bounds or {}).items()}
        lies = None if formats is None else MemoryFormats.from_json(formats)
        return cls(specs, function, lies, found)


def _spec_of(value: Mapping[str, Any]) -> InputSpec:
    name, dtype, shape = value["name"], value["dtype"], value["shape"]
    if not isinstance(name, str) or not (dtype is None or isinstance(dtype, str)):
        raise TypeError(f"an input is called {name!r}, of the type {dtype!r}")
    if shape is not None and not (
        isinstance(shape, list) and all(type(extent) in (int, str) for extent in shape)
    ):
        raise TypeError(f"the shape of {name} is {shape!r}")
    return InputSpec(name, dtype, None if shape is None else tuple(shape))


class _ExtentNames:
    """Names for symbolic extents: two variables of one name get two names."""

    def __init__(self) -> None:
        self._known: list[tuple[tirx.Var, str]] = []

    def known(self) -> list[tuple[str, str]]:
        """The symbols that were named, by their own names, and what they are called."""
        return [(var.name, name) for var, name in self._known]

    def __call__(self, extent: Any) -> int | str:
        if isinstance(extent, tirx.IntImm):
            return int(extent)
        if not isinstance(extent, tirx.Var):
            plain = re.sub(r"T\.int\d+\((-?\d+)\)", r"\1", str(extent))
            return f"({plain})"
        for var, name in self._known:
            if var.same_as(extent):
                return name
        taken = {name for _, name in self._known}
        name, number = extent.name, 0
        while name in taken:
            number += 1
            name = f"{extent.name}_{number}"
        self._known.append((extent, name))
        return name


def _input_spec(param: relax.Var, names: _ExtentNames) -> InputSpec:
    ty = param.ty
    if not isinstance(ty, relax.TensorType):
        return InputSpec(param.name, None, None)
    known = isinstance(ty.shape, relax.ShapeExpr)
    shape = tuple(names(extent) for extent in ty.shape.values) if known else None
    dtype = str(ty.dtype)  # "None" where the model does not say (an optional input)
    return InputSpec(param.name, None if dtype in ("None", "") else dtype, shape)


def _bounds_of(func: relax.Function, names: _ExtentNames) -> dict[str, Bounds]:
    """The bounds of the symbolic extents of a function, by what they are called."""
    found = bounds_of(func)
    return {name: found[symbol] for symbol, name in names.known() if symbol in found}


def _check_input(
    spec: InputSpec,
    dtype: str,
    shape: tuple[int, ...],
    extents: dict[str, int],
    bounds: Mapping[str, Bounds],
) -> None:
    if dtype != spec.dtype:
        raise InputError(f"input {spec.name}: expected dtype {spec.dtype}, got {dtype}")
    if spec.shape is None:
        return
    expected = f"expected shape ({', '.join(map(str, spec.shape))})"
    if len(shape) != len(spec.shape):
        raise InputError(
            f"input {spec.name}: {expected} of rank {len(spec.shape)}, got {shape} of rank "
            f"{len(shape)}"
        )
    for axis, (want, got) in enumerate(zip(spec.shape, shape, strict=True)):
        if isinstance(want, str) and not want.startswith("("):
            bound = extents.setdefault(want, got)
            if bound != got:
                raise InputError(
                    f"input {spec.name}: {expected}, got {shape}: axis {axis} is {got}, but "
                    f"{want} = {bound} in an earlier input"
                )
            refusal = bounds[want].refusal(got) if want in bounds else None
            if refusal is not None:
                raise InputError(
                    f"input {spec.name}: {expected}, got {shape}: axis {axis} is {got}, but "
                    f"{want} is {refusal}; a model that takes it is exported with another Dim"
                )
        elif isinstance(want, int) and want != got:
            raise InputError(f"input {spec.name}: {expected}, got {shape}: axis {axis} is {got}")
