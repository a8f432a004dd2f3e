"""A tracker and servers on this machine, for as long as a context lasts."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress

import tvm
from tvm.rpc.tracker import Tracker

from tvm_fusion.errors import TargetError
from tvm_fusion.tuning.measure.processes import module_command
from tvm_fusion.tuning.remote.wire import Tracker as Known

HOST = "127.0.0.1"
SERVE, STOCK = "tvm_fusion.tuning.serve", "tvm.exec.rpc_server"
STARTING_S = 60.0
POLL_S = 0.2


@contextmanager
def servers(wanted: Sequence[Sequence[str]]) -> Iterator[str]:
    """The address of a tracker with servers.

    Parameters
    ----------
    wanted : sequence of sequences of str
        For each server its module (`SERVE`, or `STOCK` for TVM's own) and its options, such as
        "--key" and "h200".

    Raises
    ------
    TargetError
        They do not start.
    """
    port = free_port()
    address = f"{HOST}:{port}"
    tracker = Tracker(HOST, port, port + 1, silent=True)
    started: list[subprocess.Popen] = []
    try:
        for module, *options in wanted:
            started.append(start_server(module, address, *options))
        await_servers(port, len(wanted))
        yield address
    finally:
        tracker.terminate()
        for process in started:
            kill_server(process)


def start_server(module: str, tracker: str, *options: str) -> subprocess.Popen:
    """A server of a tracker on this machine, not yet registered; `module` is as for `servers`."""
    port = free_port()
    command = module_command(module, torch=bool(tvm.cuda(0).exist))  # for the kernels of a GPU
    where = ("--host", HOST, "--port", str(port), "--port-end", str(port + 1))
    return subprocess.Popen(
        [*command, *where, "--tracker", tracker, *options],
        start_new_session=True,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )


def await_servers(port: int, count: int) -> None:
    """Waits until the tracker at a port knows that many servers.

    Raises
    ------
    TargetError
        They do not start.
    """
    until = time.monotonic() + STARTING_S
    while len(served_keys(port)) < count:
        if time.monotonic() > until:
            raise TargetError(f"the RPC servers did not start within {STARTING_S:.0f} s")
        time.sleep(POLL_S)


def served_keys(port: int) -> list[str]:
    """The keys of the servers that the tracker at a port knows, one for each."""
    with Known(HOST, port) as tracker:
        return tracker.servers()[0]


def kill_server(process: subprocess.Popen) -> None:
    """Ends a server and all its processes at once."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def free_port() -> int:
    """A port that nobody listens at."""
    with socket.socket() as probe:
        probe.bind((HOST, 0))
        return probe.getsockname()[1]
