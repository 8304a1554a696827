"""What mybinder.org would build of binder/, built here, and joined from within its 2 GB."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import threading
import venv
from pathlib import Path

import pytest

from tests.browser import JupyterLab, Tab, chromium
from tests.test_browser import LEAVES, READY, see_samples

ROOT = Path(__file__).parents[1]
MEMORY = 2 * 2**30  # bytes that mybinder.org gives; more, and the whole container is ended
LOOK_EVERY = 1.0  # s


def test_start_runs_what_it_is_given_with_few_threads():
    code = "import os; print(os.environ['OMP_NUM_THREADS'], os.environ['NUMBA_NUM_THREADS'])"
    environment = {name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"}
    done = subprocess.run(
        [ROOT / "binder" / "start", sys.executable, "-c", code], env=environment, capture_output=True, text=True
    )
    assert done.stdout.split() == ["1", "2"]


@pytest.fixture(scope="module")
def image(tmp_path_factory) -> tuple[Path, Path]:
    """(the checkout, its environment's python), made as repo2docker makes them of binder/: requirements.txt with pip
    from the checkout's root, then postBuild. The index of CPU builds is left out: here, as on PyPI's mirror, it is not
    reachable, and the pinned build is served all the same."""
    folder = tmp_path_factory.mktemp("binder")
    checkout = folder / "checkout"
    names = (".git", ".venv*", "*.egg-info", "__pycache__", "build", "demo-out", "tests", ".*_cache", ".hypothesis")
    left_out = shutil.ignore_patterns(*names)
    shutil.copytree(ROOT, checkout, ignore=left_out)
    requirements = checkout / "binder" / "requirements.txt"
    lines = requirements.read_text().splitlines(keepends=True)
    requirements.write_text("".join(line for line in lines if not line.startswith("--extra-index-url")))
    venv.create(folder / "environment", with_pip=True, symlinks=True)
    programs = folder / "environment" / "bin"
    environment = {**os.environ, "PATH": f"{programs}{os.pathsep}{os.environ['PATH']}", "PYTHONPATH": ""}
    for command in ([str(programs / "pip"), "install", "-q", "-r", "binder/requirements.txt"], ["binder/postBuild"]):
        subprocess.run(command, cwd=checkout, env=environment, check=True, timeout=900, stdin=subprocess.DEVNULL)
    return checkout, programs / "python"


@pytest.mark.slow
@pytest.mark.timeout(1500)
def test_joining_fits_into_binders_memory(image, tmp_path):
    checkout, python = image
    lab = JupyterLab(
        tmp_path,
        python=python,
        notebooks=checkout / "notebooks",
        wrapper=checkout / "binder" / "start",
        environment={"PYTHONPATH": None, "OMP_NUM_THREADS": None, "BINDER_SERVICE_HOST": "mybinder.org"},
    )
    with lab, Peak(lab) as peak, chromium() as browser:
        tab = Tab(browser, lab, "join.ipynb")
        tab.run(0)
        tab.wait_for(0, "is ready", READY)
        assert "Installing" not in tab.text(0)
        tab.run(1)
        tab.press(1, re.compile("^Start"))
        first = see_samples(tab)
        see_samples(tab, more_than=first + 2000)
        (kernel,) = lab.processes("ipykernel_launcher")
        assert Path(kernel.cmdline()[0]) == python
        assert len(lab.processes("volunteer_kit.worker")) == 2
        tab.picture("binder")
        tab.stop()
        tab.wait_for(1, "You have left", LEAVES)
        tab.wait_done(1, LEAVES)
    print(f"\npeak of JupyterLab, kernel and two volunteers: {peak.bytes / 2**20:.0f} MB in {peak.processes} processes")
    assert 0 < peak.bytes < MEMORY


class Peak:
    """The largest sum of memory of a server's processes, shared pages counted once (PSS), looked at every second."""

    def __init__(self, lab: JupyterLab):
        self._lab, self._stop = lab, threading.Event()
        self.bytes = self.processes = 0
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> Peak:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join(10)

    def _run(self) -> None:
        while not self._stop.wait(LOOK_EVERY):
            pids = self._lab.pids()
            total = sum(proportional(pid) for pid in pids)
            if total > self.bytes:
                self.bytes, self.processes = total, len(pids)


def proportional(pid: int) -> int:
    """Bytes of one process, its share of shared pages only; 0 if it is gone."""
    try:
        rollup = Path(f"/proc/{pid}/smaps_rollup").read_text()
    except OSError:
        return 0
    return 1024 * int(re.search(r"^Pss:\s+(\d+) kB", rollup, re.MULTILINE)[1])
