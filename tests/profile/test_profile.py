"""Profiles: recorded calls, what they add up to, and how they are shown."""

import contextlib
import json
import sys
import types

import numpy as np
import pytest
import tvm
import tvm_ffi
from tvm import relax

from tests.support.graphs import module
from tests.support.runtime_cases import LLVM, symbolic_sum
from tvm_fusion import cli
from tvm_fusion.config import load_profile
from tvm_fusion.errors import BuildError, InputError, TargetError
from tvm_fusion.profile import measured, ncu, ranges
from tvm_fusion.profile.facts import of_calls
from tvm_fusion.profile.measured import call_once, labelled, profile
from tvm_fusion.profile.text import text
from tvm_fusion.profile.trace import BANDWIDTH, write_trace
from tvm_fusion.report.facts import GroupReport
from tvm_fusion.runtime.calls.compiled_module import CompiledModule
from tvm_fusion.runtime.timing import spans
from tvm_fusion.runtime.timing.spans import Recorded, Span, by_function

QUICK = {"verify": False, "settle_budget_s": 0.0}
CALLS = 3


def two_layers() -> tvm.IRModule:
    """Two equal layers, then a softmax: groups that share a function, and one that does not."""
    weight = relax.const(np.eye(32, dtype="float32"))

    def emit(bb, x):
        for _ in range(2):
            x = bb.emit(relax.op.nn.relu(bb.emit(relax.op.matmul(x, weight))))
        return relax.op.nn.softmax(x)

    return module(emit, ((8, 32), "float32"))


@pytest.fixture(scope="module")
def found():
    return profile(two_layers(), LLVM, policy=QUICK, calls=CALLS)["main"]


def test_each_launch_of_a_call_has_a_time_and_the_bytes_of_its_group(found):
    before, after = found.unfused, found.fused
    assert (before.launches, after.launches) == (5, 3)
    for one in (before, after):
        assert len(one.kernels) == one.launches == len(one.example)
        assert all(kernel.time.samples == CALLS for kernel in one.kernels)
        assert all(kernel.time.median_us > 0 for kernel in one.kernels)
        assert all(kernel.limit_us > 0 for kernel in one.kernels)
        assert one.call.samples >= CALLS
    # x, the weight and the result of a layer; x and the result of the softmax
    assert [kernel.bytes for kernel in after.kernels] == [6144, 6144, 2048]
    assert after.bytes == 6144 * 2 + 2048 < before.bytes
    kernel = after.kernels[0]
    assert kernel.bytes_per_s == pytest.approx(6144e6 / kernel.time.median_us)
    assert kernel.limit_share == pytest.approx(kernel.limit_us / kernel.time.median_us)
    assert after.memory_bytes <= before.memory_bytes


def test_launches_follow_each_other_and_their_times_add_up(found):
    for one in (found.unfused, found.fused):
        ends = [0.0, *(span.end_us for span in one.example)]
        begins = [span.begin_us for span in one.example]
        assert begins[0] == 0.0
        assert all(begin >= end for begin, end in zip(begins, ends, strict=False))
        assert one.gaps.median_us <= one.span.high_us
        assert one.span.samples == one.gaps.samples == CALLS


def test_the_quartiles_and_the_gaps_are_those_of_the_calls():
    calls = [[Span("f", 0, 1, 1), Span("g", 2, 2 + n, n)] for n in (1, 2, 3, 4, 5)]
    span, busy, gaps, example = of_calls(Recorded.on_gpu("kernel", calls))
    assert (span.low_us, span.median_us, span.high_us, span.samples) == (4, 5, 6, 5)
    assert (busy.median_us, gaps.median_us, gaps.high_us) == (4, 1, 1)
    assert example == calls[2]
    # what recording takes is not between the launches of a call that is not recorded
    _, busy, gaps, _ = of_calls(Recorded("wall", calls, [2.5, 3.5, 4.5, 4.9, 6.5]))
    assert (busy.median_us, gaps.median_us, gaps.low_us) == (4, 0.5, 0.5)


@pytest.mark.parametrize("full", [False, True])
def test_the_text_fits_a_screen_and_says_what_the_values_say(found, full):
    shown = text(found, full)
    lines = shown.splitlines()
    assert max(map(len, lines)) <= 100
    assert f"{CALLS} calls by the clock; medians (quartiles)" in lines[0]
    assert lines[2].split()[:3] == ["launches", "5", "3"]
    for kernel in found.fused.kernels:
        assert kernel.label[:20] in shown


def test_a_trace_has_a_slice_for_each_launch(found, tmp_path):
    path = tmp_path / "trace.json"
    write_trace(path, {"main": found})
    data = json.loads(path.read_text())["traceEvents"]
    for number, one in ((1, found.unfused), (2, found.fused)):
        own = [event for event in data if event["pid"] == number]
        slices = [event for event in own if event["ph"] == "X"]
        assert [event["name"] for event in slices] == [kernel.label for kernel in one.kernels]
        assert [event["ts"] for event in slices] == [span.begin_us for span in one.example]
        assert all(event["dur"] > 0 and event["args"]["bytes"] for event in slices)
        assert {event["name"] for event in own if event["ph"] == "C"} == {BANDWIDTH}
        assert [event["ph"] for event in own].count("M") == 1


def test_the_command_prints_one_object_and_writes_the_trace(tmp_path, capsys):
    model, trace = tmp_path / "model.json", tmp_path / "trace.json"
    model.write_text(tvm.ir.save_json(two_layers()))
    options = ["--target", "llvm", "--policy", "verify=false,settle_budget_s=0.0", "--calls", "2"]
    assert cli.main(["profile", str(model), *options, "--json", "--trace", str(trace)]) == 0
    data = json.loads(capsys.readouterr().out)
    assert (data["before"]["launches"], data["after"]["launches"]) == (5, 3)
    assert data["after"]["kernels"][0]["time"]["samples"] == 2
    assert len(json.loads(trace.read_text())["traceEvents"]) == 2 + 3 * (5 + 3)


def test_symbolic_sizes_are_those_of_the_ledger_and_are_said():
    found = profile(symbolic_sum(), LLVM, policy=QUICK, calls=1)["main"]
    assert found.sizes == {"n": 128, "m": 128}
    assert "n = 128, m = 128" in text(found)
    assert found.fused.bytes >= 4 * 128 * 128


def test_groups_that_share_a_function_take_turns():
    named = (("f", "a"), ("f", "b"), ("g", "c"))
    groups = [GroupReport(name, (op,), (), "row", 1, 0, 0, 0.0, 0.0) for name, op in named]
    assert labelled(list("fgf"), groups) == [(0, "a"), (2, "c"), (1, "b")]
    assert labelled(list("fxfg"), groups) == [(0, "a"), (None, "x"), (1, "b"), (2, "c")]
    assert labelled(list("fff"), groups) == [(0, "a")] * 3  # in a loop: nobody knows which


def test_ranges_are_named_by_the_groups(monkeypatch):
    said = []
    monkeypatch.setattr(ranges, "_functions", lambda: (said.append, lambda: said.append(None)))
    found = call_once(two_layers(), LLVM, policy=QUICK)
    assert said == [word for one in found for word in (one.label, None)]
    assert [one.bytes for one in found] == [6144, 6144, 2048]


def test_without_nvtx_there_are_no_ranges_and_no_errors(monkeypatch):
    monkeypatch.setitem(sys.modules, "nvtx", None)
    monkeypatch.setattr(ranges, "_libraries", lambda: ["/no/such/libnvToolsExt.so"])
    push, pop = ranges._functions.__wrapped__()
    push("a"), pop()


def test_kernels_of_a_gpu_are_those_of_the_functions_in_their_order():
    kernels = {"f": ("a", "b"), "g": ("c",)}
    events = [("a", 10, 12), ("b", 13, 14), ("c", 20, 25), ("a", 30, 31), ("b", 32, 33)]
    first, second = by_function([*events, ("c", 33, 34)], ["f", "g", "library"], kernels, 2)
    assert first == [Span("f", 0, 4, 3), Span("g", 10, 15, 5)]
    assert second == [Span("f", 0, 3, 2), Span("g", 3, 4, 1)]
    assert by_function(events, ["f", "g"], kernels, 2) is None  # one was lost


@pytest.mark.parametrize("lost", [0, 1, 9])
def test_kernels_are_read_from_cupti_and_asked_for_again_where_some_are_lost(monkeypatch, lost):
    """`lost`: how many times the profiler leaves out an event."""
    torch = pytest.importorskip("torch")
    (planned,) = measured._functions(two_layers(), LLVM, QUICK).values()
    built = planned.build().built
    one, inputs = CompiledModule.of(built), [np.ones((8, 32), "float32")]
    names = spans.names_called(one, inputs)
    kernels = {name: (f"{name}_first", f"{name}_second") for name in names}
    call = [kernel for name in names for kernel in kernels[name]]
    profiles = []

    def events(profiler):
        profiles.append(profiler)
        found = [(k, 10.0 * i, 10.0 * i + 4) for i, k in enumerate(["filler", *call] * 2)]
        return found[: -1 if len(profiles) <= lost else None]

    zeros = torch.zeros
    monkeypatch.setattr(torch, "zeros", lambda *_, **__: zeros(1))
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(torch.profiler, "profile", lambda **_: contextlib.nullcontext())
    monkeypatch.setattr(spans, "device_events", events)
    if lost > spans.ATTEMPTS:
        with pytest.raises(BuildError, match=r"CUPTI reports 11 kernels of 2 calls"):
            spans._cupti_spans(one, inputs, kernels, 2)
        return
    calls = spans._cupti_spans(one, inputs, kernels, 2)
    assert len(profiles) == lost + 1
    assert [[span.begin_us for span in found] for found in calls] == [[0, 20, 40]] * 2
    assert {(span.end_us - span.begin_us, span.busy_us) for span in calls[0]} == {(14, 8)}


class FakeDriver:
    """Events a microsecond apart."""

    def __init__(self, index: int) -> None:
        self.now, self.times = 0.0, {}

    def current(self):
        return contextlib.nullcontext()

    def synchronize(self) -> None: ...

    def new_event(self, timed: bool = False) -> int:
        assert timed
        self.times[len(self.times) + 1] = None
        return len(self.times)

    def record(self, event: int, stream: int) -> None:
        self.now += 1.0
        self.times[event] = self.now

    def elapsed_us(self, first: int, second: int) -> float:
        return self.times[second] - self.times[first]

    def destroy_event(self, event: int) -> None:
        self.times[event] = None


def test_without_torch_events_stand_around_each_launch(monkeypatch):
    (planned,) = measured._functions(two_layers(), LLVM, QUICK).values()
    one = CompiledModule.of(planned.build().built)
    cleaned, cleaner = [], "tests.profile.clean"
    tvm_ffi.register_global_func(cleaner, lambda *_: cleaned.append(1), override=True)
    monkeypatch.setattr(spans, "CudaDriver", FakeDriver)
    monkeypatch.setattr(spans, "l2_cleaner", lambda device: cleaner)
    calls = spans._event_spans(one, [np.ones((8, 32), "float32")], 2)
    assert [[span.begin_us for span in call] for call in calls] == [[0, 2, 4]] * 2
    assert [span.busy_us for span in calls[0]] == [1, 1, 1]
    assert len(cleaned) == 2 + spans.WARM_CALLS


TABLE = """==PROF== Connected to process 1
==PROF== Disconnected
"ID","Process ID","Kernel Name","Metric Name","Metric Unit","Metric Value"
"0","1","fused_add(float *)","dram__bytes_read.sum","byte","8,192"
"0","1","fused_add(float *)","dram__bytes_write.sum","byte","4096"
"0","1","fused_add(float *)","gpu__time_duration.sum","nsecond","2016"
"0","1","fused_add(float *)","lts__t_sectors_srcunit_tex_op_write.sum","sector","256"
"1","1","softmax","dram__bytes_read.sum","byte","100"
"""


def test_what_nsight_compute_prints_is_read():
    first, second = ncu.counted(TABLE)
    assert first == ncu.Counted("fused_add", 8192, 4096, 256, 2016)
    assert first.bytes == 8192 + 256 * 32  # what is written leaves the L2 later
    assert (second.kernel, second.read, second.written) == ("softmax", 100, 0)


@pytest.mark.parametrize(
    ("output", "why"),
    [
        ("==ERROR== ERR_NVGPUCTRPERM - The user does not", "root.*RestrictProfilingToAdminUsers=0"),
        ("==PROF==\n==ERROR== no kernels", "no table of kernels: ==ERROR== no kernels"),
        ("", "it printed nothing"),
    ],
)
def test_why_there_are_no_counters_is_said(output, why):
    with pytest.raises(InputError, match=why):
        ncu.counted(output)


def test_the_command_for_nsight_compute_is_printed_and_nothing_is_run(capsys):
    assert cli.main(["profile", "--demo", "--target", "h200", "--ncu"]) == 0
    out = capsys.readouterr().out
    assert out.startswith("ncu --profile-from-start off ")
    assert out.endswith(" -m tvm_fusion profile --demo --target h200 --once\n")
    assert all(metric in out for metric in ncu.METRICS)


@pytest.mark.parametrize(
    ("options", "why"),
    [
        (["--target", "llvm", "--ncu"], "llvm_cpu is none"),
        (["--target", "llvm", "--calls", "0"], "--calls 0: at least one"),
        (["--target", "llvm", "--trace", "/no/such/t.json"], "there is no such directory"),
    ],
)
def test_what_cannot_be_profiled_is_refused_before_the_model_is_read(capsys, options, why):
    assert cli.main(["profile", "--demo", *options]) == 2
    assert why in capsys.readouterr().err


def test_without_the_device_there_is_nothing_to_profile(monkeypatch):
    monkeypatch.setattr(
        tvm.runtime, "device_from_target", lambda target: types.SimpleNamespace(exist=False)
    )
    with pytest.raises(TargetError, match="no cuda device to profile on"):
        profile(two_layers(), load_profile("h200").to_target())
