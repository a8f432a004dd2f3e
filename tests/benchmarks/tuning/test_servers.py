"""The benchmark of tuning through several servers: its model, and what it says of a session."""

import pytest
import torch
from torch import nn

from tvm_fusion.errors import InputError
from tvm_fusion.tuning.measure.processes import Answer

from .servers import Busy, Clock, Together, figures, line, model_of, speed_ups


class Answers:
    """A worker that has answered after some seconds, each time it is asked."""

    def __init__(self, *seconds):
        self.left = [Answer("ok", seconds=s) for s in seconds]

    def collect(self):
        return self.left.pop(0) if self.left else None


def busy_of(workers, *spans):
    busy = Busy(workers)
    busy.spans.extend(spans)
    return busy


def test_modules_together_return_what_each_returns():
    both = Together([nn.Bilinear(2, 3, 4), nn.Identity()], [2, 1])
    x, y, z = torch.ones(5, 2), torch.ones(5, 3), torch.ones(7)
    first, second = both(x, y, z)
    assert torch.equal(first, both.parts[0](x, y))
    assert torch.equal(second, z)


def test_the_model_holds_all_workloads():
    module, inputs = model_of(("softmax", "bias_gelu"), 0.02)
    softmax, bias_gelu = module(*inputs)
    assert len(inputs) == 3
    assert torch.equal(softmax, torch.softmax(inputs[0], -1))
    assert bias_gelu.shape == inputs[1].shape


def test_what_workers_answer_is_when_they_were_busy(monkeypatch):
    monkeypatch.setattr("time.monotonic", lambda: 10.0)
    worker = Answers(4.0)
    busy = Busy([worker])
    assert worker.collect().seconds == 4.0
    assert worker.collect() is None
    assert busy.spans == [(6.0, 10.0)]
    assert busy.seconds(7.0, 9.0) == 2.0
    assert busy.share(2.0, 10.0) == 0.5


def test_figures_are_of_the_time_from_the_first_to_the_last_trial():
    clock = Clock(0.0, [10.0, 15.0, 20.0, 99.0])
    building = busy_of([Answers()] * 2, (0.0, 15.0), (12.0, 17.0))
    measuring = busy_of([Answers()], (5.0, 10.0), (10.0, 15.0), (16.0, 20.0))
    found = figures(clock, 3, building, measuring)
    assert found["first_to_last_s"] == 10.0
    assert found["session_to_last_s"] == 20.0
    assert found["trials_per_s"] == 0.2
    assert (found["builders"], found["building_s"], found["building_share"]) == (2, 10.0, 0.5)
    assert (found["measuring_s"], found["measuring_share"]) == (9.0, 0.9)
    run = {"servers": 1, "tasks": 2, "failed": 1} | found
    assert line(run).startswith("1 servers, 2 builders: 3 trials (1 failed) of 2 kernels in 10.0 s")
    assert speed_ups([run, run | {"servers": 2, "trials_per_s": 0.3}]) == {"2": 1.5}


def test_a_single_trial_has_no_rate():
    busy = busy_of([Answers()])
    with pytest.raises(InputError, match="1 trials tell nothing"):
        figures(Clock(0.0, [1.0]), 1, busy, busy)
