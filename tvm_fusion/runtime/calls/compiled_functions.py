"""A compiled module of several functions: one executable, each function called by its name."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import tvm
from tvm import relax

from ...errors import InputError
from ..build.build import Built
from .compiled_module import CompiledModule, export_executable
from .sidecar import write_sidecar

if TYPE_CHECKING:
    from ...plan.plan import FusionPlan

ENTRY = "main"


class _NoMain(InputError, AttributeError):
    """What is asked of `main`, where there is none; to `hasattr` it is an attribute missing."""


def _of_main(name: str, what: str) -> property:
    """An attribute that is that of `main`."""

    def get(functions: CompiledFunctions) -> Any:
        return getattr(functions._main(f".{name}"), name)

    return property(get, doc=f"{what}: that of `main`; InputError where there is none.")


class CompiledFunctions:
    """What `tvm_fusion.compile` returns for a module of several public functions.

    A function is a `CompiledModule` with a signature, memory, in-place writes, plan, report and
    CUDA graphs of its own:

        compiled["prefill"](x, cache)

    They lie in one executable, which holds constants and kernels that functions share once, and
    have one virtual machine: calls from several threads run one after the other. If there is a
    `main`, calling the module itself runs it, and `signature`, `memory` and what else there is to
    say of a call are those of `main`; `plan`, `report` and `cuda_graph` are by function.

    Attributes
    ----------
    executable : tvm.relax.VMExecutable or tvm.runtime.Module
        With a VM function for each.
    target : tvm.target.Target
    report : FunctionReports, str or None
        The reports of all functions, set by the compiler; text after `load`.
    """

    def __init__(self, members: Mapping[str, CompiledModule], report: Any = None) -> None:
        self._members = dict(members)
        first = next(iter(self._members.values()))
        self.executable = first.executable
        self.target = first.target
        self.report = report

    @classmethod
    def of(
        cls, built: Mapping[str, Built], plans: Mapping[str, FusionPlan] | None = None
    ) -> CompiledFunctions:
        """Wrap the builds of `build.build_entries`, with the plan of each function."""
        members: dict[str, CompiledModule] = {}
        for name, one in built.items():
            beside = next(iter(members.values()), None)
            members[name] = CompiledModule.of(one, plans and plans[name], beside=beside)
        return cls(members)

    def __getitem__(self, name: str) -> CompiledModule:
        """The function of a name.

        Raises
        ------
        InputError
            There is none of that name.
        """
        if name not in self._members:
            raise InputError(f"there is no function {name!r} among those compiled: {self._names}")
        return self._members[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._members)

    def __len__(self) -> int:
        return len(self._members)

    def __contains__(self, name: object) -> bool:
        return name in self._members

    def items(self) -> list[tuple[str, CompiledModule]]:
        """The functions with their names, by name."""
        return list(self._members.items())

    def __call__(self, *inputs: Any) -> Any:
        """Run `main`; see `CompiledModule.__call__`.

        Raises
        ------
        InputError
            No function is called `main`: it is not said which to run.
        """
        return self._main("(...)")(*inputs)

    def bind(self, *inputs: Any) -> Callable[[], Any]:
        """Bind `main` to inputs; see `CompiledModule.bind`, and `__call__` for errors."""
        return self._main(".bind(...)").bind(*inputs)

    def measure_peak_memory(self, *inputs: Any) -> int:
        """Run `main`; see `CompiledModule.measure_peak_memory`, and `__call__` for errors."""
        return self._main(".measure_peak_memory(...)").measure_peak_memory(*inputs)

    signature = _of_main("signature", "The inputs of a call")
    function = _of_main("function", "The name of the function that a call runs")
    launches = _of_main("launches", "Launches in one call")
    memory = _of_main("memory", "Device memory that a call takes")
    peak_memory_bytes = _of_main("peak_memory_bytes", "The most device memory that a call takes")
    writes = _of_main("writes", "The inputs that a call writes to")
    own = _of_main("own", "The outputs that have memory of their own")
    built = _of_main("built", "The build")
    uncapturable = _of_main("uncapturable", "Why calls cannot be captured into a CUDA graph")
    cuda_graph_refusal = _of_main("cuda_graph_refusal", "Why calls run launch by launch")

    @property
    def vm(self) -> relax.VirtualMachine:
        """The virtual machine of all functions."""
        return next(iter(self._members.values())).vm

    @property
    def device(self) -> tvm.runtime.Device:
        """The device that calls run on; raises TargetError where there is none."""
        return next(iter(self._members.values())).device

    @property
    def plan(self) -> dict[str, FusionPlan | None]:
        """The plan of each function; what `compile(plan=...)` takes for the same module."""
        return {name: member.plan for name, member in self._members.items()}

    @property
    def cuda_graph(self) -> dict[str, Any]:
        """How calls of each function are captured into CUDA graphs; set it to what
        `CompiledModule.cuda_graph` takes, for all of them.
        """
        return {name: member.cuda_graph for name, member in self._members.items()}

    @cuda_graph.setter
    def cuda_graph(self, value: Any) -> None:
        for member in self._members.values():
            member.cuda_graph = value

    def save(self, path: str | Path) -> Path:
        """Write one shared library, and beside it `<path>.json`; see `CompiledModule.save`."""
        path = Path(path)
        export_executable(self.executable, path)
        functions = {name: member.facts() for name, member in self._members.items()}
        write_sidecar(path, {"target": self.target.export(), "functions": functions})
        return path

    @classmethod
    def load(cls, path: str | Path) -> Any:
        """Read what `save` wrote; see `CompiledModule.load`."""
        return CompiledModule.load(path)

    @property
    def _names(self) -> str:
        return ", ".join(self._members)

    def _main(self, asked: str) -> CompiledModule:
        """The function `main`, of which something is asked."""
        if ENTRY not in self._members:
            raise _NoMain(
                f"the module has several functions ({self._names}) and no {ENTRY!r}: say which "
                f"is meant, as in module[{next(iter(self._members))!r}]{asked}"
            )
        return self._members[ENTRY]
