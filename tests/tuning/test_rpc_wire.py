"""What servers of this package take, whoever speaks to them, and what a session takes of them."""

import json
import os
import pickle
import re
import socket
import struct
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import asdict
from types import SimpleNamespace

import pytest
from tvm.rpc.base import TrackerCode
from tvm.rpc.tracker import Tracker

from tests.support.tune_servers import free_port, served_keys
from tvm_fusion._version import __version__
from tvm_fusion.config import load_policy
from tvm_fusion.errors import InputError, TargetError
from tvm_fusion.kernels.cpu.contraction.panels import Panels
from tvm_fusion.tuning.measure.building import BuiltChoice, Place
from tvm_fusion.tuning.measure.measuring import Measurement, MeasureRequest
from tvm_fusion.tuning.measure.processes import Answer
from tvm_fusion.tuning.remote import wire
from tvm_fusion.tuning.remote.client import Served
from tvm_fusion.tuning.remote.wire import (
    Channel,
    Hello,
    Measure,
    Measured,
    ProtocolError,
    decoded,
    token_of,
)
from tvm_fusion.tuning.serve import HOST, Server, request_of

TOKEN, MATCH = b"nobody knows this", "tested:tvm_fusion-1"
LARGE = 2**31 - 1
MEASURE = Measure("{}", 1, (), 5, {"kind": "llvm"}, 0, 1.0, ())
POLITE_S = 10.0


class Touching:
    """Leaves a file when it is unpickled."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.mkdir, (str(self.path),)


def frame(text):
    data = text if isinstance(text, bytes) else text.encode()
    return struct.pack("<i", len(data)) + data


def said(kind, **fields):
    return frame(json.dumps({kind.__name__: fields}))


def measure_with(**fields):
    return said(Measure, **asdict(MEASURE) | fields)


@contextmanager
def serving(serve):
    """The port of a listener; `serve` gets it in a thread, for the first that connects."""
    with socket.create_server((HOST, 0)) as listener, ThreadPoolExecutor(1) as pool:
        served = pool.submit(serve, listener)
        yield listener.getsockname()[1]
        served.result(timeout=60)


@contextmanager
def attended(token=TOKEN):
    """A connection with a server that was offered to a session."""

    def serve(listener):
        server = Server(listener, (HOST, 1), "tested", HOST, token)
        server._match = MATCH
        server._attend()

    with serving(serve) as port, Channel(socket.create_connection((HOST, port)), POLITE_S) as there:
        yield there


# ---- before a session is let in


@pytest.mark.parametrize(
    ("token", "given"), [(TOKEN, b"what nobody knows"), (TOKEN, b""), (b"", TOKEN)]
)
def test_another_token_is_refused(caplog, token, given):
    with (
        attended(token) as channel,
        pytest.raises(ProtocolError, match="token is missing or wrong"),
    ):
        wire.enter(channel, given, MATCH)
    assert "token is missing or wrong" in caplog.text


@pytest.mark.parametrize("token", [TOKEN, b""])
def test_the_right_token_is_let_in_and_told_the_version(token):
    with attended(token) as channel:
        assert wire.enter(channel, token, MATCH) == __version__


@pytest.mark.parametrize(
    ("data", "why"),
    [
        (struct.pack("<i", LARGE), f"a message of {LARGE} bytes, of {wire.FIRST_BYTES} at most"),
        (struct.pack("<i", wire.FIRST_BYTES + 1), "a message of 1025 bytes"),
        (struct.pack("<i", -1), "a message of -1 bytes"),
        (b"GET / HTTP/1.1\r\n\r\n", "a message of 542393671 bytes"),
        (frame(b"\xff\x00"), "a message that is no JSON"),
        (frame("[]"), "expected Hello, got '[]'"),
        (said(Measure), "expected Hello, got"),
        (said(Hello, protocol=1), "Hello: expected the fields protocol, nonce, proof"),
        (b"\x01", "the other end closed the connection"),
    ],
)
def test_what_is_no_greeting_is_refused(caplog, data, why):
    with attended() as channel:
        channel.hear(Hello)
        channel.send_bytes(data)
        if why.startswith("the other end"):
            channel.close()
        else:
            with pytest.raises(ProtocolError) as refused:
                channel.hear(Hello)
            assert why in str(refused.value)
    assert why in caplog.text


def test_who_says_nothing_is_sent_away(caplog, monkeypatch):
    monkeypatch.setattr(wire, "ANSWER_S", 0.2)
    with attended() as channel:
        channel.hear(Hello)
        with pytest.raises(ProtocolError):
            channel.hear(Hello)
    assert "time" in caplog.text


def test_who_speaks_slowly_has_no_more_time(caplog, monkeypatch):
    monkeypatch.setattr(wire, "ANSWER_S", 0.3)
    with attended() as channel:
        channel.hear(Hello)
        begun = time.monotonic()
        for byte in frame(" " * 1000):
            with suppress(ConnectionError):
                channel.send_bytes(bytes([byte]))
            if not channel.is_silent:
                break
            time.sleep(0.05)
    assert time.monotonic() - begun < POLITE_S
    assert "the connection ends" in caplog.text


def test_who_comes_too_late_is_sent_away(caplog):
    with attended() as channel, pytest.raises(ConnectionResetError):
        wire.enter(channel, TOKEN, "tested:tvm_fusion-0")
    assert "to another session since" in caplog.text


# ---- of a session


@pytest.mark.parametrize(
    ("data", "why"),
    [
        (struct.pack("<i", LARGE), f"a message of {LARGE} bytes, of {wire.MESSAGE_BYTES} at most"),
        (frame("["), "no JSON"),
        (frame("[" * 100_000), "no JSON"),
        (frame('{"Measure": NaN}'), "Measure: expected the fields"),
        (said(Hello), "expected Measure, got"),
        (measure_with(more=1), "Measure: expected the fields workload, outputs"),
        (measure_with(seed="1"), "Measure.seed: expected <class 'int'>, got '1'"),
        (measure_with(repeats=True), "Measure.repeats"),
        (measure_with(limit_s=float("inf")), "Measure.limit_s"),
        (measure_with(limit_s=10**400), "Measure.limit_s"),
        (measure_with(target="/etc/passwd"), "Measure.target"),
        (measure_with(choices=[{"library": 0}]), "Measure.choices: expected the fields library"),
        (measure_with(libraries=[LARGE]), f"a library of {LARGE} bytes, of {1 << 30} at most"),
        (measure_with(libraries=[-1]), "a library of -1 bytes"),
        *(
            (measure_with(choices=[asdict(wire.Sent(n, "f", 0, ()))], libraries=[1]) + b"x", why)
            for n, why in ((1, "a library beside the 1 that came"), (-1, "a library beside the 1"))
        ),
    ],
)
def test_what_is_no_request_ends_the_session(caplog, data, why):
    with attended() as channel:
        wire.enter(channel, TOKEN, MATCH)
        channel.send_bytes(data)
        with pytest.raises(ProtocolError) as refused:
            channel.hear(Measured)
    assert why in str(refused.value)
    assert why in caplog.text


@pytest.mark.parametrize("framed", [False, True])
def test_a_pickle_is_not_unpickled(tmp_path, caplog, framed):
    pickled = pickle.dumps(Touching(tmp_path / "there"))
    for first in (True, False):
        with attended() as channel:
            if first:
                channel.hear(Hello)
            else:
                wire.enter(channel, TOKEN, MATCH)
            channel.send_bytes(frame(pickled) if framed else pickled)
            with pytest.raises(ProtocolError, match="no JSON" if framed else "a message of"):
                channel.hear(Hello)
    assert not list(tmp_path.iterdir())
    pickle.loads(pickled)
    assert list(tmp_path.iterdir())


def test_an_error_of_the_process_that_measures_is_an_answer():
    with attended() as channel:
        wire.enter(channel, TOKEN, MATCH)
        channel.tell(MEASURE)
        found = channel.hear(Measured)
    assert (found.status, found.measurements) == ("error", ())
    assert found.why


# ---- what goes there and comes back


CHOICE = {"symbol": "f", "kernels": 2, "panels": ((1, Panels((), (0,), (1,), 16, True)),)}
MEASUREMENTS = (
    Measurement((1.0, 2.5), 1e-7, "", "float64"),
    Measurement((), None, "output 0: wrong", "untuned"),
)


def answering(tmp_path, answer, seen=None):
    """A server of this protocol that answers each request with the same bytes."""

    def serve(listener):
        with Channel(listener.accept()[0], POLITE_S) as channel:
            wire.admit(channel, TOKEN, MATCH)
            for _ in range(1 if seen is None else 2):
                message = channel.hear(Measure)
                libraries = [channel.receive_bytes(size) for size in message.libraries]
                if seen is not None:
                    seen.append((message, libraries))
                channel.send_bytes(answer)

    return serving(serve)


def request_in(tmp_path):
    paths = [tmp_path / "a.so", tmp_path / "b.so"]
    for path in paths:
        path.write_bytes(path.name.encode())
    choices = tuple(BuiltChoice(path, **CHOICE) for path in paths)
    return MeasureRequest("{}", 1, choices, 5, Place("llvm", load_policy()), 7)


def test_a_request_arrives_as_it_was_and_libraries_once(tmp_path):
    seen, request = [], request_in(tmp_path)
    answer = said(Measured, **asdict(Measured("ok", MEASUREMENTS, "")))
    with answering(tmp_path, answer, seen) as port:
        served = Served(HOST, port, MATCH, TOKEN)
        answers = [served.measure(request, 3.0) for _ in range(2)]
        served.close()
    assert answers == [Answer("ok", list(MEASUREMENTS))] * 2
    (first, libraries), (second, nothing) = seen
    assert (libraries, nothing) == ([b"a.so", b"b.so"], [])
    assert (first.limit_s, second.choices) == (3.0, first.choices)
    there = request_of(first, [choice.path for choice in request.choices])
    assert there.choices == request.choices
    assert (there.workload, there.outputs, there.repeats, there.seed) == ("{}", 1, 5, 7)
    assert str(there.place.resolved()[0]) == str(request.place.resolved()[0])


@pytest.mark.parametrize(
    ("answer", "why"),
    [
        (struct.pack("<i", LARGE), "a message of"),
        (frame(pickle.dumps(Answer("ok"))), "no JSON"),
        (said(Measured, status="fine", measurements=[], why=""), "Measured.status"),
        (said(Measured, status="ok", measurements=[], why=""), "0 measurements of 2"),
        (
            said(Measured, status="ok", measurements=[asdict(MEASUREMENTS[0]) | {"us": 1}], why=""),
            "Measured.measurements: expected the fields samples_us",
        ),
        (said(wire.Refused, why="not today"), "not today"),
    ],
)
def test_what_is_no_answer_ends_the_session_here(tmp_path, answer, why):
    with answering(tmp_path, answer) as port:
        served = Served(HOST, port, MATCH, TOKEN)
        with pytest.raises(ProtocolError, match=re.escape(why)):
            served.measure(request_in(tmp_path), 1.0)
        served.close()


def test_a_server_that_does_not_know_the_token_is_not_used():
    def serve(listener):
        with Channel(listener.accept()[0], POLITE_S) as channel:
            channel.tell(Hello(wire.PROTOCOL, "0"))
            channel.hear(Hello)
            channel.tell(Hello(wire.PROTOCOL, "0", "1", __version__))

    with serving(serve) as port, pytest.raises(TargetError, match="a token is missing or wrong"):
        Served(HOST, port, MATCH, TOKEN)


def test_a_server_of_another_protocol_is_not_used():
    def serve(listener):
        with Channel(listener.accept()[0], POLITE_S) as channel:
            channel.tell(Hello(0, "0"))

    with (
        serving(serve) as port,
        pytest.raises(TargetError, match="speaks protocol 0"),
    ):
        Served(HOST, port, MATCH, TOKEN)


@pytest.mark.parametrize(
    ("kind", "value"),
    [
        (int, True),
        (int, 1.0),
        (float, "1"),
        (float, float("nan")),
        (str, None),
        (float | None, "1"),
        (tuple[int, ...], [1, "2"]),
        (tuple[int, str], [1]),
        (Hello, []),
    ],
)
def test_what_is_of_another_type_is_refused(kind, value):
    with pytest.raises(ProtocolError, match=r"^it: expected .*, got"):
        decoded(kind, value, "it")


# ---- tokens, and the tracker


def test_a_token_is_in_a_file_or_else_in_the_environment(tmp_path, monkeypatch):
    monkeypatch.delenv(wire.TOKEN_VARIABLE, raising=False)
    assert token_of() == b""
    monkeypatch.setenv(wire.TOKEN_VARIABLE, TOKEN.decode())
    assert token_of() == TOKEN
    file = tmp_path / "token"
    file.write_bytes(b" what nobody knows\n")
    assert token_of(file) == b"what nobody knows"
    monkeypatch.setenv(wire.TOKEN_VARIABLE, "short")
    file.write_bytes(b"\n")
    for where, name in ((None, wire.TOKEN_VARIABLE), (file, "--token-file")):
        with pytest.raises(InputError, match=f"{name}.*: a token has 16 bytes at least"):
            token_of(where)
    with pytest.raises(InputError, match="No such file"):
        token_of(tmp_path / "nothing")


def test_a_server_is_offered_again_when_the_session_that_took_it_does_not_come(monkeypatch):
    pending, clock = [], SimpleNamespace(monotonic=lambda: clock.now, now=100.0)

    def ask(code, *arguments):
        if code == TrackerCode.PUT:
            pending.append(arguments[1][1])
        return pending if code == TrackerCode.GET_PENDING_MATCHKEYS else 0

    monkeypatch.setattr("tvm_fusion.tuning.serve.time", clock)
    listener = SimpleNamespace(getsockname=lambda: (HOST, 9090))
    server = Server(listener, (HOST, 1), "tested", HOST, b"")
    server._tracker = SimpleNamespace(ask=ask)
    for seconds, left in ((0.0, 1), (100.0, 1), (5.0, 0), (2.0, 1), (1.0, 0), (5.0, 0), (2.0, 1)):
        clock.now += seconds
        server._offer()
        assert len(pending) == left, clock.now
        if clock.now in (200.0, 207.0):
            (match,) = pending
            assert match.rpartition(":")[0] == "tested"  # by which the tracker finds its queue
            pending.clear()  # a session took it


@pytest.mark.nightly
def test_a_server_registers_again_when_the_tracker_is_started_again(caplog):
    port = free_port()
    with socket.create_server((HOST, 0)) as listener:
        server = Server(listener, (HOST, port), "tested", HOST, TOKEN)
        for _ in range(2):
            server.step()
            assert "does not answer" in caplog.text
            caplog.clear()
            tracker = Tracker(HOST, port, port + 1, silent=True)
            try:
                server.step()
                assert served_keys(port) == ["tested"]
            finally:
                tracker.terminate()
