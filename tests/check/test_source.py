"""A compiled model is held against PyTorch: another function is found, choices are none."""

import contextlib
import math
import threading

import pytest

import tvm_fusion
from tvm_fusion.check import distance, source
from tvm_fusion.errors import VerificationError
from tvm_fusion.flow.functions import planned_function
from tvm_fusion.frontends.torch.model import CONVERTERS

from ..support.frontend_tools import Function

torch = pytest.importorskip("torch")
F = torch.nn.functional
X = torch.randn(4, 8, generator=torch.Generator().manual_seed(0))


@pytest.fixture
def wrong_tanh(monkeypatch):
    """An import of `tanh` that is another function of the same shape and dtype."""
    from tvm import relax

    def convert(importer, node):
        return importer.emit(relax.op.sigmoid(importer.value_of(node.args[0])))

    monkeypatch.setitem(CONVERTERS, "tanh.default", convert)


def model(function):
    """A function with its example input."""
    return Function(function), (X,)


def test_another_function_is_an_error(wrong_tanh):
    with pytest.raises(VerificationError, match="another function than PyTorch runs: output 0"):
        tvm_fusion.compile(model(lambda x: torch.tanh(x) + 1), "llvm")


def test_another_function_is_told_where_only_that_is_wished_for(wrong_tanh):
    compiled = tvm_fusion.compile(model(torch.tanh), "llvm", verify="report")
    assert not compiled.report.verify.passed
    assert "another function" in str(compiled.report)


def test_the_error_beside_pytorch_is_in_the_report():
    compiled = tvm_fusion.compile(model(lambda x: torch.softmax(x @ x.T, -1)), "llvm")
    assert 0 <= compiled.report.verify.source_error < 1e-5
    assert "beside PyTorch" in str(compiled.report)


@pytest.fixture
def on_a_gpu(monkeypatch):
    """As if the inputs were there; the threads that PyTorch ran the model in, their modes, and
    the threads whose streams these took.
    """
    threads, run, streams = [], source._Source.run, threading.local()

    def noted(self):
        of = getattr(streams, "of", threading.current_thread())
        threads.append((threading.current_thread(), torch.is_inference_mode_enabled(), of))
        return run(self)

    @contextlib.contextmanager
    def on_stream(of):
        streams.of = of
        yield

    monkeypatch.setattr(source._Source, "gpu", torch.device("cuda", 0))
    monkeypatch.setattr(source._Source, "run", noted)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda _: threading.current_thread())
    monkeypatch.setattr(torch.cuda, "stream", on_stream)
    return threads


@pytest.mark.parametrize("infers", [False, True])
def test_a_graph_on_a_gpu_is_run_by_pytorch_beside_planning(on_a_gpu, infers):
    given, inputs = model(torch.tanh)
    mod = planned_function(given, "llvm", example_inputs=inputs).mod
    with torch.inference_mode(infers):
        compiled = tvm_fusion.compile(mod, "llvm", source=(given, inputs))
    assert 0 <= compiled.report.verify.source_error < 1e-5
    ((thread, inferred, stream_of),) = on_a_gpu
    assert thread is not threading.main_thread()
    assert not thread.is_alive()
    assert inferred == infers
    assert stream_of is threading.current_thread()  # where inputs may be written yet


def test_another_function_is_found_beside_planning(on_a_gpu):
    given, inputs = model(torch.tanh)
    mod = planned_function(given, "llvm", example_inputs=inputs).mod
    with pytest.raises(VerificationError, match="another function than PyTorch runs: output 0"):
        tvm_fusion.compile(mod, "llvm", source=(Function(torch.sigmoid), inputs))
    (run,) = on_a_gpu
    assert run[0] is not threading.main_thread()


def test_what_pytorch_cannot_run_is_said_as_ever(on_a_gpu):
    given, inputs = model(torch.tanh)
    mod = planned_function(given, "llvm", example_inputs=inputs).mod
    with pytest.raises(RuntimeError, match="mat1 and mat2"):
        tvm_fusion.compile(mod, "llvm", source=(Function(lambda x: x @ x), inputs))


def test_a_module_of_pytorch_runs_when_it_is_compared(on_a_gpu):
    """It may depend on modes of the thread that calls, as its default device."""
    tvm_fusion.compile(model(torch.tanh), "llvm")
    assert [thread for thread, *_ in on_a_gpu] == [threading.main_thread()]


def test_what_agrees_in_float64_is_no_other_function(monkeypatch):
    """Where an output differs by more than roundings are taken to make, float64 decides."""
    monkeypatch.setattr(distance, "ROUNDINGS", {"float32": 0.0})
    monkeypatch.setattr(source, "SPECIAL_S", 0.0)
    compiled = tvm_fusion.compile(model(lambda x: torch.softmax(x @ x.T, -1)), "llvm")
    assert compiled.report.verify.source_error > 0


class Narrowed(torch.nn.Module):
    def __init__(self, factor=1.0):
        super().__init__()
        self.factor = factor

    def forward(self, x):
        return torch.exp(x.bfloat16()).float() * self.factor


@pytest.mark.parametrize("exported", [False, True])
def test_what_computes_in_bfloat16_by_itself_is_no_other_function(exported):
    """Its float32 outputs are off by roundings of bfloat16, which float64 has not."""
    torch.manual_seed(0)
    inputs = (torch.randn(64, 128),)
    given = torch.export.export(Narrowed(), inputs) if exported else (Narrowed(), inputs)
    error = tvm_fusion.compile(given, "llvm").report.verify.source_error
    assert distance.ROUNDINGS["float32"] < error < distance.ROUNDINGS["bfloat16"]
    mod = planned_function(given, "llvm").mod
    with pytest.raises(VerificationError, match="another function"):
        tvm_fusion.compile(mod, "llvm", source=(Narrowed(1.02), inputs))


def test_float64_decides_against_another_function_too(monkeypatch, wrong_tanh):
    monkeypatch.setattr(distance, "ROUNDINGS", {"float32": 0.0})
    with pytest.raises(VerificationError, match="another function"):
        tvm_fusion.compile(model(torch.tanh), "llvm")


def test_the_model_and_its_inputs_stay_as_they_were():
    class Counting(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("count", torch.zeros(1))

        def forward(self, x):
            return x + self.count

    counting, x = Counting(), X.clone()
    tvm_fusion.compile((counting, (x,)), "llvm")
    assert counting.count.item() == 0
    torch.testing.assert_close(x, X, rtol=0, atol=0)


def test_what_is_left_in_an_input_is_compared(wrong_tanh):
    def write(x, cache):
        cache[:] = torch.tanh(x)
        return x + 1

    with pytest.raises(VerificationError, match="what is left in input 1 is off"):
        tvm_fusion.compile((Function(write), (X, torch.zeros(4, 8))), "llvm")


def test_what_is_left_in_inputs_is_compared_in_float64(monkeypatch):
    monkeypatch.setattr(distance, "ROUNDINGS", {"float32": 0.0})

    def write(x, cache):
        cache.index_copy_(0, torch.arange(4), torch.softmax(x, -1))
        return cache.sum(-1), x + 1

    compiled = tvm_fusion.compile((Function(write), (X, torch.zeros(6, 8))), "llvm")
    assert compiled.writes == (1,)
    assert compiled.report.verify.source_error > 0


def test_nothing_is_compared_where_nothing_is_checked(wrong_tanh):
    compiled = tvm_fusion.compile(model(torch.tanh), "llvm", verify=False)
    assert compiled.report.verify is None


# ---- Which operator it is.


class Block(torch.nn.Module):
    def forward(self, x):
        return torch.tanh(x) * 2  # differs


class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = torch.nn.ModuleList([torch.nn.Linear(8, 8), Block()])

    def forward(self, x):
        return torch.relu(self.layers[1](self.layers[0](x)) + 1).sum(-1)


def test_the_operator_that_differs_is_named_with_its_place_and_error(wrong_tanh):
    lines = open(__file__).read().split("\n")  # noqa: SIM115
    line = next(i for i, text in enumerate(lines, 1) if text.endswith("# differs"))
    with pytest.raises(VerificationError) as error:
        tvm_fusion.compile((Net(), (X,)), "llvm")
    said = str(error.value)
    assert f"aten.tanh.default (test_source.py:{line}, in layers.1) is off by " in said
    assert "more differ" not in said  # what reads it is right, of what PyTorch gives it


def replaced(monkeypatch, name, function):
    """An operator that is converted as something else."""
    monkeypatch.setitem(
        CONVERTERS,
        name,
        lambda importer, node: importer.emit(function(importer.value_of(node.args[0]))),
    )


def lost_nan(x):
    from tvm import relax

    zero = relax.const(0.0)
    return relax.op.where(relax.op.greater(x, zero), x, zero)


def lost_infinity(x):
    from tvm import relax

    return relax.op.abs(relax.op.clip(x, -1e30, 1e30))


@pytest.mark.parametrize(
    ("name", "function", "converted", "special"),
    [
        ("relu.default", torch.relu, lost_nan, "NaN"),
        pytest.param(
            *("abs.default", torch.abs, lost_infinity, "infinities"), marks=pytest.mark.nightly
        ),
    ],
)
def test_what_differs_with_special_values_only_is_an_error_too(
    monkeypatch, name, function, converted, special
):
    replaced(monkeypatch, name, converted)
    with pytest.raises(VerificationError, match=f"with {special} in its inputs.*aten.{name}"):
        tvm_fusion.compile(model(lambda x: function(x) + 1), "llvm")


def test_what_differs_with_special_values_though_no_operator_does_is_told(monkeypatch):
    replaced(monkeypatch, "relu.default", lost_nan)
    monkeypatch.setattr(source._Source, "differing", lambda *_: [])
    compiled = tvm_fusion.compile(model(torch.relu), "llvm")
    note = compiled.report.verify.source_note
    assert note == "with NaN in the inputs outputs differ, though no operator by itself does"
    assert note in str(compiled.report.full())


def test_rows_of_one_infinity_and_quotients_that_overflow_are_as_in_torch():
    def function(x):
        return (
            x[:, :1].amax(-1), x[:, 1:2].amin(-1), x.max(), x.max(1), x.min(0),
            F.max_pool1d(x, 2, 2, 1), F.adaptive_max_pool1d(x, 1),
        )  # fmt: skip

    compiled = tvm_fusion.compile(model(function), "llvm")
    assert compiled.report.verify.source_note is None
    rows = torch.full((4, 8), -math.inf)
    rows[1], rows[2, 3], rows[3, 5] = math.inf, math.nan, torch.finfo().min
    for result, wanted in zip(
        source.leaves(compiled(rows)), source.leaves(function(rows)), strict=True
    ):
        assert torch.allclose(result, wanted, rtol=0, atol=0, equal_nan=True)

    def rests(x):  # vectors of PyTorch's on a CPU have NaN for the first of them
        return torch.fmod(x, 0.3), torch.remainder(x, 0.3), torch.remainder(2.5, x)

    apart = torch.full((4, 8, 2), torch.finfo().max)[..., 0]  # one by one
    results = tvm_fusion.compile(model(rests), "llvm")(apart.contiguous())
    for result, wanted in zip(results, rests(apart), strict=True):
        torch.testing.assert_close(result, wanted)


def test_special_inputs_have_each_value_in_a_place():
    found = dict(source.special_inputs((X, torch.arange(3)), pointwise=True))
    assert list(found) == ["NaN", "infinities", "zeros and negative numbers", "extreme numbers"]
    assert found["NaN"][0].isnan().any()
    assert {*found["infinities"][0].flatten().tolist()} >= {float("inf"), float("-inf")}
    assert found["extreme numbers"][0].max() == torch.finfo(torch.float32).max
    assert all((inputs[1] == torch.arange(3)).all() for inputs in found.values())
    assert not list(source.special_inputs((torch.arange(3),), pointwise=True))


# ---- What is compared.


def test_the_weights_are_not_copied():
    class Alone(torch.nn.Linear):
        def __deepcopy__(self, memo):
            raise AssertionError("copied")

    compiled = tvm_fusion.compile((Alone(8, 4), (X,)), "llvm")
    assert compiled.report.verify.source_error < 1e-5


def test_an_exported_program_is_compared_on_its_example_inputs(wrong_tanh):
    right = torch.export.export(torch.nn.Linear(8, 4), (X,))
    assert tvm_fusion.compile(right, "llvm").report.verify.source_error < 1e-5
    with pytest.raises(VerificationError, match="another function"):
        tvm_fusion.compile(torch.export.export(Net(), (X,)), "llvm")


def test_what_is_not_compared_is_told(monkeypatch):
    monkeypatch.setattr(source, "MOST_PARAMETERS", 3)
    found = tvm_fusion.compile((torch.nn.Linear(8, 4), (X,)), "llvm").report.verify
    assert found.source_error is None
    assert "parameters on the CPU: shapes and dtypes only" in found.source_note
    found = tvm_fusion.compile(torch.nn.ReLU(), "llvm", example_inputs={"input": X}).report.verify
    assert "not tensors by position" in found.source_note


@pytest.mark.nightly
def test_without_the_device_the_imported_module_runs_on_the_cpu(wrong_tanh):
    from tvm_fusion.flow.functions import planned_function

    planned = planned_function(model(torch.relu), "llvm")
    compiled = tvm_fusion.compile(model(torch.relu), "llvm", verify=False)
    assert (
        source.source_check(
            compiled, planned, source.Original(*model(torch.relu)), here=False
        ).error
        == 0
    )
    planned = planned_function(model(torch.tanh), "llvm")
    original = source.Original(*model(torch.tanh))
    with pytest.raises(VerificationError, match=r"aten\.tanh\.default"):
        source.source_check(compiled, planned, original, here=False)


def test_what_pytorch_refuses_special_values_for_is_compared_without_them():
    positive = model(lambda x: torch.linalg.cholesky(x @ x.mT + torch.eye(x.shape[0])))
    found = tvm_fusion.compile(positive, "llvm").report.verify
    assert found.passed
    assert found.source_error < 1e-5
