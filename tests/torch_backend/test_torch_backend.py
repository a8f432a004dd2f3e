"""torch.compile(backend="tvm_fusion") on the CPU: numbers against eager mode, shapes, weights,
breaks, and what falls back.
"""

import importlib.metadata
import json
import logging
import warnings
from concurrent.futures import ThreadPoolExecutor
from threading import Event

import pytest
import torch
from torch import nn
from torch._export import utils as export_utils
from torch._logging._internal import LazyTraceHandler, TorchLogsFormatter
from torch.utils._python_dispatch import TorchDispatchMode

import tvm_fusion.torch_backend as torch_backend
from tvm_fusion.errors import BuildError, ConfigError, FrontendError
from tvm_fusion.flow import plan_cache
from tvm_fusion.torch_backend import aten_graphs, graph_calls
from tvm_fusion.torch_backend import part_calls as calls

from ..support.fake_cuda_graph import capture_on_cpu
from ..support.models import tiny_bert, tiny_llama
from ..support.unknown_operators import other_unknown, unknown

pytestmark = pytest.mark.usefixtures("fresh_dynamo")

OPTIONS = {"verify": False}


@pytest.fixture
def drivers(monkeypatch):
    """What "captures" the calls of compiled modules, in the order in which these were made."""
    import tvm_fusion.compilation.compiler as compiler

    compile_, made = compiler.compile, []

    def captured(*args, **options):
        module = compile_(*args, **options)
        made.append(capture_on_cpu(monkeypatch, module))
        return module

    monkeypatch.setattr(compiler, "compile", captured)
    return made


def compiled(model, **options):
    return torch.compile(model, backend="tvm_fusion", options=OPTIONS | options)


def check(run, model, *inputs, rtol=1e-5):
    """Same structure and numbers as in eager mode, and no warning."""
    wanted = model(*inputs)
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        given = run(*inputs)
    torch.testing.assert_close(given, wanted, rtol=rtol, atol=rtol)


def mlp():
    return nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.LayerNorm(16), nn.Linear(16, 5)).eval()


class Attention(nn.Module):
    """Attention with a mask and a buffer."""

    def __init__(self):
        super().__init__()
        self.qkv = nn.Linear(16, 48)
        self.register_buffer("scale", torch.tensor(0.25))

    def forward(self, x, mask):
        q, k, v = self.qkv(x).unflatten(-1, (3, 2, 8)).permute(2, 0, 3, 1, 4)
        scores = (q @ k.transpose(-1, -2)) * self.scale
        weights = scores.masked_fill(~mask[:, None, None], -1e9).softmax(-1)
        return {"out": (weights @ v).transpose(1, 2).flatten(2), "weights": weights}


def test_an_mlp_gives_the_numbers_of_eager_mode(modules):
    model = mlp()
    run = compiled(model)
    for _ in range(3):
        check(run, model, torch.randn(3, 8))
    assert len(modules) == 1
    assert modules[0].target.kind.name == "llvm"
    assert modules[0].report.launches.fused < modules[0].report.launches.unfused


def test_structures_masks_and_buffers_go_through(modules):
    model = Attention().eval()
    check(compiled(model), model, torch.randn(2, 5, 16), torch.rand(2, 5) > 0.3)
    assert len(modules) == 1


# Always: attention with a mask, above, and layers of transformers (`test_layers`).
@pytest.mark.nightly
@pytest.mark.one_in(3)
@pytest.mark.parametrize("make", [tiny_llama, tiny_bert])
def test_models_of_transformers_give_the_numbers_of_eager_mode(make, modules):
    case = make(sequence=16)
    result = compiled(case.model)(*case.inputs)
    given = [result.logits] if make is tiny_llama else result.to_tuple()[:2]
    for got, wanted in zip(given, case.expected, strict=True):
        torch.testing.assert_close(got, torch.from_numpy(wanted), rtol=1e-4, atol=1e-4)
    assert modules


def test_a_batch_that_changes_becomes_symbolic_and_is_compiled_once_more(modules):
    model = mlp()
    run = compiled(model)
    for n in (3, 5, 7, 13, 64):
        check(run, model, torch.randn(n, 8))
    assert len(modules) == 2  # for 3, and for all others
    first, second = (module.signature.inputs[0].shape[0] for module in modules)
    assert first == 3
    assert isinstance(second, str)


def test_dynamic_from_the_first_call_is_one_module(modules):
    def function(x, y):
        return torch.cat([x, y]).softmax(-1), x.shape[0] + 1

    run = torch.compile(function, backend="tvm_fusion", options=OPTIONS, dynamic=True)
    for n, m in ((3, 4), (6, 5), (9, 2)):
        check(run, function, torch.randn(n, 8), torch.randn(m, 8))
    assert len(modules) == 1


def test_floats_that_dynamo_wraps_in_tensors_are_numbers_again(modules):
    model = mlp()  # with the epsilon of its norm
    run = torch.compile(model, backend="tvm_fusion", options=OPTIONS, dynamic=True)
    for n in (3, 6):
        check(run, model, torch.randn(n, 8))
    assert len(modules) == 1


def test_shapes_that_cannot_stay_symbolic_are_compiled_one_by_one(modules, monkeypatch):
    real = calls.ready

    def static_only(part, weights, inputs, *others):
        if inputs is None:
            raise ValueError("no symbols")
        return real(part, weights, inputs, *others)

    monkeypatch.setattr(calls, "ready", static_only)
    model = mlp()
    run = torch.compile(model, backend="tvm_fusion", options=OPTIONS, dynamic=True)
    for n in (3, 5, 3):
        check(run, model, torch.randn(n, 8))
    assert len(modules) == 2


def test_a_number_that_is_no_size_is_compiled_for_each_value(modules):
    def function(x, k):
        return x.softmax(-1) * k

    run = compiled(function)
    for k in (2, 3, 4, 3):
        check(run, function, torch.randn(4, 8), k)


def test_a_graph_break_makes_two_graphs(modules):
    model = mlp()

    def function(x):
        y = model(x).relu()
        torch._dynamo.graph_break()
        return y.softmax(-1) + 1

    check(compiled(function), function, torch.randn(3, 8))
    assert len(modules) == 2


def test_outputs_that_are_views_of_inputs_stay_views(modules):
    def function(x, y):
        return x.t(), (x + y).relu(), x, None, 3

    x, y = torch.randn(3, 4), torch.randn(3, 4)
    run = compiled(function)
    check(run, function, x, y)
    outputs = run(x, y)
    assert outputs[0].data_ptr() == x.data_ptr()
    assert outputs[2] is x
    assert outputs[3:] == (None, 3)
    assert len(modules) == 1


def test_results_that_are_views_of_one_tensor_share_its_memory(modules):
    def function(x):
        y = x.exp()
        return y[0], y.t(), y[1], y.view(-1)[1:3]

    x = torch.randn(2, 3)
    given, wanted = compiled(function)(x), function(x)
    for results in (given, wanted):
        results[0].zero_()
        results[2].add_(1)
    torch.testing.assert_close(given, wanted)
    assert len(modules) == 1


def test_tensors_that_are_neither_on_a_cpu_nor_on_a_gpu_are_left_to_torch(modules):
    with pytest.warns(UserWarning, match="has a tensor on meta: it runs in eager mode"):
        result = compiled(lambda x: (x * 2).sum(0))(torch.empty(3, 4, device="meta"))
    assert (result.device.type, result.shape) == ("meta", (4,))
    assert not modules


def test_weights_that_are_written_to_are_seen(modules):
    model = mlp()
    run = compiled(model)
    x = torch.randn(3, 8)
    check(run, model, x)
    for _ in range(4):
        model[0].weight.mul_(0.5)
        model.load_state_dict({k: v + 0.1 for k, v in model.state_dict().items()})
        check(run, model, x)
    assert len(modules) == 3  # constants twice, then inputs


def test_weights_whose_memory_is_exchanged_are_seen(modules):
    model, x = mlp(), torch.randn(3, 8)
    run = compiled(model)
    for _ in range(2):
        check(run, model, x)
        model[0].weight.data = torch.randn(16, 8)
    check(run, model, x)
    model.half().float()  # rounds, in memory of its own
    check(run, model, x)
    with torch.inference_mode():
        model = mlp()
        run = compiled(model)
        check(run, model, x)
        model[3].bias.data = torch.randn(5)
        check(run, model, x)


def test_frozen_weights_are_not_looked_at(modules):
    model = mlp()
    run = compiled(model, frozen=True)
    x = torch.randn(3, 8)
    before = run(x)
    model[0].weight.mul_(0.5)
    assert torch.equal(run(x), before)
    assert len(modules) == 1


def test_models_that_share_their_code_have_weights_of_their_own(modules):
    class Layer(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(8, 8)

        def forward(self, x):
            return self.linear(x).relu()

    layers = [Layer().eval() for _ in range(3)]
    runs = [compiled(layer) for layer in layers]
    for _ in range(2):
        x = torch.randn(2, 8)
        for run, layer in zip(runs, layers, strict=True):
            check(run, layer, x)
    assert len(modules) == 3


def test_inference_mode_works_too(modules):
    with torch.inference_mode():
        model = mlp()
        run = compiled(model)
        for _ in range(2):
            check(run, model, torch.randn(3, 8))
    assert len(modules) == 1


def test_gradients_fall_back_to_eager_mode_with_a_warning(modules):
    model = mlp()
    x = torch.randn(3, 8)
    with torch.enable_grad(), pytest.warns(UserWarning, match="requires a gradient"):
        compiled(model)(x).sum().backward()
    assert model[0].weight.grad is not None
    assert not modules


@pytest.mark.parametrize(
    ("function", "message", "parts"),
    [
        (
            lambda x: unknown(x) + other_unknown(x).sum(),
            "(?s)2 of 4 .*unknown.*other_unknown",
            1,
        ),
        (lambda x: nn.functional.dropout(x, 0.5, training=True), "random", 0),
        (lambda x: unknown((x * 2).relu()).exp() + 1, "1 of 5 .*unknown", 2),
        (lambda x: torch.rand_like(x.exp()) - torch.randn_like(x.exp() + 1), "2 of 6", 2),
    ],
    ids=["unknown", "random", "between", "in order"],
)
def test_what_cannot_be_compiled_runs_in_torch_between_parts_and_is_named(
    function, message, parts, modules
):
    x = torch.randn(4, 4)
    run = compiled(function)
    torch.manual_seed(1)
    with pytest.warns(UserWarning, match=message) as told:
        given = run(x)
    assert len(told) == 1
    torch.manual_seed(1)
    torch.testing.assert_close(given, function(x))
    assert len(modules) == parts


@pytest.mark.one_in(4)
@pytest.mark.parametrize(
    "function",
    [
        lambda x: x.add_(1).relu(),
        lambda x: (x.add_(1), x.relu())[1],
        lambda x: (x.view(-1).mul_(2), x.t(), x.relu())[1:],
        lambda x: (x[0].copy_(x[1] + 1), x + x.mul_(3).sum(), x[2])[1:],
    ],
    ids=["returned", "unused", "a view", "twice"],
)
def test_writes_into_inputs_are_compiled(function, modules):
    x = torch.randn(4, 4)
    run, twin = compiled(function), x.clone()
    for _ in range(2):
        torch.testing.assert_close(run(x), function(twin))
        torch.testing.assert_close(x, twin)
    assert len(modules) == 1


def attend(cache, position, value, query):
    """A step of decoding: the cache is written to and read."""
    cache.index_copy_(1, position, value)
    return (query @ cache.transpose(1, 2)).softmax(-1) @ cache


def attend_to_old(cache, position, value, query):
    old = query @ cache.transpose(1, 2)
    cache.index_copy_(1, position, value)
    return old @ cache, cache.sum()


def step_inputs(position):
    cache = torch.randn(2, 6, 16)
    return cache, torch.tensor([position]), torch.randn(2, 1, 16), torch.randn(2, 1, 16)


@pytest.mark.one_in(4)
@pytest.mark.parametrize(
    ("function", "view", "writes"),
    [
        (attend, lambda cache: cache, 1),
        (attend, lambda cache: torch.stack([cache, cache], -1)[..., 1], 1),
        (attend, lambda cache: cache.transpose(1, 2).contiguous().transpose(1, 2), 1),
        (attend_to_old, lambda cache: cache, 0),
    ],
    ids=["contiguous", "with gaps", "permuted", "old one is read"],
)
def test_caches_are_written_in_place_where_nothing_reads_the_old_one(
    function, view, writes, modules
):
    run = compiled(function, verify=True)
    for position in (2, 5):
        cache, *others = step_inputs(position)
        cache, twin = view(cache), cache.clone()
        version = cache._version
        torch.testing.assert_close(run(cache, *others), function(twin, *others))
        torch.testing.assert_close(cache, twin)
        assert cache._version > version  # graphs that have it for a constant look at this
    assert [len(module.writes) for module in modules] == [writes]


def remember(keys, values, position, key, value):
    keys.index_copy_(1, position, key)
    values.index_copy_(1, position, value)
    return key + value


def test_what_a_part_is_held_against_writes_its_inputs(monkeypatch, modules):
    sources, compile_ = [], calls.compiler.compile

    def noted(*args, source, **how):
        sources.append(source)
        return compile_(*args, source=source, **how)

    monkeypatch.setattr(calls.compiler, "compile", noted)
    cache, position, *others = step_inputs(2)
    compiled(remember, verify=True)(cache, cache.clone(), position, *others)
    ((module, tensors),) = sources
    before, given, twins = ([x.clone() for x in tensors] for _ in range(3))
    for x in (before, given, twins):
        for i in modules[0].writes:
            x[i].zero_()
    modules[0](*given)
    module(*twins)
    changed = [i for i, (x, y) in enumerate(zip(twins, before, strict=True)) if not x.equal(y)]
    assert changed == list(modules[0].writes)
    assert len(changed) == 2
    for x, y in zip(given, twins, strict=True):
        torch.testing.assert_close(x, y, rtol=0, atol=0)


def test_captured_calls_write_a_cache_in_place_step_by_step(drivers):
    run = compiled(attend)
    caches = [torch.zeros(2, 64, 16) for _ in range(2)]
    twins = [cache.clone() for cache in caches]
    for number in range(64):  # two texts in turns, each with a cache of its own
        for cache, twin in zip(caches, twins, strict=True):
            position, *others = torch.tensor([number]), *torch.randn(2, 2, 1, 16).unbind()
            given = run(cache, position, *others)
            torch.testing.assert_close(given, attend(twin, position, *others))
    torch.testing.assert_close(caches, twins)
    (driver,) = drivers
    assert len(driver.said("capture")) == 1
    assert len(driver.said("launch")) == 127


def test_captured_calls_write_counters_whose_old_value_nobody_reads(drivers):
    def step(x, position, set_anew, counted):
        set_anew.copy_(position)
        set_anew.add_(1)
        counted.add_(1)
        return torch.softmax(x, -1) * counted

    run = compiled(step)
    for number in range(4):
        counters = torch.tensor(9), torch.tensor(number)
        twins, versions = [c.clone() for c in counters], [c._version for c in counters]
        given = torch.randn(2, 8), torch.tensor(3 * number)
        with Called() as called:
            result = run(*given, *counters)
        torch.testing.assert_close(result, step(*given, *twins))
        assert list(counters) == twins
        assert all(c._version > v for c, v in zip(counters, versions, strict=True))
    assert [len(driver.said("launch")) for driver in drivers] == [3]
    assert [len(lists[0]) for lists in called.lists("_foreach_copy_.default")] == [1]  # `counted`


class Called(TorchDispatchMode):
    """The operators that torch runs."""

    def __init__(self):
        super().__init__()
        self.names, self.given = [], []

    def lists(self, name):
        """What calls of an operator were given."""
        return [given for known, given in zip(self.names, self.given, strict=True) if known == name]

    @classmethod
    def ignore_compile_internals(cls):
        return True

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.names.append(function.__name__)
        self.given.append(args)
        return function(*args, **(kwargs or {}))


def test_what_is_written_in_place_is_not_returned_though_calls_were_made_ready_before(modules):
    compiled(attend)(*step_inputs(2))
    (module,) = modules
    written, module.unread = module.unread, frozenset()
    specs = module.signature.inputs
    given = [torch.zeros(spec.shape, dtype=getattr(torch, spec.dtype)) for spec in specs]
    for unread in (frozenset(), written):
        module.unread = unread
        results = [module.call_with(given) for _ in range(2)][1]
        assert [i for i, result in enumerate(results) if result is None] == sorted(unread)
    assert written


def test_counters_are_written_in_one_call_and_inputs_may_change_places():
    def function(x, a, b, c, d):
        a.add_(1)
        b.add_(x.sum())
        before = c.clone()
        c.copy_(d)
        d.copy_(before)
        return x * 2 + c

    def inputs():
        return torch.ones(3), torch.tensor(1), torch.tensor(2.0), torch.ones(3), torch.zeros(3)

    run = compiled(function)
    run(*inputs())
    given, twins = inputs(), inputs()
    with Called() as called:
        result = run(*given)
    torch.testing.assert_close(result, function(*twins))
    torch.testing.assert_close(given, twins)
    assert called.names.count("_foreach_copy_.default") == 1
    assert called.names.count("copy_.default") <= 2


def test_what_is_returned_of_a_cache_has_memory_of_its_own(modules):
    def function(cache, position, value):
        cache.index_copy_(1, position, value)
        return cache.clone(), cache.sum()

    cache, *others = step_inputs(3)[:3]
    copied, _ = compiled(function)(cache, *others)
    before = cache.clone()
    assert torch.equal(copied, before)
    copied.add_(1)
    assert torch.equal(cache, before)
    assert len(modules[0].writes) == 1


def test_a_cache_is_written_where_its_part_runs_in_torch(monkeypatch):
    import tvm_fusion.compilation.compiler as compiler

    def broken(*_args, **_options):
        raise BuildError("a kernel is broken")

    monkeypatch.setattr(compiler, "compile", broken)
    cache, *others = step_inputs(1)
    twin = cache.clone()
    with pytest.warns(UserWarning, match="runs in torch: a kernel is broken"):
        torch.testing.assert_close(compiled(attend)(cache, *others), attend(twin, *others))
    torch.testing.assert_close(cache, twin)


def test_results_share_no_memory_and_constants_stay_what_they_are():
    def function(x):
        y = x + 1
        return y, y.clone(), torch.ones(3) * 2

    run, x = compiled(function), torch.zeros(3)
    for _ in range(2):
        given = run(x)
        torch.testing.assert_close(given, function(x))
        for tensor in given:
            tensor.add_(1)
        assert [tensor[0].item() for tensor in given] == [2, 2, 3]


class Recurrent(nn.Module):
    def __init__(self, kind, **options):
        super().__init__()
        self.layer, self.head = kind(4, 6, batch_first=True, **options), nn.Linear(6, 3)

    def forward(self, x):
        y, state = self.layer(x)
        return self.head(y[:, -1]), state


# Always: the same layers in training, below.
@pytest.mark.nightly
@pytest.mark.one_in(2)
@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU])
def test_recurrent_layers_are_compiled_whole_where_dynamo_takes_them(kind, modules):
    model, x = Recurrent(kind).eval(), torch.randn(2, 300, 4)
    with torch._dynamo.config.patch(allow_rnn=True):
        check(compiled(model, strict=True), model, x)
    assert len(modules) == 1


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU])
def test_recurrent_layers_in_training_are_compiled_unless_they_drop_elements(kind, modules):
    x = torch.randn(2, 5, 4)
    with torch.no_grad(), torch._dynamo.config.patch(allow_rnn=True):
        model = Recurrent(kind, num_layers=2).train()
        check(compiled(model, strict=True), model, x)
        assert len(modules) == 1
        with pytest.raises(FrontendError, match="draws random numbers"):
            compiled(Recurrent(kind, num_layers=2, dropout=0.5).train(), strict=True)(x)


def test_recurrent_layers_with_projections_run_in_torch():
    model, x = Recurrent(nn.LSTM, proj_size=3).eval(), torch.randn(2, 3, 4)
    model.head = nn.Linear(3, 3)
    run = compiled(model)
    with torch._dynamo.config.patch(allow_rnn=True):
        with pytest.warns(UserWarning, match=r"aten.lstm.input.*projections"):
            run(x)
        check(run, model, x)


def test_outputs_lie_as_in_eager_mode(modules):
    def function(x):
        y = x.exp()
        return y.t(), y[:, None].expand(3, 5, 4), y[::2, 1:], y.sum(0), x[1:]

    x = torch.randn(3, 4)
    run = compiled(function)
    check(run, function, x)
    assert [t.stride() for t in run(x)] == [t.stride() for t in function(x)]
    assert len(modules) == 1


@pytest.mark.parametrize(
    "function",
    [lambda: torch.arange(4) * 2, lambda: torch.ones(3).cumsum(0) - torch.zeros(2, 1)],
    ids=["integers", "floats"],
)
def test_graphs_without_inputs_give_tensors_of_torch(function):
    run = compiled(function)
    for _ in range(2):
        given = run()
        assert type(given) is torch.Tensor
        torch.testing.assert_close(given, function())
        given.add_(1)  # the caller's own


def test_sizes_that_no_tensor_has_are_given_to_the_parts(modules):
    def function(x, n):
        return x.exp().sum(), torch.arange(n) * x.sum()

    run = torch.compile(function, backend="tvm_fusion", options=OPTIONS, dynamic=True)
    for n in (3, 4, 7):
        check(run, function, torch.randn(n + 5, 32), n)
    assert len(modules) == 1


def test_numbers_of_any_sign_are_compiled_one_by_one_and_no_more_than_a_few(modules, monkeypatch):
    monkeypatch.setattr(calls, "MAX_BUILDS", 2)

    def function(x, k):
        return x.softmax(-1) * k

    run = torch.compile(function, backend="tvm_fusion", options=OPTIONS, dynamic=True)
    x = torch.randn(4, 4)
    for k in (-3, 5, -3):
        check(run, function, x, k)
    with pytest.warns(UserWarning, match="runs in torch: it was compiled for 2 sizes"):
        torch.testing.assert_close(run(x, 7), function(x, 7))
    check(run, function, x, 8)
    assert len(modules) == 2


def test_reports_are_handed_over_and_written(tmp_path):
    told = []

    def function(x):
        return unknown(x.exp() + 1).softmax(-1)

    for report in (told.append, tmp_path / "reports"):
        torch._dynamo.reset()
        run = compiled(function, report=report)
        with pytest.warns(UserWarning, match="unknown"):
            run(torch.randn(3, 4))
        for _ in range(2):
            check(run, function, torch.randn(3, 4))
    assert [one.part for one in told] == [0, 1]
    assert all(one.outside == {"tests.unknown.default": 1} for one in told)
    assert all(one.operators == 4 for one in told)
    assert all(one.outside_us.keys() == one.outside.keys() for one in told)
    assert all(0 < us < 1e6 for one in told for us in one.outside_us.values())
    assert told[0].report.launches.fused == 1
    assert told[0].plan.to_json()
    assert told[0].save(tmp_path / "part.so").exists()
    written = sorted(path.suffix for path in (tmp_path / "reports").iterdir())
    assert written == [".html", ".html", ".json", ".json"]
    for path in (tmp_path / "reports").glob("*.json"):
        assert json.loads(path.read_text())["outside_us"].keys() == told[0].outside.keys()


def test_nothing_is_timed_while_a_stream_is_captured(monkeypatch):
    told = []

    def function(x):
        return unknown(x.exp() + 1)

    run = compiled(function, report=told.append)
    with pytest.warns(UserWarning, match="unknown"):
        run(torch.randn(3, 4))
    with monkeypatch.context() as patch:
        patch.setattr(graph_calls, "_is_captured", lambda: True)
        check(run, function, torch.randn(3, 4))
    assert not told[0].outside_us
    check(run, function, torch.randn(3, 4))
    assert told[0].outside_us


@pytest.fixture
def traces(tmp_path):
    """What torch writes where TORCH_TRACE is set: metadata and payload of artifacts, by name."""
    handler, log = LazyTraceHandler(str(tmp_path)), logging.getLogger("torch.__trace")
    handler.setFormatter(TorchLogsFormatter(trace=True))
    log.addHandler(handler)

    def read():
        (path,) = tmp_path.iterdir()
        found, payload = {}, []
        for line in path.read_text().splitlines():
            if line.startswith("\t"):
                payload.append(line[1:])
                continue
            told, payload = json.loads(line[line.index("] {") + 2 :]), []
            found[told.get("artifact", {}).get("name")] = told, payload
        return {name: (told, "\n".join(lines)) for name, (told, lines) in found.items()}

    yield read
    log.removeHandler(handler)
    handler.close()


def test_traces_hold_parts_reports_plans_and_kernels(traces):
    reports = []
    with pytest.warns(UserWarning, match="unknown"):
        compiled(lambda x: unknown(x.exp()) + 1, report=reports.append)(torch.ones(3))
    graph, found = f"tvm_fusion_graph{reports[0].graph}", traces()
    for report in reports:
        name = f"tvm_fusion_{report.name}"
        assert json.loads(found[f"{name}_report"][1]) == json.loads(json.dumps(report.to_json()))
        assert json.loads(found[f"{name}_plan"][1]) == report.plan.to_json()
        kernels = found[f"{name}_kernels"][1]
        assert all(group.name in kernels for group in report.report.groups)
    assert "part1:" in found[f"{graph}_parts"][1]
    assert "tests.unknown" in found[f"{graph}_parts"][1]
    told = [told for name, (told, _) in found.items() if name and name.startswith(graph)]
    assert len(told) == 7
    assert all(one["frame_id"] is not None for one in told)  # of this compilation of Dynamo


def test_strict_is_an_error_that_names_the_operator(modules):
    def function(x):
        return unknown(x.exp()) + 1

    with pytest.raises(FrontendError, match=r"1 of 3 .*unknown.*no converter.*leave .* strict"):
        compiled(function, strict=True)(torch.randn(3))
    assert not modules


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (BuildError("a kernel is broken"), "a kernel is broken"),
        (BuildError("\n  a kernel is broken"), "a kernel is broken"),
        (MemoryError(), "MemoryError"),
    ],
)
def test_a_part_that_does_not_compile_runs_in_torch(error, said, monkeypatch):
    import tvm_fusion.compilation.compiler as compiler

    def broken(*_args, **_options):
        raise error

    monkeypatch.setattr(compiler, "compile", broken)
    model, x = mlp(), torch.randn(3, 8)
    run = compiled(model)
    with pytest.warns(UserWarning, match=f"part of 4 operators runs in torch: {said}"):
        torch.testing.assert_close(run(x), model(x))
    check(run, model, x)
    torch._dynamo.reset()
    with pytest.raises(type(error)):
        compiled(model, strict=True)(x)


@pytest.mark.parametrize(
    ("where", "name"), [(graph_calls, "partitioned"), (torch_backend, "traced")]
)
def test_an_error_of_ours_leaves_the_graph_to_torch(where, name, monkeypatch):
    def broken(*_args, **_options):
        raise KeyError("of ours")

    monkeypatch.setenv(plan_cache.VARIABLE, "0")
    monkeypatch.setattr(where, name, broken)
    model, x = mlp(), torch.randn(3, 8)
    run = compiled(model)
    with pytest.warns(UserWarning, match="a graph runs in eager mode: KeyError: 'of ours'"):
        torch.testing.assert_close(run(x), model(x))
    check(run, model, x)
    torch._dynamo.reset()
    with pytest.raises(Exception, match="of ours"):
        compiled(model, strict=True)(x)


def test_a_call_that_fails_is_done_in_torch_and_so_are_later_ones(modules, monkeypatch):
    def function(x, cache, at):
        return cache.index_copy_(0, at, x.exp()), x.softmax(-1)

    def broken(*_):
        raise BuildError("no memory")

    run, x, at = compiled(function), torch.randn(2, 4), torch.tensor([3, 1])
    check(run, function, x, torch.zeros(5, 4), at)
    monkeypatch.setattr(modules[0], "short", broken)
    ours, theirs = torch.zeros(5, 4), torch.zeros(5, 4)
    with pytest.warns(UserWarning, match="part of 3 operators runs in torch: no memory"):
        given = run(x, ours, at)
    torch.testing.assert_close(given, function(x, theirs, at))
    torch.testing.assert_close(ours, theirs)
    check(run, function, x, ours, at)
    assert len(modules) == 1


@pytest.mark.parametrize("add", ["index_add_", "index_put_"])
def test_a_call_that_fails_adds_nothing_twice(add, modules, monkeypatch):
    def function(x, sums, at):
        if add == "index_add_":
            sums.index_add_(0, at, x * 2)
        else:
            sums.index_put_((at,), x * 2, accumulate=True)
        return x.softmax(-1)

    run, x, at = compiled(function), torch.randn(2, 4), torch.tensor([3, 1])
    check(run, function, x, torch.zeros(5, 4), at)
    short = modules[0].short

    def broken(given):
        short(given)
        raise BuildError("no memory")

    sums = torch.zeros(5, 4)
    with monkeypatch.context() as patch:
        patch.setattr(modules[0], "short", broken)
        with pytest.raises(BuildError, match="no memory"):
            run(x, sums, at)
    torch.testing.assert_close(sums, torch.zeros(5, 4).index_add_(0, at, x * 2))
    check(run, function, x, sums, at)


def test_an_index_out_of_range_is_the_callers_error(modules):
    model = nn.Embedding(4, 8)
    run = compiled(model)
    check(run, model, torch.tensor([1, 3]))
    with pytest.raises(IndexError):
        run(torch.tensor([1, 9]))
    check(run, model, torch.tensor([0, 2]))
    assert len(modules) == 1


def test_a_report_that_cannot_be_handed_over_costs_no_part(modules, tmp_path):
    def broken(_report):
        raise ValueError("not mine")

    (tmp_path / "file").write_text("")
    for report, why in ((broken, "ValueError: not mine"), (tmp_path / "file" / "x", "Error: ")):
        torch._dynamo.reset()
        model, x = mlp(), torch.randn(3, 8)
        run = compiled(model, report=report)
        with pytest.warns(UserWarning, match=f"option report: graph[0-9]+_part0: .*{why}"):
            torch.testing.assert_close(run(x), model(x))
        check(run, model, x)
    assert len(modules) == 2


def test_two_models_in_two_threads_are_right():
    models = [mlp(), mlp()]
    runs = [compiled(model) for model in models]

    def work(number):
        x = torch.randn(3 + number, 8)
        with torch.no_grad():
            pairs = [(runs[number](x), models[number](x)) for _ in range(3)]
        return all(torch.allclose(a, b, rtol=1e-5, atol=1e-5) for a, b in pairs)

    with ThreadPoolExecutor(2) as pool:
        assert all(pool.map(work, range(2)))


def test_two_threads_leave_the_look_up_of_torch_as_it_was():
    look_up = export_utils._materialize_cpp_cia_ops
    within, leave = Event(), Event()

    def other():
        with aten_graphs._compositions_looked_up_once():
            within.set()
            assert leave.wait(10)

    with ThreadPoolExecutor(1) as pool:
        with aten_graphs._compositions_looked_up_once():
            done = pool.submit(other)
            assert not within.wait(0.1)
        leave.set()
        done.result()
    assert export_utils._materialize_cpp_cia_ops is look_up


@pytest.mark.nightly
@pytest.mark.parametrize("cache", ["static", None])
def test_generated_tokens_are_those_of_eager_mode(cache, modules):
    model = tiny_llama(sequence=7).model
    model.config.use_cache = True
    model.generation_config.update(pad_token_id=0, eos_token_id=None, use_cache=True)
    tokens = torch.randint(1, model.config.vocab_size, (1, 7))
    options = {"max_new_tokens": 64, "do_sample": False, "disable_compile": True}
    options |= {"cache_implementation": cache}
    wanted = model.generate(tokens, **options)
    model.forward = compiled(model.forward)
    assert torch.equal(model.generate(tokens, **options), wanted)
    count = len(modules)
    assert 2 <= count <= (2 if cache else 3)  # a cache that grows may be of a fixed size once
    assert torch.equal(model.generate(tokens, **options), wanted)
    assert len(modules) == count


def loss(weight, x):
    return torch.tanh(nn.functional.linear(x, weight)).square().sum()


@pytest.mark.one_in(3)
@pytest.mark.parametrize(
    "function",
    [
        lambda w, x: torch.func.grad(loss)(w, x),
        lambda w, x: torch.func.jvp(lambda w: nn.functional.linear(x, w).exp(), (w,), (x,))[1],
        lambda w, x: torch.vmap(torch.func.grad(loss), (None, 0))(w, x),
    ],
    ids=["grad", "jvp", "of each sample"],
)
def test_derivatives_that_a_graph_takes_itself_are_right(function, modules):
    weight, x = torch.randn(5, 5), torch.randn(5, 5)
    torch.testing.assert_close(compiled(function)(weight, x), function(weight, x))
    assert len(modules) == 1


@torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True)
def test_numbers_that_depend_on_values_are_no_operators_that_run_in_torch():
    def function(x):
        return (x[x > 0] * 2).sum()

    x = torch.randn(9)
    with pytest.warns(UserWarning, match="of a graph run in torch") as told:
        given = compiled(function)(x)
    torch.testing.assert_close(given, function(x))
    said = str(told[0].message)
    assert "aten.index.Tensor" in said
    assert "<built-in" not in said
    assert "_assert_scalar" not in said


def test_writes_into_intermediates_are_compiled(modules):
    def function(x):
        y = x + 1
        y.mul_(2)
        y[:, 0] = 0
        return y.relu(), x.t()

    check(compiled(function), function, torch.randn(4, 4))
    assert len(modules) == 1


def test_batch_norm_in_training_updates_its_statistics(modules):
    model, twin = nn.BatchNorm1d(4), nn.BatchNorm1d(4)
    x, run = torch.randn(8, 4), compiled(model)
    for _ in range(3):
        check(run, twin, x)
    assert len(modules) == 1
    torch.testing.assert_close(model.running_mean, twin.running_mean)


def test_options_reach_the_compiler(modules):
    model = mlp()
    run = compiled(model, policy={"max_group_ops": 1}, target="llvm", verify=True)
    check(run, model, torch.randn(3, 8))
    assert all(len(group.composites) <= 1 for group in modules[0].report.groups)
    assert modules[0].report.verify.passed


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"polcy": "default"}, "unknown option 'polcy'; there are target, policy"),
        ({"cuda_graph": {"shapes": 3}}, "cuda_graph: unknown option 'shapes'"),
        ({"cuda_graph": True}, "the target is llvm; CUDA graphs need"),
        ({"strict": 1}, "option strict=1 is none of True or False"),
        ({"verify": "all"}, "option verify='all' is none of None, True, False, 'full', 'groups'"),
        ({"report": 3}, "option report=3 is none of a callable, a folder or None"),
        ({"policy": "exat"}, "option policy: unknown policy 'exat'"),
        (
            {"policy": 3},
            "option policy: a policy is a name, a path, a mapping or a Policy, not int",
        ),
        ({"database": "missing"}, "option database='missing' is none of a folder that `tune` made"),
    ],
)
def test_bad_options_are_errors(options, message):
    with pytest.raises(Exception, match=message):
        compiled(mlp(), **options)(torch.randn(3, 8))


def test_the_mode_that_means_cuda_graphs_is_plain_on_a_cpu(modules):
    model = mlp()
    run = torch.compile(model, backend="tvm_fusion", mode="reduce-overhead")
    check(run, model, torch.randn(3, 8))
    assert modules[0].cuda_graph is None
    with pytest.raises(ConfigError, match="mode 'max-autotune' is none of"):
        torch_backend.BackendOptions.of(None, "max-autotune")


def test_the_entry_point_names_the_backend():
    (setup,) = importlib.resources.files("tvm_fusion").parent.glob("setup.py")
    assert '"tvm_fusion = tvm_fusion.torch_backend:backend"' in setup.read_text()
    assert torch_backend.backend is torch._dynamo.lookup_backend("tvm_fusion")


@pytest.mark.gpu
@pytest.mark.parametrize("options", [{}, {"cuda_graph": True}])
def test_a_model_on_a_gpu_runs_there(options, modules):
    model = mlp().half().cuda()
    run = compiled(model, **options)
    kept = []
    for n in (16, 16, 48, 32):
        x = torch.randn(n, 8, device="cuda").half()
        kept.append((run(x), model(x)))
    for given, wanted in kept:
        torch.testing.assert_close(given, wanted, rtol=5e-3, atol=5e-3)
    assert all(m.cuda_graph_refusal is None for m in modules)


def test_a_graph_of_one_part_gives_results_in_their_order_and_number():
    def function(x, unused, y):
        total = x + y
        return total, y * 2, total

    run = compiled(function)
    inputs = [torch.randn(3, 4) for _ in range(3)]
    for _ in range(3):
        torch.testing.assert_close(run(*inputs), function(*inputs))
