"""Measurements on other machines, which TVM's tracker knows of.

    python -m tvm.exec.rpc_tracker --host 127.0.0.1 --port 9190
    python -m tvm_fusion.tuning.serve --tracker HOST:9190 --key h200 --gpu 0      # for each GPU

A process here for each server keeps a session with it and sends it libraries. A server of this
package (`serve`) measures by itself. TVM's own (`tvm.exec.rpc_server`) does what it is told through
TVM's client: inputs and outputs are copied, numbers are compared here. A session that fails is
given up, and the tracker asked for another. One that breaks off says nothing of the kernel that
ran: it was in a process of its own at the server, or in that of TVM's server, which may have ended
for any reason.
"""

from __future__ import annotations

import gc
import json
import socket
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from tvm import rpc
from tvm.rpc.base import TrackerCode

from ..._version import __version__
from ...errors import InputError, TargetError
from ...runtime.timing.timing import L2_CLEANING_BYTES
from ..measure.measuring import MeasureRequest, Meter, forget, measure
from ..measure.processes import BROKEN, PREPARING_S, Answer, Worker
from ..measure.site import Call, Site
from . import wire
from .wire import Channel, Measured, ProtocolError, Tracker

STOCK_S = 600.0  # after which TVM's server ends a session; a kernel that hangs blocks it until then
MIN_SAMPLE_S = 200e-6  # shorter calls are repeated within a sample
WAIT_S = 60.0  # for a server that others use
GONE_S = 10.0  # for one to be registered, where there is none that this session does not use
GRACE_S = 60.0  # for a server's answer after the limit: its process has to start
POLL_S = 0.5
EXCERPT = 300  # characters of an error's text


class Libraries(dict):
    """The numbers of libraries at a server: one that is loaded there must not be written again."""

    def number(self, path: Path) -> tuple[int, bool]:
        """That of a library, and whether it is new, and to be sent."""
        count = len(self)  # sessions write no library twice to a path
        return self.setdefault(path, count), len(self) > count


class Remote(Site):
    """A device behind a session with TVM's own server."""

    def __init__(self, session: Any, kind: str) -> None:
        super().__init__(session.device(kind))
        self.session, self.kind, self._libraries = session, kind, Libraries()

    def load(self, path: Path) -> Any:
        """A library at the server."""
        number, is_new = self._libraries.number(path)
        name = f"{number}-{path.name}"
        if is_new:
            self.session.upload(str(path), name)
        return self.session.load_module(name)

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


class Served:
    """A session with a server of this package, which lasts so many seconds."""

    lasts_s, is_ours = wire.SESSION_S, True

    def __init__(self, host: str, port: int, match: str, token: bytes) -> None:
        where = f"the RPC server {host}:{port}"
        connected = socket.create_connection((host, port), wire.ANSWER_S)
        self._channel, self._libraries = Channel(connected, wire.ANSWER_S), Libraries()
        with ExitStack() as given_up:
            given_up.enter_context(self._channel)
            try:
                version = wire.enter(self._channel, token, match)
            except ProtocolError as error:
                raise TargetError(
                    f"{where} and this session do not agree: {error}"
                    "; install the same version there"
                ) from error
            if version != __version__:
                raise TargetError(
                    f"{where} has tvm_fusion {version}, this is {__version__}"
                    "; install the same version there"
                )
            given_up.pop_all()
        self._channel.last(wire.SESSION_S)

    @property
    def lives(self) -> bool:
        """Whether the server answers, as far as is known."""
        return self._channel.is_silent

    def measure(self, request: MeasureRequest, limit_s: float) -> Answer:
        """What the server's measuring process answers within a time."""
        sent, new = [], []
        for choice in request.choices:
            number, is_new = self._libraries.number(choice.path)
            new += [choice.path.read_bytes()] if is_new else []
            sent.append(wire.Sent(number, choice.symbol, choice.kernels, choice.panels))
        target = json.loads(str(request.place.resolved()[0]))  # a path says nothing elsewhere
        asked = (request.workload, request.outputs, tuple(sent), request.repeats, target)
        self._channel.tell(wire.Measure(*asked, request.seed, limit_s, tuple(map(len, new))))
        for library in new:
            self._channel.send_bytes(library)
        found = self._channel.hear(Measured)
        if found.status == "ok" and len(found.measurements) != len(sent):
            raise ProtocolError(f"{len(found.measurements)} measurements of {len(sent)}")
        return Answer(found.status, list(found.measurements), found.why)

    def close(self) -> None:
        """Ends the session."""
        self._channel.close()


class Stock:
    """A session with TVM's own server; as `Served`."""

    lasts_s, is_ours = STOCK_S, False

    def __init__(self, host: str, port: int, match: str) -> None:
        self._session: Any = rpc.connect(host, port, match, STOCK_S)
        self._site: Remote | None = None

    @property
    def lives(self) -> bool:
        """Whether the server answers."""
        try:
            self._session.get_function("tvm.rpc.server.workpath")  # which each has
        except Exception:
            return False
        return True

    def measure(self, request: MeasureRequest, limit_s: float) -> Answer:
        """As `measuring.measure`; the time limit is that of the session."""
        if self._site is None:
            kind = request.place.resolved()[0].kind.name
            self._site = Remote(self._session, "cpu" if kind == "llvm" else kind)
        return Answer("ok", measure(request, self._site))

    def close(self) -> None:
        """The server is free for the next session when nothing refers to this one."""
        self._session = self._site = None
        forget()
        gc.collect()


@dataclass(frozen=True, slots=True)
class Servers:
    """Those of a tracker that have a key; the token is asked for by those of this package."""

    host: str
    port: int
    key: str
    token: bytes = field(default=b"", repr=False)


@dataclass(frozen=True, slots=True)
class Linked:
    """A session that is kept: with which server, and since when."""

    address: str
    is_ours: bool
    since: float


_links: dict[Servers, tuple[Served | Stock, Linked]] = {}


def connect(servers: Servers, held: int, since: float) -> Linked:
    """Makes a session with a server, for the requests that follow. `held` is how many of these
    servers are in use here, `since` when the caller began to wait (`time.monotonic`).

    Raises
    ------
    TargetError
        There is none within `WAIT_S`, or within `GONE_S` where others do not use one either; or it
        has another token, or another version of this package.
    """
    if servers not in _links:
        link, address = _link(servers, held, since)
        _links[servers] = link, Linked(address, link.is_ours, time.monotonic())
    return _links[servers][1]


def measure_remotely(request: MeasureRequest, limit_s: float, servers: Servers) -> Answer:
    """Measures on one of some servers; the session with it is kept for the next request.

    Raises
    ------
    TargetError
        As `connect`, or the server ended since the last request.
    """
    if servers in _links:
        link, linked = _links[servers]
        if time.monotonic() - linked.since > link.lasts_s / 2:
            _leave(servers)
        elif not link.lives:
            _leave(servers)
            raise TargetError(
                f"{linked.address} does not answer any more"
                "; look at the server; the same command goes on"
            )
    linked = connect(servers, 0, time.monotonic())
    link = _links[servers][0]
    try:
        return link.measure(request, limit_s)
    except Exception as error:
        lives = link.lives
        _leave(servers)  # a sticky error of the device ends with its session
        if lives:
            raise
        why = " ".join(str(error).split())[-EXCERPT:]
        return Answer(BROKEN, why=f"the session with {linked.address} broke off: {why}")


def _leave(servers: Servers) -> None:
    _links.pop(servers)[0].close()


def _link(servers: Servers, held: int, since: float) -> tuple[Served | Stock, str]:
    """A session with a server, and the server's address; waits until one is free."""
    key, name = servers.key, f"the tracker {servers.host}:{servers.port}"
    while True:
        try:
            with Tracker(servers.host, servers.port) as tracker:
                keys, free = tracker.servers(key)
                if free:
                    _, (host, port, match) = tracker.ask(TrackerCode.REQUEST, key, "", 1)
                    # what is before the last colon is the key
                    ours = match.rpartition(":")[2].startswith(wire.OURS)
                    if servers.token and not ours:
                        raise TargetError(
                            f"the server {host}:{port} of {name} does not ask for the token: it "
                            "is TVM's own, which anybody may use and imitate; give no token for it"
                        )
                    token = (servers.token,) if ours else ()
                    return (Served if ours else Stock)(host, port, match, *token), f"{host}:{port}"
            there = keys.count(key)
            patience_s = WAIT_S if there > held else GONE_S
            why = _missing(name, key, there, held)
        except (RuntimeError, OSError) as error:
            patience_s = GONE_S
            why = f"no server {key!r} of {name} answers: {error}; look at it, and try again"
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
        itself: where these fail, the session broke off. What fails at the server does not end it.
        """
        linked, answer = self.linked, super().collect()
        if answer is None:
            return None
        if isinstance(answer.value, Linked):
            self.linked = answer.value
            self.name = f"server {self.linked.address}"
            return answer
        if answer.status == "ok":
            return replace(answer.value, seconds=answer.seconds)
        self.stop()
        ours = linked is not None and linked.is_ours
        if answer.status == "crash" or (answer.status == "timeout" and ours):
            return replace(answer, status=BROKEN)
        return answer

    def stop(self) -> None:
        """As `Worker.stop`."""
        self.linked = None
        super().stop()


class RemoteMeter(Meter):
    """Measures on one of some servers."""

    def __init__(self, name: str, servers: Servers) -> None:
        self.worker, self._servers = RemoteWorker(name, torch=False), servers

    @property
    def is_ready(self) -> bool:
        """Whether there is a session with a server."""
        return self.worker.linked is not None

    def connect(self, held: int) -> None:
        self.worker.send(connect, (self._servers, held, time.monotonic()), WAIT_S + GRACE_S)

    def send(self, request: MeasureRequest, limit_s: float) -> None:
        most_s = PREPARING_S + limit_s + GRACE_S
        self.worker.send(measure_remotely, (request, limit_s, self._servers), most_s)


def meters_of(tracker: str, key: str, token: str | Path | None = None) -> list[RemoteMeter]:
    """A meter for each server of a tracker that has a key.

    Parameters
    ----------
    tracker : str
        HOST:PORT.
    key : str
    token : path, optional
        Of the file that has the servers' token; by default the environment has it
        (`wire.token_of`).

    Raises
    ------
    InputError
        There is no tracker at the address, it has no such server, or there is no such file.
    """
    host, port = wire.address_of(tracker, "--rpc")
    servers = Servers(host, port, key, wire.token_of(token))
    try:
        with Tracker(host, port) as known:
            keys, _ = known.servers()
    except OSError as error:
        raise InputError(
            f"no RPC tracker answers at {tracker}: {error}"
            "; begin one with python -m tvm.exec.rpc_tracker, or give its address"
        ) from error
    if key not in keys:
        there = f"there is {', '.join(sorted(set(keys)))}" if keys else "no server is registered"
        raise InputError(f"the tracker {tracker} has no server with the key {key!r}; {there}")
    return [RemoteMeter(f"server {i} of {tracker}", servers) for i in range(keys.count(key))]
