"""Modules of several public functions: one executable, each function called by its name."""

import json
import re
import subprocess
import sys
from contextlib import nullcontext
from dataclasses import replace
from itertools import chain, count
from pathlib import Path

import numpy as np
import pytest
import tvm
import tvm_ffi
from tvm import relax, tirx
from tvm.relax.frontend import nn
from tvm.script import ir as I
from tvm.script import relax as R

import tvm_fusion
from tvm_fusion import cli
from tvm_fusion.check import compiled as check_module
from tvm_fusion.compilation import several_functions
from tvm_fusion.compilation.one_function import Wishes
from tvm_fusion.errors import (
    BuildError,
    FrontendError,
    InputError,
    PlanError,
    TargetError,
    VerificationError,
)
from tvm_fusion.flow import kernels_ahead
from tvm_fusion.flow.functions import planned_function, planned_functions
from tvm_fusion.flow.planned import Planned
from tvm_fusion.frontends import load
from tvm_fusion.plan.plan import UNWRITTEN
from tvm_fusion.runtime.build.cubin_cache import Compiling
from tvm_fusion.runtime.build.cuda_compiler import Compiler, kernel_names
from tvm_fusion.runtime.calls.compiled_module import CompiledFunctions, CompiledModule
from tvm_fusion.runtime.calls.launch_count import call_sites
from tvm_fusion.runtime.calls.signature import Signature
from tvm_fusion.transform.apply.write_kernels import KernelWriter
from tvm_fusion.transform.functions.entries import entry_alone, entry_functions, inlined, joined
from tvm_fusion.transform.functions.function_apart import renamed
from tvm_fusion.tuning.session.lookup import OtherKernels

from ..pipelines import llm
from ..pipelines.modules import cases
from ..runtime.test_written_inputs import in_place
from ..support.runtime_cases import H200_CONFIG

FACTS = (
    *("signature", "function", "launches", "memory", "peak_memory_bytes", "writes", "own"),
    *("built", "uncapturable", "cuda_graph_refusal"),
)
TARGET = {"kind": "llvm", "num-cores": 2}
SEVERAL = cases(TARGET)["several"]
WIDTH, WORDS = 32, 40


def weight(*shape: int, seed: int = 0) -> np.ndarray:
    values = np.random.default_rng(seed).uniform(-1, 1, shape) / np.sqrt(shape[-1])
    return values.astype("float32")


def head(rows: dict[str, int], held: relax.Expr | None = None) -> tvm.IRModule:
    """Functions y = relu(x w^T) over one constant w, for x of so many rows each."""
    held = relax.const(weight(WORDS, WIDTH)) if held is None else held
    builder = relax.BlockBuilder()
    for name, n in rows.items():
        x = relax.Var("x", relax.TensorType((n, WIDTH), "float32"))
        with builder.function(name, [x]):
            with builder.dataflow():
                h = builder.emit(relax.op.matmul(x, relax.op.permute_dims(held)))
                y = builder.emit_output(relax.op.nn.relu(h))
            builder.emit_func_output(y)
    return builder.get()


def counter_and_reader() -> tvm.IRModule:
    """count(x, state): relu of state + x, which stays in state; read(state, scale): a product."""
    ty = relax.TensorType((4, 8), "float32")
    bb = relax.BlockBuilder()
    gv = bb.add_func(in_place(), "increment")
    x, state = relax.Var("x", ty), relax.Var("state", ty)
    with bb.function("count", [x, state]):
        with bb.dataflow():
            new = bb.emit(relax.op.call_tir_inplace(gv, [state, x], [0], ty))
            out = bb.emit_output(relax.op.nn.relu(new))
        bb.emit_func_output(out)
    state, scale = relax.Var("state", ty), relax.Var("scale", ty)
    with bb.function("read", [state, scale]):
        with bb.dataflow():
            out = bb.emit_output(relax.op.multiply(state, scale))
        bb.emit_func_output(out)
    return bb.get()


@pytest.fixture(scope="module")
def several() -> CompiledFunctions:
    return tvm_fusion.compile(SEVERAL.make(), TARGET)


# ---- numbers and signatures


@pytest.mark.one_in(2)
@pytest.mark.parametrize("name", SEVERAL.calls)
@pytest.mark.parametrize("seed", range(3))
def test_each_function_is_called_by_its_name(several, name, seed):
    inputs, [wanted] = SEVERAL.calls[name](np.random.default_rng(seed))
    np.testing.assert_allclose(several[name](*inputs), wanted, rtol=1e-4, atol=1e-5)


def test_each_function_has_facts_of_its_own(several):
    assert list(several) == ["decode", "prefill"]
    assert len(several) == 2
    assert "decode" in several
    assert "main" not in several
    decode, prefill = several["decode"], several["prefill"]
    assert [spec.name for spec in decode.signature.inputs] == ["x", "gamma", "w", "hot"]
    assert prefill.signature.inputs[0].shape == ("n", 32)
    assert prefill.memory.peak_bytes() is None
    assert prefill.memory.peak_bytes({"n": 7}) > decode.memory.peak_bytes()
    assert prefill.launches == 2
    assert decode.executable is prefill.executable
    assert decode.vm is prefill.vm
    assert several.plan == {"decode": decode.plan, "prefill": prefill.plan}


def test_each_function_is_checked_and_reported(several):
    assert list(several.report) == ["decode", "prefill"]
    for name, report in several.report.items():
        assert report.verify.passed
        assert report is several[name].report
    text = str(several.report)
    assert text.startswith("function decode\n")
    assert "\n\nfunction prefill\n" in text
    told = json.loads(json.dumps(several.report.to_json()))
    assert told["functions"]["prefill"]["launches"]["fused"] == 2


def test_what_functions_call_is_fused_in_its_place():
    @I.ir_module
    class Calling:
        @R.function(private=True)
        def scale(x: R.Tensor(("n", 8), "float32")) -> R.Tensor(("n", 8), "float32"):
            with R.dataflow():
                y = R.multiply(x, R.const(0.5, "float32"))
                R.output(y)
            return y

        @R.function
        def inner(x: R.Tensor(("n", 8), "float32")) -> R.Tensor(("n", 8), "float32"):
            cls = Calling
            with R.dataflow():
                h = cls.scale(x)
                y = R.tanh(h)
                R.output(y)
            return y

        @R.function
        def main(x: R.Tensor((3, 8), "float32")) -> R.Tensor((3, 8), "float32"):
            cls = Calling
            with R.dataflow():
                h = cls.inner(x)
                y = R.add(h, x)
                R.output(y)
            return y

    compiled = tvm_fusion.compile(Calling, TARGET)
    assert list(compiled) == ["inner", "main"]
    assert [compiled[name].launches for name in compiled] == [1, 1]
    x = weight(3, 8)
    np.testing.assert_allclose(compiled["inner"](x), np.tanh(x / 2), rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(compiled["main"](x), np.tanh(x / 2) + x, rtol=1e-5, atol=1e-6)
    np.testing.assert_array_equal(compiled(x), compiled["main"](x))


def test_private_functions_of_a_module_of_one_entry_are_fused_in_their_place():
    @I.ir_module
    class Private:
        @R.function(private=True)
        def half(x: R.Tensor(("n", 8), "float32")) -> R.Tensor(("n", 8), "float32"):
            with R.dataflow():
                y = R.multiply(x, R.const(0.5, "float32"))
                R.output(y)
            return y

        @R.function
        def forward(x: R.Tensor((3, 8), "float32")) -> R.Tensor((3, 8), "float32"):
            cls = Private
            with R.dataflow():
                h = cls.half(x)
                y = R.add(h, x)
                R.output(y)
            return y

    compiled = tvm_fusion.compile(Private, TARGET)
    assert isinstance(compiled, CompiledModule)
    assert compiled.launches == 1
    x = weight(3, 8)
    np.testing.assert_allclose(compiled(x), 1.5 * x, rtol=1e-6)


@I.ir_module
class CallsItself:
    @R.function(private=True)
    def double(x: R.Tensor((4,), "float32"), last: R.Tensor((), "bool")) -> R.Tensor(
        (4,), "float32"
    ):
        cls = CallsItself
        if last:
            y = R.tanh(x)
        else:
            d = R.add(x, x)
            y = cls.double(d, R.const(True))
        return y

    @R.function
    def main(x: R.Tensor((4,), "float32"), last: R.Tensor((), "bool")) -> R.Tensor((4,), "float32"):
        cls = CallsItself
        h = R.exp(x)
        y = cls.double(h, last)
        return y


@I.ir_module
class CallEachOther:
    @R.function(private=True)
    def double(x: R.Tensor((4,), "float32"), last: R.Tensor((), "bool")) -> R.Tensor(
        (4,), "float32"
    ):
        cls = CallEachOther
        y = cls.bend(x, last)
        return y

    @R.function(private=True)
    def bend(x: R.Tensor((4,), "float32"), last: R.Tensor((), "bool")) -> R.Tensor((4,), "float32"):
        cls = CallEachOther
        if last:
            y = R.tanh(x)
        else:
            d = R.add(x, x)
            y = cls.double(d, R.const(True))
        return y

    @R.function
    def main(x: R.Tensor((4,), "float32"), last: R.Tensor((), "bool")) -> R.Tensor((4,), "float32"):
        cls = CallEachOther
        h = R.exp(x)
        y = cls.bend(h, last)
        return y


@I.ir_module
class MainCallsItself:
    @R.function
    def main(x: R.Tensor((4,), "float32"), last: R.Tensor((), "bool")) -> R.Tensor((4,), "float32"):
        cls = MainCallsItself
        if last:
            h = R.exp(x)
            y = R.tanh(h)
        else:
            d = R.add(x, R.const(np.log(2).astype("float32")))
            y = cls.main(d, R.const(True))
        return y


@pytest.mark.parametrize("mod", [CallsItself, CallEachOther, MainCallsItself])
def test_functions_that_call_themselves_stay_calls(mod):
    compiled = tvm_fusion.compile(mod, TARGET)
    assert compiled.launches >= 2  # each place once, however often it is come to
    assert compiled.peak_memory_bytes is None  # nobody knows how deep the calls go
    x = weight(4)
    for last, times in ((True, 1), (False, 2)):
        found = compiled(x, np.array(last))
        np.testing.assert_allclose(found, np.tanh(times * np.exp(x)), rtol=1e-5)


@I.ir_module
class Branches:
    @R.function
    def main(x: R.Tensor((8, 16), "float32"), c: R.Tensor((), "bool")) -> R.Tensor(
        (8, 16), "float32"
    ):
        h = R.exp(x)
        h2 = R.multiply(h, x)
        if c:
            a = R.tanh(h2)
            b = R.multiply(a, a)
            r = R.add(b, h2)
        else:
            a = R.sigmoid(h2)
            b = R.multiply(a, h2)
            r = R.add(b, a)
        y = R.multiply(r, r)
        z = R.add(y, r)
        return z


def test_branches_are_fused_each_by_itself():
    compiled = tvm_fusion.compile(Branches, TARGET)
    assert compiled.report.verify.passed
    assert compiled.launches == 4  # two, and one in each branch
    assert COMPILED["unfused"]().launches == 10
    assert on_h200(Branches).launches == 4


# Always: kernels that nvcc refuses (`runtime/test_build`).
@pytest.mark.nightly
def test_a_kernel_of_a_branch_that_nvcc_refuses_is_left_to_tvm(monkeypatch, own_cache):
    compile_now = Compiler.compile

    def refusing(compiler, source, arch):
        if "tanh" in kernel_names(source)[0] and "multiply" in kernel_names(source)[0]:
            raise BuildError("it is refused")
        return compile_now(compiler, source, arch)

    monkeypatch.setattr(Compiler, "compile", refusing)
    assert on_h200(Branches).launches == 8


def test_branches_are_fused_while_a_group_gives_way():
    planned = planned_function(Branches, TARGET)
    planned = replace(planned, tuned=OtherKernels(None, planned.hw, planned.policy))
    assert CompiledModule.of(planned.build().built).launches == 4


def test_branches_give_way_before_a_plan_does(monkeypatch):
    wrong, right = count(), check_module.runner
    monkeypatch.setattr(
        check_module,
        "runner",
        lambda *args, **how: (
            lambda inputs: [x + (next(wrong) == 0) for x in right(*args, **how)(inputs)]
        ),
    )
    compiled = tvm_fusion.compile(Branches, TARGET)
    assert compiled.report.verify.passed
    assert compiled.launches == 8
    assert [len(group.ops) for group in compiled.plan.groups if len(group.ops) > 1] == [2, 2]


def test_constants_of_branches_are_packed():
    ty, flag = relax.TensorType((5, WIDTH), "float32"), relax.TensorType((), "bool")
    x, c = relax.Var("x", ty), relax.Var("c", flag)
    weights = [weight(WIDTH, WIDTH, seed=i) for i in range(2)]

    def branch(w: np.ndarray) -> relax.SeqExpr:
        h, y = relax.Var("h", ty), relax.Var("y", ty)
        product = relax.VarBinding(h, relax.op.matmul(x, relax.const(w)))
        block = relax.BindingBlock([product, relax.VarBinding(y, relax.op.nn.relu(h))])
        return relax.SeqExpr([block], y)

    builder = relax.BlockBuilder()
    with builder.function("main", [x, c]):
        builder.emit_func_output(builder.emit(relax.If(c, *map(branch, weights))))
    compiled = tvm_fusion.compile(builder.get(), TARGET)
    assert compiled.launches == 2
    [pool] = [s for s in compiled.executable.stats().splitlines() if "Constant pool" in s]
    assert f"[{WIDTH}, {WIDTH}]" not in pool
    values = weight(5, WIDTH, seed=3)
    for last, w in zip((True, False), weights, strict=True):
        found = compiled(values, np.array(last))
        np.testing.assert_allclose(found, np.maximum(values @ w, 0), rtol=1e-4, atol=1e-5)


COMPILED = {
    "compile": lambda: tvm_fusion.compile(Branches, TARGET),
    "unfused": lambda: CompiledModule.of(planned_function(Branches, TARGET).build_unfused()),
    "pipeline": lambda: CompiledModule(
        tvm.compile(Branches, tvm.target.Target(TARGET), relax_pipeline="tvm_fusion"),
        tvm.target.Target(TARGET),
        Signature.of(Branches, "main"),
    ),
}


@pytest.mark.parametrize("way", COMPILED)
def test_branches_share_no_storage_that_one_of_them_allocates(way):
    compiled = COMPILED[way]()
    x = weight(8, 16)
    h = np.exp(x) * x
    bent, s = np.tanh(h), 1 / (1 + np.exp(-h))
    for c, r in ((True, bent * bent + h), (False, s * h + s)):  # TVM's plan ends the process
        np.testing.assert_allclose(compiled(x, np.array(c)), r * r + r, rtol=1e-5)


def test_inputs_are_written_by_the_function_that_writes_them():
    compiled = tvm_fusion.compile(counter_and_reader(), TARGET)
    assert compiled["count"].writes == (1,)
    assert compiled["read"].writes == ()
    x, state, total = weight(4, 8), np.zeros((4, 8), "float32"), np.zeros((4, 8), "float32")
    for _ in range(3):
        total += x
        np.testing.assert_allclose(compiled["count"](x, state), np.maximum(total, 0), rtol=1e-6)
        np.testing.assert_allclose(state, total, rtol=1e-6)
    state.flags.writeable = False
    np.testing.assert_allclose(compiled["read"](state, x), total * x, rtol=1e-6)
    with pytest.raises(InputError, match="input state is written to, but the array is read-only"):
        compiled["count"](x, state)


class Layer(nn.Module):
    """A gated layer and a head, over one position or many."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(WIDTH, -1, 1e-5, bias=False)
        self.up = nn.Linear(WIDTH, 2 * WIDTH, bias=False)
        self.down = nn.Linear(2 * WIDTH, WIDTH, bias=False)

    def prefill(self, x: nn.Tensor) -> nn.Tensor:
        return self.down(nn.op.silu(self.up(self.norm(x)))) + x

    def decode(self, x: nn.Tensor) -> nn.Tensor:
        return self.prefill(x)


def test_an_exported_network_is_compiled_with_all_its_functions():
    mod, parameters = Layer().export_tvm(
        {
            "prefill": {"x": nn.spec.Tensor((1, "n", WIDTH), "float32")},
            "decode": {"x": nn.spec.Tensor((1, 1, WIDTH), "float32")},
        }
    )
    compiled = tvm_fusion.compile(mod, TARGET)
    gamma, up, down = (weight(*p.shape, seed=i) for i, (_, p) in enumerate(parameters))
    x = weight(1, 6, WIDTH, seed=9)
    h = x / np.sqrt((x * x).mean(-1, keepdims=True) + 1e-5) * gamma @ up.T
    wanted = (h / (1 + np.exp(-h))) @ down.T + x
    whole = compiled["prefill"](x, gamma, up, down)
    np.testing.assert_allclose(whole, wanted, rtol=1e-4, atol=1e-5)
    last = compiled["decode"](x[:, -1:], gamma, up, down)
    np.testing.assert_allclose(last, wanted[:, -1:], rtol=1e-4, atol=1e-5)


@pytest.mark.nightly
def test_a_language_model_keeps_its_cache_between_functions():
    shape = llm.Shape(layers=1, width=64, inner=96, heads=4, groups=2, words=100, dtype="float32")
    target = tvm.target.Target(TARGET)
    mod, parameters = llm.language_model(shape, target)
    compiled = tvm_fusion.compile(mod, target)
    assert compiled.report["embed"].verify.passed
    assert compiled.report["decode"].verify is None  # nobody can draw a cache
    weights = {name: weight(*map(int, p.shape), seed=i) for i, (name, p) in enumerate(parameters)}
    held = [tvm.runtime.tensor(w) for w in weights.values()]
    words = np.random.default_rng(0).integers(0, shape.words, 7)
    cache = compiled["make_cache"]((1,), (64,), (32,), (16,))
    _state("add_sequence")(cache, 0)
    for name, some, seen in (("prefill", words[:6], words[:6]), ("decode", words[6:], words)):
        x = compiled["embed"](some.astype("int32"), held)[None]
        _state("begin_forward")(cache, tvm_ffi.Shape([0]), tvm_ffi.Shape([len(some)]))
        logits, _ = compiled[name](x, cache, held)
        _state("end_forward")(cache)
        wanted = llm.logits(shape, weights, llm.embedded(shape, weights, seen))
        np.testing.assert_allclose(logits[0, 0], wanted, rtol=1e-3, atol=1e-4)


def _state(name: str):
    return tvm_ffi.get_global_func(f"vm.builtin.kv_state_{name}")


# ---- what functions share


@pytest.mark.parametrize("copies", [False, True])
def test_weights_are_held_once_and_packed_once(copies):
    mod = head({"prefill": 24, "decode": 1})
    if copies:  # as equal numbers in two places, such as two reads of a file give
        own = head({"decode": 1}, relax.const(weight(WORDS, WIDTH)))
        mod = tvm.IRModule({"prefill": mod["prefill"], "decode": own["decode"]})
    compiled = tvm_fusion.compile(mod, TARGET)
    [pool] = [s for s in compiled.executable.stats().splitlines() if "Constant pool" in s]
    [held] = re.findall(r"(?<!\w)\[(\d+(?:, \d+)+)\]", pool)
    assert [*map(int, held.split(", "))] not in ([WORDS, WIDTH], [WIDTH, WORDS])
    assert compiled["decode"].memory.weights_bytes == WORDS * WIDTH * 4
    x = weight(24, WIDTH, seed=1)
    wanted = np.maximum(x @ weight(WORDS, WIDTH).T, 0)
    np.testing.assert_allclose(compiled["prefill"](x), wanted, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(compiled["decode"](x[:1]), wanted[:1], rtol=1e-4, atol=1e-5)


def test_equal_kernels_are_one_and_others_have_names_of_their_own():
    compiled = tvm_fusion.compile(head({"a": 4, "b": 4, "c": 5}), TARGET)
    called = {name: set(call_sites(compiled.executable, name)) for name in compiled}
    assert called["a"] == called["b"]
    assert called["a"].isdisjoint(called["c"])
    for name, report in compiled.report.items():
        assert {group.name for group in report.groups} == called[name]


def test_joined_modules_keep_what_differs_apart():
    mods = {n: entry_alone(head({n: rows}), n) for n, rows in (("a", 4), ("b", 4), ("c", 5))}
    parts = {n: relax.transform.LegalizeOps()(m) for n, m in mods.items()}
    mod, names = joined(parts)
    relax.analysis.well_formed(mod)
    assert entry_functions(mod) == ["a", "b", "c"]
    kernels = [f for _, f in mod.functions_items() if isinstance(f, tirx.PrimFunc)]
    assert names["a"]["matmul"] == names["b"]["matmul"] != names["c"]["matmul"]
    assert len(kernels) == len(set(names["a"].values()) | set(names["c"].values())) - 2


def test_calls_of_all_functions_wait_for_each_other(several):
    assert several["decode"].lock is several["prefill"].lock


# ---- files

SCRIPT = """
import sys
import numpy as np
from tvm_fusion.runtime.calls.compiled_module import CompiledModule
from tvm_fusion.runtime.calls.signature import Signature

compiled = CompiledModule.load(sys.argv[1])
given = np.load(sys.argv[2])
for name in compiled:
    inputs = [given[f"{name}_{i}"] for i in range(len(compiled[name].signature.inputs))]
    np.testing.assert_allclose(compiled[name](*inputs), given[name], rtol=1e-4, atol=1e-5)
print(*compiled, compiled["prefill"].launches)
print(compiled.report)
"""


# Always: modules that fresh processes load (`runtime/test_saved_modules`).
@pytest.mark.nightly
@pytest.mark.usefixtures("no_torch")
def test_all_functions_are_one_file_that_a_fresh_process_loads(several, tmp_path):
    path = several.save(tmp_path / "model.so")
    known = {}
    for name, call in SEVERAL.calls.items():
        inputs, [known[name]] = call(np.random.default_rng(0))
        known |= {f"{name}_{i}": x for i, x in enumerate(inputs)}
    np.savez(tmp_path / "known.npz", **known)
    root = str(Path(tvm_fusion.__file__).parents[1])
    ran = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(path), str(tmp_path / "known.npz")],
        cwd=root,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout.startswith("decode prefill 2\nfunction decode\n")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["known.npz", "model.so", "model.so.json"]


def test_one_function_can_be_saved_as_a_module_of_its_own(several, tmp_path):
    loaded = CompiledModule.load(several["prefill"].save(tmp_path / "prefill.so"))
    inputs, [wanted] = SEVERAL.calls["prefill"](np.random.default_rng(0))
    assert loaded.function == "prefill"
    np.testing.assert_allclose(loaded(*inputs), wanted, rtol=1e-4, atol=1e-5)


def test_the_command_line_compiles_and_explains_all_functions(tmp_path, capsys):
    model, library = tmp_path / "model.json", tmp_path / "model.so"
    model.write_text(tvm.ir.save_json(head({"decode": 1, "prefill": 24})))
    common = [str(model), "--target", "llvm"]
    assert cli.main(["explain", *common]) == 0
    text = capsys.readouterr().out
    assert text.index("function decode") < text.index("function prefill")
    assert cli.main(["compile", *common, "--peers", "none", "--json", "-o", str(library)]) == 0
    told = json.loads(capsys.readouterr().out)["functions"]
    assert all(told[name]["verify"]["passed"] for name in ("decode", "prefill"))
    x = weight(24, WIDTH)
    whole = CompiledModule.load(library)["prefill"](x)
    np.testing.assert_allclose(whole, np.maximum(x @ weight(WORDS, WIDTH).T, 0), atol=1e-5)


def test_the_command_line_knows_which_functions_have_a_pair(tmp_path, capsys):
    model = tmp_path / "model.json"
    model.write_text(tvm.ir.save_json(SEVERAL.make()))
    assert cli.main(["explain", str(model), "--target", "llvm", "--why", "p,gelu#1"]) == 0
    text = capsys.readouterr().out
    assert text.startswith("function prefill\np and gelu#1: one kernel computes both")
    assert "function decode" not in text
    assert cli.main(["explain", str(model), "--target", "llvm", "--why", "p,nothing"]) == 2


# ---- wrong numbers


@I.ir_module
class Pair:
    @R.function
    def decode(x: R.Tensor((3, 8), "float32"), y: R.Tensor((3, 8), "float32")) -> R.Tensor(
        (3, 8), "float32"
    ):
        with R.dataflow():
            h = R.add(x, y)
            z = R.nn.relu(h)
            R.output(z)
        return z

    @R.function
    def prefill(x: R.Tensor((5, 8), "float32")) -> R.Tensor((5, 8), "float32"):
        with R.dataflow():
            h = R.nn.relu(x)
            z = R.multiply(h, x)
            R.output(z)
        return z


def wrong_decode(monkeypatch, times: float) -> None:
    """Make the first `times` checks of `Pair.decode` fail."""
    number, right = count(), check_module.runner

    def runner(built, **how):
        run = right(built, **how)
        if len(built.signature.inputs) != len(Pair["decode"].params):
            return run
        error = next(number) < times
        return lambda inputs: [x + error for x in run(inputs)]

    monkeypatch.setattr(check_module, "runner", runner)


def test_a_function_that_is_wrong_whatever_is_compiled_is_named(monkeypatch, tmp_path):
    monkeypatch.setenv("TVM_FUSION_CACHE", str(tmp_path))
    wrong_decode(monkeypatch, float("inf"))
    with pytest.raises(VerificationError, match=r"^function decode: wrong numbers, whatever"):
        tvm_fusion.compile(Pair, TARGET)
    compiled = tvm_fusion.compile(Pair, TARGET, verify="report")
    assert not compiled["decode"].report.verify.passed
    assert compiled["prefill"].report.verify.passed


@pytest.mark.parametrize("wrong", [1, 2, 3])
def test_only_the_function_that_is_wrong_gives_way(monkeypatch, wrong):
    wrong_decode(monkeypatch, wrong)
    compiled = tvm_fusion.compile(Pair, TARGET)
    assert all(report.verify.passed for _, report in compiled.report.items())
    groups = compiled.plan["decode"].groups
    assert all(len(group.ops) == 1 for group in groups)
    assert all(group.kernel_class in UNWRITTEN for group in groups) is (wrong >= 2)
    assert [len(group.ops) for group in compiled.plan["prefill"].groups] == [2]
    x, y, z = weight(3, 8), weight(3, 8, seed=1), weight(5, 8)
    np.testing.assert_allclose(compiled["decode"](x, y), np.maximum(x + y, 0), rtol=1e-6)
    np.testing.assert_allclose(compiled["prefill"](z), np.maximum(z, 0) * z, rtol=1e-6)


def test_a_function_that_is_right_alone_and_wrong_with_others_is_an_error(monkeypatch):
    functions = planned_functions(Pair, TARGET)
    wrong_decode(monkeypatch, 1)  # so that all are built again
    again = several_functions.checked_again

    def spoiled(checked, made):
        wrong_decode(monkeypatch, float("inf"))
        return again(checked, made)

    monkeypatch.setattr(several_functions, "checked_again", spoiled)
    with pytest.raises(VerificationError, match=r"^function decode: wrong numbers"):
        several_functions.compile_functions(functions, Wishes(verify=True))


# ---- plans


def test_plans_are_given_by_function(several):
    compiled = tvm_fusion.compile(SEVERAL.make(), TARGET, plan=several.plan, verify=False)
    assert compiled.plan == several.plan
    one = {"prefill": several.plan["prefill"].to_dict()}
    report = tvm_fusion.explain(SEVERAL.make(), TARGET, plan=one)
    assert report["prefill"].plan == several.report["prefill"].plan


@pytest.mark.parametrize(
    ("plan", "why"),
    [
        (lambda plans: plans["decode"], r"several functions \(decode, prefill\): give a plan for"),
        (lambda plans: {"encode": plans["decode"]}, "a plan for encode, but the functions of the"),
        (lambda plans: {"decode": plans["prefill"]}, "^function decode: .*another module"),
        (lambda plans: {"decode": 3}, "not a int"),
    ],
    ids=["one", "unknown", "another", "kind"],
)
def test_plans_that_do_not_fit_are_refused(several, plan, why):
    with pytest.raises(PlanError, match=why):
        tvm_fusion.compile(SEVERAL.make(), TARGET, plan=plan(several.plan))


# ---- what goes wrong


def test_a_call_that_does_not_say_which_function_is_refused(several):
    for call in (several, several.bind, several.measure_peak_memory):
        with pytest.raises(
            InputError, match=r"functions \(decode, prefill\) and no 'main': say which"
        ):
            call(np.zeros(3))


def test_facts_of_a_call_are_those_of_main(several):
    mod = renamed(Pair, Pair.get_global_var("decode"), "main")
    compiled = tvm_fusion.compile(mod, TARGET)
    main = compiled["main"]
    for name in FACTS:
        assert getattr(compiled, name) == getattr(main, name), name
        assert not hasattr(several, name)
        with pytest.raises(
            InputError, match=rf"say which is meant, as in module\['decode'\].{name}"
        ):
            getattr(several, name)
    assert [spec.name for spec in compiled.signature.inputs] == ["x", "y"]
    x, y = weight(3, 8), weight(3, 8, seed=1)
    np.testing.assert_allclose(compiled.bind(x, y)().numpy(), np.maximum(x + y, 0), rtol=1e-6)
    assert compiled.vm is compiled["prefill"].vm


def test_an_unknown_function_is_refused_with_those_that_there_are(several):
    for found in (several, several.report):
        with pytest.raises(InputError, match=r"function 'encode'.* decode, prefill"):
            found["encode"]


def test_wrong_inputs_are_named_with_the_function(several):
    inputs, _ = SEVERAL.calls["decode"](np.random.default_rng(0))
    with pytest.raises(InputError, match=r"^decode: expected 4 inputs"):
        several["decode"](*inputs[:3])
    with pytest.raises(InputError, match=r"^decode: input x: expected shape"):
        several["decode"](np.zeros((2, 32), "float32"), *inputs[1:])


def test_a_cpu_module_has_no_cuda_graphs(several):
    with pytest.raises(TargetError, match="cuda_graph: the module is compiled for llvm"):
        several.cuda_graph = True
    assert several.cuda_graph == {"decode": None, "prefill": None}


def test_what_takes_one_function_names_those_that_there_are():
    with pytest.raises(
        FrontendError, match=r"`tvm_fusion.compile`, `explain` and `tune` take all public"
    ):
        load(SEVERAL.make())
    with pytest.raises(InputError, match="the model has several functions: decode, prefill"):
        planned_function(SEVERAL.make(), TARGET)


# ---- CUDA, without a GPU


def test_functions_are_planned_for_a_gpu_each_by_itself():
    report = tvm_fusion.explain(SEVERAL.make(), tvm.target.Target(H200_CONFIG))
    assert [name for name, _ in report.items()] == ["decode", "prefill"]
    assert report["prefill"].launches.fused < report["prefill"].launches.unfused


# Always: what is captured, and why not (`runtime/test_cuda_graph`).
@pytest.mark.nightly
def test_whether_calls_can_be_captured_is_told_by_function():
    options = {"verify": False, "cuda_graph": True}
    compiled = tvm_fusion.compile(SEVERAL.make(), tvm.target.Target(H200_CONFIG), **options)
    assert compiled["prefill"].uncapturable is None
    assert compiled["prefill"].report.cuda_graph == (
        "captured at the second call of a size, for at most 8 sizes at a time"
    )
    assert "a branch depends on the values" in compiled["decode"].cuda_graph_refusal
    compiled.cuda_graph = False
    assert set(compiled.cuda_graph.values()) == {None}


@I.ir_module
class Alike:
    """Kernels of one form: two that are equal, one that is not."""

    @R.function
    def again(x: R.Tensor((16, 64), "float32")) -> R.Tensor((16, 64), "float32"):
        with R.dataflow():
            h = R.nn.relu(x)
            y = R.multiply(h, x)
            R.output(y)
        return y

    @R.function
    def other(x: R.Tensor((16, 64), "float32")) -> R.Tensor((16, 64), "float32"):
        with R.dataflow():
            h = R.negative(x)
            y = R.multiply(h, x)
            R.output(y)
        return y

    @R.function
    def relu(x: R.Tensor((16, 64), "float32")) -> R.Tensor((16, 64), "float32"):
        with R.dataflow():
            h = R.nn.relu(x)
            y = R.multiply(h, x)
            R.output(y)
        return y


@pytest.fixture
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("TVM_FUSION_CACHE", str(tmp_path))
    monkeypatch.setenv("TVM_FUSION_KERNEL_CACHE", "1")


def on_h200(mod: tvm.IRModule) -> CompiledFunctions:
    return tvm_fusion.compile(mod, tvm.target.Target(H200_CONFIG), verify=False)


def kernels_by_function(compiled: CompiledFunctions) -> dict[str, list[str]]:
    """The source of each launch."""
    launched = {name: chain(*one.built.kernels.values()) for name, one in compiled.items()}
    sources = {k: source for source in sources_of(compiled) for k in kernel_names(source)}
    return {name: [re.sub(k, "kernel", sources[k]) for k in ks] for name, ks in launched.items()}


def sources_of(compiled: CompiledFunctions) -> tuple[str, ...]:
    first = next(iter(compiled))
    return compiled[first].built.cuda_sources


@pytest.mark.usefixtures("own_cache")
@pytest.mark.one_in(2)
@pytest.mark.parametrize("mod", [Alike, SEVERAL.make()], ids=["alike", "several"])
def test_kernels_compiled_ahead_are_those_of_a_build_without(mod, monkeypatch):
    cold = on_h200(mod)
    with monkeypatch.context() as patch:
        if mod is Alike:  # kernels of branches are written each time
            patch.setattr(KernelWriter, "kernel", lambda *_: pytest.fail("it is written again"))
        warm = on_h200(mod)
    monkeypatch.setattr(kernels_ahead, "kernels_ahead", lambda *_: nullcontext())
    plain = on_h200(mod)
    wanted = kernels_by_function(plain)
    assert kernels_by_function(cold) == wanted
    assert kernels_by_function(warm) == wanted
    assert len(sources_of(cold)) == len(sources_of(warm)) == len(set(chain(*wanted.values())))


def test_numbers_that_the_host_computes_are_no_kernels():
    n = tirx.Var("n", "int64")
    builder = relax.BlockBuilder()
    x = relax.Var("x", relax.TensorType((n, 4), "float32"))
    with builder.function("main", [x]):
        with builder.dataflow():
            h = builder.emit(relax.op.nn.relu(x))
            call = ("tests.scaled", h, relax.prim_value(n * 2))
            y = builder.emit(relax.op.call_pure_packed(*call, ty_args=[h.ty]))
            z = builder.emit_output(relax.op.exp(y))
        builder.emit_func_output(z)
    compiled = on_h200(builder.get())
    assert [len(found) for found in compiled.built.kernels.values()].count(1) == 2


@pytest.mark.usefixtures("own_cache")
def test_nvcc_begins_while_other_functions_are_still_written(monkeypatch):
    events = []
    write, begin = Planned.write_unpacked, Compiling.begin

    def noted(planned, ahead):
        events.append(planned.source.function)
        found = write(planned, ahead)
        assert ahead._ahead.codes  # they are lowered in other threads
        return found

    def begun(compiling, source):
        events.append(kernel_names(source))
        return begin(compiling, source)

    monkeypatch.setattr(Planned, "write_unpacked", noted)
    monkeypatch.setattr(Compiling, "begin", begun)
    on_h200(Alike)
    first, second = events[1], events[3]
    assert events[:5] == ["again", first, "other", second, "relu"]
    assert first != second
    assert set(events[5:]) == {first, second}  # equal kernels are one


@pytest.mark.usefixtures("own_cache")
def test_a_kernel_that_nvcc_refuses_is_cut_in_each_function_that_has_it(monkeypatch):
    compile_now = Compiler.compile

    def refusing(compiler, source, arch):
        if "relu" in kernel_names(source)[0] and "multiply" in kernel_names(source)[0]:
            raise BuildError("it is refused")
        return compile_now(compiler, source, arch)

    monkeypatch.setattr(Compiler, "compile", refusing)
    compiled = on_h200(Alike)
    assert {name: one.launches for name, one in compiled.items()} == {
        "again": 2,
        "other": 1,
        "relu": 2,
    }


@pytest.mark.gpu
def test_each_function_has_cuda_graphs_of_its_own():
    import torch

    compiled = tvm_fusion.compile(Pair, "cuda", cuda_graph=True)
    assert all(report.verify.passed for _, report in compiled.report.items())
    for seed in range(3):
        x, y, z = (
            torch.from_numpy(weight(n, 8, seed=seed + i)).cuda() for i, n in enumerate((3, 3, 5))
        )
        torch.testing.assert_close(compiled["decode"](x, y), (x + y).relu())
        torch.testing.assert_close(compiled["prefill"](z), z.relu() * z)
    assert all(function.cuda_graph_refusal is None for _, function in compiled.items())


def test_private_functions_of_others_stay_calls():
    @I.ir_module
    class Library:
        @R.function(private=True)
        def exp(x: R.Tensor((4,), "float32")) -> R.Tensor((4,), "float32"):
            R.func_attr({"Composite": "mine.exp"})
            with R.dataflow():
                y = R.exp(x)
                R.output(y)
            return y

        @R.function(private=True)
        def bend(x: R.Tensor((4,), "float32")) -> R.Tensor((4,), "float32"):
            with R.dataflow():
                y = R.tanh(x)
                R.output(y)
            return y

        @R.function
        def main(x: R.Tensor((4,), "float32")) -> R.Tensor((4,), "float32"):
            cls = Library
            with R.dataflow():
                h = cls.exp(x)
                y = cls.bend(h)
                R.output(y)
            return y

    mod = inlined(Library)
    assert sorted(gvar.name_hint for gvar in mod.get_global_vars()) == ["exp", "main"]
    tvm.ir.assert_structural_equal(mod["exp"], Library["exp"])
