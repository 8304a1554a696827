"""A volunteer on a platform: runs a hosted run's notebook from top to bottom, in the platform's own Python and outside
any checkout, until a sample is credited; then presses the notebook's stop button, as who leaves does."""

from __future__ import annotations

import contextlib
import json
import os
import re
import secrets
import subprocess
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import nbformat
import psutil
from jupyter_client import KernelManager
from jupyter_client.kernelspec import KernelSpecManager
from nbclient import NotebookClient
from nbclient.exceptions import CellExecutionError, CellTimeoutError, DeadKernelError

from volunteer_kit.process_group import find, kill_all

MARK = "VOLUNTEER_KIT_VISIT"  # in the environment of all that a visit starts
NOBODY = 2**22 + 1  # no process id
GOODBYE = 120.0  # s in which a volunteer leaves in good order
OWN = re.compile(r"^(PYTHON|PIP_CONSTRAINT|VIRTUAL_ENV|JUPYTER|IPYTHON|VOLUNTEER_KIT|VSCODE)")  # of this process alone
# what the machine itself says about which kit is there, and what a notebook's last cell tells
VERSIONS = "import importlib.metadata as m, json; print(json.dumps({d.name: d.version for d in m.distributions()}))"
TELL = "import dataclasses, json\nprint('VISIT', json.dumps(dataclasses.asdict(contribution)))"


@dataclass
class Visit:
    """The findings of one visit."""

    install_s: float = 0.0  # the first cell
    changed: dict[str, list[str | None]] = field(default_factory=dict)  # platform's packages: from, to (None: gone)
    added: list[str] = field(default_factory=list)  # packages that were missing
    first_sample_s: float | None = None  # from the second cell's start until one is credited; None: none was
    samples: int = 0  # of its own, as it was told at the end
    left_cleanly: bool = False  # the cell returned what was given, and no process stayed
    error: str = ""  # what a cell ended with
    said: str = ""  # what the cells printed


def visit(
    python: Path,
    notebook: Path,
    folder: Path,
    *,
    credited: Callable[[], int],
    environment: Mapping[str, str | None] | None = None,
    patience: float = 600.0,
) -> Visit:
    """Run `notebook` by the kernel of `python`, whose environment it changes: pass a copy of one that is kept.

    :param folder: empty; the notebook's working directory and its home are made in it
    :param credited: -> samples of this volunteer that the run has credited by now, asked twice a second
    :param environment: beside this process's: the stand-in Hub, HF_TOKEN; None takes a name away
    :param patience: s for each cell
    """
    for name in ("work", "home"):
        (folder / name).mkdir(parents=True, exist_ok=True)
    mark = secrets.token_hex(8)
    kept = {name: value for name, value in os.environ.items() if not OWN.match(name)}
    ours = {"VOLUNTEER_KIT_HOME": str(folder / "home"), "IPYTHONDIR": str(folder / "ipython"), MARK: mark}
    full = {name: value for name, value in {**kept, **(environment or {}), **ours}.items() if value is not None}
    before = versions(python)
    found = Visit()
    manager = _manager(python, folder)
    book = _prepared(notebook)
    client = NotebookClient(
        book, km=manager, timeout=int(patience), resources={"metadata": {"path": str(folder / "work")}}
    )
    watch = _Watch(manager, credited)
    client.on_cell_execute = watch.begins
    client.on_cell_executed = watch.ends
    try:
        client.execute(env=full)
    except (CellExecutionError, CellTimeoutError, DeadKernelError) as error:
        found.error = str(error)[-2000:]
    finally:
        watch.close()
        with contextlib.suppress(Exception):  # it may be dead
            manager.shutdown_kernel(now=True)
        stayed = _stayed(mark)
        kill_all(NOBODY, f"{MARK}={mark}")
    nbformat.write(book, folder / "notebook.ipynb")
    found.said = _said(book)
    told = re.search(r"^VISIT (.*)$", found.said, re.MULTILINE)
    given = json.loads(told[1]) if told else {}
    found.install_s, found.first_sample_s = watch.seconds.get(0, 0.0), watch.first_sample_s
    found.samples = given.get("samples", 0)
    found.left_cleanly = bool(given) and not given.get("error") and not stayed and not found.error
    after = versions(python)
    found.changed = {name: [old, after.get(name)] for name, old in before.items() if after.get(name) != old}
    found.added = sorted(after.keys() - before.keys())
    return found


def versions(python: Path) -> dict[str, str]:
    """{package: version} of an environment."""
    clean = {name: value for name, value in os.environ.items() if not OWN.match(name)}
    done = subprocess.run(
        [str(python), "-I", "-c", VERSIONS], capture_output=True, text=True, env=clean, timeout=120, check=True
    )
    return json.loads(done.stdout)


def _manager(python: Path, folder: Path) -> KernelManager:
    kernel = folder / "kernels" / "platform" / "kernel.json"
    kernel.parent.mkdir(parents=True, exist_ok=True)
    command = [str(python), "-m", "ipykernel_launcher", "-f", "{connection_file}"]
    kernel.write_text(json.dumps({"argv": command, "display_name": "Platform", "language": "python"}))
    specs = KernelSpecManager(kernel_dirs=[str(folder / "kernels")])
    return KernelManager(kernel_name="platform", kernel_spec_manager=specs)


def _prepared(notebook: Path) -> nbformat.NotebookNode:
    """No button can be pressed here: the call accepts the terms. One more cell tells what was given."""
    book = nbformat.read(notebook, as_version=4)
    joining = [cell for cell in book.cells if cell.cell_type == "code" and "join_swarm(RUN)" in cell.source]
    if len(joining) != 1:
        raise ValueError(f"{notebook} has {len(joining)} cells that join")
    joining[0].source = joining[0].source.replace("join_swarm(RUN)", "join_swarm(RUN, accept_terms=True)")
    book.cells.insert(1 + book.cells.index(joining[0]), nbformat.v4.new_code_cell(TELL))
    return book


class _Watch:
    """Seconds of each code cell; and the stop button, once a sample is credited."""

    def __init__(self, manager: KernelManager, credited: Callable[[], int]) -> None:
        self.seconds: dict[int, float] = {}  # by the number of the code cell
        self.first_sample_s: float | None = None
        self._manager, self._credited = manager, credited
        self._number, self._began, self._over = -1, 0.0, threading.Event()
        self._thread: threading.Thread | None = None

    def begins(self, cell: nbformat.NotebookNode, **_: object) -> None:
        if cell.cell_type != "code":
            return
        self._number, self._began = self._number + 1, time.monotonic()
        if "join_swarm(RUN" in cell.source:
            self._thread = threading.Thread(target=self._wait_for_credit, daemon=True)
            self._thread.start()

    def ends(self, cell: nbformat.NotebookNode, **_: object) -> None:
        if cell.cell_type == "code":
            self.seconds[self._number] = round(time.monotonic() - self._began, 1)
            if "join_swarm(RUN" in cell.source:
                self.close()

    def close(self) -> None:
        self._over.set()
        if self._thread is not None:
            self._thread.join(30)

    def _wait_for_credit(self) -> None:
        began = self._began
        while not self._over.wait(0.5):
            try:
                samples = self._credited()
            except OSError:  # the dashboard is busy
                continue
            if samples > 0:
                self.first_sample_s = round(time.monotonic() - began, 1)
                os.kill(self._manager.provisioner.pid, 2)  # to the kernel alone, as Jupyter's stop button
                return


def _stayed(mark: str) -> list[psutil.Process]:
    """Processes of the visit that do not end by themselves."""
    processes = []
    for pid in find(NOBODY, f"{MARK}={mark}"):
        with contextlib.suppress(psutil.NoSuchProcess):
            processes.append(psutil.Process(pid))
    return psutil.wait_procs(processes, timeout=GOODBYE)[1]


def _said(book: nbformat.NotebookNode) -> str:
    outputs = [output for cell in book.cells if cell.cell_type == "code" for output in cell.get("outputs", [])]
    return "".join(output.text for output in outputs if output.output_type == "stream")
