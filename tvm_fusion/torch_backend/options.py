"""The options of `torch.compile(..., options={...})`."""

from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from tvm_fusion.compilation.compiler import VERIFY
from tvm_fusion.errors import ConfigError
from tvm_fusion.runtime.graphs.capture_rules import CudaGraphOptions

_MODES = (None, "default", "reduce-overhead")


@dataclass(frozen=True, slots=True)
class BackendOptions:
    """How graphs are compiled.

    Attributes
    ----------
    target, policy, verify, measure, database
        As `tvm_fusion.compile` takes them; without a target it is the device of the inputs.
    cuda_graph : bool, mapping or CudaGraphOptions
        Capture whole calls, on a GPU.
    frozen : bool
        The weights never change: calls do not look whether they did. Without it, a graph is
        compiled again after a weight was replaced or written to (through `weight.data` nobody can
        tell).
    strict : bool
        An operator that is not compiled is an error, which ends the run; without it, it runs in
        torch, and a warning names it.
    report : callable, str, Path or None
        Takes a `PartReport` of each part that was compiled; or a folder, in which each is written.
    graph_where_possible : bool
        `cuda_graph`, but only for graphs that run on a GPU; what the mode "reduce-overhead" means.
    """

    target: Any = None
    policy: Any = None
    verify: bool | str | None = None
    measure: bool = False
    database: Any = None
    cuda_graph: Any = False
    frozen: bool = False
    strict: bool = False
    report: Any = None
    graph_where_possible: bool = False

    @classmethod
    def of(cls, options: Mapping[str, Any] | None, mode: str | None) -> "BackendOptions":
        """Read the arguments of `torch.compile`.

        Raises
        ------
        ConfigError
            For an unknown option or mode.
        """
        if mode not in _MODES:
            raise ConfigError(
                f"torch.compile, backend tvm_fusion: mode {mode!r} is none of 'default' and "
                "'reduce-overhead'"
            )
        known = [field.name for field in fields(cls)][:-1]
        for name in options or {}:
            if name not in known:
                raise ConfigError(
                    f"torch.compile, backend tvm_fusion: unknown option {name!r}; there are "
                    f"{', '.join(known)}"
                )
        wanted = cls(**(options or {}), graph_where_possible=mode == "reduce-overhead")
        wanted._check()
        return wanted

    def _check(self) -> None:
        CudaGraphOptions.of(self.cuda_graph)
        for name in ("frozen", "strict", "measure"):
            if not isinstance(getattr(self, name), bool):
                raise _wrong(name, getattr(self, name), "True or False")
        if self.verify not in (None, *VERIFY):
            raise _wrong("verify", self.verify, ", ".join(map(repr, (None, *VERIFY))))
        if not (self.report is None or callable(self.report) or _is_path(self.report)):
            raise _wrong("report", self.report, "a callable, a folder or None")


def _wrong(name: str, value: Any, allowed: str) -> ConfigError:
    return ConfigError(
        f"torch.compile, backend tvm_fusion: option {name}={value!r} is none of {allowed}"
    )


def _is_path(value: Any) -> bool:
    return isinstance(value, str | Path)
