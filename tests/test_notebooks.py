"""The notebooks: what they hold, and each run from top to bottom as a first visitor would."""

from __future__ import annotations

import contextlib
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import nbformat
import psutil
import pytest
from nbclient import NotebookClient
from nbclient.exceptions import CellExecutionError

from tests.demo_volunteer import demo_volunteer
from volunteer_kit.process_group import find

ROOT = Path(__file__).parents[1]
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))
NOBODY = 2**22 + 1  # no process id
EVERY = pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.name)


def code_cells(name: str) -> list[str]:
    cells = json.loads((ROOT / "notebooks" / name).read_text())["cells"]
    return ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"]


def prose(path: Path) -> str:
    cells = json.loads(path.read_text())["cells"]
    return "\n".join("".join(cell["source"]) for cell in cells if cell["cell_type"] == "markdown")


# --- what they hold ---


def test_all_four_are_here():
    ours = {"join.ipynb", "gallery.ipynb", "host_a_run.ipynb", "finetune_with_trainer.ipynb"}
    assert {path.name for path in NOTEBOOKS} == ours


def test_join_is_prose_and_two_cells():
    assert len(code_cells("join.ipynb")) == 2


@EVERY
def test_every_notebook_installs_by_the_same_cell_from_one_constant(path):
    cell, joins = code_cells(path.name)[0], code_cells("join.ipynb")[0]
    line = re.compile(r"^EXTRAS = .*$", re.MULTILINE)
    assert len(line.findall(cell)) == 1
    assert line.sub("", cell) == line.sub("", joins)


@EVERY
def test_no_metadata_but_the_kernels_name(path):
    notebook = json.loads(path.read_text())
    assert set(notebook["metadata"]) == {"kernelspec", "language_info"}
    assert notebook["metadata"]["language_info"] == {"name": "python"}
    assert all(cell["metadata"] == {} for cell in notebook["cells"])
    nbformat.validate(nbformat.read(path, as_version=4))


@EVERY
def test_nothing_leads_to_a_place_or_a_name_that_is_not_ours(path):
    """Neither a badge to a repository that is nobody's, nor a name in an index that anybody may register."""
    text = path.read_text()
    for words in ("OWNER", "badge", "colab.research.google.com", "kaggle.com/kernels", "mybinder.org"):
        assert words not in text
    assert not re.search(r"pip install[^\n]*volunteer.kit", text)


def test_join_says_what_the_platforms_allow_and_how_to_stop():
    text = prose(ROOT / "notebooks" / "join.ipynb")
    for words in ("running distributed computing workers", "paid", "Kaggle", "Binder", "To stop", "stop button"):
        assert words in text


# --- the install cell, with a stand-in for what installs (test_install_cell.py has the rest) ---

ASKED = "def prepare(*asked):\n    print('asked', [str(one) for one in asked])\n"


def run_install_cell(folder: Path, name: str = "join.ipynb", **variables: str) -> subprocess.CompletedProcess:
    return subprocess.run(
        [sys.executable, "-S", "-c", code_cells(name)[0]], cwd=folder, env=variables, capture_output=True, text=True,
        timeout=240,
    )  # fmt: skip


def kit_in(folder: Path) -> Path:
    """A package that only says what it was asked to install."""
    (folder / "volunteer_kit" / "host").mkdir(parents=True)
    (folder / "volunteer_kit" / "__init__.py").touch()
    (folder / "volunteer_kit" / "host" / "install_cell.py").write_text(ASKED)
    return folder


@pytest.mark.parametrize(
    ("name", "extras"), [("join.ipynb", []), ("host_a_run.ipynb", ["server"]), ("finetune_with_trainer.ipynb", ["hf"])]
)
def test_the_checkout_around_it_is_installed(tmp_path, name, extras):
    checkout = kit_in(tmp_path / "checkout")
    other = kit_in(tmp_path / "site")  # an older one, say
    (checkout / "notebooks").mkdir()
    done = run_install_cell(checkout / "notebooks", name, PYTHONPATH=str(other))
    assert done.stdout.strip() == f"asked {[str(checkout), str(extras)]}", done.stderr


def test_what_an_installed_kit_lacks_is_installed(tmp_path):
    site = kit_in(tmp_path / "site")
    done = run_install_cell(tmp_path, PYTHONPATH=str(site))
    assert done.stdout.strip() == "asked ['None', '[]']", done.stderr


def test_elsewhere_it_says_where_the_kit_is_to_be_had(tmp_path):
    done = run_install_cell(tmp_path)
    assert done.returncode != 0 and "1. To join a run, open the link that its host gave you" in done.stderr


def test_in_a_notebook_the_reason_is_no_traceback(tmp_path):
    with pytest.raises(CellExecutionError):
        hidden = "volunteer_kit_that_nobody_has"
        execute("join.ipynb", tmp_path, lambda code: code.replace('("volunteer_kit")', f'("{hidden}")'), timeout=240)
    (output,) = [out for out in outputs(tmp_path, "join.ipynb") if out.output_type == "error"]
    shown = "\n".join(output.traceback)
    assert "no package index has it" in shown and "Traceback" not in shown and "----" not in shown


# --- top to bottom ---


def execute(
    name: str,
    folder: Path,
    edit: Callable[[str], str] = str,
    environment: dict[str, str] | None = None,
    timeout: int = 500,
) -> None:
    """In `folder`, where it is left with its outputs. Raises CellExecutionError."""
    notebook = nbformat.read(ROOT / "notebooks" / name, as_version=4)
    for cell in notebook.cells:
        if cell.cell_type == "code":
            cell.source = edit(cell.source)
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    ours = {"PYTHONPATH": path, "OMP_NUM_THREADS": "1", "IPYTHONDIR": str(folder / "ipython")}
    client = NotebookClient(notebook, timeout=timeout, resources={"metadata": {"path": str(folder)}})
    try:
        client.execute(env={**os.environ, **ours, **(environment or {})})
    finally:
        nbformat.write(notebook, folder / name)


def outputs(folder: Path, name: str) -> list:
    notebook = nbformat.read(folder / name, as_version=4)
    return [output for cell in notebook.cells if cell.cell_type == "code" for output in cell.outputs]


def said(folder: Path, name: str) -> str:
    return "".join(out.text for out in outputs(folder, name) if out.output_type == "stream")


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_gallery_draws_with_the_model_of_a_running_swarm(tmp_path):
    with demo_volunteer(tmp_path) as volunteer:
        volunteer.wait_epoch(2)
        address = volunteer.maddrs[0]
        execute(
            "gallery.ipynb",
            tmp_path,
            lambda code: code.replace('INITIAL_PEERS = ""', f"INITIAL_PEERS = {address!r}"),
        )
    assert re.search(r"8 pictures by the model of epoch \d+", said(tmp_path, "gallery.ipynb"))
    assert [out for out in outputs(tmp_path, "gallery.ipynb") if "image/png" in out.get("data", {})]
    assert (tmp_path / "gallery" / "grid.png").exists()


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_two_fine_tune_together_as_one_had_done_alone(tmp_path):
    """In QLoRA's 4 bits, with a second peer that the notebook starts."""
    mark = f"VOLUNTEER_KIT_NOTEBOOK={tmp_path.name}-{os.getpid()}"
    execute("finetune_with_trainer.ipynb", tmp_path, environment=dict([mark.split("=")]))
    text = said(tmp_path, "finetune_with_trainer.ipynb")
    assert "numbers are equal on both peers" in text and "Traceback" not in text and "Warning" not in text
    for name in ("alone", "together: this notebook", "together: the other peer"):
        [(first, last)] = re.findall(rf"{name}: loss ([\d.]+) -> ([\d.]+)", text)
        assert float(last) < 0.5 * float(first)
    assert "after:  down from 42: 42 41 40 39 38" in text
    assert [out for out in outputs(tmp_path, "finetune_with_trainer.ipynb") if "image/png" in out.get("data", {})]
    assert not still_there(mark)


def still_there(mark: str) -> list[psutil.Process]:
    """Processes with this mark that do not end by themselves; torch's keeper of shared memory takes 2 s for it."""
    processes = []
    for pid in find(NOBODY, mark):
        with contextlib.suppress(psutil.NoSuchProcess):
            processes.append(psutil.Process(pid))
    return psutil.wait_procs(processes, timeout=120)[1]
