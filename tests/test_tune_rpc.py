"""Measurements through TVM's RPC tracker, with two servers on this machine."""

import socket
import subprocess
import sys
import time

import pytest
from tvm import rpc

from tvm_fusion.errors import InputError
from tvm_fusion.tuning.choices import DEFAULT
from tvm_fusion.tuning.rpc import meters_of

from .test_tune_session import SETTINGS, make_session, tested  # noqa: F401

KEY = "tested"
SERVERS = 2


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def at(port: int) -> tuple[str, ...]:
    return "--port", str(port), "--port-end", str(port + 1)


def start(module, *arguments):
    command = [sys.executable, "-m", f"tvm.exec.{module}", *arguments]
    quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    return subprocess.Popen(command, start_new_session=True, **quiet)


@pytest.fixture(scope="module")
def tracker():
    """The address of a tracker with two servers."""
    port = free_port()
    address = f"127.0.0.1:{port}"
    processes = [start("rpc_tracker", "--host", "127.0.0.1", *at(port))]
    try:
        wait_until(lambda: servers(port) is not None)
        options = ("--host", "127.0.0.1", "--tracker", address, "--key", KEY)
        for _ in range(SERVERS):
            processes.append(start("rpc_server", *options, *at(free_port())))
        wait_until(lambda: len(servers(port)) == SERVERS)
        yield address
    finally:
        for process in processes:
            process.kill()
            process.wait()


def servers(port):
    try:
        socket.create_connection(("127.0.0.1", port), 1.0).close()
    except OSError:
        return None
    found = rpc.connect_tracker("127.0.0.1", port).summary()["server_info"]
    return [s for s in found if s["key"] == f"server:{KEY}"]


def wait_until(condition, seconds=60.0):
    until = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < until, "the tracker or its servers did not start"
        time.sleep(0.2)


def test_a_session_measures_on_all_servers(tracker, tested):  # noqa: F811
    session, kept, state = make_session(SETTINGS, choices=(DEFAULT, "plain", "fast", "wrong"))
    session.meters = meters_of(tracker, KEY)
    assert len(session.meters) == SERVERS
    session.run()
    assert not [t.why for t in kept.found if t.status == "error"]
    assert {t.text: t.status for t in kept.found} == {
        DEFAULT: "ok",
        "Way(way=plain)": "ok",
        "Way(way=fast)": "ok",
        "Way(way=wrong)": "wrong",
    }
    assert state.untuned_us > 0
    assert not state.needs_final


@pytest.mark.parametrize(
    ("address", "key", "why"),
    [
        ("nowhere", KEY, "expected HOST:PORT"),
        ("127.0.0.1:{closed}", KEY, "no RPC tracker answers"),
        ("{open}", "h200", "no server with the key 'h200'; there is tested"),
    ],
)
def test_a_wrong_address_or_key_is_told(tracker, address, key, why):
    address = address.format(closed=free_port(), open=tracker)
    with pytest.raises(InputError, match=why):
        meters_of(address, key)
