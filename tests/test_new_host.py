"""A new host's first hour, with nothing but the wheel: install, init, host, look at the run's page in a browser, copy
the line that joins; a volunteer downloads the notebook there, is credited, and finds itself on the dashboard."""

from __future__ import annotations

import contextlib
import json
import os
import queue
import shlex
import signal
import subprocess
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from playwright.sync_api import Browser, Page, expect

from tests.browser import JupyterLab, Tab, chromium
from tests.free_ports import free_ports
from tests.hub import Hub
from tests.own_python import OwnPython, links_to_our_packages
from tests.test_browser import of_hub
from tests.test_hosted_run import wait_until
from volunteer_kit.host.kit_wheel import make_wheel
from volunteer_kit.process_group import kill_all

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1200)]

UP, READY, CREDITED, LEAVES = 240, 240, 420, 120  # s, on two busy cores
RUN = "shapes-together"
WAYS = ("light", {"viewport": {"width": 1280, "height": 900}}), ("dark", {"viewport": {"width": 1280, "height": 900},
        "color_scheme": "dark"}), ("phone", {"viewport": {"width": 390, "height": 844}, "device_scale_factor": 2,
        "is_mobile": True, "has_touch": True})  # fmt: skip
TOKENS = {name: f"hf_onlyReads{name.capitalize()}123456" for name in ("ada", "bob", "mona")}


@pytest.fixture
def hub() -> Iterator[Hub]:
    with Hub() as hub:
        for name, token in TOKENS.items():
            hub.tokens[token], hub.rights[token] = name, {"role": "read"}
        yield hub


class Process:
    """A command of the kit in an environment of its own; its words, and its end with all that it started."""

    def __init__(self, command: list[str], cwd: Path, environment: dict[str, str], mark: str):
        self._mark = f"VOLUNTEER_KIT_NEW_HOST_TEST={mark}"
        name, _, value = self._mark.partition("=")
        self.said = ""
        self._lines: queue.SimpleQueue[str] = queue.SimpleQueue()
        self.process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, cwd=cwd,
            env=environment | {name: value}, start_new_session=True, errors="replace",
        )  # fmt: skip
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        for line in self.process.stdout:
            self._lines.put(line)
        self._lines.put("")

    def wait_for(self, words: str, seconds: float) -> None:
        deadline = time.monotonic() + seconds
        while words not in self.said:
            with contextlib.suppress(queue.Empty):
                line = self._lines.get(timeout=1)
                assert line, f"it has ended\n{self.said}"
                self.said += line
            assert time.monotonic() < deadline, f"not within {seconds:.0f} s: {words}\n{self.said}"

    def close(self) -> None:
        kill_all(self.process.pid, self._mark)
        self.process.wait()


@pytest.fixture
def start() -> Iterator[Callable[..., Process]]:
    """start(command, cwd, environment) -> Process; none of them stays."""
    started: list[Process] = []

    def begin(*arguments) -> Process:
        started.append(Process(*arguments, f"{os.getpid()}-{len(started)}"))
        return started[-1]

    yield begin
    for process in reversed(started):
        process.close()


def state(url: str) -> dict:
    with urllib.request.urlopen(f"{url}/dashboard/api/state", timeout=120) as answer:
        return json.load(answer)


def credit_of(url: str, name: str) -> int:
    return sum(row["samples"] for row in state(url)["leaderboard"] if row["name"] == name)


def visit(browser: Browser, url: str, complaints: list[str], **how) -> Page:
    context = browser.new_context(**how, permissions=["clipboard-read", "clipboard-write"])
    page = context.new_page()
    page.on("pageerror", lambda error: complaints.append(str(error)))
    page.on("console", lambda line: line.type in ("error", "warning") and complaints.append(line.text))
    page.goto(url)
    return page


def picture(page: Page, folder: Path, name: str) -> None:
    shots = os.environ.get("VOLUNTEER_KIT_SCREENSHOTS")
    page.screenshot(path=(Path(shots) if shots else folder) / f"{name}.png", full_page=True)


def look(browser: Browser, url: str, folder: Path, name: str, complaints: list[str]) -> None:
    """By day, by night, and on a phone, where nothing is wider than the screen."""
    for way, how in WAYS:
        page = visit(browser, url, complaints, **how)
        page.wait_for_load_state("networkidle")
        assert page.evaluate("document.documentElement.scrollWidth") <= how["viewport"]["width"], way
        picture(page, folder, f"{name}-{way}")
        page.context.close()


def test_from_an_empty_folder_to_a_credited_volunteer(tmp_path, hub, start):
    # --- the host: an empty folder, and the wheel ---
    packages = links_to_our_packages(tmp_path / "packages")
    host, volunteer = OwnPython(tmp_path / "host-env", packages), OwnPython(tmp_path / "volunteer-env", packages)
    wheel = make_wheel(tmp_path / "wheel")
    host.install(f"{wheel.path.as_uri()}#sha256={wheel.sha256}")
    for folder in ("host", "ada", "bob", "bob/lab", "bob/notebooks"):
        (tmp_path / folder).mkdir()
    assert host.place_of_the_kit(tmp_path / "host").is_relative_to(host.site), "not the checkout"
    assert volunteer.place_of_the_kit(tmp_path / "bob") is None
    of_the_hub = {name: value for name, value in of_hub(hub, tmp_path).items() if value is not None}
    common = of_the_hub | {"OMP_NUM_THREADS": "1", "HOME": str(tmp_path / "host")}
    kit = str(host.bin / "volunteer-kit")
    answers = ["--name", RUN, "--model", "tiny", "--data", "scenes", "--who", "open", "--moderators", "mona"]
    made = subprocess.run(
        [kit, "host", "init", "run.yaml", *answers, "--address", "", "--help-url", ""], capture_output=True, text=True,
        cwd=tmp_path / "host", env=host.environment(**common), timeout=120,
    )  # fmt: skip
    assert made.returncode == 0 and "Then: volunteer-kit host run.yaml" in made.stdout, made.stdout + made.stderr
    lacks = subprocess.run(
        [kit, "setup"], capture_output=True, text=True, cwd=tmp_path / "host", env=host.environment(**common),
        timeout=120,
    )  # fmt: skip
    assert lacks.returncode == 0 and "Nothing to do" in lacks.stdout, lacks.stdout + lacks.stderr
    run_file = tmp_path / "host" / "run.yaml"
    run_file.write_text(run_file.read_text().replace("target_batch_size: 256", "target_batch_size: 1024"))
    own, dashboard, peer = map(str, free_ports(3))
    ports = ["--port", own, "--dashboard-port", dashboard, "--host-maddrs", f"/ip4/127.0.0.1/tcp/{peer}"]
    hosting = start([kit, "host", "run.yaml", *ports], tmp_path / "host", host.environment(**common))
    hosting.wait_for("Ctrl-C stops it", UP)
    lines = hosting.said.splitlines()
    url = lines[lines.index("For volunteers, one link:") + 1].strip()
    assert "Without" not in hosting.said and "Colab" not in hosting.said and "OWNER" not in hosting.said

    complaints: list[str] = []
    with chromium() as browser:
        # --- the page: its line is copied, its notebook is downloaded ---
        page = visit(browser, url, complaints, **WAYS[0][1])
        expect(page.get_by_role("heading", name=RUN)).to_be_visible()
        look(browser, url, tmp_path, "landing-new", complaints)
        page.get_by_role("link", name="Join", exact=True).click()
        page.get_by_role("button", name="Copy the join line").click()
        expect(page.get_by_role("button", name="Copied")).to_be_visible()
        line = page.evaluate("navigator.clipboard.readText()")
        assert line == f"volunteer-kit join {url}"
        with page.expect_download() as download:
            page.get_by_role("link", name="Download join.ipynb").click()
        assert download.value.suggested_filename == "join.ipynb"
        download.value.save_as(tmp_path / "bob" / "notebooks" / "join.ipynb")

        # --- a volunteer by the copied line, and one by the notebook ---
        of_ada = host.environment(**common, HF_TOKEN=TOKENS["ada"], VOLUNTEER_KIT_HOME=str(tmp_path / "ada" / "home"))
        ada = start([*shlex.split(line), "--accept-terms"], tmp_path / "ada", of_ada)
        own = {name: value for name, value in of_hub(hub, tmp_path / "bob").items() if name != "HF_TOKEN"}
        own |= {"PYTHONPATH": None, "HF_TOKEN": None}
        with JupyterLab(
            tmp_path / "bob" / "lab", environment=own, python=volunteer.python, notebooks=tmp_path / "bob" / "notebooks"
        ) as lab:
            tab = Tab(browser, lab, "join.ipynb")
            tab.run_all()
            tab.wait_for(0, "is ready", READY)
            assert volunteer.place_of_the_kit(tmp_path / "bob").is_relative_to(volunteer.site)
            expect(tab.outputs(1).locator("input[type=password]")).to_be_visible(timeout=READY * 1000)
            expect(tab.outputs(1).locator(".vk-terms")).to_have_css("display", "grid")
            tab.picture("new-host-welcome")
            tab.type(1, TOKENS["bob"])
            tab.press(1, "Start")
            assert tab.interactions <= 3, "run all, paste the token, press the button"
            wait_until(lambda: credit_of(url, "bob") and credit_of(url, "ada"), CREDITED, "both are credited")
            tab.picture("new-host-notebook")

            # --- the volunteer finds itself, on pages that were open or are opened ---
            expect(page.locator("#people").get_by_text("bob")).to_be_visible(timeout=READY * 1000)  # without a reload
            page.get_by_role("link", name="See how it goes").click()
            expect(page.get_by_role("rowheader", name="bob")).to_be_visible(timeout=READY * 1000)
            wait_until(lambda: state(url)["images"], CREDITED, "the model has drawn")
            look(browser, url, tmp_path, "landing", complaints)
            look(browser, f"{url}/dashboard/", tmp_path, "dashboard", complaints)
            tab.press(1, "Leave")
            tab.wait_for(1, "You have left", LEAVES)
            wait_until(lambda: not lab.processes("volunteer_kit.worker"), LEAVES, "the volunteer's worker ends")
    assert not complaints
    ada.process.send_signal(signal.SIGINT)
    ada.wait_for("You have left", LEAVES)
    hosting.process.send_signal(signal.SIGINT)
    assert hosting.process.wait(timeout=LEAVES) == 0
