"""What all rows of a run share."""

from dataclasses import dataclass, field
from typing import Any

import torch
import tvm

from tvm_fusion.config import HardwareProfile
from tvm_fusion.errors import TargetError

from .. import workloads
from ..peers.names import OWN_PEERS
from ..workloads.instance import Instance


def is_gpu(device: str, purpose: str) -> bool:
    """Whether one of torch's devices is a GPU.

    Raises
    ------
    TargetError
        It is, and this machine has none to `purpose` on or for.
    """
    if device != "cpu" and not torch.cuda.is_available():
        raise TargetError(f"this machine has no cuda device to {purpose}")
    return device != "cpu"


def usual_dtype(on_gpu: bool) -> str:
    """The type of the models of a suite, where nobody names another."""
    return "float16" if on_gpu else "float32"


@dataclass(frozen=True, slots=True)
class Saved:
    """Our builds of one workload in files.

    Attributes
    ----------
    facts : dict
        What `kernel_facts` says of the fused one.
    paths : dict[str, str]
        The libraries that `CompiledModule.save` wrote, by label.
    """

    facts: dict[str, Any]
    paths: dict[str, str]


@dataclass(frozen=True, slots=True)
class Setup:
    """How the workloads of a run are made and measured."""

    named: Any  # the target as the caller named it: a profile of his own is more than its Target
    target: tvm.target.Target
    hw: HardwareProfile
    peers: tuple[str, ...]
    dtype: str | None
    scale: float
    repeats: int
    budget_s: float
    plain_peers: tuple[str, ...] | None = None  # of a matrix product alone; None: as `peers`
    patience_s: float | None = None
    instructions: str | None = None  # that all keep to, of `bench.apart.INSTRUCTIONS`
    given_up: dict[tuple[str, str], str] = field(default_factory=dict)  # (workload, peer): why
    saved: dict[str, Saved] = field(default_factory=dict)  # by workload, what was compiled ahead

    def peers_of(self, name: str) -> tuple[str, ...]:
        """What is measured beside ours on a workload."""
        workload = workloads.workload(name)
        labels = self.plain_peers if workload.plain and self.plain_peers is not None else self.peers
        return tuple(x for x in labels if x not in OWN_PEERS or x in workload.peers)

    @property
    def device(self) -> str:
        """torch's name of the device."""
        return "cuda" if self.target.kind.name == "cuda" else "cpu"

    def instance(self, name: str) -> Instance:
        """Make a workload in the dtype of the run, else its own, else that of the device."""
        default = "float16" if self.device == "cuda" else "float32"
        dtype = self.dtype or workloads.dtype_of(name, default)
        return workloads.make(name, self.device, dtype, self.scale)


def exact_float32() -> None:
    """Keep torch from rounding the operands of float32 products to TF32."""
    torch.backends.cuda.matmul.allow_tf32 = False
