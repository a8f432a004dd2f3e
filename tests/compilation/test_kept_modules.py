"""What was compiled before is read again: nothing is planned, built or checked, and it is right."""

import shutil
import threading

import pytest
import torch

import tvm_fusion
from tvm_fusion.compilation import compiler, kept_modules
from tvm_fusion.flow import plan_cache
from tvm_fusion.flow.planned import Planned
from tvm_fusion.ir import weights
from tvm_fusion.kernels.gpu import ahead
from tvm_fusion.runtime.module import CompiledModule

WIDTH = 32


class Model(torch.nn.Module):
    """A counter that stays, an output that is a dict, and weights read in several ways."""

    def __init__(self, seed: int, counts: bool = False):
        super().__init__()
        torch.manual_seed(seed)
        self.norm = torch.nn.LayerNorm(WIDTH)
        self.linear = torch.nn.Linear(WIDTH, WIDTH, bias=False)
        self.other = torch.nn.Parameter(torch.randn(WIDTH, WIDTH))
        self.counts = counts
        self.register_buffer("calls", torch.zeros(1))

    def forward(self, x):
        if self.counts:
            self.calls += 1
        y = torch.softmax(self.linear(self.norm(x)), -1) @ self.other.exp()
        return {"y": y + self.calls, "sum": y.sum(-1)}


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    """A cache of the test's own, in which all is kept, and small weights."""
    monkeypatch.setenv("TVM_FUSION_CACHE", str(tmp_path))
    monkeypatch.setenv(plan_cache.VARIABLE, "1")
    monkeypatch.setattr(compiler, "LEAST_S", 0)
    monkeypatch.setattr(weights, "LEAST_ELEMENTS", 256)
    return tmp_path / "modules"


@pytest.fixture
def planned(monkeypatch):
    """How many functions were planned."""
    found, of = [], Planned.of

    def counted(*args, **options):
        found.append(args)
        return of(*args, **options)

    monkeypatch.setattr(Planned, "of", counted)
    return found


X = torch.randn(5, WIDTH)


def compiled(model, **options):
    found = tvm_fusion.compile(model.eval(), "llvm", example_inputs=(X,), **options)
    kept_modules.settle()
    return found


def check(module, model, calls=1):
    for _ in range(calls):
        expected, found = model(X), module(X)
        for name, value in expected.items():
            torch.testing.assert_close(found[name], value, rtol=1e-4, atol=1e-4)


@pytest.mark.one_in(2)
@pytest.mark.parametrize("counts", [False, True])
def test_a_second_compile_reads_the_first_and_computes_its_own_weights(
    counts, planned, tmp_path, capfd
):
    first = compiled(Model(0, counts))
    assert len(planned) == 1
    other = Model(1, counts)
    again = compiled(other)
    assert len(planned) == 1
    check(again, other, calls=2)
    assert len(planned) == 1
    assert again.report.full() == first.report.full()
    assert again.plan == first.plan
    assert again.launches == first.launches
    loaded = CompiledModule.load(again.save(tmp_path / "saved.so"))
    torch.testing.assert_close(loaded(X)["sum"], other(X)["sum"], rtol=1e-4, atol=1e-4)
    assert "Scope" not in capfd.readouterr().err  # a line of TVM's for each constant


def test_a_module_is_written_while_its_caller_goes_on(folder, planned, monkeypatch):
    writes, library_of = threading.Event(), kept_modules.library_of

    def late(executable, place):
        write = library_of(executable, place)
        return lambda path: writes.wait(60) and write(path)

    monkeypatch.setattr(kept_modules, "library_of", late)
    model = Model(0).eval()
    check(tvm_fusion.compile(model, "llvm", example_inputs=(X,)), model)
    assert not list(folder.glob("*/module.so"))
    writes.set()
    check(tvm_fusion.compile(model, "llvm", example_inputs=(X,)), model)  # waits for it
    assert len(planned) == 1
    assert len(list(folder.glob("*/module.so"))) == 1


def test_what_is_asked_for_otherwise_is_compiled(planned):
    model = Model(0)
    compiled(model)
    compiled(model, policy={"name": "other", "rounding": "exact"})
    compiled(model, verify=False)
    wide = Model(0)
    wide.norm.eps = 1e-3
    compiled(wide)
    with torch.no_grad():
        wide.norm.weight += 1  # no weight: too small, its numbers are looked at
    compiled(wide)
    assert len(planned) == 5


@pytest.mark.one_in(2)
@pytest.mark.parametrize("variable", [ahead.VARIABLE, "TVM_CUDA_NVCC_NO_FAST_MATH"])
def test_what_the_environment_says_of_kernels_is_heeded(variable, planned, monkeypatch):
    model = Model(0)
    compiled(model)
    monkeypatch.setenv(variable, "1")
    compiled(model)
    assert len(planned) == 2
    monkeypatch.delenv(variable)
    compiled(model)
    assert len(planned) == 2


@pytest.mark.parametrize("file", ["module.so", "facts.pickle"])
def test_a_damaged_module_is_compiled_again(file, folder, planned, caplog):
    model = Model(0)
    compiled(model)
    (one,) = folder.iterdir()
    (one / file).write_bytes(b"no such thing")
    check(compiled(model), model)
    assert len(planned) == 2
    assert "is made again" in caplog.text
    check(compiled(model), model)
    assert len(planned) == 2


def test_plans_and_databases_of_callers_are_not_kept(folder, planned):
    model = Model(0)
    plan = compiled(model).plan
    shutil.rmtree(folder)
    compiled(model, plan=plan)
    assert not folder.exists()


def test_only_the_modules_used_last_stay(folder, monkeypatch):
    monkeypatch.setattr(kept_modules, "MOST_MODULES", 2)
    for width in (3, 4, 5):
        model, x = torch.nn.Softmax(-1), torch.randn(2, width)
        tvm_fusion.compile(model, "llvm", example_inputs=(x,), verify=False)
        kept_modules.settle()
    assert len(list(folder.iterdir())) == 2
