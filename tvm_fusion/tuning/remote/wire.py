"""What a session, a server of this package (`serve`) and TVM's tracker say to each other.

A message is its length (an int32) and JSON, as TVM's tracker has it. Nothing is pickled, and what
has not exactly the fields that it should have ends the connection, as does what takes too long:

    server -> Hello, a number only; session -> Hello, the first that a server reads
    server -> Hello where the session's proof is right, and then for an hour at most
    session -> Measure and the libraries that are new; server -> Measured
    server -> Refused at any time, before it closes the connection

A proof is an HMAC, by the token, of numbers that both ends drew; messages are not encrypted.
(`multiprocessing.connection` compares proofs by `==` in Python 3.11, asks for none where the token
is empty, and waits for ever for a peer that says nothing.)
"""

from __future__ import annotations

import hmac
import json
import math
import os
import secrets
import select
import socket
import struct
import time
from contextlib import suppress
from dataclasses import asdict, dataclass, is_dataclass
from pathlib import Path
from types import UnionType
from typing import Any, Literal, Self, get_args, get_origin, get_type_hints

from tvm.rpc.base import RPC_TRACKER_MAGIC, TrackerCode

from ..._version import __version__
from ...errors import InputError
from ...kernels.cpu.contraction.panels import Panels
from ..measure.measuring import Measurement

PROTOCOL = 1
FIRST_BYTES = 1 << 10  # of a message at most, before the proof was compared
MESSAGE_BYTES = 1 << 24  # of one after it, most of which is a workload
LIBRARY_BYTES = 1 << 30  # of a library at most
CHUNK_BYTES = 1 << 20
ANSWER_S = 5.0  # for a connection, an answer of a tracker, and all that is said up to the proofs
SESSION_S = 3600.0  # after which a server ends a session
TOKEN_VARIABLE = "TVM_FUSION_TOKEN"
TOKEN_BYTES = 16  # at least: who listens may try shorter ones out
OURS = "tvm_fusion-"  # begins the random part of the match keys of servers of this package


class ProtocolError(ConnectionError):
    """An end says what it should not."""


@dataclass(frozen=True, slots=True)
class Hello:
    """`match` is the key by which the tracker gives the server away."""

    protocol: int
    nonce: str
    proof: str = ""
    version: str = ""
    match: str = ""


@dataclass(frozen=True, slots=True)
class Sent:
    """A `BuiltChoice`; the libraries of a session are numbered as they come."""

    library: int
    symbol: str
    kernels: int
    panels: tuple[tuple[int, Panels], ...]


@dataclass(frozen=True, slots=True)
class Measure:
    """A `MeasureRequest`, the seconds that it may take, and the sizes of libraries that follow."""

    workload: str
    outputs: int
    choices: tuple[Sent, ...]
    repeats: int
    target: dict
    seed: int
    limit_s: float
    libraries: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Measured:
    """An `Answer`."""

    status: Literal["ok", "error", "crash", "timeout", "memory", "lost"]
    measurements: tuple[Measurement, ...]
    why: str


@dataclass(frozen=True, slots=True)
class Refused:
    """Why the server goes on no more."""

    why: str


def decoded(kind: Any, value: Any, name: str) -> Any:
    """JSON as a value of a type: a dataclass, tuple, union with None, literal, or a plain one.

    Raises
    ------
    ProtocolError
        It is none; `name` says what.
    """
    origin, inner = get_origin(kind), get_args(kind)
    if is_dataclass(kind):
        hints = get_type_hints(kind)
        if isinstance(value, dict) and value.keys() == hints.keys():
            return kind(**{k: decoded(hints[k], v, f"{name}.{k}") for k, v in value.items()})
        kind = f"the fields {', '.join(hints)}"
    elif origin is tuple and isinstance(value, list):
        kinds = inner[:1] * len(value) if inner[-1] is ... else inner
        if len(kinds) == len(value):
            return tuple(decoded(k, v, name) for k, v in zip(kinds, value, strict=True))
    elif origin is UnionType:
        return None if value is None else decoded(inner[0], value, name)
    elif kind is float:
        with suppress(OverflowError):
            if type(value) in (int, float) and math.isfinite(value):
                return float(value)
    elif value in inner if origin is Literal else type(value) is kind:
        return value
    raise ProtocolError(f"{name}: expected {kind}, got {str(value)[:80]!r}")


class Channel:
    """A socket that carries messages for some seconds, and raises TimeoutError then; a context."""

    def __init__(self, connected: socket.socket, lasts_s: float) -> None:
        self._socket = connected
        self.fileno, self.close = connected.fileno, connected.close
        self.own_host = connected.getsockname()[0]
        self.last(lasts_s)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def last(self, seconds: float) -> None:
        """Gives it so much time from now."""
        self._until = time.monotonic() + seconds

    @property
    def left_s(self) -> float:
        """Of its time."""
        left_s = self._until - time.monotonic()
        if left_s <= 0:
            raise TimeoutError("its time is over")
        return left_s

    @property
    def is_silent(self) -> bool:
        """Whether it is open, and the other end has neither said anything nor closed it."""
        return self.fileno() >= 0 and not select.select([self], [], [], 0)[0]

    def tell(self, message: Any) -> None:
        """Sends one of the messages above."""
        self.send({type(message).__name__: asdict(message)})

    def hear(self, kind: type, most: int = MESSAGE_BYTES) -> Any:
        """The next message; ProtocolError where it is none of this kind, or has more bytes."""
        value = self.receive(most)
        for known in (kind, Refused):
            if isinstance(value, dict) and value.keys() == {known.__name__}:
                message = decoded(known, value[known.__name__], known.__name__)
                if known is Refused:
                    raise ProtocolError(message.why)
                return message
        raise ProtocolError(f"expected {kind.__name__}, got {str(value)[:80]!r}")

    def send(self, value: Any) -> None:
        """Sends JSON."""
        data = json.dumps(value).encode()
        self.send_bytes(struct.pack("<i", len(data)) + data)

    def receive(self, most: int = MESSAGE_BYTES) -> Any:
        """JSON; ProtocolError where it is none, or has more bytes."""
        (size,) = struct.unpack("<i", self.receive_bytes(4))
        if not 0 < size <= most:
            raise ProtocolError(f"a message of {size} bytes, of {most} at most")
        try:
            return json.loads(self.receive_bytes(size))
        except (ValueError, RecursionError) as error:
            raise ProtocolError(f"a message that is no JSON: {error}") from None

    def send_bytes(self, data: bytes) -> None:
        """Sends them as they are."""
        self._socket.settimeout(self.left_s)
        self._socket.sendall(data)

    def receive_bytes(self, size: int) -> bytes:
        """Exactly so many; no memory is taken for what is announced and does not come."""
        data = bytearray()
        while len(data) < size:
            self._socket.settimeout(self.left_s)
            if not (part := self._socket.recv(min(size - len(data), CHUNK_BYTES))):
                raise ConnectionResetError("the other end closed the connection")
            data += part
        return bytes(data)


def admit(channel: Channel, token: bytes, match: str) -> None:
    """Lets a session in that knows the token, or raises, and proves to it that this end does."""
    drawn = secrets.token_hex(32)
    channel.tell(Hello(PROTOCOL, drawn))
    given = channel.hear(Hello, FIRST_BYTES)
    _compare(given, _proof(token, "session", drawn, given.nonce))
    if given.match != match:
        raise ConnectionResetError("the tracker has given the server to another session since")
    proof = _proof(token, "server", drawn, given.nonce)
    channel.tell(Hello(PROTOCOL, given.nonce, proof, __version__, match))


def enter(channel: Channel, token: bytes, match: str) -> str:
    """Proves to a server that this end knows the token, and has it prove the same, or raises; the
    server's version.
    """
    first, drawn = channel.hear(Hello, FIRST_BYTES), secrets.token_hex(32)
    if first.protocol != PROTOCOL:
        raise ProtocolError(f"it speaks protocol {first.protocol}, this is {PROTOCOL}")
    proof = _proof(token, "session", first.nonce, drawn)
    channel.tell(Hello(PROTOCOL, drawn, proof, match=match))
    given = channel.hear(Hello, FIRST_BYTES)
    _compare(given, _proof(token, "server", first.nonce, drawn))
    return given.version


def _proof(token: bytes, *words: str) -> str:
    return hmac.new(token, " ".join(words).encode(errors="replace"), "sha256").hexdigest()


def _compare(given: Hello, proof: str) -> None:
    if not hmac.compare_digest(given.proof.encode(errors="replace"), proof.encode()):
        raise ProtocolError(f"a token is missing or wrong (--token-file, or {TOKEN_VARIABLE})")


def token_of(file: str | Path | None = None) -> bytes:
    """The token in a file, or else in the environment; empty where there is none.

    Raises
    ------
    InputError
        The file cannot be read, or the token is shorter than `TOKEN_BYTES`.
    """
    where = TOKEN_VARIABLE if file is None else f"--token-file {file}"
    try:
        text = os.environ.get(TOKEN_VARIABLE, "") if file is None else Path(file).read_text()
    except (OSError, ValueError) as error:
        raise InputError(f"{where}: {error}; check the path") from error
    token = text.strip().encode()
    if len(token) < TOKEN_BYTES and (token or file is not None):
        raise InputError(f"{where}: a token has {TOKEN_BYTES} bytes at least; make a longer one")
    return token


class Tracker(Channel):
    """A connection with TVM's tracker; OSError where there is none, now or later.

    TVM's client (`rpc.TrackerSession`) registers no servers, tries for a minute where there is no
    tracker, waits for ever where no server is free, and does not say which one it got.
    """

    def __init__(self, host: str, port: int) -> None:
        super().__init__(socket.create_connection((host, port), ANSWER_S), ANSWER_S)
        magic = struct.pack("<i", RPC_TRACKER_MAGIC)
        self.send_bytes(magic)
        if self.receive_bytes(4) != magic:
            self.close()
            raise ProtocolError("what answers is no RPC tracker")

    def ask(self, *question: Any) -> Any:
        """What it answers to a `TrackerCode` and what belongs to it."""
        self.last(ANSWER_S)
        self.send(question)
        return self.receive()

    def servers(self, key: str = "") -> tuple[list[str], int]:
        """The keys of all servers, one for each; and how many with a key are in nobody's use."""
        found = self.ask(TrackerCode.SUMMARY)[1]
        keys = [one["key"].removeprefix("server:") for one in found["server_info"]]
        return keys, found["queue_info"].get(key, {}).get("free", 0)


def address_of(text: str, option: str) -> tuple[str, int]:
    """Host and port of HOST:PORT; InputError names the option."""
    host, separator, port = text.rpartition(":")
    if not separator or not port.isdecimal():
        raise InputError(f"{option}: expected HOST:PORT, got {text!r}")
    return host, int(port)
