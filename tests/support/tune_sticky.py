"""Meters whose device is lost: to its process with the second measurement, as by a wild access; or
to all, like a server that is gone; or that are lost in the middle, like a server that ends.
"""

import tvm

from tvm_fusion.errors import TargetError
from tvm_fusion.tuning.measure import site
from tvm_fusion.tuning.measure.measuring import LocalMeter, measure
from tvm_fusion.tuning.measure.processes import BROKEN, Answer
from tvm_fusion.tuning.measure.site import ends_with_device
from tvm_fusion.tuning.remote.client import RemoteWorker

_lost = False


class StickyMeter(LocalMeter):
    """Counts its measurements in a file, since the process that measures may be a new one."""

    def __init__(self, counter):
        super().__init__()
        self.counter = counter

    def send(self, request, limit_s):
        self.worker.send(measure_or_lose, (request, self.counter), limit_s)


def measure_or_lose(request, counter):
    with ends_with_device(tvm.target.Target("cuda")):
        return _measure_or_lose(request, counter)


def _measure_or_lose(request, counter):
    global _lost
    with open(counter, "a") as file:
        file.write("x")
        second = file.tell() == 2
    _lost = _lost or second
    site.device_works = lambda: not _lost
    if _lost:
        raise RuntimeError("the device is lost to this process")
    return measure(request)


class GoneMeter(LocalMeter):
    """Its first `times` measurements find no server."""

    def __init__(self, worker, counter, times):
        self.worker, self.counter, self.times = worker, counter, times

    def send(self, request, limit_s):
        self.worker.send(measure_or_miss, (request, self.counter, self.times), limit_s)


def measure_or_miss(request, counter, times):
    with open(counter, "a") as file:
        file.write("x")
        missing = file.tell() <= times
    if missing:
        raise TargetError("no server answers")
    return measure(request)


class BreakingMeter(LocalMeter):
    """Some of its measurements, by number, are lost together with their server."""

    def __init__(self, counter, *lost):
        self.worker, self.counter, self.lost = RemoteWorker("a server", torch=False), counter, lost

    def send(self, request, limit_s):
        self.worker.send(measure_or_break, (request, self.counter, self.lost), limit_s)


def measure_or_break(request, counter, lost):
    with open(counter, "a") as file:
        file.write("x")
        number = file.tell()
    if number in lost:
        return Answer(BROKEN, why="it broke off")
    return Answer("ok", measure(request))
