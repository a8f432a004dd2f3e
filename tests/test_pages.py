"""README, CONTRIBUTING and the pages: what they name exists, and what they list is all there is."""

import argparse
import os
import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from tvm_fusion._version import __version__
from tvm_fusion.cli import _parser
from tvm_fusion.plan.refusal import RefusalCode

from .support.notebooks import TEXTS
from .support.pages import PAGES, ROOT, commands, made, names

TUTORIALS = ROOT / "tutorials"
TEXT_FILES = [*PAGES, *TEXTS, ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md"]
COMMAND = re.compile(r"python -m ([a-z_]+(?:\.[a-z_]+)*)((?: [^`\n#|]*)?)")
LINK = re.compile(r"\]\((?!https?:|#)([^)#\s]+)(?:#[^)]*)?\)")
pages = pytest.mark.parametrize("page", PAGES, ids=lambda p: str(p.relative_to(ROOT)))
text_files = pytest.mark.parametrize("file", TEXT_FILES, ids=lambda p: str(p.relative_to(ROOT)))
_MODULES = ("tvm_fusion", "tests", "pytest")


@pages
def test_what_is_made_of_the_code_and_of_results_is_up_to_date(page):
    text = page.read_text()
    assert made(text) == text, "`python -m tests.support.pages` makes it anew"


def test_the_pages_list_every_command_and_every_public_name():
    assert commands() in (TUTORIALS / "pages" / "command_line.md").read_text()
    api = (TUTORIALS / "pages" / "api.md").read_text()
    for module in ("tvm_fusion", "tvm_fusion.transform", "tvm_fusion.extend"):
        assert names(module) in api


def test_every_command_has_its_options_in_its_table():
    for name, command in _commands().items():
        table = commands().partition(f"## {name}\n")[2].partition("\n## ")[0]
        shown = set(re.findall(r"(?<![\w-])--?[a-z][a-z-]*", " ".join(_first_cells(table))))
        options = {
            o for a in command._actions if a.help != argparse.SUPPRESS for o in a.option_strings
        }
        assert shown == options - {"-h", "--help"}


def _first_cells(table: str) -> list[str]:
    return [line.split("|")[1] for line in table.splitlines() if line.startswith("| `")]


def _commands() -> dict[str, argparse.ArgumentParser]:
    actions = _parser()._actions
    return next(a for a in actions if isinstance(a, argparse._SubParsersAction)).choices


def test_every_refusal_has_a_row_and_every_row_is_of_one():
    text = (TUTORIALS / "pages" / "refusals.md").read_text()
    assert sorted(re.findall(r"^\| `(\w+)` \|", text, re.M)) == sorted(c.value for c in RefusalCode)


@text_files
def test_links_lead_somewhere(file):
    text = file.read_text()
    if file.suffix == ".py":
        text = "\n".join(line for line in text.splitlines() if line.startswith("#"))
    links = LINK.findall(text)
    assert [link for link in links if not (file.parent / link).exists()] == []


def wrong_commands(text: str) -> list[str]:
    """Commands with a module, a sub-command or an option that does not exist."""
    return [found[0] for found in COMMAND.finditer(text) if not _exists(found[1], found[2].split())]


def _exists(module: str, words: list[str]) -> bool:
    if module.split(".")[0] not in _MODULES:
        return True
    if module != "tvm_fusion":
        return find_spec(module) is not None
    name, known = (words or [""])[0], _commands()
    if name not in known:
        return name in ("", "COMMAND", "--version", "--help")
    options = {option for action in known[name]._actions for option in action.option_strings}
    return {w.strip("[]") for w in words if w.strip("[]").startswith("-")} <= options


@text_files
def test_the_commands_that_are_named_exist(file):
    assert wrong_commands(file.read_text()) == []


def test_commands_and_links_that_do_not_exist_are_found():
    good = "`python -m tvm_fusion compile MODEL [-o model.so]`, python -m pytest -m nightly\n"
    bad = "python -m tvm_fusion compil x\n    python -m tvm_fusion tune x --work_dir\n"
    more = "`python -m tests.no_such`, `python -m tvm_fusion.bench --suite x`"
    found = wrong_commands(good + bad + more)
    assert [command.split()[2:4] for command in found] == [
        ["tvm_fusion", "compil"],
        ["tvm_fusion", "tune"],
        ["tests.no_such"],
    ]
    assert LINK.findall("[a](b.md#c) ![d](e.png) [f](https://g.h) [i](#j)") == ["b.md", "e.png"]


# Always: links lead somewhere, page by page.
@pytest.mark.nightly
@pytest.mark.long
def test_the_site_is_built_and_no_link_in_it_leads_nowhere(tmp_path):
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "-q"]
    done = subprocess.run(
        [*command, "-f", str(ROOT / ".mkdocs.yml"), "-d", str(tmp_path)],
        capture_output=True,
        text=True,
        check=False,
        env=os.environ | {"NO_MKDOCS_2_WARNING": "1"},
    )
    assert done.returncode == 0, done.stderr
    for source in [*TUTORIALS.glob("*.ipynb"), *TUTORIALS.rglob("*.md")]:
        page = tmp_path / source.relative_to(TUTORIALS).with_suffix(".html")
        assert "</html>" in page.read_text()


def test_the_changelog_begins_with_this_version():
    versions = re.findall(r"^## (\S+)", (ROOT / "CHANGELOG.md").read_text(), re.M)
    assert versions[0] == __version__


def test_the_readme_begins_with_what_it_is_two_commands_a_picture_and_a_table():
    first = (ROOT / "README.md").read_text().partition("\n## ")[0]
    assert [line.strip() for line in first.splitlines() if line.startswith("    ")] == [
        "pip install . && python -m tvm_fusion compile --demo",
        "pip install '.[test]' && python -m pytest",
    ]
    assert "`python -m pytest -m nightly`" in first
    assert first.count("![") == 1
    assert first.count("|---") > 1
    assert Path(ROOT / "tutorials/images/report.png").read_bytes().startswith(b"\x89PNG")
