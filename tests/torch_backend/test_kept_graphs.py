"""A graph of Dynamo that was traced before is read again: AOTAutograd does not run, and numbers are
right. What decides what it makes of a graph is in the key; what calls would need it for is not
kept.
"""

import errno
import math
import os
import pickle
import sys
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.testing._internal.two_tensor import TwoTensor

import tvm_fusion.torch_backend as torch_backend
from tvm_fusion.flow import plan_cache
from tvm_fusion.torch_backend import graph_calls, kept_graphs
from tvm_fusion.torch_backend.kept_graphs import Place

from ..support.unknown_operators import unknown


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    """A cache of the test's own."""
    monkeypatch.setenv("TVM_FUSION_CACHE", str(tmp_path))
    monkeypatch.setenv(plan_cache.VARIABLE, "1")
    torch._dynamo.reset()
    torch.manual_seed(0)
    with torch.no_grad():
        yield tmp_path / "graphs"


@pytest.fixture
def traces(monkeypatch):
    """The graphs that AOTAutograd traced."""
    found, traced = [], torch_backend.traced
    monkeypatch.setattr(torch_backend, "traced", lambda *a: found.append(a[0]) or traced(*a))
    return found


def in_new_process(model, *inputs, **options):
    """What `torch.compile` gives where nothing is in memory of earlier calls, and its function."""
    torch._dynamo.reset()
    run = torch.compile(model, backend="tvm_fusion", options={"verify": False, **options})
    return run(*inputs), run


class Model(nn.Module):
    """Views, a constant, a buffer, and a weight that is read twice."""

    def __init__(self, seed=0):
        super().__init__()
        torch.manual_seed(seed)
        self.first, self.norm = nn.Linear(8, 24), nn.LayerNorm(8)
        self.register_buffer("scale", torch.rand(1))

    def forward(self, x):
        a, b, c = self.first(self.norm(x)).chunk(3, -1)
        mask = torch.full((x.shape[0], x.shape[0]), -math.inf).triu(1)
        weights = torch.softmax(a @ b.mT * self.scale + mask, -1)
        return {"y": weights @ c, "z": nn.functional.gelu(c).sum(-1)}


X = torch.randn(5, 8)


def test_nothing_is_traced_again(folder, traces):
    for seed in (0, 1):  # with other weights
        model = Model(seed)
        given, _ = in_new_process(model, X)
        torch.testing.assert_close(given, model(X), rtol=1e-5, atol=1e-5)
    assert len(traces) == 1
    assert len(list(folder.iterdir())) == 1


def test_weights_may_change_after_a_warm_start(traces):
    in_new_process(Model(), X)
    model = Model()
    _, run = in_new_process(model, X)
    for _ in range(2):
        for weight in (model.first.weight, model.norm.bias, model.scale):
            weight.add_(0.5)
        torch.testing.assert_close(run(X), model(X), rtol=1e-4, atol=1e-4)
    assert len(traces) == 1


def test_what_runs_in_torch_stays_there_and_is_named(traces):
    def model(x):
        return torch.rand_like((x * 2).exp()).relu() + x.sigmoid() * 3

    for _ in range(2):
        torch.manual_seed(1)
        wanted = model(X)
        torch.manual_seed(1)
        with pytest.warns(UserWarning, match=r"1 of . .*rand_like.*test_kept_graphs.py:\d"):
            given, _ = in_new_process(model, X)
        torch.testing.assert_close(given, wanted)
    assert len(traces) == 1


def test_an_operator_that_is_refused_now_is_taken_out_of_the_parts(traces, monkeypatch):
    model = Model()
    in_new_process(model, X)
    refused_of, refused = graph_calls._refused, [{"gelu": "no more"}]
    monkeypatch.setattr(
        graph_calls, "_refused", lambda *a: refused.pop() if refused else refused_of(*a)
    )
    with pytest.warns(UserWarning, match="gelu.*no more"):
        given, _ = in_new_process(model, X)
    torch.testing.assert_close(given, model(X), rtol=1e-5, atol=1e-5)
    assert len(traces) == 1


def test_an_operator_that_was_refused_is_tried_again(traces, monkeypatch, recwarn):
    model, refused_of, refused = Model(), graph_calls._refused, [{"gelu": "not these values"}]
    with monkeypatch.context() as patched:
        patched.setattr(
            graph_calls, "_refused", lambda *a: refused.pop() if refused else refused_of(*a)
        )
        in_new_process(model, X)
    assert any("not these values" in str(w.message) for w in recwarn.list)
    recwarn.clear()
    given, _ = in_new_process(model, X)
    torch.testing.assert_close(given, model(X), rtol=1e-5, atol=1e-5)
    assert not any("gelu" in str(w.message) for w in recwarn.list)
    assert len(traces) == 1


def test_a_damaged_file_is_traced_again(folder, traces):
    def model(x):
        return x.exp() * 2

    in_new_process(model, X)
    (file,) = folder.iterdir()
    for content in (file.read_bytes()[:-100], pickle.dumps({})):
        file.write_bytes(content)
        given, _ = in_new_process(model, X)
        torch.testing.assert_close(given, model(X))
    assert len(traces) == 3


def places(model, *inputs, **options):
    """Where the graph of a model would lie; None where it is not kept."""
    found = []

    def backend(graph, given):
        found.append(Place.of(graph, given))
        return graph.forward

    torch._dynamo.reset()
    torch.compile(model, backend=backend, **options)(*inputs)
    return [place and place.path for place in found]


def test_all_that_decides_is_in_the_key(monkeypatch):
    def model(x, y=1.0):
        return nn.functional.gelu(x.transpose(0, 1)) * y + torch.ones(())

    def other(x):
        return nn.functional.gelu(x.transpose(0, 1), approximate="tanh") * 1.0 + torch.ones(())

    found = [*places(model, X), *places(other, X)]
    found += places(model, X, 2.0) + places(model, X, 1) + places(model, X, -0.0)
    found += places(model, X[:4]) + places(model, X.double()) + places(model, X.mT.contiguous().mT)
    found += places(model, torch.randn(41)[1:].view(5, 8)) + places(model, nn.Parameter(X))
    with torch.enable_grad():
        found += places(model, X)
    torch.set_default_dtype(torch.float64)
    found += places(model, X)
    torch.set_default_dtype(torch.float32)
    torch.use_deterministic_algorithms(True)
    found += places(model, X)
    torch.use_deterministic_algorithms(False)
    for owner, name in ((torch, "__version__"), (kept_graphs.tvm, "__version__")):
        with monkeypatch.context() as patches:
            patches.setattr(owner, name, "0.0")
            found += places(model, X)
    for name in ("package_state", "_changed_operators"):
        with monkeypatch.context() as patches:
            patches.setattr(kept_graphs, name, lambda: "other")
            found += places(model, X)
    assert None not in found
    assert len(set(found)) == len(found)
    assert places(model, X) == [found[0]]


def test_what_is_written_to_is_written_again(traces):
    class Counter(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("calls", torch.zeros(5, 1))
            self.register_buffer("last", torch.zeros(5, 8))

        def forward(self, x, at):
            self.calls += 1
            self.last.index_copy_(0, at, x[at] * 2)
            return (x * self.calls + self.last).softmax(-1)

    at = torch.tensor([1, 3])
    for _ in range(2):
        ours, theirs = Counter(), Counter()
        _, run = in_new_process(ours, X, at)
        theirs(X, at)
        for _ in range(2):
            last = ours.last
            torch.testing.assert_close(run(X, at), theirs(X, at))
            assert ours.last is last
        torch.testing.assert_close(dict(ours.named_buffers()), dict(theirs.named_buffers()))
    assert len(traces) == 1


def test_what_is_written_to_shares_its_memory_with_no_other_input(folder, traces):
    def model(x, y):
        return (x.add_(1) * y).relu()

    def of_one_memory():
        x = X.clone()
        return x, x.view(8, 5).view(5, 8)

    def apart():
        return X.clone(), X.clone()

    for given, count in ((of_one_memory, 0), (apart, 1), (of_one_memory, 1)):
        result, _ = in_new_process(model, *given())
        torch.testing.assert_close(result, model(*given()))
        assert len(list(folder.glob("*"))) == count
    assert len(traces) == 3


def test_views_of_inputs_are_left_to_aot_autograd(folder, traces):
    for _ in range(2):
        given, _ = in_new_process(lambda x: (x.exp()[0], x.T), X)
        torch.testing.assert_close(given, (X.exp()[0], X.T))
        assert given[1].data_ptr() == X.data_ptr()
    assert len(traces) == 2
    assert not folder.exists()


@pytest.mark.filterwarnings("ignore:dynamo_pgo")
def test_what_the_key_cannot_tell_is_not_looked_up(monkeypatch):
    model = Model()
    assert None not in places(model, X)
    assert places(lambda x: unknown(x) + 1, X) == [None]
    assert Place.of(torch.fx.symbolic_trace(lambda x: x + x), [torch.eye(5).to_sparse()]) is None
    assert places(lambda x: x * 2, TwoTensor(X, X)) == [None]
    with torch._dynamo.config.patch(allow_rnn=True):
        assert places(nn.LSTM(8, 8), X) == [None]
    assert places(model, X, dynamic=True) == [None]
    with torch.autocast("cpu", torch.bfloat16):
        assert places(model, X) == [None]
    with torch.compiler.config.patch(force_disable_caches=True):
        assert places(model, X) == [None]
    monkeypatch.setenv(plan_cache.VARIABLE, "0")
    assert places(model, X) == [None]


def test_the_graphs_used_last_stay(folder, traces, monkeypatch):
    monkeypatch.setattr(kept_graphs, "MOST_GRAPHS", 1)
    for factor in (2.0, 3.0, 2.0):
        in_new_process(lambda x, factor=factor: x.exp() * factor, X)
    assert len(traces) == 3
    assert len(list(folder.iterdir())) == 1


def test_a_cache_that_can_only_be_read_is_read(traces, monkeypatch, caplog):
    def model(x):
        return x.exp() * 5

    in_new_process(model, X)

    def refused(*_, **__):
        raise OSError(errno.EROFS, "Read-only file system")

    monkeypatch.setattr(os, "utime", refused)
    given, _ = in_new_process(model, X)
    torch.testing.assert_close(given, model(X))
    assert len(traces) == 1
    assert not [r for r in caplog.records if r.name.startswith("tvm_fusion")]


def functions_of(call):
    """The code of the functions in Python that a call runs."""
    found = []
    with torch.no_grad():
        before = sys.getprofile()
        sys.setprofile(lambda frame, event, _: event == "call" and found.append(frame.f_code))
        try:
            call()
        finally:
            sys.setprofile(before)
    return found


@pytest.mark.parametrize("is_read", [False, True])
def test_a_call_runs_few_functions_and_none_of_aotautograd(is_read):
    def function(x, y):
        return x + y, x, x * 2

    x, y = torch.randn(5), torch.randn(5)
    for _ in range(1 + is_read):
        given, run = in_new_process(function, x, y)
    assert given[1] is x
    run(x, y)
    ran = functions_of(lambda: run(x, y))
    assert not [code for code in ran if "runtime_wrapper" in code.co_filename]
    home = str(Path(torch_backend.__file__).parents[1]) + os.sep
    ours = [code.co_qualname for code in ran if code.co_filename.startswith(home)]
    assert len(ours) == 4, ours


def test_aotautograd_stays_around_a_graph_that_needs_it():
    def function(x):
        return x[1:], x * 2

    _, run = in_new_process(function, X)
    ran = functions_of(lambda: run(X))
    assert [code for code in ran if "runtime_wrapper" in code.co_filename]
    part, _ = run(X)
    assert part._base is X
