"""Inputs that a module writes to: found, copied back, refused, and written once a captured call."""

import numpy as np
import pytest
import torch
import tvm
from tvm import relax
from tvm.script import tirx as T

from tvm_fusion.errors import InputError
from tvm_fusion.report.assemble import calls_of
from tvm_fusion.runtime.build.build import build
from tvm_fusion.runtime.calls.compiled_module import CompiledModule
from tvm_fusion.runtime.calls.written_inputs import writes_constants, written_inputs
from tvm_fusion.runtime.timing.timing import time_modules

from ..support.fake_cuda_graph import captured_on_cpu
from ..support.runtime_cases import LLVM, relax_module


def in_place() -> tvm.tirx.PrimFunc:
    """Adds the second tensor to the first."""

    @T.prim_func(s_tir=True, private=True)
    def increment(old: T.Buffer((4, 8), "float32"), step: T.Buffer((4, 8), "float32")):
        T.func_attr({"tirx.noalias": True})
        for i, j in T.grid(4, 8):
            with T.sblock("increment"):
                vi, vj = T.axis.remap("SS", [i, j])
                old[vi, vj] = old[vi, vj] + step[vi, vj]

    return increment


def counter(through_view: bool = False) -> tvm.IRModule:
    """y = relu(state + x), where state + x stays in state."""
    ty = relax.TensorType((4, 8), "float32")
    x, state = relax.Var("x", ty), relax.Var("state", ty)
    given = relax.Var("state", relax.TensorType((32,), "float32")) if through_view else state
    bb = relax.BlockBuilder()
    gv = bb.add_func(in_place(), "increment")
    with bb.function("main", [x, given]):
        with bb.dataflow():
            target = bb.emit(relax.op.reshape(given, (4, 8))) if through_view else given
            new = bb.emit(relax.op.call_tir_inplace(gv, [target, x], [0], ty))
            out = bb.emit_output(relax.op.nn.relu(new))
        bb.emit_func_output(out)
    return bb.get()


def check_counter(compiled, wrap, unwrap, calls=4):
    torch.manual_seed(0)
    state = torch.zeros(4, 8)
    wanted, kept = torch.zeros(4, 8), wrap(state.clone())
    for _ in range(calls):
        x = torch.randn(4, 8)
        wanted += x
        y = compiled(wrap(x), kept)
        torch.testing.assert_close(unwrap(y), wanted.relu())
        torch.testing.assert_close(unwrap(kept), wanted)


KINDS = {
    "torch": (lambda t: t, lambda t: t),
    "numpy": (lambda t: t.numpy(), torch.from_numpy),
    "transposed": (lambda t: t.T.contiguous().T, lambda t: t),
    "unaligned": (
        lambda t: torch.cat([torch.zeros(1), t.view(-1)])[1:].view(4, 8),
        lambda t: t,
    ),
    "big-endian": (
        lambda t: t.numpy().astype(">f4"),
        lambda a: torch.from_numpy(a.astype("float32")),
    ),
    "tvm": (lambda t: tvm.runtime.tensor(t.numpy()), lambda t: torch.from_numpy(t.numpy())),
}


@pytest.mark.one_in(2)
@pytest.mark.parametrize("kind", KINDS)
def test_what_is_written_reaches_the_caller(kind):
    check_counter(CompiledModule.of(build(counter(), LLVM)), *KINDS[kind])


@pytest.mark.one_in(2)
@pytest.mark.parametrize("kind", KINDS)
def test_a_captured_call_writes_once_and_reaches_the_caller(monkeypatch, kind):
    compiled, driver = captured_on_cpu(monkeypatch, counter())
    check_counter(compiled, *KINDS[kind])
    assert compiled.cuda_graph_refusal is None
    assert len(driver.said("capture")) == 1
    assert len(driver.said("launch")) == 3


def test_a_bound_call_writes_once_from_the_first_call_on(monkeypatch):
    compiled, driver = captured_on_cpu(monkeypatch, counter())
    x, state = torch.ones(4, 8), torch.zeros(4, 8)
    call = compiled.bind(x, state)
    for number in range(1, 4):
        result = torch.from_dlpack(call())
        assert torch.equal(state, torch.full((4, 8), float(number)))
        assert torch.equal(result, state)
    assert len(driver.said("launch")) == 2


def test_a_module_that_writes_to_its_inputs_is_timed_wherever_these_lie():
    compiled, room = CompiledModule.of(build(counter(), LLVM)), np.zeros(33, "float32")
    inputs = [np.ones((4, 8), "float32"), room[1:].reshape(4, 8)]
    assert time_modules({"ours": compiled}, inputs, repeats=3)["ours"].median_us > 0


def test_a_report_captures_a_call_wherever_its_inputs_lie(monkeypatch):
    compiled, _ = captured_on_cpu(monkeypatch, counter())
    room = np.zeros(33, "float32")
    found = calls_of(compiled, [np.ones((4, 8), "float32"), room[1:].reshape(4, 8)], time=True)
    assert found["cuda_graph"] == "captured at the first call"
    assert found["call_us"].fused > 0


def test_writes_are_followed_through_views_to_inputs():
    assert written_inputs(counter()) == (1,)
    assert written_inputs(counter(through_view=True)) == (1,)
    plain = relax_module(lambda bb, x: relax.op.nn.relu(x), ("x", (4, 8), "float32"))
    assert written_inputs(plain) == ()


def test_what_cannot_be_written_to_is_refused_before_the_call():
    compiled = CompiledModule.of(build(counter(), LLVM))
    x = np.ones((4, 8), "float32")
    fixed = np.zeros((4, 8), "float32")
    fixed.flags.writeable = False
    with pytest.raises(InputError, match="input state is written to, but the array is read-only"):
        compiled(x, fixed)
    with pytest.raises(InputError, match=r"input state .* several of its elements are one"):
        compiled(torch.ones(4, 8), torch.zeros(1, 8).expand(4, 8))
    with pytest.raises(InputError, match="input state is written to, but it would be copied"):
        compiled.bind(torch.ones(4, 8), torch.zeros(8, 4).T)


def test_a_loaded_module_knows_what_it_writes(tmp_path):
    compiled = CompiledModule.of(build(counter(), LLVM))
    loaded = CompiledModule.load(compiled.save(tmp_path / "counter.so"))
    assert loaded.writes == compiled.writes == (1,)
    check_counter(loaded, *KINDS["transposed"])


@pytest.mark.parametrize("target", ["constant", "view", "input"])
def test_it_is_known_whether_a_constant_is_written_into(target):
    bb, ty = relax.BlockBuilder(), relax.TensorType((4, 8), "float32")
    gv = bb.add_func(in_place().with_attr("global_symbol", "increment"), "increment")
    x = relax.Var("x", ty)
    with bb.function("main", [x]):
        held = relax.const(np.ones((8, 4), "float32"))
        written = {
            "constant": lambda: relax.const(np.ones((4, 8), "float32")),
            "view": lambda: bb.emit(relax.op.reshape(held, (4, 8))),
            "input": lambda: x,
        }[target]()
        bb.emit_func_output(bb.emit(relax.op.call_tir_inplace(gv, [written, x], [0], ty)))
    assert writes_constants(bb.get()) == (target != "input")
