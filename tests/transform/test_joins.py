"""Concatenations whose parts are computed where they belong: which ones they are, and that numbers
stay when memory is planned so.
"""

import pytest
import torch
import torch.nn.functional as F
import tvm
from torch import nn
from tvm import relax

from tvm_fusion.config import load_policy, resolve_target
from tvm_fusion.flow.planned import Lowered, Planned, Source
from tvm_fusion.frontends import load
from tvm_fusion.ir.graph import PLACED_ATTR, build_graph
from tvm_fusion.plan.plan import JOIN
from tvm_fusion.runtime.build.build import build
from tvm_fusion.runtime.calls.compiled_module import CompiledModule
from tvm_fusion.transform.memory.plan_memory import PlanMemory
from tvm_fusion.transform.pipeline import lower

from ..support.module_on_cpu import EmulatedModule
from ..support.runtime_cases import LLVM

GPU, HOPPER = resolve_target("nvidia_h200")
POLICY = load_policy(None)


def conv(channels, filters, kernel=3):
    return nn.Conv2d(channels, filters, kernel, padding=kernel // 2)


class Net(nn.Module):
    """Three convolutions in a row and what `joined` makes of their results."""

    def __init__(self, joined, *widths):
        super().__init__()
        first, second, third = widths
        self.joined = joined
        self.a, self.b, self.c = conv(8, first), conv(first, second), conv(second, third)

    def forward(self, x):
        y = F.relu(self.a(x))
        z = self.b(y)
        return self.joined(x, y, z, self.c(z))


def cat(*parts):
    return torch.cat(parts, 1)


def wide(x):
    """What reads a concatenation by itself: more elements than any of its parts."""
    return F.max_pool2d(x, 3, 1, 1)


JOINS = {
    # name: what is made of x, y, z, w; widths; parts that are copied
    "two": (lambda x, y, z, w: wide(cat(y, z)), (16, 16, 16), 0),
    "dense": (lambda x, y, z, w: wide(cat(cat(cat(y, z), w), w * 2)), (16, 8, 24), 0),
    "beside": (lambda x, y, z, w: (wide(cat(z, w)), wide(cat(z, y))), (32, 16, 8), 1),
    "twice": (lambda x, y, z, w: wide(cat(z, y, z)), (32, 16, 8), 1),
    "result": (lambda x, y, z, w: (wide(cat(y, z)), y.permute(0, 2, 3, 1)), (16, 16, 8), 1),
    "input": (lambda x, y, z, w: wide(cat(x, y, z)), (16, 16, 8), 0),
    "images": (lambda x, y, z, w: wide(torch.cat([y, z], 0)), (16, 16, 8), 0),
    "both axes": (lambda x, y, z, w: wide(torch.cat([cat(y, z), w], 0)), (16, 16, 32), 0),
}
REFUSED = {
    "odd": (lambda x, y, z, w: wide(cat(y, z)), (16, 13, 16)),
    "a result": (lambda x, y, z, w: cat(y, z).permute(0, 2, 3, 1), (16, 16, 16)),
    "pointwise": (lambda x, y, z, w: (wide(cat(x, x * 2)), w), (16, 16, 16)),
    "most are copies": (
        lambda x, y, z, w: (wide(cat(y, z)), y.permute(0, 2, 3, 1)),
        (40, 16, 16),
    ),
}


def apart(joined, widths):
    """Each operator by itself: all that may be joined is."""
    torch.manual_seed(0)
    model = Net(joined, *widths).eval().to(memory_format=torch.channels_last)
    x = torch.randn(2, 8, 5, 7).to(memory_format=torch.channels_last)
    mod = load(model, example_inputs=(x,))
    low = lower(mod, GPU, hw=HOPPER)
    lowered = Lowered(low, build_graph(low), HOPPER, POLICY)
    return Planned(Source(mod, GPU, HOPPER, POLICY), lowered, lowered.alone), model, x


def joins_of(plan):
    return [op for op in plan.graph.ops if op.is_join]


@pytest.mark.one_in(4)
@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_joined_is_concatenated(case):
    plan, _, _ = apart(*REFUSED[case])
    assert not joins_of(plan)


ALWAYS = ("dense", "twice", "both axes")


@pytest.mark.one_in(3)
@pytest.mark.parametrize(
    "case",
    [c if c in ALWAYS else pytest.param(c, marks=pytest.mark.nightly) for c in JOINS],
)
def test_parts_lie_within_their_whole(case, monkeypatch):
    joined, widths, copies = JOINS[case]
    plan, model, x = apart(joined, widths)
    assert joins_of(plan)
    assert sum("copy" in op.func for op in plan.graph.ops) == copies
    assert sum(g.kernel_class == JOIN for g in plan.plan.groups) == len(joins_of(plan))
    mod = plan.fused_functions()
    seen = []

    def plan_memory():
        return tvm.transform.Sequential([PlanMemory(), _Shown(seen)])

    monkeypatch.setattr(relax.transform, "StaticPlanBlockMemory", plan_memory)
    compiled = CompiledModule.of(build(mod, LLVM))
    calls = seen[-1]["main"].script().count("join(")
    assert calls == 0, "a join is called all the same"
    for _ in range(2):
        with torch.no_grad():
            torch.testing.assert_close(compiled(x), model(x), atol=1e-4, rtol=1e-4)


@tvm.transform.module_pass(opt_level=0, name="Shown")
class _Shown:
    def __init__(self, to):
        self.to = to

    def transform_module(self, mod, _ctx):
        self.to.append(mod)
        return mod


class Branches(nn.Module):
    """Products that share their input: one kernel has several results."""

    def __init__(self):
        super().__init__()
        self.branches = nn.ModuleList(conv(32, 16, 1) for _ in range(3))
        self.last = conv(48, 32)

    def forward(self, x):
        return self.last(torch.cat([F.relu(branch(x)) for branch in self.branches], 1))


def test_several_results_of_one_kernel_are_written_where_they_belong():
    model = Branches().eval().half().to(memory_format=torch.channels_last)
    x = torch.randn(2, 32, 6, 5).half().to(memory_format=torch.channels_last)
    plan = Planned.of(load(model, example_inputs=(x,)), GPU, HOPPER, POLICY)
    assert any(g.kernel_class == JOIN for g in plan.plan.groups)
    emulated = EmulatedModule.of(plan)
    assert not emulated.cuts
    [placed] = [f for f in plan.fused_functions().functions.values() if PLACED_ATTR in f.attrs]
    assert list(map(int, placed.attrs[PLACED_ATTR])) == [0, 32, 64]
    (found,) = emulated([x.numpy()])
    with torch.no_grad():
        wanted = model.float()(x.float())
    torch.testing.assert_close(torch.tensor(found).float(), wanted, atol=5e-3, rtol=5e-3)


class Decoder(nn.Module):
    """A part of the concatenation is enlarged before, the other one is not."""

    def __init__(self):
        super().__init__()
        self.a, self.b, self.c = conv(8, 16), conv(16, 16), conv(32, 16)

    def forward(self, x):
        skip = F.silu(self.a(x))
        deep = F.interpolate(F.silu(self.b(F.max_pool2d(skip, 2))), scale_factor=2.0)
        return self.c(torch.cat([deep, skip], 1))


def test_a_part_that_is_enlarged_is_written_where_it_belongs():
    """Its elements are at other places than its input's, and at the pitch of the whole."""
    model = Decoder().eval().half().to(memory_format=torch.channels_last)
    x = torch.randn(2, 8, 6, 10).half().to(memory_format=torch.channels_last)
    plan = Planned.of(load(model, example_inputs=(x,)), GPU, HOPPER, POLICY)
    assert any(g.kernel_class == JOIN for g in plan.plan.groups)
    (found,) = EmulatedModule.of(plan)([x.numpy()])
    with torch.no_grad():
        wanted = model.float()(x.float())
    torch.testing.assert_close(torch.tensor(found).float(), wanted, atol=5e-3, rtol=5e-3)
