"""The house stays as `tvm_fusion/ARCHITECTURE.md` says, and does not grow back into a maze."""

from __future__ import annotations

from pathlib import Path

import pytest

from .support import house
from .support.house import (
    PAGE,
    House,
    Import,
    benchmarks,
    level_of,
    modules_by_folder,
    read_exceptions,
    read_house,
    read_layers,
)

LARGEST_FOLDER = 25
IN_CIRCLES = 0  # modules
INSIDE_FUNCTIONS = 60


@pytest.fixture(scope="module")
def found() -> House:
    return read_house()


@pytest.fixture(scope="module")
def page() -> str:
    return PAGE.read_text(encoding="utf-8")


def test_imports_go_downwards_but_for_the_exceptions_on_the_page(found, page):
    upwards = {(i.source, i.target) for i in found.upwards(read_layers(page))}
    assert upwards == read_exceptions(page)


def test_rooms_import_each_other_only_where_the_page_has_an_exception(found, page):
    layers = read_layers(page)
    excepted = {frozenset(house.room_of(n, layers) for n in e) for e in read_exceptions(page)}
    assert found.pairs(layers) <= excepted


def test_every_room_on_the_page_is_there(found, page):
    rooms = {".".join(name.split(".")[:n]) for name in found.files for n in (1, 2, 3)}
    assert set(read_layers(page)) <= rooms


def test_no_folder_is_too_large_to_be_a_room(found):
    folders = found.folders() + modules_by_folder(benchmarks())
    assert {folder: n for folder, n in folders.items() if n > LARGEST_FOLDER} == {}


def test_the_package_needs_nothing_of_the_tests(found):
    named = {name: house.roots(path) for name, path in found.files.items()}
    assert {name for name, roots in named.items() if "tests" in roots} == set()
    assert {"pytest", "tvm_fusion"} < house.roots(Path(__file__).with_name("test_packaging.py"))


def test_there_are_no_more_circles_and_hidden_imports_than_there_were(found):
    assert sum(map(len, found.circles())) <= IN_CIRCLES
    assert found.inside_functions() <= INSIDE_FUNCTIONS


def test_what_is_wrong_is_found(tmp_path, monkeypatch):
    package = tmp_path / "tvm_fusion"
    (package / "low").mkdir(parents=True)
    texts = {
        "__init__": "",
        "high": "from .low import first\n",
        "low/__init__": "",
        "low/first": "def late():\n    from . import second\n",
        "low/second": "from typing import TYPE_CHECKING\nfrom .first import late\n"
        "if TYPE_CHECKING:\n    from .. import high\n",
    }
    for name, text in texts.items():
        (package / f"{name}.py").write_text(text)
    monkeypatch.setattr(house, "ROOT", tmp_path)
    found = read_house(tmp_path)
    layers = read_layers("| 1 | `tvm_fusion`, `high` | what |\n| 2 | `low` | what |\n")
    assert found.upwards(layers) == [Import("low.second", "high", "types", 4)]
    assert found.circles() == [["high", "low.first", "low.second"]]
    assert found.inside_functions() == 1
    assert found.pairs(layers) == {frozenset({"high", "low"})}
    assert found.folders() == {"tvm_fusion": 2, str(Path("tvm_fusion/low")): 3}
    with pytest.raises(LookupError, match="no layer for elsewhere"):
        level_of("elsewhere.module", layers)
