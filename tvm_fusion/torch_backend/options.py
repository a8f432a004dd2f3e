"""The options of `torch.compile(..., options={...})`."""

from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import torch

from tvm_fusion.compilation.compiler import VERIFY
from tvm_fusion.config import load_policy
from tvm_fusion.errors import ConfigError
from tvm_fusion.runtime.graphs.capture_rules import CudaGraphOptions

_MODES = (None, "default", "reduce-overhead")


@dataclass(frozen=True, slots=True)
class BackendOptions:
    """How graphs are compiled.

    Attributes
    ----------
    target, policy, verify, measure, database
        As `tvm_fusion.compile` takes them; without a target it is the device of the inputs. Without
        a policy, float32 products are rounded where torch rounds them (`policy_on`).
    cuda_graph : bool, mapping or CudaGraphOptions
        Capture whole calls, on a GPU; those of a graph in parts with what stands between, if all of
        that are collectives and torch's own operators on that GPU, else each part (`step_graphs`).
    frozen : bool
        The weights never change: calls do not look whether they did. Without it, a graph is
        compiled again after a weight was replaced, written to or given other memory (what is
        written into `weight.data`, or into weights made under `inference_mode`, nobody can tell).
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

    def policy_on(self, device: torch.device) -> Any:
        """The policy; where none is given, on a GPU, the default one with tfloat32 if torch may
        round float32 in matrix products (`torch.set_float32_matmul_precision("high")`) and, as it
        may unless it is told otherwise, in convolutions.
        """
        if self.policy is not None or device.type != "cuda":
            return self.policy
        may = _rounds(torch.backends.cuda.matmul) and _rounds(torch.backends.cudnn.conv)
        return {"allow_tf32": True} if may else None

    def graphs_on(self, device: torch.device) -> Any:
        """`cuda_graph` on a device."""
        return self.cuda_graph or (self.graph_where_possible and device.type == "cuda")

    def _check(self) -> None:
        CudaGraphOptions.of(self.cuda_graph)
        for name in ("frozen", "strict", "measure"):
            if not isinstance(getattr(self, name), bool):
                raise _wrong(name, getattr(self, name), "True or False")
        if self.verify not in (None, *VERIFY):
            raise _wrong("verify", self.verify, ", ".join(map(repr, (None, *VERIFY))))
        try:
            load_policy(self.policy)
        except ConfigError as why:
            raise ConfigError(
                f"torch.compile, backend tvm_fusion: option policy: {why}; give another"
            ) from why
        if not (self.database is None or _is_database(self.database)):
            raise _wrong("database", self.database, "a folder that `tune` made, a TuningDatabase")
        if not (self.report is None or callable(self.report) or _is_path(self.report)):
            raise _wrong("report", self.report, "a callable, a folder or None")


def _rounds(kind: Any) -> bool:
    """Whether torch may round float32 to tfloat32 in one kind of operators."""
    own = kind.fp32_precision
    return (torch.backends.fp32_precision if own == "none" else own) == "tf32"


def _wrong(name: str, value: Any, allowed: str) -> ConfigError:
    return ConfigError(
        f"torch.compile, backend tvm_fusion: option {name}={value!r} is none of {allowed}"
    )


def _is_path(value: Any) -> bool:
    return isinstance(value, str | Path)


def _is_database(value: Any) -> bool:
    return Path(value).is_dir() if _is_path(value) else hasattr(value, "stores")
