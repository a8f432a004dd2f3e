"""A module with wrong numbers is never returned: what gives way, in which order, and what is said
where nothing helps.
"""

import os
import subprocess
import sys
import warnings
from itertools import count
from pathlib import Path

import numpy as np
import pytest
import torch

import tvm_fusion
from tvm_fusion.check import compiled as check_module
from tvm_fusion.check import repair
from tvm_fusion.errors import InputError, VerificationError
from tvm_fusion.host.cache_folder import CACHE_VARIABLE
from tvm_fusion.plan.plan import UNWRITTEN
from tvm_fusion.plan.refusal import RefusalCode

from ..planted import every, planted, tried


class Sum(torch.nn.Module):
    def forward(self, x):
        return x.sum(-1)


class ScaledSum(torch.nn.Module):
    def forward(self, x):
        return (x * 2 + 1).sum(-1) * 3


def numbers(dtype=torch.float32, seed=0):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn((33, 133), generator=generator) * 9
    return x.to(dtype)


def assert_right(compiled, model, dtype=torch.float32):
    x = numbers(dtype, seed=5)
    exact = model(x.double() if x.is_floating_point() else x)
    np.testing.assert_allclose(compiled(x).double(), exact.double(), rtol=1e-5, atol=1e-3)


@pytest.mark.one_in(2)
@pytest.mark.parametrize(("model", "dtype"), [(Sum(), torch.float32), (ScaledSum(), torch.int32)])
def test_a_sum_without_its_last_terms_is_never_returned(model, dtype):
    x = numbers(dtype)
    with planted("short loop", 1):
        unchecked = tvm_fusion.compile((model, (x,)), "llvm", verify=False)
        compiled = tvm_fusion.compile((model, (x,)), "llvm")
    with pytest.raises(AssertionError):
        assert_right(unchecked, model, dtype)
    assert_right(compiled, model, dtype)
    assert compiled.report.verify.passed
    said = [g.fallback for g in compiled.report.groups if g.fallback]
    assert said
    assert all(why.startswith(RefusalCode.WRONG_NUMBERS.value) for why in said)


def test_a_single_operator_that_is_wrong_gets_tvms_own_code():
    with planted("short loop", 1):
        compiled = tvm_fusion.compile((Sum(), (numbers(),)), "llvm")
    assert [g.kernel_class for g in compiled.report.groups] == ["stock"]


def test_what_is_never_written_is_missed_though_the_memory_holds_right_numbers():
    with planted("dropped store", 0):
        compiled = tvm_fusion.compile((ScaledSum(), (numbers(),)), "llvm")
    assert_right(compiled, ScaledSum())


# ---- nothing helps -------------------------------------------------------------------------------


@pytest.fixture
def always_wrong(monkeypatch, tmp_path):
    """Whatever is run gives numbers that are off by one."""
    monkeypatch.setenv(CACHE_VARIABLE, str(tmp_path))
    right = check_module.runner

    def wrong(built, **how):
        run = right(built, **how)
        return lambda inputs: [x + 1 for x in run(inputs)]

    monkeypatch.setattr(check_module, "runner", wrong)
    return tmp_path


@pytest.mark.usefixtures("no_torch")
def test_without_any_right_module_there_is_an_error_that_says_it_all(always_wrong):
    with pytest.raises(VerificationError) as caught:
        tvm_fusion.compile((ScaledSum(), (numbers(),)), "llvm")
    said = str(caught.value)
    assert "output 0 error" in said
    assert "; at [" in said
    assert "no group of the plan is wrong by itself" in said
    for step in ("the plan", "nothing fused", "TVM's code for", "as TVM alone compiles it"):
        assert step in said
    (script,) = always_wrong.glob("wrong/*/reproduce.py")
    assert f"python {script}" in said
    root = Path(tvm_fusion.__file__).parents[1]
    ran = subprocess.run(
        [sys.executable, script],
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(root), os.environ["PYTHONPATH"]])},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert ran.returncode == 0, ran.stderr
    assert "verify    passed" in ran.stdout


def test_the_kernel_that_is_wrong_is_named(monkeypatch, always_wrong):
    monkeypatch.setattr(repair.Repair, "_coarse_steps", lambda self: ())
    with planted("short loop", 1), pytest.raises(VerificationError) as caught:
        tvm_fusion.compile((Sum(), (numbers(),)), "llvm")
    assert "is wrong by itself (kernel sum" in str(caught.value)
    assert "class row" in str(caught.value)


def test_who_asks_for_the_report_gets_the_module_all_the_same(always_wrong):
    compiled = tvm_fusion.compile((ScaledSum(), (numbers(),)), "llvm", verify="report")
    assert not compiled.report.verify.passed
    assert_right(compiled, ScaledSum())  # as it is outside of this test's check


def test_under_torch_compile_the_graph_runs_in_torch_with_one_warning(always_wrong):
    torch.compiler.reset()
    model = torch.compile(ScaledSum(), backend="tvm_fusion")
    with torch.no_grad(), warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        given = model(numbers())
    said = [str(w.message) for w in caught if "tvm_fusion" in str(w.message)]
    assert len(said) == 1
    assert "runs in torch: wrong numbers" in said[0]
    torch.testing.assert_close(given, ScaledSum()(numbers()))


# ---- the order -----------------------------------------------------------------------------------


@pytest.mark.one_in(6)
@pytest.mark.parametrize("wrong", [0, 1, 2, 3])
def test_as_little_as_need_be_gives_way(monkeypatch, wrong):
    """The first `wrong` modules are wrong as a whole, and no group by itself."""
    number, right = count(), check_module.runner

    def runner(built, **how):
        run, error = right(built, **how), next(number) < wrong
        return lambda inputs: [x + error for x in run(inputs)]

    monkeypatch.setattr(check_module, "runner", runner)
    compiled = tvm_fusion.compile((ScaledSum(), (numbers(),)), "llvm")
    assert compiled.report.verify.passed
    assert_right(compiled, ScaledSum())
    groups = compiled.plan.groups
    assert any(len(g.ops) > 1 for g in groups) is (wrong == 0)
    assert all(g.kernel_class in UNWRITTEN for g in groups) is (wrong >= 2)


def test_an_unknown_way_to_verify_is_refused():
    with pytest.raises(InputError, match="'group' is none of None, True, False, 'full', 'groups'"):
        tvm_fusion.compile((Sum(), (numbers(),)), "llvm", verify="group")


@pytest.mark.nightly
@pytest.mark.parametrize(("program", "mutation", "seed"), list(every(1)))
def test_no_planted_bug_is_returned(program, mutation, seed):
    assert tried(program, mutation, seed).verdict != "wrong"
