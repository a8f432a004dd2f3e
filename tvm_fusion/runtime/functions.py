"""A compiled module of several functions: one executable, each function called by its name."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import tvm

from ..errors import InputError
from .build import Built
from .module import CompiledModule, export_executable
from .sidecar import write_sidecar

if TYPE_CHECKING:
    from ..plan.plan import FusionPlan
    from ..report.functions import FunctionReports

ENTRY = "main"


class CompiledFunctions:
    """What `tvm_fusion.compile` returns for a module of several public functions.

    A function is a `CompiledModule` with a signature, memory, in-place writes, plan, report and
    CUDA graphs of its own:

        compiled["prefill"](x, cache)

    They lie in one executable, which holds constants and kernels that functions share once, and
    have one virtual machine: calls from several threads run one after the other. Calling the module
    itself runs `main`, if there is one.

    Attributes
    ----------
    executable : tvm.relax.VMExecutable or tvm.runtime.Module
        With a VM function for each.
    target : tvm.target.Target
    report : FunctionReports, str or None
        The reports of all functions, set by the compiler; text after `load`.
    """

    def __init__(
        self, members: Mapping[str, CompiledModule], report: FunctionReports | str | None = None
    ) -> None:
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
        if ENTRY not in self._members:
            self._ambiguous("call")
        return self._members[ENTRY](*inputs)

    def bind(self, *inputs: Any) -> NoReturn:
        """Raises InputError: a function is bound, `module[name].bind(...)`."""
        self._ambiguous("bind")

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

    def _ambiguous(self, verb: str) -> NoReturn:
        example = next(iter(self._members))
        raise InputError(
            f"the module has several functions ({self._names}): say which to {verb}, as in "
            f"module[{example!r}](...)"
        )
