"""tune() of a module of several functions, and what uses its database."""

import json
import shutil
from contextlib import nullcontext

import numpy as np
import pytest
import tvm

import tvm_fusion
from tvm_fusion.cli import main
from tvm_fusion.transform import Fuse
from tvm_fusion.tuning.session.lookup import TunedKernels

from ..support.tune_sessions import OPTIONS, chain_module, several

SIZES = {"again": (256, 1024), "decode": (256, 1024), "prefill": (320, 1000)}
FAST = "Way(way=fast)"


def chains() -> tvm.IRModule:
    """Functions of which two compute the same."""
    return chain_module(**SIZES)


@pytest.fixture(scope="module")
def tuned(tmp_path_factory):
    """The database of a session, and what it returned."""
    folder = tmp_path_factory.mktemp("tuned")
    with several(("plain", "fast")):
        yield folder, tvm_fusion.tune(chains(), "llvm", database=folder, **OPTIONS)


@pytest.fixture
def settled(monkeypatch):
    """How often a plan was asked for and known, or not."""
    found = []
    plan = TunedKernels.plan

    def noted(*arguments):
        result = plan(*arguments)
        found.append(result is not None)
        return result

    monkeypatch.setattr(TunedKernels, "plan", noted)
    return found


@pytest.mark.long
def test_kernels_of_all_functions_are_tuned_and_equal_ones_once(tuned):
    _, result = tuned
    assert result.functions == ("again", "decode", "prefill")
    launched = [task for task in result.tasks if task.launches]
    assert sorted((task.launches, task.choice) for task in launched) == [(1, FAST), (2, FAST)]
    assert result.trials == sum(task.trials for task in result.tasks)
    assert result.best_us == pytest.approx(sum(t.launches * t.best_us for t in launched))
    assert {name: len(plan.groups) for name, plan in result.plan.items()} == dict.fromkeys(SIZES, 1)


def test_the_result_names_functions_and_folder_in_ten_lines(tuned):
    folder, result = tuned
    lines = str(result).splitlines()
    assert len(lines) <= 10
    assert f"{result.trials} trials in" in lines[0]
    assert "for again, decode, prefill; " in lines[0]
    assert str(folder) in lines[-1]


@pytest.mark.one_in(2)
@pytest.mark.parametrize("around", [False, True], ids=["argument", "with"])
def test_compile_uses_it_for_every_function(tuned, settled, around):
    folder, result = tuned
    given = {"policy": "aggressive", "verify": "groups"}
    with tvm_fusion.TuningDatabase(folder) if around else nullcontext():
        given |= {} if around else {"database": folder}
        compiled = tvm_fusion.compile(chains(), "llvm", **given)
    assert settled == [True] * len(SIZES)
    for name, size in SIZES.items():
        assert compiled.report[name].verify.passed
        [group] = compiled.report[name].to_json()["groups"]
        assert group["tuned"]["choice"] == FAST
        assert compiled.plan[name].groups == result.plan[name].groups
        x = np.random.default_rng(0).standard_normal(size).astype("float32")
        np.testing.assert_allclose(compiled[name](x), np.tanh(0.25 * x) + 0.75, atol=1e-5)


@pytest.mark.parametrize("around", [False, True], ids=["argument", "with"])
def test_fuse_uses_it_for_every_function(tuned, settled, around):
    folder, _ = tuned
    fused = []
    how = {} if around else {"database": folder}
    with tvm_fusion.TuningDatabase(folder) if around else nullcontext():
        mod = Fuse("llvm", policy="aggressive", on_plan=fused.append, **how)(chains())
    assert settled == [True] * len(SIZES)
    said = [group["tuned"]["choice"] for f in fused for group in f.report().to_json()["groups"]]
    assert said == [FAST] * len(SIZES)
    kernels = [f for _, f in mod.functions_items() if isinstance(f, tvm.tirx.PrimFunc)]
    assert len(kernels) == 2


@pytest.mark.nightly
def test_the_command_line_tunes_all_functions(tuned, tmp_path, capsys):
    folder, result = shutil.copytree(tuned[0], tmp_path / "tuned"), tuned[1]
    model = tmp_path / "chains.json"
    model.write_text(tvm.ir.save_json(chains()))
    how = ["--target", "llvm", "--policy", "aggressive"]
    assert (
        main(["tune", str(model), *how, "--work-dir", str(folder), "--trials", "1", "--json"]) == 0
    )
    found = json.loads(capsys.readouterr().out)
    assert found["functions"] == list(result.functions)
    assert main(["explain", str(model), *how, "--database", str(folder), "--json"]) == 0
    told = json.loads(capsys.readouterr().out)["functions"]
    assert all(told[name]["groups"][0]["tuned"]["choice"] for name in SIZES)
