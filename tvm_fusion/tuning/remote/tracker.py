"""What TVM's RPC tracker knows of its servers, asked with time limits.

TVM's own client (`tvm.rpc.connect_tracker`) tries for a minute where there is no tracker, waits for
ever where no server is free, and does not say which server it got.
"""

from __future__ import annotations

import socket
import struct
from types import TracebackType
from typing import Any

from tvm import rpc
from tvm.rpc import base

from ...errors import InputError

CONNECT_S = 5.0  # for a connection, and for an answer


class Tracker:
    """A connection with a tracker; a context.

    Parameters
    ----------
    host : str
    port : int

    Raises
    ------
    OSError, RuntimeError
        There is no tracker.
    """

    def __init__(self, host: str, port: int) -> None:
        self._socket = socket.create_connection((host, port), CONNECT_S)
        self._socket.sendall(struct.pack("<i", base.RPC_TRACKER_MAGIC))
        if struct.unpack("<i", base.recvall(self._socket, 4))[0] != base.RPC_TRACKER_MAGIC:
            self._socket.close()
            raise RuntimeError("what answers is no RPC tracker")

    def __enter__(self) -> Tracker:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._socket.close()

    @property
    def own_host(self) -> str:
        """The address of this machine as the tracker sees it."""
        return self._socket.getsockname()[0]

    def servers(self) -> list[tuple[str, str, int]]:
        """Key, host and port of each server that is registered."""
        found = self._summary()["server_info"]
        return [(one["key"].removeprefix("server:"), *one["addr"]) for one in found]

    def free(self, key: str) -> int:
        """How many servers with a key are in nobody's use."""
        return self._summary()["queue_info"].get(key, {}).get("free", 0)

    def request(self, key: str, lasts_s: float) -> tuple[Any, str]:
        """A session with a free server, which ends it after a time, and the server's HOST:PORT.

        Raises
        ------
        OSError, RuntimeError
            None is free any more, or it does not answer.
        """
        host, port, match = self._asked([base.TrackerCode.REQUEST, key, "", 1])
        return rpc.connect(host, port, match, lasts_s), f"{host}:{port}"

    def _summary(self) -> dict[str, Any]:
        return self._asked([base.TrackerCode.SUMMARY])

    def _asked(self, question: list) -> Any:
        base.sendjson(self._socket, question)
        status, value = base.recvjson(self._socket)
        if status != base.TrackerCode.SUCCESS:
            raise RuntimeError(f"the tracker answers {status}")
        return value


def address_of(text: str, option: str) -> tuple[str, int]:
    """Host and port of HOST:PORT.

    Raises
    ------
    InputError
        It is no such text; `option` is named.
    """
    host, separator, port = text.rpartition(":")
    if not separator or not port.isdecimal():
        raise InputError(f"{option}: expected HOST:PORT, got {text!r}")
    return host, int(port)


def served_keys(host: str, port: int) -> list[str]:
    """The keys of the servers that are registered with a tracker, one for each server.

    Raises
    ------
    OSError, RuntimeError
        There is no tracker.
    """
    with Tracker(host, port) as tracker:
        return [key for key, *_ in tracker.servers()]
