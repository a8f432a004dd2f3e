"""Measurements on other machines: TVM's RPC tracker and servers.

    python -m tvm.exec.rpc_tracker --host 0.0.0.0 --port 9190
    python -m tvm_fusion.tuning.serve --tracker HOST:9190 --key h200 --gpu 0      # for each GPU

A process here for each server keeps a session with it and sends it libraries. A server of this
package (`serve`) measures by itself. TVM's own (`tvm.exec.rpc_server`) does what it is told through
the session: inputs and outputs are copied, numbers are compared here. A session that fails is given
up; the next trial asks the tracker for another.
"""

from __future__ import annotations

import gc
import pickle
import socket
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol

from .._version import __version__
from ..errors import InputError, TargetError
from ..runtime.timing import L2_CLEANING_BYTES
from .measuring import MeasureRequest, forget, measure
from .processes import Answer, Worker
from .serve import MEASURE, VERSION
from .site import Arrays, Call

SERVED_S = 3600  # after which a server of this package ends a session
STOCK_S = 600  # the same of TVM's own; a kernel that hangs blocks it until then
CONNECT_S = 5.0
WAIT_S = 60.0  # for a free server
POLL_S = 0.5
MIN_SAMPLE_S = 200e-6  # shorter calls are repeated within a sample


class Libraries:
    """Libraries at a server, each sent once.

    A library has a name of its own there: one that is loaded must not be written again.
    """

    def __init__(self, session: Any) -> None:
        self._session = session
        self._names: dict[tuple[Path, int], str] = {}

    def name(self, path: Path) -> str:
        """The name of a library at the server."""
        key = (path, path.stat().st_mtime_ns)
        if key not in self._names:
            name = f"{len(self._names)}-{path.name}"
            self._session.upload(str(path), name)
            self._names[key] = name
        return self._names[key]


class Remote(Arrays):
    """A device behind a session with TVM's own server."""

    def __init__(self, session: Any, kind: str) -> None:
        super().__init__(session.device(kind))
        self.session, self.kind = session, kind
        self._libraries = Libraries(session)

    def load(self, path: Path) -> Any:
        """A library at the server."""
        return self.session.load_module(self._libraries.name(path))

    def samples(
        self, calls: Sequence[Call], kernels: Sequence[int], repeats: int
    ) -> list[list[float]]:
        """Microseconds of each call, interleaved; on a GPU the L2 is cleaned before each."""
        numbers = [self._number(call) for call in calls]
        found: list[list[float]] = [[] for _ in calls]
        for _ in range(repeats):
            for samples, call, number in zip(found, calls, numbers, strict=True):
                samples.append(self._seconds(call, number) * 1e6)
        return found

    def _number(self, call: Call) -> int:
        """How often a call is repeated within a sample: once where the L2 is cleaned before."""
        once = self._seconds(call, 1)
        return 1 if self.kind == "cuda" else max(1, int(MIN_SAMPLE_S / max(once, 1e-7)))

    def _seconds(self, call: Call, number: int) -> float:
        evaluate = call.library.time_evaluator(
            call.symbol,
            self.device,
            number=number,
            repeat=1,
            cache_flush_bytes=L2_CLEANING_BYTES if self.kind == "cuda" else 0,
        )
        return evaluate(*call.tensors).mean


class Link(Protocol):
    """What measures through a session; `lasts_s` is how long the session may last."""

    lasts_s: float

    def measure(self, request: MeasureRequest, limit_s: float) -> Answer: ...


class Served:
    """A session with a server of this package."""

    lasts_s = SERVED_S

    def __init__(self, session: Any) -> None:
        self._measure = session.get_function(MEASURE)
        self._libraries = Libraries(session)

    def measure(self, request: MeasureRequest, limit_s: float) -> Answer:
        """What the server's measuring process answers within a time."""
        message = pickle.dumps((request.moved(self._libraries.name), limit_s))
        return pickle.loads(bytes(self._measure(message)))


class Stock:
    """A session with TVM's own server."""

    lasts_s = STOCK_S

    def __init__(self, session: Any, kind: str) -> None:
        self._site = Remote(session, "cpu" if kind == "llvm" else kind)

    def measure(self, request: MeasureRequest, limit_s: float) -> Answer:
        """As `measuring.measure`; the time limit is that of the session."""
        return Answer("ok", measure(request, self._site))


_links: dict[tuple[str, int, str], tuple[Link, float]] = {}


def measure_remotely(
    request: MeasureRequest, limit_s: float, host: str, port: int, key: str
) -> Answer:
    """Measures on a server with a key; the session with it is kept for the next request.

    Raises
    ------
    TargetError
        The server has another version of this package.
    """
    place = (host, port, key)
    if place in _links and time.monotonic() - _links[place][1] > _links[place][0].lasts_s / 2:
        _leave(place)
    if place not in _links:
        kind = request.place.resolved()[0].kind.name
        _links[place] = (_link(*place, kind), time.monotonic())
    try:
        return _links[place][0].measure(request, limit_s)
    except Exception:
        _leave(place)  # a sticky error of the device ends with its session
        raise


def _leave(place: tuple[str, int, str]) -> None:
    """Ends a session; the server is free for the next one when nothing refers to it."""
    del _links[place]
    forget()
    gc.collect()


def _link(host: str, port: int, key: str, kind: str) -> Link:
    session = _session(host, port, key, SERVED_S)
    version = _version(session)
    if version == __version__:
        return Served(session)
    if version is not None:
        raise TargetError(f"the RPC server has tvm_fusion {version}, this is {__version__}")
    del session  # of TVM's own server: a kernel that hangs must not block it for an hour
    return Stock(_session(host, port, key, STOCK_S), kind)


def _version(session: Any) -> str | None:
    """Of this package at a server; None where it is TVM's own."""
    try:
        return str(session.get_function(VERSION)())
    except AttributeError:
        return None


def _session(host: str, port: int, key: str, lasts_s: float) -> Any:
    from tvm import rpc

    try:
        tracker = rpc.connect_tracker(host, port)
        _wait_for_free(tracker, key)
        return tracker.request(key, session_timeout=lasts_s)
    except (RuntimeError, OSError) as error:
        raise TargetError(f"no server {key!r} of {host}:{port} answers: {error}") from error


def _wait_for_free(tracker: Any, key: str) -> None:
    """Waits until a server is free: a request itself would wait for ever."""
    end = time.monotonic() + WAIT_S
    while not tracker.summary()["queue_info"].get(key, {}).get("free"):
        if time.monotonic() > end:
            raise RuntimeError(f"none is free within {WAIT_S:.0f} s")
        time.sleep(POLL_S)


class RemoteWorker(Worker):
    """A process that passes requests on; the answer is that of the process at the server."""

    def collect(self) -> Answer | None:
        """As `Worker.collect`."""
        answer = super().collect()
        if answer is not None and answer.status == "ok":
            return replace(answer.value, seconds=answer.seconds)
        return answer


class RemoteMeter:
    """Measures on one server of a tracker."""

    def __init__(self, name: str, host: str, port: int, key: str) -> None:
        self.worker = RemoteWorker(name)
        self._place = (host, port, key)

    def send(self, request: MeasureRequest, limit_s: float) -> None:
        """Asks for the measurements of a request."""
        self.worker.send(measure_remotely, (request, limit_s, *self._place), limit_s + WAIT_S)


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
    host, separator, port = tracker.rpartition(":")
    if not separator or not port.isdecimal():
        raise InputError(f"--rpc: expected HOST:PORT, got {tracker!r}")
    try:
        keys = served_keys(host, int(port))
    except (RuntimeError, OSError) as error:
        raise InputError(f"no RPC tracker answers at {tracker}: {error}") from error
    if key not in keys:
        there = f"there is {', '.join(sorted(set(keys)))}" if keys else "no server is registered"
        raise InputError(f"the tracker {tracker} has no server with the key {key!r}; {there}")
    return [RemoteMeter(f"server {i}", host, int(port), key) for i in range(keys.count(key))]


def served_keys(host: str, port: int) -> list[str]:
    """The keys of the servers that are registered with a tracker, one for each server.

    Raises
    ------
    RuntimeError, OSError
        There is no tracker.
    """
    from tvm import rpc

    socket.create_connection((host, port), CONNECT_S).close()  # TVM itself tries for a minute
    servers = rpc.connect_tracker(host, port).summary()["server_info"]
    return [server["key"].removeprefix("server:") for server in servers]
