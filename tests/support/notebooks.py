"""Tutorials are kept twice: `NN_name.py` is what one edits and reads in a diff, `NN_name.ipynb` has
the same cells with their outputs and figures.

    python -m tests.support.notebooks            runs those whose pair differs, keeps outputs
    python -m tests.support.notebooks 03 07      runs these, whether they differ or not
    python -m tests.support.notebooks --all      runs all
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Sequence
from pathlib import Path

import jupytext
import nbformat
from nbclient import NotebookClient
from nbformat import NotebookNode

TUTORIALS = Path(__file__).parents[2] / "tutorials"
TEXTS = sorted(TUTORIALS.glob("[0-9][0-9]_*.py"))
CELL_TIMEOUT_S = 240
KERNEL = {"kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"}}
PRIVATE = re.compile(rf"{re.escape(str(TUTORIALS.parent))}/?|/tmp/\w+")
"""Paths of the machine that ran a notebook, which are no part of it."""


def cells_of(text: Path) -> NotebookNode:
    """A notebook without outputs, from its text."""
    notebook = jupytext.read(text, fmt="py:percent")
    notebook.metadata = KERNEL | {"language_info": {"name": "python"}}
    for number, cell in enumerate(notebook.cells):
        cell.metadata = {}
        cell.id = f"cell-{number}"
    return notebook


def differs(text: Path) -> bool:
    """Whether the notebook of a text is missing, has other cells, or was not run to its end."""
    path = text.with_suffix(".ipynb")
    if not path.is_file():
        return True
    kept = nbformat.read(path, as_version=4)
    pairs = [[(c.cell_type, c.source) for c in n.cells] for n in (kept, cells_of(text))]
    return pairs[0] != pairs[1] or any(c.get("execution_count", 1) is None for c in kept.cells)


def executed(text: Path) -> NotebookNode:
    """The notebook of a text with its outputs; raises CellExecutionError where a cell fails."""
    notebook = cells_of(text)
    where = {"metadata": {"path": str(TUTORIALS)}}
    NotebookClient(notebook, timeout=CELL_TIMEOUT_S, resources=where).execute()
    for cell in notebook.cells:
        cell.metadata = {}
        cell.get("outputs", [])[:] = [_public(output) for output in cell.get("outputs", [])]
    nbformat.validate(notebook)
    return notebook


def _public(output: NotebookNode) -> NotebookNode:
    if "text" in output:
        output.text = PRIVATE.sub("", output.text)
    for kind, value in output.get("data", {}).items():
        if kind.startswith("text/"):
            output.data[kind] = PRIVATE.sub("", value)
    return output


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("numbers", nargs="*", help="of the tutorials to run, like 03")
    parser.add_argument("--all", action="store_true", help="run all of them")
    args = parser.parse_args(argv)
    for text in TEXTS:
        if args.all or text.name[:2] in args.numbers or (not args.numbers and differs(text)):
            print(text.stem, flush=True)
            nbformat.write(executed(text), text.with_suffix(".ipynb"))


if __name__ == "__main__":
    main()
