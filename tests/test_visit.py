"""A visit to a hosted run, as benchmarks/join_platforms.py makes it, with a stand-in for the kit in a kernel."""

from __future__ import annotations

import subprocess
import sys
import venv
from pathlib import Path

import nbformat
import pytest

from benchmarks.join_platforms_parts.visit import visit
from tests.small_wheels import make_wheel

KIT = """
import dataclasses, os, pathlib, subprocess, sys, time

@dataclasses.dataclass
class Contribution:
    samples: int
    error: str | None = None

def join_swarm(run, accept_terms):
    assert accept_terms and os.environ["HF_TOKEN"] == "hf_reads" and not pathlib.Path("setup.cfg").exists()
    if "leaves a process" in run:
        subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True)
    try:
        pathlib.Path(run).write_text("here")  # the stop button is pressed as soon as it is seen
        time.sleep(600)
    except KeyboardInterrupt:
        print("You have left.")
    return Contribution(7)
"""


@pytest.fixture(scope="module")
def python(tmp_path_factory) -> Path:
    """A platform's, with this environment's ipykernel to be seen and a package of its own."""
    folder = tmp_path_factory.mktemp("platform")
    venv.create(folder, with_pip=True, symlinks=True)
    site = next(folder.glob("lib/python3*/site-packages"))
    (site / "ours.pth").write_text("\n".join(path for path in sys.path if path.endswith("site-packages")))
    (site / "kit_stand_in.py").write_text(KIT)
    wheel = make_wheel(folder, "small-package", "1.0")
    subprocess.run([folder / "bin/python", "-m", "pip", "install", "-q", "--no-index", wheel], check=True, timeout=120)
    return folder / "bin/python"


def notebook_of(folder: Path, install: str, run: Path) -> Path:
    cells = [
        nbformat.v4.new_markdown_cell("# A run"),
        nbformat.v4.new_code_cell(install),
        nbformat.v4.new_code_cell(f"from kit_stand_in import join_swarm\nRUN = {str(run)!r}\njoin_swarm_is = 1\n"
                                  "contribution = join_swarm(RUN)"),
    ]  # fmt: skip
    path = folder / "join.ipynb"
    nbformat.write(nbformat.v4.new_notebook(cells=cells), path)
    return path


def visited(python: Path, folder: Path, name: str, install: str = "print('Installed.')", patience: float = 240):
    run = folder / name
    book = notebook_of(folder, install, run)
    is_there = lambda: 3 * run.exists()  # noqa: E731
    return visit(
        python, book, folder / "visit", credited=is_there, environment={"HF_TOKEN": "hf_reads"}, patience=patience
    )


def test_a_visit_is_timed_to_the_first_credited_sample_and_ends_by_the_stop_button(python, tmp_path):
    newer = make_wheel(tmp_path, "small-package", "2.0")
    other = make_wheel(tmp_path, "brought-along", "1.0")
    found = visited(python, tmp_path, "run", f"%pip install -q --no-index {newer} {other}\nprint('Installed.')")
    assert found.error == "" and "Installed." in found.said and "You have left." in found.said
    assert found.left_cleanly and found.samples == 7 and found.first_sample_s < 240 and found.install_s > 0
    assert found.changed == {"small-package": ["1.0", "2.0"]} and found.added == ["brought-along"]


def test_what_stays_behind_is_no_clean_leave_and_is_ended(python, tmp_path, monkeypatch):
    monkeypatch.setattr("benchmarks.join_platforms_parts.visit.GOODBYE", 0.5)
    found = visited(python, tmp_path, "leaves a process")
    assert found.samples == 7 and not found.left_cleanly


def test_an_install_that_fails_is_told(python, tmp_path):
    found = visited(python, tmp_path, "run", "raise RuntimeError('the disk is full')")
    assert "the disk is full" in found.error and not found.left_cleanly and found.first_sample_s is None
