"""A TVM RPC server that measures by itself: `python -m tvm_fusion.tuning.serve`.

    python -m tvm_fusion.tuning.serve --tracker HOST:9190 --key h200 --gpu 0

It is TVM's own server with two functions more, which a session finds by their names (`rpc`). Inputs
and outputs stay on its device, numbers are compared there, and times are those of a session on one
machine. Kernels run in a process of its own: one that hangs or crashes ends that process only. A
session whose process ends leaves the server as it was (TVM's own listens no more).
"""

from __future__ import annotations

import argparse
import os
import pickle
import signal
import sys
import threading
from collections.abc import Sequence
from functools import cache
from typing import Any, NoReturn

import tvm_ffi
from tvm import rpc
from tvm.rpc import server as rpc_server

from .._version import __version__
from ..config.targets import present_gpu
from ..errors import InputError
from .measure.measuring import LocalMeter
from .measure.processes import wait_for
from .measure.worker import end_with
from .remote.tracker import Tracker, address_of

VERSION = "tvm_fusion.version"
MEASURE = "tvm_fusion.measure"
POLL_S = 1.0
PORTS = 100  # that are tried
MOST_PORTS = 1 << 16


def register() -> None:
    """Makes the functions known to the sessions of this process, which ends with its parent."""
    end_with(os.getppid())
    tvm_ffi.register_global_func(VERSION, lambda: __version__, override=True)
    tvm_ffi.register_global_func(MEASURE, measured, override=True)
    threading.excepthook = _end
    _outlive_sessions()


def _outlive_sessions() -> None:
    """Has TVM listen on after a session whose process was killed or crashed."""
    serving = rpc_server._serving

    def served(connection: Any, address: Any, *arguments: Any) -> None:
        folder = os.getcwd()
        try:
            serving(connection, address, *arguments)
        except RuntimeError as error:
            rpc_server.logger.warning("the session with %s broke off: %s", address, error)
            os.chdir(folder)
            connection.close()

    rpc_server._serving = served


def _end(failed: threading.ExceptHookArgs) -> NoReturn:
    """Ends the process with its thread that listens."""
    print(f"the RPC server ends: {failed.exc_value}", file=sys.stderr, flush=True)
    os._exit(1)


def measured(message: bytes) -> bytes:
    """An `Answer` with the measurements of a request.

    `message` has a `MeasureRequest`, whose libraries were uploaded under the names that their paths
    are, and the seconds that it may take. Both are pickled: who may talk to a server of TVM may run
    any code on it.
    """
    request, limit_s = pickle.loads(bytes(message))
    folder = tvm_ffi.get_global_func("tvm.rpc.server.workpath")
    meter = _meter()
    meter.send(request.moved(lambda path: str(folder(str(path)))), limit_s)
    while (answer := meter.worker.collect()) is None:
        wait_for([meter.worker], POLL_S)
    return pickle.dumps(answer)


@cache
def _meter() -> LocalMeter:
    """The process that measures for a session; it ends with the session's own."""
    return LocalMeter()


def main(arguments: Sequence[str] | None = None) -> int:
    """Serves until it is interrupted or terminated."""
    parser = argparse.ArgumentParser(
        prog="python -m tvm_fusion.tuning.serve", description=__doc__.splitlines()[0]
    )
    parser.add_argument("--tracker", metavar="HOST:PORT", required=True)
    parser.add_argument("--key", required=True, help="the name that sessions ask for")
    parser.add_argument("--gpu", type=int, metavar="N", help="which GPU; by default the first")
    parser.add_argument("--host", default="0.0.0.0", help="the address to listen at")
    parser.add_argument("--port", type=int, default=9090, help="the first port to try")
    parser.add_argument(
        "--port-end", type=int, help=f"the port after the last; by default {PORTS} are tried"
    )
    parser.add_argument("--custom-addr", metavar="HOST", help="the address to tell the tracker")
    given = parser.parse_args(arguments)
    try:
        tracker = address_of(given.tracker, "--tracker")
        port_end = _port_end(given.port, given.port_end)
    except InputError as error:
        parser.error(str(error))
    if given.gpu is not None:
        os.environ["CUDA_VISIBLE_DEVICES"] = str(given.gpu)
    try:
        server = rpc.Server(
            given.host,
            given.port,
            port_end,
            tracker_addr=tracker,
            key=given.key,
            custom_addr=given.custom_addr,
            server_init_callback=register,
        )
    except (OSError, ValueError) as error:
        why = str(error).strip().splitlines()[-1]  # of the traceback in the server's process
        print(f"the RPC server cannot listen at {given.host}: {why}", file=sys.stderr)
        return 2
    signal.signal(signal.SIGTERM, _leave)
    try:
        return _watch(server, tracker, given)
    except KeyboardInterrupt:
        return 0
    finally:
        server.terminate()


def _port_end(port: int, end: int | None) -> int:
    """The port after the last to try.

    Raises
    ------
    InputError
        There is none to try.
    """
    if not 0 < port < MOST_PORTS:
        raise InputError(f"--port: {port} is no port")
    if end is None:
        return min(port + PORTS, MOST_PORTS)
    if not port < end <= MOST_PORTS:
        raise InputError(
            f"--port-end: {end} is the port after the last to try: give {port + 1} "
            f"for --port {port} alone, and {MOST_PORTS} at most"
        )
    return end


def _watch(server: Any, tracker: tuple[str, int], given: argparse.Namespace) -> int:
    """Waits until the server ends, which it does not by itself; says when it is registered."""
    said = False
    while server.proc.is_alive():
        if not said and (address := _registered(server.port, tracker, given)):
            device = present_gpu()[0] or "CPU"
            print(f"{address} is registered as {given.key!r} with {given.tracker}: {device}")
            sys.stdout.flush()
            said = True
        server.proc.join(POLL_S)
    return 1


def _registered(port: int, tracker: tuple[str, int], given: argparse.Namespace) -> str | None:
    """HOST:PORT of the server, if the tracker knows it."""
    try:
        with Tracker(*tracker) as known:
            own = (given.key, given.custom_addr or known.own_host, port)
            return f"{own[1]}:{port}" if own in known.servers() else None
    except (OSError, RuntimeError):
        return None


def _leave(*_: object) -> NoReturn:
    sys.exit(0)


if __name__ == "__main__":
    from tvm_fusion.tuning import serve  # the server's process finds `register` by this name

    sys.exit(serve.main())
