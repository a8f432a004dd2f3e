"""Servers that end in the middle of measurements, and what that costs."""

import os
import threading
import time
from dataclasses import replace
from types import SimpleNamespace

import pytest

from tests.support.tune_servers import (
    HOST,
    SERVE,
    await_servers,
    kill_server,
    served_keys,
    servers,
    start_server,
)
from tvm_fusion.errors import TargetError
from tvm_fusion.tuning.measure.processes import BROKEN, Answer, wait_for
from tvm_fusion.tuning.remote import client
from tvm_fusion.tuning.remote.client import Servers
from tvm_fusion.tuning.session.choices import DEFAULT

from ..support.tune_sessions import SETTINGS, make_session
from ..support.tune_sticky import BreakingMeter
from .test_rpc import KEY, address_of, assert_all_measured, assert_measured, links, request_of, run  # noqa: F401

pytestmark = pytest.mark.usefixtures("no_torch_in_module")


@pytest.fixture
def impatient(monkeypatch):
    """Sessions have waited for most of the time that they wait for a server."""
    late_s = client.GONE_S - 3.0
    clock = SimpleNamespace(monotonic=lambda: time.monotonic() - late_s)
    monkeypatch.setattr(client, "time", clock)


class Fleet:
    """Servers of a tracker, by their addresses."""

    def __init__(self, address, count):
        self.address, (_, self.port) = address, address_of(address)
        self.processes = [start_server(SERVE, address, "--key", KEY) for _ in range(count)]
        await_servers(self.port, count)

    def of(self, meter):
        """The process of the server that a meter has a session with."""
        port = meter.worker.linked.address.partition(":")[2]
        return next(p for p in self.processes if port in p.args)

    def kill_while(self, meter):
        """Kills the server in the middle of the meter's next measurement, which takes longer."""
        send, fleet = meter.send, self

        def sent(request, limit_s):
            meter.send = send
            threading.Timer(1.0, kill_server, [fleet.of(meter)]).start()
            send(replace(request, repeats=1_000_000), limit_s)

        meter.send = sent


@pytest.fixture
def fleet():
    made = []
    with servers([]) as address:

        def start(count):
            made.append(Fleet(address, count))
            return made[-1]

        yield start
        for process in made[0].processes:
            kill_server(process)


@pytest.mark.long
def test_a_server_that_dies_in_the_middle_costs_no_trial(tested, fleet, caplog):
    choices = (DEFAULT, "plain", "fast", "wrong")
    session, kept, state = make_session(SETTINGS, choices=choices)
    servers = fleet(2)
    session.meters = client.meters_of(servers.address, KEY)
    servers.kill_while(session.meters[0])
    run(session)
    assert_all_measured(kept, state)
    (text,) = [m for m in caplog.messages if "is lost" in m]
    assert text.startswith(f"server {HOST}:")
    assert "its trial is made again" in text
    assert served_keys(servers.port) == [KEY]


@pytest.mark.usefixtures("impatient")
def test_a_session_ends_after_its_last_server(tested, fleet):
    session, kept, _ = make_session(SETTINGS, choices=(DEFAULT, "plain", "fast"))
    servers = fleet(1)
    session.meters = client.meters_of(servers.address, KEY)

    def watch(session):
        if len(kept.found) == 1:
            servers.kill_while(session.meters[0])

    session.watch = watch
    why = (
        f"nothing is left to measure on: the tracker {servers.address} has no server with the key "
        f"'{KEY}' any more: start one; what was measured is kept, and the same command goes on"
    )
    with pytest.raises(TargetError) as raised:
        run(session)
    assert str(raised.value) == why
    assert [(t.text, t.status) for t in kept.found] == [(DEFAULT, "ok")]


def test_a_choice_that_is_lost_with_its_server_twice_is_a_crash(tested, tmp_path):
    meter = BreakingMeter(tmp_path / "count", 1, 3, 4)
    session, kept, state = make_session(choices=(DEFAULT, "plain", "fast"), meter=meter)
    session.run()
    assert [(t.text, t.status) for t in kept.found[:2]] == [
        (DEFAULT, "ok"),
        ("Way(way=fast)", "crash"),
    ]
    assert kept.found[1].why == "2 servers were lost while it ran: it broke off"
    assert state.untuned_us > 0


@pytest.mark.parametrize(
    ("function", "arguments", "status", "is_kept"),
    [
        (Answer, ("crash",), "crash", True),  # of the process that measures at the server
        (Answer, ("timeout",), "timeout", True),
        (int, ("no number",), "error", False),  # of the one here: it left its session
        (os._exit, (1,), BROKEN, False),  # it runs no kernel
    ],
)
def test_only_what_ends_at_a_healthy_server_is_said_of_the_kernel(
    function, arguments, status, is_kept
):
    worker = client.RemoteWorker("a server", torch=False)
    worker.send(function, arguments, 60.0)
    worker.linked = client.Linked("there:1", True, 0.0)
    while (answer := worker.collect()) is None:
        wait_for([worker], 1.0)
    assert (answer.status, worker.linked is not None) == (status, is_kept)
    worker.stop()


def test_a_server_outlives_the_process_of_a_session(tested, fleet, links, tmp_path):  # noqa: F811
    servers = fleet(1)
    request = request_of(tmp_path)
    (meter,) = client.meters_of(servers.address, KEY)
    meter.connect(0)
    while meter.worker.collect() is None:
        wait_for([meter.worker], 1.0)
    meter.send(replace(request, repeats=1_000_000), 3600.0)
    time.sleep(1.0)
    assert meter.worker.collect() is None
    meter.worker.stop()
    there = Servers(*address_of(servers.address), KEY)
    assert_measured(client.measure_remotely(request, 60.0, there))
