"""Other configurations for kernels that spill, by what ptxas says of them."""

import shutil
from dataclasses import replace

import pytest
from tvm.relax import op

from tests.support.graphs import module
from tvm_fusion.compilation import several_functions, spilled
from tvm_fusion.compilation.one_function import Wishes, compile_function
from tvm_fusion.compilation.spilled import with_less_spilled
from tvm_fusion.config import load_policy, resolve_target
from tvm_fusion.flow.planned import Planned
from tvm_fusion.report.assemble import built_report

pytestmark = pytest.mark.skipif(shutil.which("nvcc") is None, reason="needs nvcc")


@pytest.fixture(scope="module")
def planned():
    mod = module(lambda bb, x: op.nn.softmax(x), ((4096, 4096), "float16"))
    return Planned.of(mod, *resolve_target("nvidia_h100"), load_policy({"probe": "off"}))


@pytest.fixture(scope="module")
def made(planned):
    return planned.build()


def spills(made, count):
    """The build as if each kernel had spilled so many bytes a thread."""
    found = {n: replace(r, spill_bytes=count) for n, r in made.built.resources.items()}
    return replace(made, built=replace(made.built, resources=found))


@pytest.fixture
def ptxas(monkeypatch):
    """Says that the first configurations that are judged spill so much, and counts all."""
    asked, real = [], spilled.resources_of

    def pretend(*bytes_of_first):
        def told(code):
            count = bytes_of_first[len(asked)] if len(asked) < len(bytes_of_first) else 0
            asked.append(code)
            return tuple(replace(k, spill_bytes=count) for k in real(code))

        monkeypatch.setattr(spilled, "resources_of", told)
        return asked

    return pretend


def test_without_spills_nothing_is_compiled_again(made, ptxas):
    asked = ptxas()
    assert not any(r.spill_bytes for r in made.built.resources.values())
    assert with_less_spilled(made) is made
    assert asked == []


def test_a_kernel_that_spills_is_built_in_another_configuration(made, ptxas):
    asked = ptxas(4096)
    again = with_less_spilled(spills(made, 4096))
    assert 1 < len(asked) <= 1 + spilled.MOST_OTHERS
    assert again.built.cuda_sources != made.built.cuda_sources
    (group,) = built_report(again).groups
    said = group.tuned
    assert said["predicted_us"] < said["instead_of_us"]
    assert (said["spill_bytes"], said["instead_of_spill_bytes"]) == (0, 4096)
    text = built_report(again).full()
    assert "other configurations, as the first spilled:" in text
    assert "4096 bytes a thread spilled before" in text


def test_it_stays_where_the_others_spill_as_much(made, ptxas):
    asked = ptxas(4096, 1 << 20, 1 << 20)
    given = spills(made, 4096)
    assert with_less_spilled(given) is given
    assert len(asked) == 1 + spilled.MOST_OTHERS


def test_a_few_bytes_are_worth_no_other_configuration(made, ptxas):
    ptxas(0)
    given = spills(made, 4)
    assert with_less_spilled(given) is given


def test_versions_by_range_stay_as_they_are(made, ptxas):
    asked = ptxas(4096)
    ((name, kernels),) = ((n, k) for n, k in made.built.kernels.items() if k)
    versions = f"{name}_upto_64_kernel", f"{name}_beyond_kernel"
    worse = replace(made.built.resources[kernels[0]], spill_bytes=4096)
    built = replace(made.built, kernels={name: versions}, resources=dict.fromkeys(versions, worse))
    given = replace(made, built=built)
    assert with_less_spilled(given) is given
    assert asked == []


def test_compile_asks_for_it(planned, monkeypatch):
    seen = []
    monkeypatch.setattr(
        "tvm_fusion.compilation.one_function.with_less_spilled", lambda m: seen.append(m) or m
    )
    compile_function(planned, Wishes())
    assert len(seen) == 1


def test_functions_that_spill_are_built_together_again(planned, ptxas, monkeypatch):
    asked, builds = ptxas(4096), []
    spilling, build_together = spilled._spilling, several_functions.build_together

    def recorded(functions):
        builds.append(build_together(functions))
        return builds[-1]

    monkeypatch.setattr(spilled, "_spilling", lambda made: spilling(spills(made, 4096)))
    monkeypatch.setattr(several_functions, "build_together", recorded)
    mod = module(lambda bb, x: op.nn.softmax(x), ((1024, 2048), "float16"))
    other = Planned.of(mod, planned.target, planned.hw, planned.policy)
    compiled = several_functions.compile_functions({"first": planned, "second": other}, Wishes())
    before, after = (built.functions["first"].built.cuda_sources for built in builds)
    assert before != after
    assert len(asked) > 2
    (first,), (second,) = (compiled[name].report.groups for name in ("first", "second"))
    assert first.tuned["instead_of_spill_bytes"] == 4096
    assert not second.tuned
