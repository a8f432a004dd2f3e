"""`tutorials/pages/environment.md` has the variables that the package reads, and no others."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parent.parent
PAGE = ROOT / "tutorials" / "pages" / "environment.md"
READERS = ("get", "setdefault", "pop")
SAVED = {"bench/apart.py"}  # sets variables of its own for a process, and puts back what was there


def reads(tree: ast.Module) -> Iterator[str | None]:
    """The variables that a module reads; None where the name of one cannot be told."""
    values = dict(_constants(tree))
    for node in ast.walk(tree):
        name = None
        if isinstance(node, ast.Call) and ast.unparse(node.func) in _readers():
            name = node.args[0]
        elif isinstance(node, ast.Subscript) and ast.unparse(node.value) == "os.environ":
            name = node.slice if isinstance(node.ctx, ast.Load) else None
        elif isinstance(node, ast.Compare) and "os.environ" in map(ast.unparse, node.comparators):
            name = node.left
        if isinstance(name, ast.Constant):
            yield name.value
        elif name is not None:
            yield from values.get(ast.unparse(name), (None,))


def _readers() -> set[str]:
    return {"os.getenv", *(f"os.environ.{how}" for how in READERS)}


def _constants(tree: ast.Module) -> Iterator[tuple[str, tuple[str, ...]]]:
    """Names of strings at the top level, and of what runs over such a tuple of them."""
    strings = {}
    for node in tree.body:
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
            found = node.value.elts if isinstance(node.value, ast.Tuple) else [node.value]
            if all(isinstance(e, ast.Constant) and isinstance(e.value, str) for e in found):
                strings[node.targets[0].id] = tuple(e.value for e in found)
    yield from strings.items()
    for node in ast.walk(tree):
        if isinstance(node, ast.For | ast.comprehension) and isinstance(node.iter, ast.Name):
            yield ast.unparse(node.target), strings.get(node.iter.id, (None,))


def test_the_page_lists_the_variables_that_are_read():
    found, untold = set(), set()
    for path in (ROOT / "tvm_fusion").rglob("*.py"):
        text = path.read_text(encoding="utf-8")
        names = set(reads(ast.parse(text))) if re.search("environ|getenv", text) else set()
        if None in names:
            untold.add(path.relative_to(ROOT / "tvm_fusion").as_posix())
        found |= names - {None}
    rows = (line.split("|")[1] for line in PAGE.read_text().splitlines() if line.startswith("| `"))
    assert untold == SAVED
    assert sorted(found) == sorted(name for row in rows for name in re.findall(r"`(\w+)`", row))


def test_a_variable_is_found_however_it_is_read():
    text = """
import os
NAME, NAMES = "B", 1
NAME = "A"
SEVERAL = ("C", "D")
os.environ.get(NAME), os.environ["E"], "F" in os.environ, os.getenv("G", "0")
for one in SEVERAL:
    os.environ.get(one)
for other in f():
    os.environ.get(other)
os.environ["written"] = "1"
os.environ.setdefault("H", "1")
"""
    assert set(reads(ast.parse(text))) == {*"ACDEFGH", None}
