"""The tutorials run from top to bottom, and what is kept of them is what their text says."""

import json
import runpy

import nbformat
import pytest

from .support.notebooks import TEXTS, TUTORIALS, cells_of, differs, executed, main

NAMES = [text.stem for text in TEXTS]
FIGURES = {"01", "02", "03", "04", "05", "06"}
tutorials = pytest.mark.parametrize("text", TEXTS, ids=NAMES)


def test_there_are_ten_in_order():
    assert [name[:2] for name in NAMES] == [f"{n:02}" for n in range(1, 11)]
    assert {path.stem for path in TUTORIALS.glob("*.ipynb")} == set(NAMES)


@tutorials
def test_a_notebook_has_the_cells_of_its_text_and_their_outputs(text):
    assert not differs(text), "`python -m tests.support.notebooks` runs it and keeps the outputs"
    notebook = nbformat.read(text.with_suffix(".ipynb"), as_version=4)
    nbformat.validate(notebook)
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", [])]
    assert outputs
    assert not [output for output in outputs if output.output_type == "error"]
    figures = [output for output in outputs if "image/png" in output.get("data", {})]
    assert bool(figures) == (text.name[:2] in FIGURES)
    words = json.dumps([o.get("text", "") for o in outputs])
    assert not [path for path in ("/tmp/", str(TUTORIALS.parent)) if path in words]


@tutorials
def test_a_tutorial_explains_before_it_computes_and_holds_what_it_says(text):
    cells = cells_of(text).cells
    assert cells[0].cell_type == "markdown"
    assert "**Question.**" in cells[0].source
    code = [cell.source for cell in cells if cell.cell_type == "code"]
    assert sum("assert" in source for source in code) >= 3
    assert "## What to try" in "\n".join(c.source for c in cells if c.cell_type == "markdown")


# The text has the notebook's cells: run as a program it needs no kernel, whose start takes seconds.
@pytest.mark.one_in(4)
@pytest.mark.long
@tutorials
def test_a_tutorial_runs(text, monkeypatch):
    monkeypatch.setenv("MPLBACKEND", "Agg")
    runpy.run_path(str(text), run_name="tutorial")


@pytest.mark.nightly
@tutorials
def test_a_notebook_runs_in_a_kernel(text, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(TUTORIALS.parent))
    assert any(cell.get("outputs") for cell in executed(text).cells)


def test_a_pair_that_differs_is_found_and_run_again(tmp_path, monkeypatch, capsys):
    text = tmp_path / "01_short.py"
    monkeypatch.setattr("tests.support.notebooks.TEXTS", [text])
    ran = []
    monkeypatch.setattr("tests.support.notebooks.executed", lambda t: ran.append(t) or run(t))
    text.write_text("# %% [markdown]\n# # A title\n\n# %%\nx = 1\n")
    assert differs(text)
    main([])
    assert ran == [text]
    assert not differs(text)
    main([])
    assert ran == [text]
    text.write_text(text.read_text().replace("x = 1", "x = 2"))
    assert differs(text)
    main(["02"])
    assert ran == [text]
    main(["--all"])
    assert ran == [text, text]


def run(text):
    """The notebook as if it had run."""
    notebook = cells_of(text)
    for number, cell in enumerate(c for c in notebook.cells if c.cell_type == "code"):
        cell.execution_count = number + 1
    return notebook
