"""Measurements: how long they may take, and who makes them again where meters are lost."""

from types import SimpleNamespace

import pytest

from tvm_fusion.errors import TargetError
from tvm_fusion.tuning.measure import measuring
from tvm_fusion.tuning.measure.measuring import LocalMeter, Measurements
from tvm_fusion.tuning.measure.processes import BROKEN, LOST, PREPARING_S, Answer
from tvm_fusion.tuning.remote.client import RemoteMeter, Servers
from tvm_fusion.tuning.session.settings import load_settings

SHOP = SimpleNamespace(text=lambda state: state.task.key, place=None)
OK = Answer("ok", "measured", seconds=1.0)


class Scripted:
    """A meter and its worker: the next answers are given, to connecting first."""

    def __init__(self, name, *answers, is_ready=True):
        self.worker, self.name, self.answers = self, name, list(answers)
        self.is_ready, self.busy, self.held, self.requests = is_ready, False, None, 0
        self.limit_s = 0.0

    def connect(self, held):
        self.busy, self.held = True, held

    def send(self, request, limit_s):
        assert self.is_ready
        self.busy, self.requests, self.limit_s = True, self.requests + 1, limit_s

    def collect(self):
        if not self.answers:
            return None
        self.busy = False
        if not self.is_ready:
            self.is_ready = self.answers[0].status == "ok"
        return self.answers.pop(0)

    def stop(self):
        self.busy = False


class Server(Scripted):
    """What is stopped has to connect."""

    def stop(self):
        super().stop()
        self.is_ready = False


def job_of(text):
    state = SimpleNamespace(task=SimpleNamespace(key="task", name="task", outputs=1))
    return SimpleNamespace(state=state, choice=SimpleNamespace(text=text))


def begun(meters, *texts):
    """Measurements that are under way on the first meters."""
    measurements = Measurements(meters, SHOP, load_settings())
    for text in texts:
        measurements.begin(measurements.free[0], [], [job_of(text)], 9)
    return measurements


def collected(measurements):
    return [(jobs[0].choice.text, answer.status) for jobs, answer in measurements.collect()]


def test_a_final_has_more_time_than_a_trial_by_its_samples():
    settings = load_settings({"run_timeout_s": 10, "repeats": 5})
    for choices, repeats, limit_s in ((1, 5, 10.0), (2, 5, 10.0), (4, 50, 200.0)):
        meter = Scripted("meter")
        measurements = Measurements([meter], SHOP, settings)
        measurements.begin(meter, [None] * choices, [job_of("a")], repeats)
        assert meter.limit_s == limit_s


def test_inputs_and_reference_take_none_of_a_trials_time(monkeypatch):
    sent = []
    meter = LocalMeter()
    monkeypatch.setattr(meter.worker, "send", lambda *a, **named: sent.append((a, named)))
    meter.send("request", 5.0)
    before = (measuring.prepare_here, ("request",))
    assert sent == [((measuring.measure_here, ("request",), 5.0), {"before": before})]


def test_a_server_has_time_for_inputs_and_reference(monkeypatch):
    sent = []
    meter = RemoteMeter("a server", Servers("host", 1, "key"))
    monkeypatch.setattr(meter.worker, "send", lambda *arguments: sent.append(arguments))
    meter.send("request", 5.0)
    ((_, (_, limit_s, *_), most_s),) = sent
    assert limit_s == 5.0
    assert most_s > limit_s + PREPARING_S


@pytest.mark.parametrize("status", [LOST, BROKEN])
def test_what_is_lost_goes_to_a_meter_that_is_free(status):
    first, second = Server("first", Answer(status)), Server("second")
    measurements = begun([first, second], "a")
    assert collected(measurements) == []
    assert (second.busy, second.requests, first.busy) == (True, 1, False)
    second.answers.append(OK)
    assert collected(measurements) == [("a", "ok")]
    assert measurements.busy == []


@pytest.mark.parametrize("status", ["error", "crash", "timeout", "memory"])
def test_what_ends_a_measurement_alone_costs_no_server(status):
    server = Server("server", Answer(status), OK)
    measurements = begun([server], "a")
    assert collected(measurements) == [("a", status)]
    measurements.begin(server, [], [job_of("b")], 9)
    assert collected(measurements) == [("b", "ok")]
    assert server.requests == 2


def test_what_is_lost_comes_before_what_waits_and_connects_where_nothing_is_free():
    first, second = Server("first", Answer(BROKEN)), Server("second")
    measurements = begun([first, second], "a", "b")
    assert collected(measurements) == []
    assert first.busy
    assert first.held == 1  # the second one has a server
    assert measurements.busy == [second, first]
    second.answers += [OK, OK]
    assert collected(measurements) == [("b", "ok")]
    assert collected(measurements) == [("a", "ok")]
    assert measurements.busy == []  # the first one still connects, for nothing that waits


def test_what_is_lost_with_two_servers_is_a_crash():
    meters = [Server("first", Answer(BROKEN)), Server("second", Answer(BROKEN, why="gone"))]
    measurements = begun(meters, "a")
    assert collected(measurements) == []
    ((jobs, answer),) = measurements.collect()
    assert (jobs[0].choice.text, answer.status) == ("a", "crash")
    assert answer.why == "2 servers were lost while it ran: gone"
    assert measurements.meters == meters


def test_a_meter_that_cannot_connect_is_given_up(caplog):
    first, second = Server("first", is_ready=False), Server("second")
    measurements = begun([second, first], "a", "b")
    assert first.busy
    first.answers.append(Answer(LOST, why="no server is free"))
    assert collected(measurements) == []
    assert measurements.meters == [second]
    assert caplog.messages == ["first is given up: no server is free"]
    second.answers += [OK, OK]
    assert collected(measurements) + collected(measurements) == [("a", "ok"), ("b", "ok")]


def test_a_meter_that_refuses_three_times_is_given_up():
    measurements = begun([Scripted("first", *[Answer(LOST, why="no device")] * 3)], "a")
    assert collected(measurements) == []
    assert collected(measurements) == []
    with pytest.raises(TargetError, match=r"measure on: no device; what was measured is kept"):
        collected(measurements)


def test_what_waits_is_dropped_at_the_end():
    first = Server("first", is_ready=False)
    measurements = begun([first], "a")
    assert measurements.busy == [first]
    (job,) = measurements.drop()
    assert job.choice.text == "a"
    assert measurements.busy == []  # who connects holds up no end
    measurements.stop()
    assert measurements.busy == []
    assert not first.busy
