"""The notebooks: what they hold, and each run from top to bottom as a first visitor would."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import subprocess
import sys
import venv
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
NOT_THERE = "volunteer-kit-that-nobody-has-published"
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
def test_every_notebook_installs_by_the_same_cell_from_two_constants(path):
    cell, joins = code_cells(path.name)[0], code_cells("join.ipynb")[0]
    for constant in ("KIT", "NEEDED"):
        line = re.compile(rf"^{constant} = .*$", re.MULTILINE)
        assert len(line.findall(cell)) == 1
        cell, joins = line.sub("", cell), line.sub("", joins)
    assert cell == joins


@EVERY
def test_no_metadata_but_the_kernels_name(path):
    notebook = json.loads(path.read_text())
    assert set(notebook["metadata"]) == {"kernelspec", "language_info"}
    assert notebook["metadata"]["language_info"] == {"name": "python"}
    assert all(cell["metadata"] == {} for cell in notebook["cells"])
    nbformat.validate(nbformat.read(path, as_version=4))


@EVERY
def test_badges_open_this_notebook(path):
    text = prose(path)
    for place in ("colab.research.google.com/github", "kaggle.com/kernels/welcome", "mybinder.org/v2/gh"):
        (link,) = re.findall(rf"\(https://{re.escape(place)}[^)]*\)", text)
        assert path.name in link


def test_join_says_what_the_platforms_allow_and_how_to_stop():
    text = prose(ROOT / "notebooks" / "join.ipynb")
    for words in ("running distributed computing workers", "paid", "Kaggle", "Binder", "To stop", "stop button"):
        assert words in text


# --- the install cell, with pip replaced by one that writes down what it was asked ---

PIP = """
import pathlib, sys
words = sys.argv[1:]
kept = pathlib.Path(words[words.index("-c") + 1]).read_text() if "-c" in words else None
with open({log!r}, "a") as log:
    print([words, kept], file=log)
print("no matching distribution")
sys.exit({code})
"""


def run_install_cell(folder: Path, *, exit_code: int = 0, installed: tuple[str, ...] = ("torch", "numpy")):
    """Where nothing of the kit is installed: (stdout, stderr, what pip was asked)."""
    site, log = folder / "site", folder / "asked"
    (site / "pip").mkdir(parents=True)
    (site / "pip" / "__init__.py").touch()
    (site / "pip" / "__main__.py").write_text(PIP.format(log=str(log), code=exit_code))
    for name in installed:
        info = site / f"{name}-1.2.3.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.2.3\n")
    cell = re.sub(r"^KIT = .*$", f"KIT = {NOT_THERE!r}", code_cells("join.ipynb")[0], flags=re.MULTILINE)
    done = subprocess.run(
        [sys.executable, "-S", "-c", cell], cwd=folder, env={"PYTHONPATH": str(site)}, capture_output=True, text=True,
        timeout=60,
    )  # fmt: skip
    asked = [eval(line) for line in log.read_text().splitlines()] if log.exists() else []
    return done, asked


def test_it_keeps_the_platforms_torch_and_numpy(tmp_path):
    done, asked = run_install_cell(tmp_path)
    (kit, kept), (model, _) = asked
    assert NOT_THERE in kit and "only-if-needed" in kit
    assert kept.split() == ["torch==1.2.3", "numpy==1.2.3"]
    assert "--no-deps" in model and "dalle-pytorch==1.6.6" in model
    assert done.returncode == 0 and "about a minute" in done.stdout and "is ready" in done.stdout


def test_without_a_torch_nothing_is_kept(tmp_path):
    done, asked = run_install_cell(tmp_path, installed=())
    assert done.returncode == 0 and asked[0][1] == "" and "Kept" not in done.stdout


def test_it_stops_with_the_reason_when_pip_fails(tmp_path):
    done, asked = run_install_cell(tmp_path, exit_code=1)
    assert len(asked) == 1 and done.returncode != 0 and "is ready" not in done.stdout
    assert "no matching distribution" in done.stderr and "1. Is the internet on?" in done.stderr


def test_in_a_notebook_the_reason_is_no_traceback(tmp_path):
    """The kit is hidden from the cell, and pip fails at once, for it is told to look nowhere."""

    def edit(code: str) -> str:
        hidden = code.replace('find_spec("volunteer_kit")', f'find_spec("{NOT_THERE.replace("-", "_")}")')
        return re.sub(r"^KIT = .*$", f"KIT = {NOT_THERE!r}", hidden, flags=re.MULTILINE)

    with pytest.raises(CellExecutionError):
        execute("join.ipynb", tmp_path, edit, {"PIP_NO_INDEX": "1"}, timeout=60)
    (output,) = [out for out in outputs(tmp_path, "join.ipynb") if out.output_type == "error"]
    shown = "\n".join(output.traceback)
    assert "The kit could not be installed" in shown and "Traceback" not in shown and "----" not in shown


PLATFORM = ("torch==2.13.0+cpu", "numpy==2.2.6")  # neither is the newest
LOADED = """
import numpy
import torch

print("before", torch.__version__, numpy.__version__)
"""
USED = """
import importlib.metadata

from volunteer_kit import build_model, load_run

model = build_model(load_run("demo"))
print("after", importlib.metadata.version("torch"), importlib.metadata.version("numpy"), model.num_parameters())
"""


@pytest.fixture
def platform(tmp_path, monkeypatch):
    """A kernel `python3` in an environment of its own with a torch and a numpy, as on a platform."""
    venv.create(tmp_path / "environment", with_pip=True, symlinks=True)
    python = str(tmp_path / "environment" / "bin" / "python")
    subprocess.run([python, "-m", "pip", "install", "-q", *PLATFORM, "ipykernel"], check=True, timeout=600)
    kernel = tmp_path / "jupyter" / "kernels" / "python3" / "kernel.json"
    kernel.parent.mkdir(parents=True)
    command = [python, "-m", "ipykernel_launcher", "-f", "{connection_file}"]
    kernel.write_text(json.dumps({"argv": command, "display_name": "Python 3", "language": "python"}))
    monkeypatch.setenv("JUPYTER_PATH", str(tmp_path / "jupyter"))
    monkeypatch.delenv("PYTHONPATH", raising=False)


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_it_installs_beside_a_torch_and_a_numpy_that_are_loaded(platform, tmp_path):
    source = tmp_path / "source"
    left_out = shutil.ignore_patterns(".git", ".venv*", "*.egg-info", "__pycache__", "build", "demo-out", "tests")
    shutil.copytree(ROOT, source, ignore=left_out)
    cell = re.sub(r"^KIT = .*$", f"KIT = {str(source)!r}", code_cells("join.ipynb")[0], flags=re.MULTILINE)
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(code) for code in (LOADED, cell, USED)])
    NotebookClient(notebook, timeout=900, resources={"metadata": {"path": str(tmp_path)}}).execute()
    before, installing, after = ["".join(out.get("text", "") for out in cell.outputs) for cell in notebook.cells]
    assert before.split()[1:] == after.split()[1:3] == ["2.13.0+cpu", "2.2.6"]
    assert "Installed in" in installing and "Kept as they were: torch==2.13.0+cpu, numpy==2.2.6" in installing
    assert "WARNING" not in installing and "ERROR" not in installing
    assert int(after.split()[3]) > 100_000


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
def test_join_runs(tmp_path):
    """As a machine would run it that presses no buttons: the terms are accepted in the call, and a cap ends it."""

    def edit(code: str) -> str:
        return code.replace("join_swarm(RUN)", "join_swarm(RUN, accept_terms=True, max_hours=1 / 30)\ncontribution")

    execute("join.ipynb", tmp_path, edit, {"VOLUNTEER_KIT_HOME": str(tmp_path / "home")})
    text = str(outputs(tmp_path, "join.ipynb"))
    (samples,) = re.findall(r"Contribution\(samples=(\d+)", text)
    assert int(samples) > 0 and "Traceback" not in text


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
    return psutil.wait_procs(processes, timeout=20)[1]
