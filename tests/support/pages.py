"""Puts into the pages what the package says of itself, between lines that name it.

    <!-- made of commands -->    every sub-command and option of the command line
    <!-- made of tvm_fusion -->  the names of a module, each with the first line of its docstring
    <!-- made of operators.onnx -->  (or .torch) a row for each operator of a framework
    <!-- made of gpus -->  the cards whose profiles are derived, by architecture
    <!-- made of database -->  what of PyTorch's database of operators is right, by results
    <!-- end -->

Operators are those of the version that the page names; with another one installed they stay.

`python -m tests.support.pages` remakes them all, and the results of `tests.benchmarks.readme`.
"""

from __future__ import annotations

import argparse
import inspect
import json
import re
from collections.abc import Iterator
from importlib import import_module
from importlib.metadata import version
from pathlib import Path

from tvm_fusion.frontends.coverage import counted, onnx_rows, torch_rows

from ..benchmarks.readme import filled
from .onnx_conformance import COUNTS

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "tutorials").rglob("*.md"))]
_BLOCK = re.compile(r"(<!-- made of (\S+) -->\n).*?(<!-- end -->)", re.S)


def made(text: str, of_any_version: bool = False) -> str:
    """A page's text with its blocks made anew; `of_any_version` operators, too."""

    def block(found: re.Match[str]) -> str:
        kind = found[2].removeprefix("operators.")
        if kind != found[2]:
            if not of_any_version and _version(kind) not in found[0]:
                return found[0]
            content = operators(kind)
        else:
            parts = {"commands": commands, "database": database, "gpus": gpus}
            content = parts[kind]() if kind in parts else names(kind)
        return f"{found[1]}\n{content}\n\n{found[3]}"

    return filled(_BLOCK.sub(block, text), ROOT)


def commands() -> str:
    """A heading and a table for each sub-command."""
    from tvm_fusion.cli import _parser

    (subparsers,) = (
        action for action in _parser()._actions if isinstance(action, argparse._SubParsersAction)
    )
    return "\n\n".join(
        f"## {name}\n\n{command.description[0].upper()}{command.description[1:]}.\n\n"
        + "\n".join(_options(command))
        for name, command in subparsers.choices.items()
    )


def _options(command: argparse.ArgumentParser) -> Iterator[str]:
    yield "| argument | meaning |"
    yield "|---|---|"
    for action in command._actions:
        if action.help is argparse.SUPPRESS or isinstance(action, argparse._HelpAction):
            continue
        formatter = command._get_formatter()
        value = formatter._format_args(action, formatter._get_default_metavar_for_optional(action))
        name = ", ".join(action.option_strings) or action.dest.upper()
        shown = f"{name} {value}".strip() if action.option_strings else name
        required = " Required." if action.required and action.option_strings else ""
        meaning = formatter._expand_help(action) if action.help else ""
        yield f"| `{_cell(shown)}` | {_cell(meaning)}{required} |"


def operators(framework: str) -> str:
    """A table of the operators of a framework; of ONNX with how many of its tests pass."""
    rows = torch_rows() if framework == "torch" else onnx_rows()
    tests = json.loads(COUNTS.read_text()) if framework == "onnx" else {}
    told = f"{_version(framework)}: {len(rows)} operators, {counted(rows)}."
    more = " from opset | tests that pass |" if tests else ""
    lines = [
        "",
        told,
        "",
        f"| operator | converted by |{more}",
        "|---|---|" + "---|---|" * bool(tests),
    ]
    for row in rows:
        passed, count = tests.get(row.name, (0, 0))
        opsets = ", ".join(map(str, row.opsets))
        share = f" {opsets} | {passed} of {count} |" if count else f" {opsets} | |"
        lines.append(f"| `{row.name}` | {row.by.value} |" + (share if tests else ""))
    return "\n".join(lines[1:])


def gpus() -> str:
    """A row for each architecture, with the names of its cards."""
    from tvm_fusion.config.cards import cards

    found: dict[int, list[str]] = {}
    for card in cards():
        found.setdefault(card.architecture.number, []).append(f"`{card.name}`")
    rows = [f"| sm_{number} | {', '.join(names)} |" for number, names in sorted(found.items())]
    return "\n".join(["| architecture | derived profiles |", "|---|---|", *rows])


def database() -> str:
    """A row for each result of `tests.opdb` that has inductor beside it, by version of PyTorch."""
    lines = [
        "| PyTorch | judged | right | refused | right by inductor | of these here | one graph in "
        "inductor | of these here |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for path in sorted((ROOT / "tests/results").glob("opdb_float32_torch_2_*.json")):
        result = json.loads(path.read_text())
        counts = result["counts"]["float32"]
        judged = len(result["rows"]) - counts["not judged"]
        cells = [result["versions"]["torch"], judged, counts["right"], counts["refused"]]
        for theirs in ("right by inductor", "right by inductor as one graph"):
            both = counts[f"{theirs} and here"]
            cells += [counts[theirs], f"{both} ({both / counts[theirs]:.1%})"]
        lines.append(f"| {' | '.join(map(str, cells))} |")
    return "\n".join(lines)


def _version(framework: str) -> str:
    name = {"torch": "PyTorch", "onnx": "ONNX"}[framework]
    return f"{name} {version(framework).partition('+')[0]}"


def names(module: str) -> str:
    """A table of what `__all__` of a module has; plain values without a docstring in one line."""
    found = import_module(module)
    told, plain = [], []
    for name in found.__all__:
        value = getattr(found, name)
        if inspect.ismodule(value) or inspect.isclass(value) or inspect.isroutine(value):
            told.append(f"| `{name}` | {_cell(_first_sentence(value))} |")
        else:
            plain.append(f"`{name}`")
    lines = ["| name | what it is |", "|---|---|", *told]
    return "\n".join([*lines, *(["", f"Values: {', '.join(plain)}."] if plain else [])])


def _first_sentence(value: object) -> str:
    text = inspect.getdoc(value)
    assert text, f"{value} has no docstring"
    paragraph = " ".join(text.split("\n\n")[0].split())
    return re.split(r"(?<=[.;])\s", paragraph)[0].rstrip(".;:")


def _cell(text: str) -> str:
    return text.replace("|", r"\|")


def main() -> None:
    for page in PAGES:
        page.write_text(made(page.read_text(encoding="utf-8"), True), encoding="utf-8")


if __name__ == "__main__":
    main()
