"""Saved modules without this package: from Python with tvm-ffi alone, and from C++."""

import json
import os
import re
import shutil
import subprocess
import sys
import textwrap
from pathlib import Path

import numpy as np
import pytest
import tvm
from tvm import relax

import tvm_fusion

from ..support.runtime_cases import LLVM, symbolic_sum

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "tutorials" / "pages" / "deploying.md"
POLICY = {"verify": False, "settle_budget_s": 0.0}
N, M = 5, 7
FORBIDDEN = """
    import sys

    class Forbidden:
        def find_spec(self, name, path=None, target=None):
            if name.partition(".")[0] in {forbidden}:
                raise AssertionError(f"{{name}} is imported")

    sys.meta_path.insert(0, Forbidden())
"""


def two_functions() -> tvm.IRModule:
    """Functions `scaled` and `summed` of a weight that they share."""
    weight = relax.const(np.arange(8, dtype="float32"))
    bb = relax.BlockBuilder()
    for name, emit in (("scaled", relax.op.multiply), ("summed", relax.op.add)):
        x = relax.Var("x", relax.TensorType((3, 8), "float32"))
        with bb.function(name, [x]):
            with bb.dataflow():
                out = bb.emit_output(relax.op.nn.softmax(bb.emit(emit(x, weight))))
            bb.emit_func_output(out)
    return bb.get()


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """`model.so` with two inputs of symbolic sizes and nested outputs, `several.so`, inputs, and
    what the modules give.
    """
    path = tmp_path_factory.mktemp("deployed")
    rng = np.random.default_rng(0)
    inputs = {"x": rng.standard_normal((N, 8)), "y": rng.standard_normal((N, M))}
    inputs = {name: value.astype("float32") for name, value in inputs.items()}
    for name, value in inputs.items():
        np.save(path / f"{name}.npy", value)
        value.tofile(path / f"{name}.bin")
    model = tvm_fusion.compile(symbolic_sum(), LLVM, policy=POLICY)
    model.save(path / "model.so")
    first, (second,) = model(*inputs.values())
    np.savez(path / "expected.npz", first=first, second=second)
    several = tvm_fusion.compile(two_functions(), LLVM, policy=POLICY)
    several.save(path / "several.so")
    x = inputs["x"][:3]
    x.tofile(path / "three.bin")
    np.savez(path / "several.npz", **{name: one(x) for name, one in several.items()})
    return path


def run(folder: Path, *command: str) -> str:
    done = subprocess.run(
        command,
        capture_output=True,
        text=True,
        cwd=folder,
        env={**os.environ, "TVM_NUM_THREADS": "2"},
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.usefixtures("no_torch")
def test_what_the_page_says_runs_with_tvm_ffi_alone(folder):
    (code,) = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    code = code.replace("list(result)", "[result[0], *result[1]]")  # of this model
    check = """
        expected = np.load("expected.npz")
        for name, output in zip(("first", "second"), outputs, strict=True):
            np.testing.assert_array_equal(np.from_dlpack(output), expected[name])
        mapped = Path("/proc/self/maps").read_text() if Path("/proc/self/maps").exists() else ""
        assert "libtvm_compiler" not in mapped
        assert not {"tvm", "tvm_fusion"} & sys.modules.keys()
    """
    hook = FORBIDDEN.format(forbidden=("tvm", "tvm_fusion"))
    run(folder, sys.executable, "-c", textwrap.dedent(hook) + code + textwrap.dedent(check))


@pytest.mark.usefixtures("no_torch")
def test_a_library_runs_in_a_virtual_machine_of_tvm_without_this_package(folder):
    code = """
        import numpy as np, tvm
        x, y = (tvm.runtime.tensor(np.load(f"{name}.npy")) for name in "xy")
        executable = tvm.runtime.load_module("model.so")
        first, (second,) = tvm.relax.VirtualMachine(executable, tvm.cpu())["main"](x, y)
        expected = np.load("expected.npz")
        np.testing.assert_array_equal(first.numpy(), expected["first"])
        np.testing.assert_array_equal(second.numpy(), expected["second"])
    """
    hook = FORBIDDEN.format(forbidden=("tvm_fusion",))
    run(folder, sys.executable, "-c", textwrap.dedent(hook) + textwrap.dedent(code))


@pytest.fixture(scope="module")
def program(tmp_path_factory) -> Path:
    """The program of `tutorials/deploy`, built by its Makefile."""
    if not (shutil.which("make") and shutil.which("g++")):
        if os.environ.get("CI"):
            pytest.fail("make and g++ are missing")
        pytest.skip("needs make and g++")
    built = tmp_path_factory.mktemp("program") / "deploy"
    shutil.copytree(ROOT / "tutorials" / "deploy", built)
    run(built, "make", f"PYTHON={sys.executable}", "CXX=g++")
    return built / "run"


def test_a_program_in_cpp_gives_what_python_gives(folder, program, record_property):
    words = ("./model.so", f"n={N}", f"m={M}", "x.bin", "y.bin", "out")
    said = dict(line.split() for line in run(folder, str(program), *words).splitlines())
    expected = np.load(folder / "expected.npz")
    for number, name in enumerate(("first", "second")):
        found = np.fromfile(folder / f"out{number}.bin", "float32")
        np.testing.assert_array_equal(found, expected[name].ravel())
    size = (folder / "model.so").stat().st_size
    print(f"{size} bytes, loaded in {said['load_ms']} ms, a call takes {said['call_ms']} ms")
    record_property("bytes", size)
    record_property("load_ms", said["load_ms"])
    assert float(said["call_ms"]) > 0
    assert 10_000 < size < 1_000_000


def test_a_program_in_cpp_calls_each_function_of_several(folder, program):
    expected = np.load(folder / "several.npz")
    for name in ("scaled", "summed"):
        run(folder, str(program), "./several.so", f"function={name}", "three.bin", name)
        found = np.fromfile(folder / f"{name}0.bin", "float32")
        np.testing.assert_array_equal(found, expected[name].ravel())


def test_a_program_in_cpp_says_what_is_wrong(folder, program):
    def fails(*words: str) -> str:
        command = [str(program), "./model.so", *words]
        done = subprocess.run(command, capture_output=True, text=True, cwd=folder)
        assert done.returncode == 1
        return done.stderr

    sizes = (f"n={N}", f"m={M}")
    assert "the model takes 2 inputs" in fails(*sizes, "x.bin", "out")
    assert "x.bin has another size than y" in fails(*sizes, "x.bin", "x.bin", "out")
    assert "cannot read none.bin" in fails(*sizes, "none.bin", "y.bin", "out")


def test_the_program_needs_the_runtime_and_no_compiler(program):
    needed = subprocess.run(["ldd", str(program)], capture_output=True, text=True).stdout
    assert "libtvm_runtime.so" in needed
    assert "libtvm_ffi.so" in needed
    assert "libtvm_compiler" not in needed


def test_the_json_file_has_what_the_page_names(folder):
    said = re.findall(r"^- \*\*`(\w+)`\*\*", PAGE.read_text(), re.MULTILINE)
    facts = json.loads((folder / "model.so.json").read_text())
    several = json.loads((folder / "several.so.json").read_text())
    assert {"formats", "writes", "own", "convention"} == set(said)
    assert {"function", "signature", "target", *said} < facts.keys()
    assert set(several["functions"]) == {"scaled", "summed"}
