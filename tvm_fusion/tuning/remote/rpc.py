"""Measurements on other machines: TVM's RPC tracker and servers.

    python -m tvm.exec.rpc_tracker --host 0.0.0.0 --port 9190
    python -m tvm_fusion.tuning.serve --tracker HOST:9190 --key h200 --gpu 0      # for each GPU

A process here for each server keeps a session with it and sends it libraries. A server of this
package (`serve`) measures by itself. TVM's own (`tvm.exec.rpc_server`) does what it is told through
the session: inputs and outputs are copied, numbers are compared here. A session that fails is given
up, and the tracker asked for another. One that breaks off says nothing of the kernel that ran: it
was in a process of its own at the server, or in that of TVM's server, which may have ended for any
reason.
"""

from __future__ import annotations

import gc
import pickle
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

from ..._version import __version__
from ...errors import InputError, TargetError
from ...runtime.timing.timing import L2_CLEANING_BYTES
from ..measure.measuring import MeasureRequest, forget, measure
from ..measure.processes import BROKEN, PREPARING_S, Answer, Worker
from ..measure.site import Arrays, Call
from ..serve import MEASURE, VERSION
from .tracker import Tracker, address_of, served_keys

SERVED_S = 3600  # after which a server of this package ends a session
STOCK_S = 600  # the same of TVM's own; a kernel that hangs blocks it until then
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
    is_ours: bool
    session: Any

    def measure(self, request: MeasureRequest, limit_s: float) -> Answer: ...


class Served:
    """A session with a server of this package."""

    lasts_s, is_ours = SERVED_S, True

    def __init__(self, session: Any) -> None:
        self.session = session
        self._measure = session.get_function(MEASURE)
        self._libraries = Libraries(session)

    def measure(self, request: MeasureRequest, limit_s: float) -> Answer:
        """What the server's measuring process answers within a time."""
        message = pickle.dumps((request.moved(self._libraries.name), limit_s))
        return pickle.loads(bytes(self._measure(message)))


class Stock:
    """A session with TVM's own server."""

    lasts_s, is_ours = STOCK_S, False

    def __init__(self, session: Any) -> None:
        self.session = session
        self._site: Remote | None = None

    def measure(self, request: MeasureRequest, limit_s: float) -> Answer:
        """As `measuring.measure`; the time limit is that of the session."""
        if self._site is None:
            kind = request.place.resolved()[0].kind.name
            self._site = Remote(self.session, "cpu" if kind == "llvm" else kind)
        return Answer("ok", measure(request, self._site))


WAIT_S = 60.0  # for a server that others use
GONE_S = 10.0  # for one to be registered, where there is none that this session does not use
GRACE_S = 60.0  # for a server's answer after the limit: its process has to start
POLL_S = 0.5
EXCERPT = 300  # characters of an error's text
WORKPATH = "tvm.rpc.server.workpath"  # a function that each server has


@dataclass(frozen=True, slots=True)
class Linked:
    """A session that is kept: with which server, and since when."""

    address: str
    is_ours: bool
    since: float


_links: dict[tuple[str, int, str], tuple[Link, Linked]] = {}


def connect(host: str, port: int, key: str, held: int, since: float) -> Linked:
    """Makes a session with a server of a tracker, for the requests that follow.

    Parameters
    ----------
    host, port, key
        Of the tracker, and of its servers.
    held : int
        How many of these servers the rest of the session uses.
    since : float
        When the caller began to wait for one (`time.monotonic`).

    Raises
    ------
    TargetError
        There is none within `WAIT_S`, or within `GONE_S` where others do not use one either; or it
        has another version of this package.
    """
    place = (host, port, key)
    if place not in _links:
        link, address = _link(*place, held, since)
        _links[place] = link, Linked(address, link.is_ours, time.monotonic())
    return _links[place][1]


def measure_remotely(
    request: MeasureRequest, limit_s: float, host: str, port: int, key: str
) -> Answer:
    """Measures on a server with a key; the session with it is kept for the next request.

    Raises
    ------
    TargetError
        As `connect`, or the server ended since the last request.
    """
    place = (host, port, key)
    if place in _links:
        link, linked = _links[place]
        if time.monotonic() - linked.since > link.lasts_s / 2:
            _leave(place)
        elif not _lives(link):
            _leave(place)
            raise TargetError(f"{linked.address} does not answer any more")
    linked = connect(*place, 0, time.monotonic())
    link = _links[place][0]
    try:
        return link.measure(request, limit_s)
    except Exception as error:
        lives = _lives(link)
        _leave(place)  # a sticky error of the device ends with its session
        if lives:
            raise
        why = " ".join(str(error).split())[-EXCERPT:]
        return Answer(BROKEN, why=f"the session with {linked.address} broke off: {why}")


def _lives(link: Link) -> bool:
    """Whether the server answers in a session."""
    try:
        link.session.get_function(WORKPATH)
    except Exception:
        return False
    return True


def _leave(place: tuple[str, int, str]) -> None:
    """Ends a session; the server is free for the next one when nothing refers to it."""
    del _links[place]
    forget()
    gc.collect()


def _link(host: str, port: int, key: str, held: int, since: float) -> tuple[Link, str]:
    session, address = _session(host, port, key, SERVED_S, held, since)
    version = _version(session)
    if version == __version__:
        return Served(session), address
    if version is not None:
        raise TargetError(
            f"the RPC server {address} has tvm_fusion {version}, this is {__version__}"
        )
    del session  # of TVM's own server: a kernel that hangs must not block it for an hour
    session, address = _session(host, port, key, STOCK_S, held, since)
    return Stock(session), address


def _version(session: Any) -> str | None:
    """Of this package at a server; None where it is TVM's own."""
    try:
        return str(session.get_function(VERSION)())
    except AttributeError:
        return None


def _session(
    host: str, port: int, key: str, lasts_s: float, held: int, since: float
) -> tuple[Any, str]:
    """A session with a server, and the server's address; waits until one is free."""
    while True:
        try:
            with Tracker(host, port) as tracker:
                if tracker.free(key):
                    return tracker.request(key, lasts_s)
                there = sum(one[0] == key for one in tracker.servers())
            patience_s = WAIT_S if there > held else GONE_S
            why = _missing(f"the tracker {host}:{port}", key, there, held)
        except (RuntimeError, OSError) as error:
            patience_s = GONE_S
            why = f"no server {key!r} of the tracker {host}:{port} answers: {error}"
        if time.monotonic() - since > patience_s:
            raise TargetError(why)
        time.sleep(POLL_S)


def _missing(tracker: str, key: str, there: int, held: int) -> str:
    """Why no server is free."""
    if not there:
        return f"{tracker} has no server with the key {key!r} any more: start one"
    if there <= held:
        return f"{tracker} has no server with the key {key!r} beside the {there} used here already"
    return f"none of the {there} servers with the key {key!r} of {tracker} is free"


class RemoteWorker(Worker):
    """A process that passes requests on; the answer is that of the process at the server.

    `linked` is its session with a server.
    """

    linked: Linked | None = None

    def collect(self) -> Answer | None:
        """As `Worker.collect`. A process that dies ran no kernel, and a server of ours keeps time
        itself: where these fail, the session broke off.
        """
        linked, answer = self.linked, super().collect()
        if answer is None:
            return None
        if isinstance(answer.value, Linked):
            self.linked = answer.value
            self.name = f"server {self.linked.address}"
        elif answer.status == "ok":
            return replace(answer.value, seconds=answer.seconds)
        elif answer.status == "crash" or (
            answer.status == "timeout" and linked is not None and linked.is_ours
        ):
            return replace(answer, status=BROKEN)
        return answer

    def stop(self) -> None:
        """As `Worker.stop`."""
        self.linked = None
        super().stop()


class RemoteMeter:
    """Measures on one server of a tracker."""

    def __init__(self, name: str, host: str, port: int, key: str) -> None:
        self.worker = RemoteWorker(name, torch=False)
        self._place = (host, port, key)

    @property
    def is_ready(self) -> bool:
        """Whether there is a session with a server."""
        return self.worker.linked is not None

    def connect(self, held: int) -> None:
        """Asks for a session with a server."""
        arguments = (*self._place, held, time.monotonic())
        self.worker.send(connect, arguments, WAIT_S + GRACE_S)

    def send(self, request: MeasureRequest, limit_s: float) -> None:
        """Asks for the measurements of a request."""
        most_s = PREPARING_S + limit_s + GRACE_S
        self.worker.send(measure_remotely, (request, limit_s, *self._place), most_s)


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
    host, port = address_of(tracker, "--rpc")
    try:
        keys = served_keys(host, port)
    except (RuntimeError, OSError) as error:
        raise InputError(f"no RPC tracker answers at {tracker}: {error}") from error
    if key not in keys:
        there = f"there is {', '.join(sorted(set(keys)))}" if keys else "no server is registered"
        raise InputError(f"the tracker {tracker} has no server with the key {key!r}; {there}")
    return [
        RemoteMeter(f"server {i} of {tracker}", host, port, key) for i in range(keys.count(key))
    ]
