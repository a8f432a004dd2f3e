"""Large models: each distinct kernel is checked by itself, the whole beside PyTorch."""

from dataclasses import replace

import pytest
import torch
import tvm
from torch import nn
from tvm import relax

import tvm_fusion
from tvm_fusion.check import kernels
from tvm_fusion.check.compiled import Checked
from tvm_fusion.check.verify import Verification
from tvm_fusion.compilation import one_function
from tvm_fusion.flow.functions import planned_function
from tvm_fusion.plan.refusal import RefusalCode
from tvm_fusion.plan.search.search import unfused_plan
from tvm_fusion.runtime.build import build, join_writes

from ..planted import planted
from ..runtime.test_join_writes import step
from .test_written_memory import WRONG, other_value
from .test_written_memory import planted as planted_write


class Layers(nn.Module):
    """Equal layers with weights of their own."""

    def __init__(self, count: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(48, 48) for _ in range(count))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = x + torch.tanh(layer(x)).softmax(-1)
        return x


class Sum(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.sum(-1)


class Write(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.zeros(5, 48))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen.add_(x)
        return self.seen.exp()


X = torch.randn(5, 48, generator=torch.Generator().manual_seed(1))


@pytest.fixture(autouse=True)
def all_are_large(monkeypatch):
    monkeypatch.setattr(kernels, "SHORT", 0)


def test_kernels_of_equal_layers_are_checked_once():
    found = [tvm_fusion.compile(Layers(count), "llvm", example_inputs=(X,)) for count in (2, 5)]
    few, many = (one.report.verify for one in found)
    assert few.passed
    assert many.passed
    assert 0 < few.kernels == many.kernels < found[1].report.launches.fused
    assert max(few.worst_error, many.worst_error, many.source_error) < 1e-5
    assert f"of {many.kernels} kernels, each by itself" in str(found[1].report)
    torch.testing.assert_close(found[1](X), Layers(5)(X).detach())


class Halved(nn.Module):
    """A view between two products."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        wide = (x.T @ x).reshape(24, 96)
        return wide @ wide.T


def test_views_are_no_kernels():
    model = planned_function(Halved(), "llvm", example_inputs=(X,))
    plan = unfused_plan(model.graph, model.hw, model.policy)
    views = [group for group in plan.groups if group.kernel_class == "view"]
    found = kernels.kernels_checked(replace(model, plan=plan).build())
    assert found.verification.passed
    assert found.kernels == len(plan.groups) - len(views) < len(plan.groups)


def test_a_module_without_kernels_is_checked_as_a_whole():
    nothing = planned_function(nn.Identity(), "llvm", example_inputs=(X,))
    assert kernels.kernels_checked(nothing.build()) is None


def test_all_of_it_is_computed_in_float64_where_that_is_asked_for():
    full = tvm_fusion.compile(Layers(2), "llvm", example_inputs=(X,), verify="full").report.verify
    assert full.passed
    assert full.kernels == 0


def test_a_module_without_a_source_is_checked_as_a_whole():
    mod = planned_function(Layers(2), "llvm", example_inputs=(X,)).mod
    assert tvm_fusion.compile(mod, "llvm").report.verify.kernels == 0
    beside = tvm_fusion.compile(mod, "llvm", source=(Layers(2), (X,))).report.verify
    assert beside.kernels > 0
    assert beside.source_error < 1e-5


@pytest.mark.one_in(2)
@pytest.mark.parametrize(("mutation", "seed"), [("short loop", 1), ("dropped store", 0)])
def test_a_wrong_kernel_gives_way(mutation, seed, caplog):
    x = torch.randn(33, 133, generator=torch.Generator().manual_seed(2)) * 9
    with planted(mutation, seed):
        compiled = tvm_fusion.compile((Sum(), (x,)), "llvm")
    assert any(r.name == kernels.__name__ and "kernel" in r.message for r in caplog.records)
    torch.testing.assert_close(compiled(x), x.sum(-1), rtol=1e-5, atol=1e-3)
    (group,) = compiled.report.groups
    assert group.fallback.startswith(RefusalCode.WRONG_NUMBERS.value)


def test_what_no_kernel_shows_is_seen_beside_pytorch(monkeypatch):
    """Kernels that are right, and a module that is wrong all the same."""
    asked = []

    def all_right(made):
        asked.append(made)
        return Checked(made, Verification("kernels", True, (), 0.0), kernels=1)

    monkeypatch.setattr(one_function, "kernels_checked", all_right)
    x = torch.randn(33, 133, generator=torch.Generator().manual_seed(2)) * 9
    with planted("short loop", 1):
        compiled = tvm_fusion.compile((Sum(), (x,)), "llvm")
    assert len(asked) == 1
    assert compiled.report.verify.kernels == 0  # checked again, as a whole
    torch.testing.assert_close(compiled(x), x.sum(-1), rtol=1e-5, atol=1e-3)


def test_a_model_that_keeps_state_is_compared_from_its_first_state():
    found = tvm_fusion.compile(Write(), "llvm", example_inputs=(X,))
    assert found.report.verify.passed
    assert found.report.verify.source_error < 1e-5
    once, twice = Write(), Write()
    expected = [once(X), (twice(X), twice(X))[1]]
    torch.testing.assert_close([found(X), found(X)], expected)


class Cached(nn.Module):
    """Each layer writes what it computes into a cache of its own, which it reads as far as it is
    full.
    """

    def __init__(self, count: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(48, 48) for _ in range(count))

    def forward(self, x: torch.Tensor, start: torch.Tensor, *caches: torch.Tensor) -> torch.Tensor:
        places = torch.arange(5) + start
        seen = torch.arange(16)[:, None] < start + 5
        for layer, cache in zip(self.layers, caches, strict=True):
            kept = cache.index_copy_(0, places, torch.tanh(layer(x)))
            x = x + torch.where(seen, kept, 0.0).sum(0)
        return x


def with_caches(count: int) -> tuple[torch.Tensor, ...]:
    made = torch.Generator().manual_seed(2)
    return X.clone(), torch.tensor(2), *(torch.randn(16, 48, generator=made) for _ in range(count))


@pytest.mark.one_in(2)
@pytest.mark.parametrize("through_torch_compile", [False, True])
def test_what_writes_into_caches_is_checked_once(through_torch_compile):
    found = set()
    for count in (2, 3):
        model, given, expected = Cached(count), with_caches(count), with_caches(count)
        with torch.no_grad():
            if through_torch_compile:
                reports = []
                options = {"report": reports.append}
                compiled = torch.compile(model, backend="tvm_fusion", options=options)
                result = compiled(*given)
                report = reports[0].report
            else:
                compiled = tvm_fusion.compile(model, "llvm", example_inputs=with_caches(count))
                result, report = compiled(*given), compiled.report
            torch.testing.assert_close(result, model(*expected))
        torch.testing.assert_close(given, expected)
        assert report.verify.passed
        assert report.verify.source_error < 1e-5
        found.add(report.verify.kernels)
    assert len(found) == 1
    assert min(found) > 2


@pytest.mark.one_in(4)
@pytest.mark.parametrize("wrong", WRONG)
def test_a_wrong_write_into_a_cache_is_found(wrong, monkeypatch, caplog):
    model = planned_function(Cached(1), "llvm", example_inputs=with_caches(1))
    done = planted_write(monkeypatch, WRONG[wrong])
    assert kernels.kernels_checked(model.build()) is None
    assert any(f"kernel {done[0]}" in r.message for r in caplog.records)


@pytest.fixture
def writes_are_joined(monkeypatch):
    """As they are on a GPU."""
    pipeline = build.lowering_pipeline

    def joining(*args, **options):
        passes = [relax.transform.LegalizeOps(), join_writes.JoinWrites()]
        return tvm.transform.Sequential([*passes, pipeline(*args, **options)])

    monkeypatch.setattr(build, "lowering_pipeline", joining)


def test_writes_that_are_one_launch_are_checked_each(writes_are_joined):
    model = planned_function(step(), "llvm")
    made = model.build()
    ((parts,),) = [made.built.joined.values()]
    assert len(parts) == 2
    found = kernels.kernels_checked(made)
    assert found.verification.passed
    assert {*parts} <= found.group_errors.keys()


def test_a_wrong_write_of_a_joint_launch_is_found(writes_are_joined, monkeypatch, caplog):
    model = planned_function(step(), "llvm")
    done = planted_write(monkeypatch, other_value)
    made = model.build()
    assert made.built.joined
    assert kernels.kernels_checked(made) is None
    assert any(f"kernel {done[0]}" in r.message for r in caplog.records)


class Third(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.split(16, -1)[1].tanh()


def test_of_an_operator_alone_that_gives_more_the_parts_that_are_read_are_compared():
    model = planned_function(Third(), "llvm", example_inputs=(X,))
    apart = replace(model, plan=unfused_plan(model.graph, model.hw, model.policy))
    found = kernels.kernels_checked(apart.build())
    assert found.verification.passed
    assert found.kernels == 2


class Largest(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.cummax(-1)[0]


def test_a_function_that_no_plan_has_to_do_with_is_checked(monkeypatch):
    model = planned_function(Largest(), "llvm", example_inputs=(X,))
    assert kernels.kernels_checked(model.build()).kernels == 1
    done = planted_write(monkeypatch, other_value, "cumulative_extremum", 1)
    assert kernels.kernels_checked(model.build()) is None
    assert done
