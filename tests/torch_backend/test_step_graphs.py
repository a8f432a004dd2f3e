"""Parts and collectives as one CUDA graph, with a stand-in for torch's: what it would repeat is
done again."""

import re
import types
import warnings

import pytest
import torch
from torch import distributed, nn
from torch.distributed import _functional_collectives as functional

import tvm_fusion.torch_backend  # noqa: F401 - makes the backend known
from tvm_fusion.compilation import compiler
from tvm_fusion.runtime.graphs import mode
from tvm_fusion.torch_backend import graph_calls, options, part_calls, step_graphs

from .test_distributed import free_port


class Summed(nn.Module):
    """Two products whose results are summed over all processes, and a counter of calls."""

    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)
        self.register_buffer("cache", torch.zeros(2, 8))

    def forward(self, x, at):
        y = functional.all_reduce(self.up(x).relu(), "sum", "0")
        z = x + functional.all_reduce(self.down(y), "sum", "0")
        self.cache.index_copy_(0, at, z[:1])
        return torch.tanh(z), self.cache.sum()


class Stream:
    def __init__(self):
        self.waited = []

    def wait_stream(self, other):
        self.waited.append(other)


class Device:
    """What torch's GPU is asked."""

    def __init__(self):
        self.graphs, self.replays, self.refuses, self.is_captured = 0, 0, False, False
        self.stream = Stream()

    def recorded(self, call, device):
        if self.refuses:
            raise RuntimeError("operation not permitted when stream is capturing")
        self.graphs += 1
        saved = [b.clone() for b in self.written]
        results = call()
        for buffer, value in zip(self.written, saved, strict=True):
            buffer.copy_(value)  # nothing runs while it is recorded

        def replay():
            self.replays += 1
            for result, again in zip(results, call(), strict=True):
                result.copy_(again)

        return types.SimpleNamespace(replay=replay), results


@pytest.fixture
def device(monkeypatch):
    torch._dynamo.reset()
    made = Device()
    monkeypatch.setattr(step_graphs, "RECORDED", ("cpu",))
    monkeypatch.setattr(step_graphs, "recorded", made.recorded)
    monkeypatch.setattr(step_graphs, "current_stream", lambda _: made.stream)
    monkeypatch.setattr(step_graphs, "synchronize", lambda _: None)
    monkeypatch.setattr(step_graphs, "is_captured", lambda: made.is_captured)
    monkeypatch.setattr(options.BackendOptions, "graphs_on", lambda self, _: self.cuda_graph)
    compile_ = compiler.compile

    def compiled(*given, cuda_graph, **how):
        assert cuda_graph  # plans are made for graphs
        return compile_(*given, **how)

    monkeypatch.setattr(compiler, "compile", compiled)
    return made


@pytest.fixture
def alone():
    """A group of one process."""
    place = f"tcp://127.0.0.1:{free_port()}"
    distributed.init_process_group("gloo", init_method=place, rank=0, world_size=1)
    yield
    distributed.destroy_process_group()


class Run:
    """A model and its twin, called alike."""

    def __init__(self, device, monkeypatch, **given):
        torch.manual_seed(0)
        self.model, self.twin = Summed().eval(), Summed().eval()
        self.twin.load_state_dict(self.model.state_dict())
        device.written = [self.model.cache]
        self.steps = []
        made = graph_calls.StepGraph

        def noted(*arguments):
            self.steps.append(made(*arguments))
            return self.steps[-1]

        monkeypatch.setattr(graph_calls, "StepGraph", noted)
        how = {"verify": False, "cuda_graph": True, **given}
        self.compiled = torch.compile(self.model, backend="tvm_fusion", options=how)

    def check(self, count=1):
        for _ in range(count):
            x, at = torch.randn(3, 8), torch.randint(2, (1,))
            with torch.no_grad():
                given, wanted = self.compiled(x, at), self.twin(x, at)
            torch.testing.assert_close(given, wanted)
            torch.testing.assert_close(self.model.cache, self.twin.cache)
        return given


@pytest.mark.usefixtures("alone")
def test_a_step_is_recorded_in_its_second_call_and_replayed(device, monkeypatch):
    run = Run(device, monkeypatch)
    run.check()
    assert (device.graphs, device.replays) == (0, 0)
    first, _ = run.check()
    kept = first.clone()
    run.check(4)
    assert (device.graphs, device.replays) == (1, 5)
    assert torch.equal(first, kept)  # the caller's own


@pytest.mark.usefixtures("alone")
def test_results_may_lie_where_the_next_call_writes(device, monkeypatch):
    run = Run(device, monkeypatch, cuda_graph={"static_outputs": True})
    run.check()
    first, _ = run.check()
    second, _ = run.check()
    assert first.data_ptr() == second.data_ptr()


@pytest.mark.usefixtures("alone")
def test_it_is_recorded_anew_for_new_weights_and_other_memory(device, monkeypatch):
    run = Run(device, monkeypatch)
    run.check(3)
    for model in (run.model, run.twin):
        with torch.no_grad():
            model.up.weight.mul_(0.5)
    run.check(3)
    assert device.graphs == 2
    for model in (run.model, run.twin):
        model.down.weight = nn.Parameter(torch.randn(8, 16, generator=torch.manual_seed(1)))
    run.check(3)
    assert device.graphs == 3
    run.model.cache.data = run.model.cache.clone()
    run.check(2)
    assert device.graphs == 4


@pytest.mark.usefixtures("alone")
def test_parts_have_graphs_of_their_own_where_torch_cannot_record(device, monkeypatch):
    device.refuses = True
    monkeypatch.setattr(mode, "CAPTURED_TARGETS", ("cuda", "llvm"))
    run = Run(device, monkeypatch)
    run.check(3)
    (step,) = run.steps
    assert "not permitted" in step.refusal
    assert device.replays == 0
    assert all(part.build.run.module.cuda_graph is not None for part in step._parts)


@pytest.mark.usefixtures("alone")
def test_a_caller_who_captures_gets_plain_launches(device, monkeypatch):
    run = Run(device, monkeypatch)
    run.check(2)
    device.is_captured = True
    run.check(2)
    assert device.replays == 1


@pytest.mark.usefixtures("alone")
def test_what_fails_while_it_is_captured_is_the_callers_error(device, monkeypatch):
    run = Run(device, monkeypatch)
    run.check(2)
    part = run.steps[0]._parts[0]
    with monkeypatch.context() as within, torch.no_grad():
        device.is_captured = True
        within.setattr(part_calls, "torch_captures", lambda: True)
        within.setattr(part.build.run, "call_with", lambda _: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            run.compiled(torch.randn(3, 8), torch.tensor([1]))
    device.is_captured = False
    run.check(2)
    assert part.build.run is not None  # not in torch from now on


@pytest.mark.usefixtures("alone")
def test_another_stream_waits_for_the_one_before(device, monkeypatch):
    run = Run(device, monkeypatch)
    run.check(3)
    before, device.stream = device.stream, Stream()
    run.check(2)
    assert before.waited == []
    assert device.stream.waited == [before]


def all_reduced(x):
    return functional.all_reduce(x, "sum", "0")


@pytest.mark.one_in(4)
@pytest.mark.usefixtures("alone", "device")
@pytest.mark.parametrize(
    ("function", "why"),
    [
        (lambda x: all_reduced(x.sin()).cos(), None),
        (lambda x: x.sin() * torch.rand(3, 8), "nothing in it talks to other processes"),
        (lambda x: all_reduced(x.sin()) * torch.rand(3, 8), "aten.rand.* runs in torch"),
        (lambda x: all_reduced(x.sin()).cos().expand(2, 3, 8), "gaps in memory"),
    ],
)
def test_what_may_not_be_repeated_is_not_recorded(monkeypatch, function, why):
    told, kept = [], graph_calls.why_not
    monkeypatch.setattr(graph_calls, "why_not", lambda *given: told.append(kept(*given)))
    options = {"verify": False, "cuda_graph": True}
    run = torch.compile(function, backend="tvm_fusion", options=options)
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        run(torch.randn(3, 8))
    (found,) = told
    assert found is None if why is None else re.search(why, found)
