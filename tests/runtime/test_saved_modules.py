"""Fused modules as text, and in processes that know nothing of this package."""

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import tvm
from tvm import relax, tirx

from tvm_fusion.config import load_policy, resolve_target
from tvm_fusion.flow.planned import Planned
from tvm_fusion.runtime.build.lowering import is_tirx
from tvm_fusion.transform import Fuse
from tvm_fusion.transform.apply.kernel_bodies import has_root, with_roots, without_root

from ..pipelines.cells import LLVM, TARGETS
from ..pipelines.modules import cases

ELSEWHERE = """
import json
import sys

sys.modules["torch"] = None  # TVM imports it where it is, which takes seconds
import numpy as np
import tvm
from tvm import relax


def run(function, path, target, results):
    saved = open(path).read()
    mod = tvm.script.from_source(saved) if path.endswith(".py") else tvm.ir.load_json(saved)
    executable = tvm.compile(mod, tvm.target.Target(target))
    given = np.load(results)
    inputs = [tvm.runtime.tensor(given[f"in{i}"]) for i in range(len(given) - 1)]
    result = relax.VirtualMachine(executable, tvm.cpu())[function](*inputs).numpy()
    np.testing.assert_allclose(result, given["out"], rtol=1e-4, atol=1e-5)


outcomes = []
for call in json.loads(sys.argv[1]):
    try:
        run(*call)
        outcomes.append("right")
    except Exception as error:
        outcomes.append(f"{type(error).__name__}: {error}")
assert not any(name.startswith("tvm_fusion") for name in sys.modules)
print(json.dumps(outcomes))
"""


def fused(module: str, target: str) -> tvm.IRModule:
    described = TARGETS[target]
    return Fuse(tvm.target.Target(described))(cases(described)[module].make())


def saved_call(folder: Path, module: str, target: str, suffix: str) -> list:
    """A fused module in a file, and a call of it: what `run` above takes."""
    mod, [(function, call)] = fused(module, target), cases(LLVM)[module].calls.items()
    path, held = folder / f"{module}_{target}{suffix}", folder / f"{module}.npz"
    path.write_text(mod.script(show_meta=True) if suffix == ".py" else tvm.ir.save_json(mod))
    inputs, [wanted] = call(np.random.default_rng(0))
    np.savez(held, out=wanted, **{f"in{i}": array for i, array in enumerate(inputs)})
    return [function, str(path), dict(TARGETS[target]), str(held)]


def test_processes_that_lack_this_package_run_cpu_kernels_right_or_name_the_import(tmp_path):
    calls = [
        saved_call(tmp_path, "block", "llvm", ".json"),
        saved_call(tmp_path, "export", "llvm", ".py"),
        saved_call(tmp_path, "block", "cuda", ".json"),
    ]
    command = [sys.executable, "-c", ELSEWHERE, json.dumps(calls)]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    *on_cpu, on_gpu = json.loads(done.stdout.splitlines()[-1])
    assert on_cpu == ["right", "right"]
    assert "unknown storage scope" in on_gpu
    assert on_gpu.endswith("(import tvm_fusion before building this module)")


@pytest.mark.one_in(2)
@pytest.mark.parametrize("module", ["block", "rows"])
def test_what_stands_around_kernels_comes_off_again(module):
    target, hw = resolve_target("h200")
    planned = Planned.of(cases(LLVM)[module].make(), target, hw, load_policy(None))
    bare = planned.fuse()
    rooted = with_roots(bare)
    kernels = [g for g, f in bare.functions_items() if isinstance(f, tirx.PrimFunc) and is_tirx(f)]
    assert kernels
    for gvar in kernels:
        assert has_root(rooted[gvar])
        tvm.ir.assert_structural_equal(without_root(rooted[gvar]), bare[gvar])


@pytest.mark.one_in(6)
@pytest.mark.parametrize("module", tuple(cases(LLVM)))
def test_a_fused_module_reads_back_from_its_script(module):
    mod = fused(module, "llvm")
    again = tvm.script.from_source(mod.script(show_meta=True))
    tvm.ir.assert_structural_equal(again, mod, map_free_vars=True)
    for gvar, func in mod.functions_items():
        if isinstance(func, relax.Function):
            assert not any("tvm_fusion" in name for name in dict(func.attrs or {})), gvar


@pytest.mark.one_in(2)
@pytest.mark.parametrize("target", ["llvm", "cuda"])
def test_a_fused_module_reads_back_from_json(target):
    mod = fused("several", target)
    tvm.ir.assert_structural_equal(tvm.ir.load_json(tvm.ir.save_json(mod)), mod)
