"""Dumps of each stage, and lines of loggers."""

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import tvm

import tvm_fusion
from tests.profile.test_profile import QUICK, two_layers
from tests.support.runtime_cases import LLVM
from tvm_fusion.compilation import observed
from tvm_fusion.errors import ConfigError, InputError
from tvm_fusion.frontends import load
from tvm_fusion.frontends.relax_file import from_script
from tvm_fusion.host import logs
from tvm_fusion.plan.plan import FusionPlan

ROOT = Path(__file__).parents[2]
SCRIPTS = ("00_imported", "01_decomposed", "02_lowered", "04_fused", "05_written")
OTHERS = ("03_plan.json", "06_kernels.ll", "07_report.txt", "07_report.json")


def as_it_is(mod: tvm.IRModule, _where: str) -> tvm.IRModule:
    return mod


def dumped(tmp_path, monkeypatch, run) -> Path:
    """The folder of the only function that was dumped."""
    monkeypatch.setenv(logs.DUMP, str(tmp_path / "dump"))
    run()
    (folder,) = (tmp_path / "dump").iterdir()
    return folder


@pytest.fixture(scope="module")
def compiled(tmp_path_factory):
    """A module, and its folder."""
    with pytest.MonkeyPatch.context() as patch:
        path = tmp_path_factory.mktemp("dumped")
        made = []
        how = {"policy": QUICK}
        folder = dumped(
            path, patch, lambda: made.append(tvm_fusion.compile(two_layers(), LLVM, **how))
        )
    return made[0], folder


def test_each_stage_is_a_numbered_file(compiled):
    _, folder = compiled
    names = sorted(path.name for path in folder.iterdir())
    constants = [name for name in names if name.startswith("constants_")]
    assert names == sorted([*(f"{name}.py" for name in SCRIPTS), *OTHERS, *constants])
    assert folder.name.startswith("main_")
    assert FusionPlan.load(folder / "03_plan.json") == compiled[0].plan
    report = json.loads((folder / "07_report.json").read_text())
    assert report["launches"]["fused"] == 3
    assert "define" in (folder / "06_kernels.ll").read_text()


def test_what_is_dumped_is_read_as_it_was(compiled):
    module, folder = compiled
    found = {name: from_script(folder / f"{name}.py", as_it_is) for name in SCRIPTS}
    tvm.ir.assert_structural_equal(found["00_imported"], two_layers())
    for name, mod in found.items():
        assert body(mod.script(show_meta=True)) == body((folder / f"{name}.py").read_text())
    x = np.random.default_rng(0).standard_normal((8, 32)).astype("float32")
    with tvm.target.Target(LLVM):
        again = tvm.compile(
            found["05_written"], LLVM, relax_pipeline=tvm.relax.get_pipeline("tvm_fusion")
        )
    got = tvm.relax.VirtualMachine(again, tvm.cpu())["main"](tvm.runtime.tensor(x))
    np.testing.assert_array_equal(got.numpy(), module(x))


def body(text: str) -> str:
    """A script without its constants and what it imports."""
    return text.partition("@I.ir_module\n")[2].strip()


@pytest.mark.usefixtures("no_torch")
def test_a_script_runs_by_itself(compiled):
    _, folder = compiled
    code = "import runpy, sys; print(runpy.run_path(sys.argv[1])['Module']['main'].params)"
    done = subprocess.run(
        [sys.executable, "-c", code, str(folder / "05_written.py")],
        capture_output=True,
        text=True,
        cwd="/",
    )
    assert (done.returncode, "x0" in done.stdout) == (0, True), done.stderr


def test_kernels_for_a_gpu_are_dumped_as_scripts_that_parse(tmp_path, monkeypatch):
    folder = dumped(
        tmp_path, monkeypatch, lambda: tvm_fusion.explain(two_layers(), "h200", policy=QUICK)
    )
    for name in SCRIPTS:
        mod = from_script(folder / f"{name}.py", as_it_is)
        assert isinstance(mod, tvm.IRModule)
    assert any(
        "tvm_fusion.tirx" in (func.attrs or {})
        for _, func in from_script(folder / "05_written.py", as_it_is).functions_items()
    )
    assert json.loads((folder / "07_report.json").read_text())["target"] == "nvidia_h200"


def test_the_pass_dumps_what_it_fuses(tmp_path, monkeypatch):
    fuse = tvm_fusion.transform.Fuse(LLVM, policy=QUICK)
    folder = dumped(tmp_path, monkeypatch, lambda: fuse(two_layers()))
    assert {path.name for path in folder.glob("*.py")} == {f"{name}.py" for name in SCRIPTS}


def test_a_folder_that_cannot_be_written_is_named(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv(logs.DUMP, str(tmp_path / "file"))
    with pytest.raises(InputError, match=r"TVM_FUSION_DUMP: .*file.* name a folder that can be"):
        tvm_fusion.explain(two_layers(), LLVM, policy=QUICK)


def test_machine_code_is_what_a_disassembler_says(monkeypatch, tmp_path):
    program = tmp_path / "cuobjdump"
    program.write_text('#!/bin/sh\necho "$1"; cat "$2"\n')
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/bin:/usr/bin")
    monkeypatch.setattr(
        observed, "compile_source", lambda source, arch: type("Code", (), {"binary": b"machine"})
    )
    assert observed._machine_code("source", "sm_90a") == "-sass\nmachine"
    program.unlink()
    assert observed._machine_code("source", "sm_90a") is None


@pytest.fixture
def topics():
    """Loggers as they were before."""
    before = [(topic, topic.level, list(topic.handlers)) for topic in map(logs.topic, logs.TOPICS)]
    yield
    for topic, level, handlers in before:
        topic.setLevel(level)
        topic.handlers = handlers


@pytest.mark.usefixtures("topics")
def test_topics_are_logged_and_others_are_not(monkeypatch, capsys):
    monkeypatch.setenv(logs.VARIABLE, "plan, cost,kernels,time")
    logs.configure()
    logs.configure()
    tvm_fusion.explain(two_layers(), LLVM, policy=QUICK)
    lines = capsys.readouterr().err.splitlines()
    of = {name: [x for x in lines if x.startswith(f"tvm_fusion.{name}: ")] for name in logs.TOPICS}
    assert sum(map(len, of.values())) == len(lines)
    assert "main: 9 operators, 3 launches, predicted" in "\n".join(of["plan"])
    assert sum(": predicted " in line for line in of["cost"]) == 3
    assert any(": row" in line for line in of["kernels"])
    assert any("tvm_fusion.time: reading the model: 0." in line for line in of["time"])


def test_nothing_is_logged_that_nobody_asks_for(capsys):
    tvm_fusion.explain(two_layers(), LLVM, policy=QUICK)
    assert capsys.readouterr() == ("", "")


def test_an_unknown_topic_is_refused_with_the_known_ones(monkeypatch):
    monkeypatch.setenv(logs.VARIABLE, "plan,coast")
    with pytest.raises(ConfigError, match=r"no topic 'coast'; name some of plan, cost, kernels, t"):
        logs.configure()


def test_a_model_that_was_dumped_is_a_model(compiled):
    assert load(compiled[1] / "00_imported.py")["main"].params[0].name == "x0"
