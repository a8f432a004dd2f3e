"""Before and After in the docstrings of the public passes."""

import re
from textwrap import dedent

import pytest
import tvm
from tvm.script import ir as I
from tvm.script import relax as R
from tvm.script import tirx as T

from tvm_fusion import transform
from tvm_fusion.config import hardware

PASSES = [
    name
    for name, found in ((name, getattr(transform, name)) for name in transform.__all__)
    if isinstance(found, type) and issubclass(found, tvm.transform.Pass)
]
BLOCK = r"::\n\n(?P<{}>(?: {{8,}}.*\n|\n)+)"
EXAMPLE = re.compile(
    "Before" + BLOCK.format("before") + r"\s*After ``(?P<call>[^`]+)``" + BLOCK.format("after")
)


def module_of(source: str) -> tvm.IRModule:
    """A module of a docstring; between stages it need not be well formed."""
    names = {"I": I, "R": R, "T": T, "tvm": tvm}
    return tvm.script.from_source(dedent(source), extra_vars=names, check_well_formed=False)


def example_of(name: str) -> re.Match:
    found = EXAMPLE.search(getattr(transform, name).__doc__)
    assert found, f"no Before and After in the docstring of {name}"
    return found


def test_the_stages_are_public():
    stages = {"Plan", "Materialize", "WriteKernels", "PackConstants", "PlanMemory"}
    assert set(PASSES) == {"AssignLayouts", "Decompose", *stages, "Fuse"}


@pytest.mark.parametrize("name", PASSES)
def test_a_pass_does_what_its_docstring_shows(name, capsys, monkeypatch):
    """On a CPU with AVX2: its vectors decide on loops."""
    avx2 = tvm.target.Target({"kind": "llvm", "mcpu": "haswell", "num-cores": 2})
    monkeypatch.setattr(hardware, "_cpu_target", lambda _cores: avx2)
    example = example_of(name)
    before, after = module_of(example["before"]), module_of(example["after"])
    made = eval(example["call"], {**vars(transform), "Before": before})
    assert str(made.info.name) == f"tvm_fusion.{name}"
    untouched = before.script()
    tvm.ir.assert_structural_equal(made(before), after)
    assert before.script() == untouched


def test_the_docstring_of_plan_shows_what_it_hands_out(capsys):
    example = example_of("Plan")
    before = module_of(example["before"])
    eval(example["call"], {**vars(transform), "Before": before})(before)
    assert capsys.readouterr().out == "main [('lv', 'y')]\n"
