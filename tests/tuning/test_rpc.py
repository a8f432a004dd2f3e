"""Measurements through TVM's RPC tracker, with servers on this machine, and servers that end."""

import os
import socket
import subprocess
import sys
import threading
import time
from dataclasses import replace
from types import SimpleNamespace

import pytest
import tvm

from tests.support.tune_servers import (
    HOST,
    SERVE,
    STOCK,
    await_servers,
    free_port,
    kill_server,
    served_keys,
    servers,
    start_server,
)
from tvm_fusion.config import load_policy
from tvm_fusion.errors import InputError, TargetError
from tvm_fusion.tuning import serve
from tvm_fusion.tuning.measure.building import BuildRequest, Place, build_choice
from tvm_fusion.tuning.measure.measuring import MeasureRequest
from tvm_fusion.tuning.measure.processes import BROKEN, Answer, stop_all
from tvm_fusion.tuning.remote import client
from tvm_fusion.tuning.remote.client import Servers, Stock
from tvm_fusion.tuning.remote.wire import TOKEN_VARIABLE, address_of
from tvm_fusion.tuning.session.choices import DEFAULT

from ..support.tune_sessions import SETTINGS, make_session
from ..support.tune_sticky import BreakingMeter

pytestmark = [pytest.mark.long, pytest.mark.usefixtures("no_torch_in_module")]

KEY, STOCK_KEY, TOKEN = "tested", "stock", b"nobody knows this"
SERVERS = 2


@pytest.fixture(scope="module")
def tracker(no_torch_in_module, tmp_path_factory):
    """The address of a tracker with two servers of this package and one of TVM's own."""
    file = tmp_path_factory.mktemp("token") / "token"
    file.write_bytes(TOKEN + b"\n")
    ours = (SERVE, "--key", KEY, "--token-file", str(file))
    theirs = (STOCK, "--key", STOCK_KEY)
    with servers([ours] * SERVERS + [theirs]) as address:
        yield address


@pytest.fixture
def links(monkeypatch):
    """The sessions of this process, none at first."""
    monkeypatch.setattr(client, "_links", {})
    yield client._links
    for linked in list(client._links):
        client._leave(linked)


def request_of(tmp_path):
    session, _, state = make_session()
    choice = state.choices[0]
    text = tvm.ir.save_json(state.task.workload)
    place = session.place
    built = build_choice(BuildRequest(text, choice.kind, choice.text, place, tmp_path / "0.so"))
    return MeasureRequest(text, state.task.outputs, (built,), 5, place)


def test_a_session_measures_on_all_servers(tracker, tested, monkeypatch):
    monkeypatch.setenv(TOKEN_VARIABLE, TOKEN.decode())
    session, kept, state = make_session(SETTINGS, choices=(DEFAULT, "plain", "fast", "wrong"))
    session.meters = client.meters_of(tracker, KEY)
    assert len(session.meters) == SERVERS
    run(session)
    assert_all_measured(kept, state)


def run(session):
    try:
        session.run()
    finally:
        stop_all([m.worker for m in session.meters])


def assert_all_measured(kept, state):
    assert not [t.why for t in kept.found if t.status in ("error", "crash", "timeout")]
    assert {t.text: t.status for t in kept.found} == {
        DEFAULT: "ok",
        "Way(way=fast)": "ok",
        "Way(way=wrong)": "wrong",
    }
    assert state.untuned_us > 0
    assert not state.needs_final


def test_a_server_says_that_it_is_registered(tracker):
    port = free_port()
    options = ["--tracker", tracker, "--key", "said", "--host", HOST, "--port", str(port)]
    with subprocess.Popen(
        [sys.executable, "-m", SERVE, *options],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
        text=True,
    ) as process:
        try:
            line = process.stdout.readline()
        finally:
            kill_server(process)
    assert line.startswith(f"{HOST}:{port} is registered as 'said' with {tracker}: ")


@pytest.mark.parametrize(
    ("options", "why"),
    [
        (["--tracker", "nowhere"], "--tracker: expected HOST:PORT, got 'nowhere'"),
        (["--port", "0"], "--port: 0 is no port"),
        (["--port", "9410", "--port-end", "9199"], "--port-end: 9199 is the port after the last"),
        (["--port", "9410", "--port-end", "9410"], "give 9411 for --port 9410 alone"),
        (["--host", "0.0.0.0"], "--host: 0.0.0.0 lets others in, and so needs a token"),
        (["--host", "nowhere.invalid"], "'nowhere.invalid' is no address"),
        (["--tracker", "192.0.2.1:9190"], "--host: the tracker would send others to 127.0.0.1"),
        (["--token-file", "/nowhere/token"], "--token-file /nowhere/token: "),
    ],
)
def test_a_server_refuses_what_it_cannot_listen_at(capsys, monkeypatch, options, why):
    monkeypatch.delenv(TOKEN_VARIABLE, raising=False)
    with pytest.raises(SystemExit) as ended:
        serve.main(["--tracker", f"{HOST}:1", "--key", KEY, *options])
    assert ended.value.code == 2
    assert why in capsys.readouterr().err


def test_a_port_that_is_taken_is_one_line(capfd):
    with socket.socket() as taken:
        taken.bind((HOST, 0))
        taken.listen()
        port = taken.getsockname()[1]
        where = ["--host", HOST, "--port", str(port), "--port-end", str(port + 1)]
        assert serve.main(["--tracker", f"{HOST}:1", "--key", KEY, *where]) == 2
    (line,) = capfd.readouterr().err.splitlines()
    assert line.startswith(f"the RPC server cannot listen at {HOST}: ")
    assert f"[{port}, {port + 1})" in line


def test_the_last_port_to_try_follows_the_first():
    assert serve._ports(9410, None) == range(9410, 9410 + serve.PORTS)
    assert serve._ports(65535, None) == range(65535, 65536)
    assert serve._ports(9410, 9411) == range(9410, 9411)


def test_servers_of_tvm_measure_too(tracker, tested, links, tmp_path):
    theirs = Servers(*address_of(tracker, ""), STOCK_KEY)
    answer = client.measure_remotely(request_of(tmp_path), 60.0, theirs)
    assert isinstance(links[theirs][0], Stock)
    assert_measured(answer)


def assert_measured(answer):
    assert answer.status == "ok"
    (found,) = answer.value
    assert not found.why
    assert found.reference == "float64"
    assert len(found.samples_us) == 5
    assert min(found.samples_us) > 0


@pytest.mark.nightly
def test_what_takes_too_long_is_ended_at_the_server(tracker, tested, links, tmp_path):
    request, ours = request_of(tmp_path), Servers(*address_of(tracker, ""), KEY, TOKEN)
    assert_measured(client.measure_remotely(request, 60.0, ours))
    late = client.measure_remotely(request, 0.0, ours)  # its process is there by now
    assert late.status == "timeout"
    link = links[ours][0]
    answer = client.measure_remotely(request, 60.0, ours)
    assert links[ours][0] is link
    assert_measured(answer)


def test_a_session_is_kept_until_it_is_old_or_fails(links, monkeypatch):
    made = []

    class Link:
        lasts_s, is_ours, lives = 3600.0, True, True

        def __init__(self):
            made.append(self)

        def close(self):
            pass

        def measure(self, request, limit_s):
            self.lives = limit_s != BREAKS
            if limit_s < 0:
                raise OSError("gone")
            return Answer("ok", len(made))

    FAILS, BREAKS = -1.0, -2.0
    monkeypatch.setattr(client, "_link", lambda *_: (Link(), "there:1"))
    servers, request = (
        Servers("host", 1, KEY),
        MeasureRequest("", 1, (), 1, Place("llvm", load_policy())),
    )
    assert [client.measure_remotely(request, 1.0, servers).value for _ in range(2)] == [1, 1]
    with pytest.raises(OSError, match="gone"):  # said of the request: the server still answers
        client.measure_remotely(request, FAILS, servers)
    assert client.measure_remotely(request, 1.0, servers).value == 2
    answer = client.measure_remotely(request, BREAKS, servers)
    assert answer == Answer(BROKEN, why="the session with there:1 broke off: gone")
    assert client.measure_remotely(request, 1.0, servers).value == 3
    made[-1].lives = False
    with pytest.raises(TargetError, match="there:1 does not answer any more"):
        client.measure_remotely(request, 1.0, servers)
    assert client.measure_remotely(request, 1.0, servers).value == 4
    Link.lasts_s = 0.0
    assert client.measure_remotely(request, 1.0, servers).value == 5


def test_a_server_of_another_version_is_refused(tracker, tested, links, tmp_path, monkeypatch):
    monkeypatch.setattr(client, "__version__", "0")
    ours = Servers(*address_of(tracker, ""), KEY, TOKEN)
    with pytest.raises(TargetError, match=r"RPC server .*:\d+ has tvm_fusion .*, this is 0"):
        client.measure_remotely(request_of(tmp_path), 60.0, ours)


def test_a_server_refuses_who_does_not_know_its_token(tracker, links):
    ours = Servers(*address_of(tracker, ""), KEY, b"what nobody knows")
    with pytest.raises(TargetError, match=r"RPC server .*: a token is missing or wrong"):
        client.connect(ours, 0, time.monotonic())


def test_a_server_of_tvms_own_is_not_used_where_a_token_is_given(tracker, links):
    """Who reaches the tracker may register one under any key."""
    theirs = Servers(*address_of(tracker, ""), STOCK_KEY, TOKEN)
    with pytest.raises(TargetError, match="does not ask for the token"):
        client.connect(theirs, 0, time.monotonic())


@pytest.mark.parametrize(
    ("address", "key", "why"),
    [
        ("nowhere", KEY, "expected HOST:PORT"),
        ("127.0.0.1:{closed}", KEY, "no RPC tracker answers"),
        ("{open}", "h200", "no server with the key 'h200'; there is stock, tested"),
    ],
)
def test_a_wrong_address_or_key_is_told(tracker, address, key, why):
    address = address.format(closed=free_port(), open=tracker)
    with pytest.raises(InputError, match=why):
        client.meters_of(address, key)


# ---- servers that end in the middle of measurements, and what that costs


@pytest.fixture
def impatient(monkeypatch):
    """Sessions have waited for most of the time that they wait for a server."""
    late_s = client.GONE_S - 3.0
    clock = SimpleNamespace(monotonic=lambda: time.monotonic() - late_s)
    monkeypatch.setattr(client, "time", clock)


class Fleet:
    """Servers of a tracker, by their addresses."""

    def __init__(self, address, count):
        self.address, (_, self.port) = address, address_of(address, "")
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


# Always: a session that broke off, and processes that lost their device (`test_session`).
@pytest.mark.nightly
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


@pytest.mark.nightly
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


@pytest.mark.nightly
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


@pytest.fixture(scope="module")
def passing():
    """A process that passes requests on; one that ended is started again."""
    worker = client.RemoteWorker("a server", torch=False)
    yield worker
    worker.stop()


@pytest.mark.parametrize(
    ("function", "arguments", "status", "is_kept"),
    [
        (Answer, ("crash",), "crash", True),  # of the process that measures at the server
        # Always: the crash above, which ends there, too.
        pytest.param(Answer, ("timeout",), "timeout", True, marks=pytest.mark.nightly),
        (int, ("no number",), "error", False),  # of the one here: it left its session
        (os._exit, (1,), BROKEN, False),  # it runs no kernel
    ],
)
def test_only_what_ends_at_a_healthy_server_is_said_of_the_kernel(
    passing, function, arguments, status, is_kept
):
    passing.send(function, arguments, 60.0)
    passing.linked = client.Linked("there:1", True, 0.0)
    answer = passing.wait()
    assert (answer.status, passing.linked is not None) == (status, is_kept)


@pytest.mark.nightly
def test_a_server_outlives_the_process_of_a_session(tested, fleet, links, tmp_path):
    servers = fleet(1)
    request = request_of(tmp_path)
    (meter,) = client.meters_of(servers.address, KEY)
    meter.connect(0)
    meter.worker.wait()
    meter.send(replace(request, repeats=1_000_000), 3600.0)
    time.sleep(1.0)
    assert meter.worker.collect() is None
    meter.worker.stop()
    there = Servers(*address_of(servers.address, ""), KEY)
    assert_measured(client.measure_remotely(request, 60.0, there))
