"""What measures trials: a process on this machine, or one for a server elsewhere (`rpc`)."""

from __future__ import annotations

from typing import Protocol

import tvm

from .measuring import MeasureRequest, measure_here, prepare_here, warm_up
from .processes import Worker


class Meter(Protocol):
    """What measures: a process on this machine, or one for a server elsewhere.

    What is not ready has to connect before it is sent anything. `connect` asks its worker for that;
    `held` is how many other meters of the session are connected.
    """

    worker: Worker

    @property
    def is_ready(self) -> bool: ...

    def connect(self, held: int) -> None: ...

    def send(self, request: MeasureRequest, limit_s: float) -> None: ...


class LocalMeter:
    """Measures in a process of its own on this machine.

    Parameters
    ----------
    gpu : int, optional
        Which GPU, by its number; None takes the first.
    """

    def __init__(self, gpu: int | None = None) -> None:
        environment = {} if gpu is None else {"CUDA_VISIBLE_DEVICES": str(gpu)}
        on_gpu = bool(tvm.cuda(0).exist)  # whose kernels torch's profiler times
        self.worker = Worker("measurer", (warm_up, ()), environment, torch=on_gpu)

    @property
    def is_ready(self) -> bool:
        """Always: there is nothing to connect with."""
        return True

    def connect(self, held: int) -> None:
        """Nothing."""

    def send(self, request: MeasureRequest, limit_s: float) -> None:
        """Asks for the measurements of a request."""
        self.worker.send(measure_here, (request,), limit_s, before=(prepare_here, (request,)))
