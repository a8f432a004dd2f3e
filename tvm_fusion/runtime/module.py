"""A compiled model: call it, ask it what it is, save it, load it."""

import json
import re
import threading
from collections.abc import Callable, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import tvm
from tvm import relax

from ..errors import BuildError, InputError, TargetError
from . import cubin_cache
from .build import Built
from .launches import count_launches
from .signature import Signature
from .tensors import (
    Kind,
    TorchInput,
    are_as_described,
    describe,
    describe_torch,
    from_tvm,
    kind_of,
    result_kind,
    to_argument,
    torch_stream,
)

_FORMAT = 1


class CompiledModule:
    """What `tvm_fusion.compile` returns.

    Calling it runs `main`. NumPy arrays in give NumPy arrays out, torch tensors give torch tensors
    (by DLPack, without a copy), anything else TVM tensors; tuples stay tuples. Inputs are checked
    first, and copied only where they are not contiguous, not aligned, or on another device.

    Calls from several threads are safe and run one after the other. On CUDA, kernels are launched
    on torch's current stream when torch tensors are given, else on TVM's, and a call returns
    before they end. Memory goes back to a pool as soon as no tensor refers to it: whoever uses
    outputs on another stream synchronises first.

    Attributes
    ----------
    executable : tvm.relax.VMExecutable or tvm.runtime.Module
        For `relax.VirtualMachine`.
    target : tvm.target.Target
        What it was compiled for.
    signature : Signature
        The inputs of `main`.
    built : Built or None
        The build, with CUDA sources and resources; None after `load`.
    plan : FusionPlan or None
        The fusion plan, set by the compiler.
    report : Report, str or None
        The report, set by the compiler; text after `load`.
    """

    def __init__(
        self,
        executable: Any,
        target: tvm.target.Target,
        signature: Signature,
        *,
        built: Built | None = None,
        plan: Any = None,
        report: Any = None,
    ) -> None:
        self.executable = executable
        self.target = target
        self.signature = signature
        self.built = built
        self.plan = plan
        self.report = report
        self._lock = threading.Lock()
        self._accepted: tuple[TorchInput, ...] = ()

    @classmethod
    def of(cls, built: Built, plan: Any = None, report: Any = None) -> "CompiledModule":
        """Wrap a build."""
        return cls(
            built.executable, built.target, built.signature, built=built, plan=plan, report=report
        )

    @cached_property
    def launches(self) -> int:
        """Launches in one call, read off the built module."""
        return count_launches(self)

    @cached_property
    def device(self) -> tvm.runtime.Device:
        """The device that calls run on; raises TargetError where there is none."""
        device = tvm.runtime.device_from_target(self.target)
        if not device.exist:
            raise TargetError(
                f"the module is compiled for {self.target.kind.name}, and this machine has no such "
                "device: compile for the target llvm to run on the CPU"
            )
        return device

    @cached_property
    def vm(self) -> relax.VirtualMachine:
        """The virtual machine; made on first use, which moves the weights to the device."""
        return relax.VirtualMachine(self.executable, self.device)

    @cached_property
    def _main(self) -> Callable[..., Any]:
        return self.vm["main"]

    def __call__(self, *inputs: Any) -> Any:
        """Run `main`.

        Parameters
        ----------
        *inputs : numpy.ndarray, torch.Tensor or tvm.runtime.Tensor
            In the order of `signature`.

        Returns
        -------
        Any
            A tensor, or a tuple of tensors (nested as the model's output is), of the kind given.

        Raises
        ------
        InputError
            If number, kind, dtype or shape of the inputs are not those of `signature`; symbolic
            extents have to agree between inputs.
        TargetError
            If this machine lacks the device.
        """
        if self._accepted and are_as_described(inputs, self._accepted):
            # TVM takes and gives torch tensors itself, and launches on torch's current stream
            with self._lock:
                return from_tvm(self._run(inputs), Kind.TORCH, None)
        kind, torch_device = self._check(inputs)
        self._accepted = describe_torch(inputs, self.device)
        with self._lock, torch_stream(self.device, kind):
            return from_tvm(self._run(self.arguments(inputs)), kind, torch_device)

    def bind(self, *inputs: Any) -> Callable[[], Any]:
        """Check and convert inputs once, and return a function that runs `main` on them.

        It neither checks nor converts nor locks: for timing, and for loops over fixed buffers. Its
        outputs are TVM tensors.
        """
        kind, _ = self._check(inputs)
        with torch_stream(self.device, kind):
            arguments = self.arguments(inputs)
        main = self._main
        return lambda: main(*arguments)

    def _check(self, inputs: Sequence[Any]) -> tuple[Kind, Any]:
        """Check inputs, and return whose tensors they are, and torch's device if torch's."""
        self.signature.check_count(len(inputs))
        pairs = list(zip(self.signature.inputs, inputs, strict=True))
        kinds = [(kind_of(value), value) for spec, value in pairs if spec.dtype is not None]
        self.signature.check([spec.dtype and describe(value) for spec, value in pairs])
        torch_device = next((value.device for kind, value in kinds if kind is Kind.TORCH), None)
        return result_kind([kind for kind, _ in kinds]), torch_device

    def arguments(self, inputs: Sequence[Any]) -> list[Any]:
        """Return inputs as the VM takes them, on the module's device."""
        specs = self.signature.inputs
        return [to_argument(x, self.device, s) for x, s in zip(inputs, specs, strict=True)]

    def _run(self, arguments: Sequence[Any]) -> Any:
        try:
            return self._main(*arguments)
        except RuntimeError as error:
            refused = re.search(r"ErrorContext\(fn=main, loc=param\[(\d+)\]", str(error))
            if refused is None:
                raise
            number = int(refused[1])
            raise InputError(
                f"expected {self.signature.inputs[number]}, got {describe(arguments[number])[1]}"
            ) from error

    def save(self, path: str | Path) -> Path:
        """Write a shared library, and beside it `<path>.json` with signature, plan and report.

        CUDA kernels are stored as machine code where they were built on a machine with a GPU, else
        as source, compiled (through the cubin cache) where the library is loaded.
        """
        path = Path(path)
        if not isinstance(self.executable, tvm.runtime.Executable):
            raise BuildError("a loaded module cannot be saved again: copy its file and its .json")
        try:
            self.executable.export_library(str(path))
        except (OSError, RuntimeError) as error:
            raise BuildError(
                f"cannot write the library {path}: {error}. It takes a writable folder and a C++ "
                "compiler (g++ or clang++) on PATH"
            ) from error
        text = json.dumps(
            {
                "format": _FORMAT,
                "tvm": tvm.__version__,
                "target": self.target.export(),
                "signature": self.signature.to_json(),
                "launches": self.launches,
                "plan": self.plan and self.plan.to_dict(),
                "report": None if self.report is None else str(self.report),
            },
            indent=1,
            default=_plain,
        )
        _sidecar(path).write_text(text + "\n")
        return path

    @classmethod
    def load(cls, path: str | Path) -> "CompiledModule":
        """Read what `save` wrote.

        Raises
        ------
        InputError
            If a file is missing, broken, or of another version.
        """
        from ..plan.plan import FusionPlan

        path = Path(path)
        meta = _read_sidecar(path)
        cubin_cache.install()
        try:
            library = tvm.runtime.load_module(str(path))
        except (OSError, RuntimeError, ValueError) as error:
            raise InputError(
                f"cannot load {path}: {error}. A library for CUDA loads only where there is a GPU"
            ) from error
        module = cls(
            library,
            tvm.target.Target(meta["target"]),
            Signature.from_json(meta["signature"]),
            plan=None if meta["plan"] is None else FusionPlan.from_dict(meta["plan"], str(path)),
            report=meta["report"],
        )
        module.launches = meta["launches"]
        return module


def _sidecar(path: Path) -> Path:
    return path.with_name(path.name + ".json")


def _read_sidecar(path: Path) -> dict[str, Any]:
    sidecar = _sidecar(path)
    for file in (path, sidecar):
        if not file.is_file():
            raise InputError(f"there is no file {file}; CompiledModule.save writes both")
    try:
        meta = json.loads(sidecar.read_text())
    except ValueError as error:
        raise InputError(f"{sidecar} is no JSON: {error}") from error
    if not isinstance(meta, dict) or meta.get("format") != _FORMAT:
        raise InputError(f"{sidecar} has not the format {_FORMAT}: compile and save again")
    if meta["tvm"] != tvm.__version__:
        raise InputError(
            f"{path} was built with TVM {meta['tvm']}, this is TVM {tvm.__version__}: compile and "
            "save again"
        )
    return meta


def _plain(value: Any) -> Any:
    """Turn TVM's containers into plain ones, for JSON."""
    if isinstance(value, tvm.ir.Map):
        return dict(value.items())
    return list(value) if isinstance(value, tvm.ir.Array) else str(value)
