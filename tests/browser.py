"""A volunteer at a real JupyterLab, in headless Chromium: opens a notebook, runs cells, presses buttons, looks.

    with JupyterLab(tmp_path, ipykernel=6) as lab, chromium() as browser:
        tab = Tab(browser, lab, "join.ipynb")
        tab.run(0)
        tab.wait_for(0, "is installed")

No wait is a fixed pause: each awaits a condition. Every process carries a mark and is killed by it.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import queue
import re
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from urllib.parse import urlsplit

import psutil
import pytest
from playwright.sync_api import Browser, Locator, Page, expect, sync_playwright

from tests import older_packages
from tests.free_ports import free_port
from volunteer_kit.process_group import find, kill_all

ROOT = Path(__file__).parents[1]
STARTUP = 240  # s for the server, on two busy cores
CLICK = 120_000  # ms until something can be clicked
OPEN = 240_000  # ms until a notebook is there and its kernel answers
expect.set_options(timeout=CLICK)
SETTINGS = {  # of JupyterLab: it asks nobody about news, and nothing on the network
    "apputils-extension/notification": {"fetchNews": "false", "checkForUpdates": False},
    "apputils-extension/themes": {"adaptive-theme": False},
}


class JupyterLab:
    """A server with a copy of the notebooks, a home and settings of its own.

    :param folder: for everything it writes
    :param ipykernel: 7 is the environment's own, 6 Kaggle's, with its ipywidgets and IPython
    :param environment: of the server and its kernels, beside this process's own; None takes a name away
    :param edit: notebook's name, code -> the code as it is to be run, of every code cell
    :param python: of the kernels, if it is not the environment's own
    :param notebooks: this folder itself is opened, no copy
    :param wrapper: a program that starts the server, given its command
    """

    def __init__(
        self,
        folder: Path,
        *,
        ipykernel: int = 7,
        environment: Mapping[str, str | None] | None = None,
        edit: Callable[[str, str], str] | None = None,
        python: Path | None = None,
        notebooks: Path | None = None,
        wrapper: Path | None = None,
    ):
        self.folder, self.ipykernel, self.notebooks = folder, ipykernel, notebooks or folder / "notebooks"
        self._token, self._mark = secrets.token_hex(16), secrets.token_hex(16)
        self._environment = self._own_environment() | dict(environment or {})
        self._wrapper = [str(wrapper)] if wrapper else []
        self._write_settings()
        if notebooks is None:
            self._copy_notebooks(edit)
        if python is not None:
            self._write_kernel(python)

    def _own_environment(self) -> dict[str, str | None]:
        home = self.folder / "jupyter"
        paths = [str(older_packages.folder("kaggle-kernel"))] if self.ipykernel == 6 else []
        paths += [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
        return {
            "VOLUNTEER_KIT_BROWSER_TEST": self._mark,
            "JUPYTER_TOKEN": self._token,
            "JUPYTER_CONFIG_DIR": str(home / "config"),
            "JUPYTER_DATA_DIR": str(home / "data"),
            "JUPYTER_PATH": str(home / "own"),  # read first
            "JUPYTER_RUNTIME_DIR": str(home / "runtime"),
            "JUPYTERLAB_SETTINGS_DIR": str(home / "settings"),
            "JUPYTERLAB_WORKSPACES_DIR": str(home / "workspaces"),
            "IPYTHONDIR": str(home / "ipython"),
            "VOLUNTEER_KIT_HOME": str(self.folder / "home"),
            "HF_HOME": str(self.folder / "hf"),
            "PYTHONPATH": os.pathsep.join(paths),
            "PYTHONDONTWRITEBYTECODE": "1",
            "OMP_NUM_THREADS": "1",
        }

    def _copy_notebooks(self, edit: Callable[[str, str], str] | None) -> None:
        self.notebooks.mkdir(parents=True)
        for path in (ROOT / "notebooks").glob("*.ipynb"):
            notebook = json.loads(path.read_text())
            for cell in notebook["cells"]:
                if edit and cell["cell_type"] == "code":
                    cell["source"] = edit(path.name, "".join(cell["source"]))
            (self.notebooks / path.name).write_text(json.dumps(notebook))

    def _write_settings(self) -> None:
        for name, values in SETTINGS.items():
            path = self.folder / "jupyter" / "settings" / "@jupyterlab" / f"{name}.jupyterlab-settings"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(json.dumps(values))

    def _write_kernel(self, python: Path) -> None:
        path = self.folder / "jupyter" / "own" / "kernels" / "python3" / "kernel.json"
        path.parent.mkdir(parents=True)
        command = [str(python), "-m", "ipykernel_launcher", "-f", "{connection_file}"]
        path.write_text(json.dumps({"argv": command, "display_name": "Python 3 (ipykernel)", "language": "python"}))

    def __enter__(self) -> JupyterLab:
        environment = {k: v for k, v in {**os.environ, **self._environment}.items() if v is not None}
        self.log = self.folder / "jupyter.log"
        options = [f"--ServerApp.root_dir={self.notebooks}", f"--ServerApp.port={free_port()}", "--ip=127.0.0.1"]
        options += ["--no-browser", "--allow-root", "--LabApp.extension_manager=readonly", "--LabApp.news_url=None"]
        self.process = subprocess.Popen(
            [*self._wrapper, sys.executable, "-m", "jupyterlab", *options],
            stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE,
            env=environment, start_new_session=True, cwd=self.folder, text=True, errors="replace",
            preexec_fn=_die_with_parent,
        )  # fmt: skip
        addresses: queue.SimpleQueue[str | None] = queue.SimpleQueue()
        self._reader = threading.Thread(target=self._read, args=(addresses,), daemon=True)
        self._reader.start()
        try:
            self.url = addresses.get(timeout=STARTUP)
            assert self.url, "JupyterLab ended"
            self._wait_until_it_listens()
        except BaseException as error:
            self.__exit__()
            error.add_note(self.log.read_text()[-2000:]) if hasattr(error, "add_note") else None
            raise
        return self

    def _read(self, addresses: queue.SimpleQueue[str | None]) -> None:
        """The server's log into a file, for as long as it lives; its address as soon as it is told."""
        with self.log.open("w") as log, self.process.stderr as lines:
            for line in lines:
                log.write(line)
                log.flush()
                if found := re.search(r"http://127\.0\.0\.1:\d+(?=/lab)", line):
                    addresses.put(found[0])
        addresses.put(None)

    def _wait_until_it_listens(self) -> None:
        """The server tells its address before it binds the port."""
        address = urlsplit(self.url)
        deadline = time.monotonic() + STARTUP
        while True:
            try:
                socket.create_connection((address.hostname, address.port), timeout=STARTUP).close()
                return
            except ConnectionRefusedError:
                assert self.process.poll() is None, "JupyterLab ended"
                assert time.monotonic() < deadline, "JupyterLab does not listen"
                time.sleep(0.05)

    def __exit__(self, *_: object) -> None:
        left = kill_all(self.process.pid, f"VOLUNTEER_KIT_BROWSER_TEST={self._mark}", timeout=60.0)
        self.process.wait()
        self._reader.join(10)
        assert not left, f"processes {left} live on"

    def address(self, name: str) -> str:
        return f"{self.url}/lab/tree/{name}?token={self._token}"

    def pids(self) -> list[int]:
        """The server, and all that it started, directly or not."""
        return find(self.process.pid, f"VOLUNTEER_KIT_BROWSER_TEST={self._mark}")

    def processes(self, part: str) -> list[psutil.Process]:
        """Of pids(): the ones with `part` in their command, and not started by such a one itself (hivemind forks)."""
        found = {}
        for pid in self.pids():
            with contextlib.suppress(psutil.Error):
                process = psutil.Process(pid)
                if part in " ".join(process.cmdline()):
                    found[pid] = process
        return [process for process in found.values() if process.ppid() not in found]

    def saved(self, name: str) -> str:
        """The notebook's file as it is on the disk now."""
        return (self.notebooks / name).read_text()


def _die_with_parent() -> None:
    """A test run that is killed leaves no server behind."""
    ctypes.CDLL(None).prctl(1, signal.SIGTERM)  # PR_SET_PDEATHSIG


@contextlib.contextmanager
def chromium() -> Iterator[Browser]:
    """Debian's, by Playwright; ended with everything that it started."""
    path = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    if path is None:
        pytest.fail("There is no Chromium.\n1. Install it: apt-get install chromium")
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(
            executable_path=path,
            args=["--no-sandbox", "--disable-dev-shm-usage", "--disable-gpu", "--force-color-profile=srgb"],
        )
        try:
            yield browser
        finally:
            browser.close()


class Tab:
    """One tab in which a notebook is open. Cells are code cells, counted from 0.

    `interactions` counts what a person would have done: cells run, buttons pressed, texts typed.
    """

    def __init__(self, browser: Browser, lab: JupyterLab, name: str, pictures: Path | None = None):
        self.lab, self.name, self.interactions = lab, name, 0
        shots = os.environ.get("VOLUNTEER_KIT_SCREENSHOTS")
        self._pictures = Path(shots) if shots else (pictures or lab.folder / "pictures")
        self._context = browser.new_context(viewport={"width": 1200, "height": 1700})
        self._context.set_default_timeout(CLICK)
        self.page = self._open()

    # --- the tab ---

    def _open(self) -> Page:
        page = self._context.new_page()
        page.goto(self.lab.address(self.name), timeout=OPEN)
        expect(page.locator(".jp-Notebook .jp-CodeCell").first).to_be_visible(timeout=OPEN)
        status = page.locator("#jp-main-statusbar").get_by_text(re.compile(r"\| (Idle|Busy)$"))
        expect(status).to_be_visible(timeout=OPEN)  # a cell run before that asks for a kernel
        return page

    def close(self) -> None:
        """As a person closes it: without saving, the kernel left alone."""
        self.page.close()

    def reopen(self) -> None:
        """Close the tab if it is open, and open the notebook anew; the kernel must answer, so a cell that runs must
        serve its messages."""
        if not self.page.is_closed():
            self.close()
        self.page = self._open()

    # --- its cells ---

    def cell(self, index: int) -> Locator:
        return self.page.locator(".jp-Notebook .jp-CodeCell").nth(index)

    def outputs(self, index: int) -> Locator:
        return self.cell(index).locator(".jp-Cell-outputArea")

    def text(self, index: int) -> str:
        return self.outputs(index).inner_text()

    def run(self, index: int) -> None:
        """Click into the cell and press Ctrl-Enter."""
        self.interactions += 1
        self.cell(index).locator(".cm-content").click()
        self.page.keyboard.press("Control+Enter")

    def run_all(self) -> None:
        """One choice of the menu: Run, Run All Cells."""
        self.interactions += 1
        self._choose("Run", "Run All Cells")

    def wait_for(self, index: int, text: str | re.Pattern[str], timeout: float = 240) -> None:
        """Until the cell's output has this text; `timeout` in s."""
        expect(self.outputs(index)).to_contain_text(text, timeout=timeout * 1000)

    def wait_done(self, index: int, timeout: float = 240) -> None:
        """Until the cell has run; `timeout` in s."""
        prompt = self.cell(index).locator(".jp-InputPrompt")
        expect(prompt).to_have_text(re.compile(r"\[\d+\]:"), timeout=timeout * 1000)

    def is_running(self, index: int) -> bool:
        return "*" in self.cell(index).locator(".jp-InputPrompt").inner_text()

    def press(self, index: int, name: str | re.Pattern[str]) -> None:
        """A widget's button in the cell's output."""
        self.interactions += 1
        self.outputs(index).get_by_role("button", name=name).click()

    def type(self, index: int, text: str) -> None:
        """Into the password field in the cell's output."""
        self.interactions += 1
        self.outputs(index).locator("input[type=password]").fill(text)

    def stop(self) -> None:
        """The toolbar's square."""
        self.page.locator('[data-jp-item-name="interrupt"]').first.click()

    # --- JupyterLab around it ---

    def save(self) -> str:
        """Ctrl-S; :returns: the file, once it has been written."""
        path = self.lab.notebooks / self.name
        before = path.stat().st_mtime_ns
        with self.page.expect_response(lambda r: r.request.method == "PUT" and "/api/contents/" in r.url) as saved:
            self._choose("File", "Save Notebook")
        assert saved.value.ok and path.stat().st_mtime_ns > before
        return path.read_text()

    def theme(self, name: str) -> None:
        """light or dark, by the menu."""
        self._choose("Settings", "Theme", f"JupyterLab {name.capitalize()}")
        light = "true" if name == "light" else "false"
        expect(self.page.locator("body")).to_have_attribute("data-jp-theme-light", light)
        expect(self.page.locator("#jupyterlab-splash")).to_have_count(0)  # it covers the page for a second

    def _choose(self, *path: str) -> None:
        self.page.locator("#jp-MainMenu").get_by_text(path[0], exact=True).click()
        for step in path[1:]:
            item = self.page.locator(".lm-Menu-itemLabel").get_by_text(step, exact=True)
            item.hover()
            if step == path[-1]:
                item.click()

    def picture(self, name: str, index: int | None = None) -> Path:
        """A screenshot of the page, or of one cell; in $VOLUNTEER_KIT_SCREENSHOTS or the server's folder."""
        path = self._pictures / f"{name}.png"
        (self.cell(index) if index is not None else self.page).screenshot(path=path)
        return path
