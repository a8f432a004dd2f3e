"""Measurements on other machines: TVM's RPC tracker and servers.

    python -m tvm.exec.rpc_tracker --host 0.0.0.0 --port 9190
    python -m tvm.exec.rpc_server --tracker HOST:9190 --key h200         # on each machine, per GPU

A process here for each server keeps a session with it, sends it libraries, and reads numbers and
times back. A session that fails is given up; the next trial asks the tracker for another.
"""

from __future__ import annotations

import itertools
import socket
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ..errors import InputError
from .measuring import Measurement, MeasureRequest, forget, measure
from .processes import Worker
from .site import Arrays, Call

SESSION_S = 600  # after which a server ends a session that hangs
CONNECT_S = 5.0
WAIT_S = 60.0  # for a free server
MIN_SAMPLE_S = 200e-6  # shorter calls are repeated within a sample
FLUSH = "l2_cache_flush_cuda"


class Remote(Arrays):
    """A device behind an RPC session."""

    def __init__(self, session: Any, kind: str) -> None:
        super().__init__(session.device(kind))
        self.session, self.kind = session, kind
        self._names = itertools.count()

    def load(self, path: Path) -> Any:
        """A library, sent to the server under a name of its own: one that is loaded must not be
        written again.
        """
        name = f"{next(self._names)}-{path.name}"
        self.session.upload(str(path), name)
        return self.session.load_module(name)

    def samples(
        self, calls: Sequence[Call], kernels: Sequence[int], repeats: int
    ) -> list[list[float]]:
        """Microseconds of each call, interleaved; on a GPU the L2 is flushed before each."""
        numbers = [self._number(call) for call in calls]
        found: list[list[float]] = [[] for _ in calls]
        for _ in range(repeats):
            for samples, call, number in zip(found, calls, numbers, strict=True):
                samples.append(self._seconds(call, number) * 1e6)
        return found

    def _number(self, call: Call) -> int:
        """How often a call is repeated within a sample: once where the L2 is flushed before."""
        once = self._seconds(call, 1)
        return 1 if self.kind == "cuda" else max(1, int(MIN_SAMPLE_S / max(once, 1e-7)))

    def _seconds(self, call: Call, number: int) -> float:
        evaluate = call.library.time_evaluator(
            call.symbol,
            self.device,
            number=number,
            repeat=1,
            f_preproc=FLUSH if self.kind == "cuda" else "",
        )
        return evaluate(*call.tensors).mean


_sites: dict[tuple[str, int, str], Remote] = {}


def measure_remotely(request: MeasureRequest, host: str, port: int, key: str) -> list[Measurement]:
    """As `measuring.measure`, on a server with a key."""
    kind = request.place.resolved()[0].kind.name
    place = (host, port, key)
    if place not in _sites:
        _sites[place] = Remote(_session(*place), "cpu" if kind == "llvm" else kind)
    try:
        return measure(request, _sites[place])
    except Exception:
        del _sites[place]  # a sticky error of the device ends with its session
        forget()
        raise


def _session(host: str, port: int, key: str) -> Any:
    from tvm import rpc

    tracker = rpc.connect_tracker(host, port)
    return tracker.request(key, session_timeout=SESSION_S, max_retry=int(WAIT_S))


class RemoteMeter:
    """Measures on one server of a tracker."""

    def __init__(self, name: str, host: str, port: int, key: str) -> None:
        self.worker = Worker(name)
        self._place = (host, port, key)

    def send(self, request: MeasureRequest, limit_s: float) -> None:
        """Asks for the measurements of a request."""
        self.worker.send(measure_remotely, (request, *self._place), limit_s + WAIT_S)


def meters_of(tracker: str, key: str) -> list[RemoteMeter]:
    """A meter for each server of a tracker that has a key.

    Parameters
    ----------
    tracker : str
        HOST:PORT.
    key : str

    Raises
    ------
    InputError
        There is no tracker at the address, or it has no such server.
    """
    from tvm import rpc

    host, separator, port = tracker.rpartition(":")
    if not separator or not port.isdecimal():
        raise InputError(f"--rpc: expected HOST:PORT, got {tracker!r}")
    try:  # TVM itself tries for a minute
        socket.create_connection((host, int(port)), CONNECT_S).close()
        summary = rpc.connect_tracker(host, int(port)).summary()
    except (RuntimeError, OSError) as error:
        raise InputError(f"no RPC tracker answers at {tracker}: {error}") from error
    servers = [s for s in summary["server_info"] if s["key"].removeprefix("server:") == key]
    if not servers:
        known = sorted({s["key"].removeprefix("server:") for s in summary["server_info"]})
        there = f"there is {', '.join(known)}" if known else "no server is registered"
        raise InputError(f"the tracker {tracker} has no server with the key {key!r}; {there}")
    return [RemoteMeter(f"server {i}", host, int(port), key) for i in range(len(servers))]
