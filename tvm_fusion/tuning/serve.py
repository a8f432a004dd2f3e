"""A TVM RPC server that measures by itself: `python -m tvm_fusion.tuning.serve`.

    python -m tvm_fusion.tuning.serve --tracker HOST:9190 --key h200 --gpu 0

It is TVM's own server with two functions more, which a session finds by their names (`rpc`). Inputs
and outputs stay on its device, numbers are compared there, and times are those of a session on one
machine. Kernels run in a process of its own: one that hangs or crashes ends that process only.
"""

from __future__ import annotations

import argparse
import os
import pickle
import signal
import sys
from collections.abc import Sequence
from functools import cache
from typing import NoReturn

import tvm_ffi

from .._version import __version__
from .meters import LocalMeter
from .processes import wait_for
from .worker import end_with

VERSION = "tvm_fusion.version"
MEASURE = "tvm_fusion.measure"
POLL_S = 1.0


def register() -> None:
    """Makes the functions known to the sessions of this process, which ends with its parent."""
    end_with(os.getppid())
    tvm_ffi.register_global_func(VERSION, lambda: __version__, override=True)
    tvm_ffi.register_global_func(MEASURE, measured, override=True)


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
    parser.add_argument("--port-end", type=int, default=9199, help="the port after the last")
    parser.add_argument("--custom-addr", metavar="HOST", help="the address to tell the tracker")
    given = parser.parse_args(arguments)
    host, separator, port = given.tracker.rpartition(":")
    if not separator or not port.isdecimal():
        parser.error(f"--tracker: expected HOST:PORT, got {given.tracker!r}")
    if given.gpu is not None:
        os.environ["CUDA_VISIBLE_DEVICES"] = str(given.gpu)
    from tvm import rpc

    signal.signal(signal.SIGTERM, _leave)
    server = rpc.Server(
        given.host,
        given.port,
        given.port_end,
        tracker_addr=(host, int(port)),
        key=given.key,
        custom_addr=given.custom_addr,
        server_init_callback=register,
    )
    try:
        server.proc.join()
    except KeyboardInterrupt:
        pass
    finally:
        server.terminate()
    return 0


def _leave(*_: object) -> NoReturn:
    sys.exit(0)


if __name__ == "__main__":
    from tvm_fusion.tuning import serve  # the server's process finds `register` by this name

    sys.exit(serve.main())
