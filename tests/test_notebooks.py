"""The notebooks run from top to bottom, as the first visitor would run them."""

from __future__ import annotations

import json
import os
from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

NOTEBOOKS = Path(__file__).parents[1] / "notebooks"


def code_cells(name: str) -> list[str]:
    cells = json.loads((NOTEBOOKS / name).read_text())["cells"]
    return ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"]


def test_join_is_prose_and_two_cells():
    assert len(code_cells("join.ipynb")) == 2


def test_the_install_cell_keeps_the_platforms_torch_and_numpy(tmp_path, monkeypatch):
    """Run the cell with pip taken out; what it would hand to pip must pin what is installed."""
    import numpy
    import torch

    monkeypatch.setenv("TMPDIR", str(tmp_path))
    lines = code_cells("join.ipynb")[0].splitlines()
    commands = [line.strip() for line in lines if line.strip().startswith("%pip")]
    scope: dict = {}
    exec("\n".join("    pass" if line.strip().startswith("%pip") else line for line in lines), scope)
    constraints = scope["kept"].read_text().split()
    assert f"torch=={torch.__version__}" in constraints and f"numpy=={numpy.__version__}" in constraints
    for command in commands:
        assert "--no-deps" in command or ("-c {kept}" in command and "only-if-needed" in command)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_join_runs(tmp_path, monkeypatch):
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setenv("VOLUNTEER_KIT_INSTALLED", "1")
    monkeypatch.setenv("VOLUNTEER_KIT_MINUTES", "0.75")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(NOTEBOOKS.parent), os.environ.get("PYTHONPATH", "")]))
    notebook = nbformat.read(NOTEBOOKS / "join.ipynb", as_version=4)
    NotebookClient(notebook, timeout=500, resources={"metadata": {"path": str(tmp_path)}}).execute()
    outputs = notebook.cells[-2].outputs
    pictures = [out for out in outputs if "image/png" in out.get("data", {})]
    assert len(pictures) == 2
    text = "".join(out.get("text", "") for out in outputs if out.output_type == "stream")
    assert '"loss_last"' in text and "Traceback" not in text
