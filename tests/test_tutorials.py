"""The notebooks run from top to bottom."""

from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

TUTORIALS = Path(__file__).parent.parent / "tutorials"
CELL_TIMEOUT_S = 240


def test_there_is_a_tutorial():
    assert (TUTORIALS / "01_quickstart.ipynb").is_file()


@pytest.mark.long
@pytest.mark.parametrize("path", sorted(TUTORIALS.glob("*.ipynb")), ids=lambda path: path.stem)
def test_a_tutorial_runs(path, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(TUTORIALS.parent))
    notebook = nbformat.read(path, as_version=4)
    # execute() raises the first error of a cell.
    NotebookClient(notebook, timeout=CELL_TIMEOUT_S, kernel_name="python3").execute()
    assert any(cell.get("outputs") for cell in notebook.cells)


@pytest.mark.parametrize("path", sorted(TUTORIALS.glob("*.ipynb")), ids=lambda path: path.stem)
def test_a_tutorial_is_stored_without_outputs(path):
    notebook = nbformat.read(path, as_version=4)
    nbformat.validate(notebook)
    assert all(not cell.outputs for cell in notebook.cells if cell.cell_type == "code")
