"""Every notebook runs from top to bottom, and is kept without outputs."""

import os
from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

NOTEBOOKS = sorted((Path(__file__).parents[1] / "notebooks").glob("*.ipynb"))


def test_there_are_notebooks():
    assert [path.name for path in NOTEBOOKS] == ["quickstart.ipynb"]


@pytest.mark.slow
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_runs(path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv("MPLBACKEND", raising=False)  # the kernel's own draws into the notebook
    monkeypatch.setenv("IPYTHONDIR", str(tmp_path))
    notebook = nbformat.read(path, as_version=4)
    NotebookClient(notebook, timeout=300, resources={"metadata": {"path": str(tmp_path)}}).execute()
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", [])]
    assert not [output for output in outputs if output.output_type == "error"]
    for kind, what in (("text/html", "coloured text"), ("image/png", "plot")):
        assert any(kind in output.get("data", {}) for output in outputs), f"the {what} is missing"
    if target := os.environ.get("KEEP_NOTEBOOKS"):
        nbformat.write(notebook, Path(target) / path.name)


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_is_kept_without_outputs(path: Path):
    for cell in nbformat.read(path, as_version=4).cells:
        assert not cell.get("outputs"), f"{path.name}: strip the outputs of: {cell.source[:60]}"
        assert cell.get("execution_count") is None
