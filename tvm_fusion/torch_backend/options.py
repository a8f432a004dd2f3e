"""The options of `torch.compile(..., options={...})`."""

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from tvm_fusion.errors import ConfigError
from tvm_fusion.runtime.graphs.capture_rules import CudaGraphOptions

_MODES = (None, "default", "reduce-overhead")


@dataclass(frozen=True, slots=True)
class BackendOptions:
    """How graphs are compiled.

    Attributes
    ----------
    target, policy, verify, measure
        As `tvm_fusion.compile` takes them; without a target it is the device of the inputs.
    cuda_graph : bool, mapping or CudaGraphOptions
        Capture whole calls, on a GPU.
    frozen : bool
        The weights never change: calls do not look whether they did. Without it, a graph is
        compiled again after a weight was replaced or written to (through `weight.data` nobody can
        tell).
    graph_where_possible : bool
        `cuda_graph`, but only for graphs that run on a GPU; what the mode "reduce-overhead" means.
    """

    target: Any = None
    policy: Any = None
    verify: bool | str | None = None
    measure: bool = False
    cuda_graph: Any = False
    frozen: bool = False
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
        CudaGraphOptions.of((options or {}).get("cuda_graph"))
        return cls(**(options or {}), graph_where_possible=mode == "reduce-overhead")
