"""What users write with the public names is typed, and mypy sees where it is wrong."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import tvm_fusion
from tvm_fusion import extend, transform

HERE = Path(__file__).parent
USES = HERE / "public_api.py"

WRONG = """
import tvm
import tvm_fusion
from tvm_fusion import extend, transform

mod = tvm.IRModule()
tvm_fusion.compile(mod, "llvm", verfy=True)
tvm_fusion.explain(mod).groups.append(1)
transform.Fuse("llvm", polic="exact")
count: int = transform.plan(mod, "llvm")
tvm_fusion.register_rewrite(7)
tvm_fusion.register_family(object())
tvm_fusion.fuse(mod)
class Mine(extend.Family):
    name = 7
"""


@pytest.fixture(scope="module")
def said(tmp_path_factory) -> list[tuple[str, int]]:
    """File and line of each error that mypy finds."""
    folder = tmp_path_factory.mktemp("mypy")
    wrong = folder / "wrong.py"
    wrong.write_text(WRONG)
    command = [sys.executable, "-m", "mypy", "--config-file", HERE / "mypy.ini", "--no-pretty"]
    command += ["--cache-dir", folder, USES, wrong]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=HERE.parents[1])
    assert done.returncode == 1, done.stdout + done.stderr  # 2 if mypy itself failed
    lines = (line.split(":", 3) for line in done.stdout.splitlines() if ": error:" in line)
    found = {(Path(file).name, int(line)) for file, line, *_ in lines}
    assert found, done.stdout
    return sorted(found)


def test_what_the_public_names_are_for_is_well_typed(said):
    assert [where for where in said if where[0] == USES.name] == []


def test_each_wrong_use_is_found(said):
    wrong = WRONG.splitlines()
    start = wrong.index("mod = tvm.IRModule()") + 2
    lines = [n for n, text in enumerate(wrong, 1) if n >= start and not text.startswith("class")]
    assert [line for file, line in said if file == "wrong.py"] == lines


@pytest.mark.parametrize("module", [tvm_fusion, transform, extend], ids=lambda m: m.__name__)
def test_every_public_name_is_used(module):
    name = module.__name__.rpartition(".")[2]
    nodes = ast.walk(ast.parse(USES.read_text()))
    used = {
        node.attr
        for node in nodes
        if isinstance(node, ast.Attribute)
        and isinstance(node.value, ast.Name)
        and node.value.id == name
    }
    imported = {"extend", "transform"} if module is tvm_fusion else set()
    assert set(module.__all__) - used - imported == set()
