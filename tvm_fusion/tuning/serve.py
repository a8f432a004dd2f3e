"""A server that measures for sessions elsewhere: `python -m tvm_fusion.tuning.serve`.

    python -m tvm_fusion.tuning.serve --tracker HOST:9190 --key h200 --gpu 0

It registers with TVM's tracker, serves one session at a time (`remote.wire`), and lets nobody in
who does not know its token; who does may run any code, since libraries are code. Inputs and outputs
stay on its device, numbers are compared there, and times are those of a session on one machine.
Kernels run in a process of their own: one that hangs or crashes ends that process only, and what a
session says, or does not say, ends that session only.
"""

from __future__ import annotations

import argparse
import errno
import ipaddress
import json
import logging
import os
import secrets
import select
import signal
import socket
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import wait
from pathlib import Path
from typing import NoReturn

from tvm.rpc.base import TrackerCode

from ..config import load_policy
from ..config.targets import present_gpu
from ..errors import InputError
from .measure.building import BuiltChoice, Place
from .measure.measuring import LocalMeter, MeasureRequest
from .measure.processes import Answer, scratch_folder
from .remote import wire
from .remote.wire import Channel, Measure, Measured, ProtocolError, Refused, Tracker

logger = logging.getLogger(__name__)

HOST, EVERYWHERE = "127.0.0.1", ("0.0.0.0", "::")
PORTS, MOST_PORTS = 100, 1 << 16  # that are tried, and that there are
POLL_S = 1.0
EXTRA_S = 0.01
UNUSED_S = 6.0  # after which a session that was given the server does not come any more


@dataclass
class Server:
    """Serves the sessions that the tracker at a place sends, one at a time, under a key. `host` is
    what it tells them; None is the address that it sees. An empty token is none.
    """

    listener: socket.socket
    place: tuple[str, int]
    key: str
    host: str | None
    token: bytes
    _tracker: Tracker | None = None
    _match: str = ""
    _offered: float = 0.0

    def step(self) -> None:
        """Serves a session, or waits a little for one."""
        try:
            self._offer()
        except OSError as error:
            logger.warning("the tracker %s:%d does not answer: %s", *self.place, error)
            self._tracker = None
            time.sleep(POLL_S)
        else:
            if select.select([self.listener], [], [], POLL_S)[0]:
                self._attend()

    def _offer(self) -> None:
        """Has the tracker offer the server where it does not and no session is about to come."""
        now, port = time.monotonic(), self.listener.getsockname()[1]
        if self._tracker is None:
            tracker = Tracker(*self.place)
            info = {"key": f"server:{self.key}", "addr": [self.host, port]}
            tracker.ask(TrackerCode.UPDATE_INFO, info)
            self._tracker, self._match = tracker, ""
            where, device = f"{self.host or tracker.own_host}:{port}", present_gpu()[0]
            text = f"{where} is registered as {self.key!r} with {{}}:{{}}: {device or 'CPU'}"
            print(text.format(*self.place), flush=True)
        if self._match and self._match in self._tracker.ask(TrackerCode.GET_PENDING_MATCHKEYS):
            self._offered = now
        elif not self._match or now - self._offered > UNUSED_S:
            # what is before the last colon is the key, to the tracker
            self._match, self._offered = f"{self.key}:{wire.OURS}{secrets.token_hex(8)}", now
            self._tracker.ask(TrackerCode.PUT, self.key, [port, self._match], self.host)

    def _attend(self) -> None:
        """Serves who connects, whatever becomes of that."""
        try:
            connected, (host, port, *_) = self.listener.accept()
            opened = Channel(connected, wire.ANSWER_S)
        except OSError as error:  # it is gone already, or there are too many files
            logger.warning("nobody connects: %s", error)
            return
        with opened as channel:
            try:
                wire.admit(channel, self.token, self._match)
                self._match = ""
                channel.last(wire.SESSION_S)
                measure(channel)
            except Exception as error:
                logger.warning("%s:%d: the connection ends: %s", host, port, error)
                if not isinstance(error, ConnectionResetError):
                    with suppress(OSError):
                        channel.last(POLL_S)
                        channel.tell(Refused(str(error)))


def measure(channel: Channel) -> NoReturn:
    """Measures what a session asks for, until OSError says that it is over."""
    meter, libraries = LocalMeter(), []
    with scratch_folder() as folder:
        try:
            while True:
                message = channel.hear(Measure)
                for size in message.libraries:
                    libraries.append(folder / f"{len(libraries)}.so")
                    _receive(channel, size, libraries[-1])
                meter.send(request_of(message, libraries), message.limit_s)
                answer = _awaited(meter, channel)
                found = tuple(answer.value) if answer.status == "ok" else ()
                channel.tell(Measured(answer.status, found, answer.why))
        finally:
            meter.worker.stop()


def _receive(channel: Channel, size: int, path: Path) -> None:
    if not 0 < size <= wire.LIBRARY_BYTES:
        raise ProtocolError(f"a library of {size} bytes, of {wire.LIBRARY_BYTES} at most")
    with path.open("wb") as file:
        while size:
            size -= file.write(channel.receive_bytes(min(size, wire.CHUNK_BYTES)))


def request_of(message: Measure, libraries: Sequence[Path]) -> MeasureRequest:
    """What the process that measures is asked; ProtocolError where a library did not come."""
    if not all(0 <= choice.library < len(libraries) for choice in message.choices):
        raise ProtocolError(f"a library beside the {len(libraries)} that came")
    choices = [
        BuiltChoice(libraries[c.library], c.symbol, c.kernels, panels=c.panels)
        for c in message.choices
    ]
    place = Place(json.dumps(message.target), load_policy())  # measuring asks for no policy
    told = (message.workload, message.outputs, tuple(choices), message.repeats)
    return MeasureRequest(*told, place, message.seed)


def _awaited(meter: LocalMeter, channel: Channel) -> Answer:
    """The answer of the process that measures, as long as the session waits for it."""
    while (answer := meter.worker.collect()) is None:
        left_s = min(meter.worker.left_s + EXTRA_S, channel.left_s)
        wait([meter.worker.connection, channel], left_s)
        if not channel.is_silent:
            raise ConnectionResetError("the session does not wait for its measurements")
    return answer


def main(arguments: Sequence[str] | None = None) -> int:
    """Serves until it is interrupted or terminated."""
    parser = argparse.ArgumentParser(
        prog="python -m tvm_fusion.tuning.serve", description=__doc__.splitlines()[0]
    )
    add = parser.add_argument
    add("--tracker", metavar="HOST:PORT", required=True)
    add("--key", required=True, help="the name that sessions ask for")
    add("--gpu", type=int, metavar="N", help="which GPU; by default the first")
    add("--host", default=HOST, help=f"the address to listen at; by default {HOST}")
    add(
        "--token-file",
        metavar="FILE",
        help=f"has the token; by default {wire.TOKEN_VARIABLE} has it",
    )
    add("--port", type=int, default=9090, help="the first port to try")
    add("--port-end", type=int, help=f"the port after the last; by default {PORTS} are tried")
    add("--custom-addr", metavar="HOST", help="the address to tell the tracker")
    given = parser.parse_args(arguments)
    try:
        tracker = wire.address_of(given.tracker, "--tracker")
        ports = _ports(given.port, given.port_end)
        token = wire.token_of(given.token_file)
        if not _is_loopback(given.host):
            if not token:
                raise InputError(
                    f"--host: {given.host} lets others in, and so needs a token: give "
                    f"--token-file, or set {wire.TOKEN_VARIABLE}"
                )
        elif not (given.custom_addr or _is_loopback(tracker[0])):
            raise InputError(
                f"--host: the tracker would send others to {given.host}: give the address that "
                "they reach this machine by, with a token, or --custom-addr for a tunnel"
            )
    except InputError as error:
        parser.error(str(error))
    if given.gpu is not None:
        os.environ["CUDA_VISIBLE_DEVICES"] = str(given.gpu)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    told = given.custom_addr or (None if given.host in EVERYWHERE else given.host)
    try:
        listener = _listen(given.host, ports)
    except OSError as error:
        print(f"the RPC server cannot listen at {given.host}: {error}", file=sys.stderr)
        return 2
    with listener, suppress(KeyboardInterrupt):
        server = Server(listener, tracker, given.key, told, token)
        while True:
            server.step()
    return 0


def _is_loopback(host: str) -> bool:
    """Whether only this machine reaches an address; InputError where it is none."""
    try:
        found = socket.getaddrinfo(host, None)
    except OSError as error:
        raise InputError(
            f"{host!r} is no address: {error}; give a name or a number of this machine"
        ) from error
    return all(ipaddress.ip_address(one[4][0].partition("%")[0]).is_loopback for one in found)


def _ports(port: int, end: int | None) -> range:
    """Those to try; InputError where there is none."""
    if not 0 < port < MOST_PORTS:
        raise InputError(f"--port: {port} is no port; give one from 1 to 65535")
    if end is not None and not port < end <= MOST_PORTS:
        raise InputError(
            f"--port-end: {end} is the port after the last to try: give {port + 1} "
            f"for --port {port} alone, and {MOST_PORTS} at most"
        )
    return range(port, end or min(port + PORTS, MOST_PORTS))


def _listen(host: str, ports: range) -> socket.socket:
    """Listens at the first port that is free; OSError where there is none."""
    family = socket.getaddrinfo(host, None)[0][0]
    for port in ports:
        try:
            return socket.create_server((host, port), family=family)
        except OSError as error:
            if error.errno != errno.EADDRINUSE:
                raise
    raise OSError(f"each port in [{ports.start}, {ports.stop}) is taken")


if __name__ == "__main__":
    sys.exit(main())
