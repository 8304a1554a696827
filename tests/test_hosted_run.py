"""A run as its people live it: a host starts it, two volunteers join by the link in their browsers, a moderator bans
one on the web page, everybody sees it on the dashboard; then the host's machine dies, and comes back."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest
from playwright.sync_api import Browser, Page, expect

from tests.browser import JupyterLab, Tab, chromium
from tests.free_ports import free_port
from tests.hub import Hub
from tests.test_browser import joins, of_hub, see_samples, start
from volunteer_kit.process_group import find, kill_all
from volunteer_kit.run_reader import find_run_file

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

UP, CREDITED, OUT = 180, 240, 150  # s, on two busy cores
REASON = "two machines, one of them in a cupboard"


class HostOfTwo:
    """`volunteer-kit host` in a folder of its own, again and again."""

    def __init__(self, folder: Path, hub: Hub, edit: Callable[[str], str] = lambda text: text):
        """:param edit: of the run file's text"""
        self.folder = folder / "host"
        self.port, self.board, self.peer_port = free_port(), free_port(), free_port()
        self.run_file, self.said = folder / "together.yaml", ""
        text = find_run_file("demo").read_text().replace("run_id: demo", "run_id: together")
        size = "target_batch_size: 256"
        assert size in text
        text = text.replace(size, "target_batch_size: 2048")  # the monitor needs seconds a step
        who = "url: 'http://127.0.0.1', open: true, moderators: [mona], public_key: ''"
        self.run_file.write_text(f"{edit(text)}\nauthority: {{{who}}}\n")
        self._mark = f"VOLUNTEER_KIT_HOSTED_TEST={folder.name}-{os.getpid()}"
        name, _, value = self._mark.partition("=")
        root = str(Path(__file__).parents[1])
        changes = of_hub(hub, folder) | {name: value, "OMP_NUM_THREADS": "1", "PYTHONPATH": root}
        self._environment = {k: v for k, v in {**os.environ, **changes}.items() if v is not None}
        self.process: subprocess.Popen[str] | None = None

    @property
    def link(self) -> str:
        return f"http://127.0.0.1:{self.port}/run.yaml"

    def start(self) -> None:
        command = [sys.executable, "-m", "volunteer_kit.cli", "host", str(self.run_file), "--folder", str(self.folder)]
        ports = ["--port", str(self.port), "--dashboard-port", str(self.board)]
        self.process = subprocess.Popen(
            [*command, *ports, "--host-maddrs", f"/ip4/127.0.0.1/tcp/{self.peer_port}"],
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=self._environment, start_new_session=True,
        )  # fmt: skip
        alarm = threading.Timer(UP, self.process.kill)
        alarm.start()
        self.said = ""
        for line in self.process.stdout:
            self.said += line
            if "Ctrl-C stops it" in line:
                break
        alarm.cancel()
        assert "For volunteers, one link" in self.said and "Without" not in self.said, self.said
        threading.Thread(target=self.process.stdout.read, daemon=True).start()

    def kill(self) -> None:
        """SIGKILL to it alone; returns when what it had started has ended by itself."""
        family = [psutil.Process(pid) for pid in find(self.process.pid, self._mark) if pid != self.process.pid]
        self.process.send_signal(signal.SIGKILL)
        self.process.wait()
        alive = psutil.wait_procs(family, timeout=UP)[1]
        assert not alive, f"they live on: {alive}"

    def close(self) -> None:
        if self.process is not None:
            kill_all(self.process.pid, self._mark)
            self.process.wait()

    @property
    def peer_id(self) -> str:
        return json.loads((self.folder / "host.json").read_text())["peer_id"]

    def state(self) -> dict:
        """As the dashboard tells programs."""
        with urllib.request.urlopen(f"http://127.0.0.1:{self.board}/api/state", timeout=60) as answer:
            return json.load(answer)

    def credit_of(self, name: str) -> int:
        return sum(row["samples"] for row in self.state()["leaderboard"] if row["name"] == name)


@pytest.fixture
def hub() -> Iterator[Hub]:
    with Hub() as hub:
        for name in ("ada", "bob", "mona"):
            hub.tokens[token_of(name)], hub.rights[token_of(name)] = name, {"role": "read"}
        yield hub


def token_of(name: str) -> str:
    return f"hf_onlyReads{name.capitalize()}123456"


def machine_of(name: str, folder: Path, hub: Hub, link: str) -> JupyterLab:
    (folder / name).mkdir()
    environment = of_hub(hub, folder / name) | {"HF_TOKEN": token_of(name)}
    return JupyterLab(folder / name, environment=environment, edit=joins(link))


def wait_until(true, seconds: float, what: str) -> None:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        with contextlib.suppress(OSError):
            if true():
                return
        time.sleep(0.5)
    raise AssertionError(f"not within {seconds:.0f} s: {what}")


def picture(page: Page, folder: Path, name: str) -> None:
    shots = os.environ.get("VOLUNTEER_KIT_SCREENSHOTS")
    page.screenshot(path=(Path(shots) if shots else folder) / f"{name}.png", full_page=True)


def moderator_at(browser: Browser, host: HostOfTwo) -> Page:
    """Signed in at the authority's page."""
    page = browser.new_context(viewport={"width": 900, "height": 1000}).new_page()
    page.goto(f"http://127.0.0.1:{host.port}/moderate")
    page.locator("input[type=password]").fill(token_of("mona"))
    page.get_by_role("button", name="Sign in").last.click()
    expect(page.get_by_role("heading", name="Moderators", exact=True)).to_be_visible()
    return page


def test_a_host_two_volunteers_and_a_moderator(tmp_path, hub):
    host = HostOfTwo(tmp_path, hub)
    try:
        host.start()
        peer_id = host.peer_id
        with (
            chromium() as browser,
            machine_of("ada", tmp_path, hub, host.link) as hers,
            machine_of("bob", tmp_path, hub, host.link) as his,
        ):
            ada, bob = Tab(browser, hers, "join.ipynb"), Tab(browser, his, "join.ipynb")
            for tab in (ada, bob):
                start(tab)
            for tab in (ada, bob):
                see_samples(tab)
            board = browser.new_context(viewport={"width": 1280, "height": 1000}).new_page()
            board.goto(f"http://127.0.0.1:{host.board}/")
            wait_until(lambda: host.credit_of("ada") and host.credit_of("bob"), CREDITED, "both have credit")
            expect(board.get_by_role("rowheader", name="ada")).to_be_visible()
            picture(board, tmp_path, "hosted-dashboard")

            page = moderator_at(browser, host)
            expect(page.get_by_text("bob", exact=True).first).to_be_visible()
            page.get_by_label("Ban bob", exact=True).click()
            page.get_by_label("Reason, which bob will read").fill(REASON)
            picture(page, tmp_path, "hosted-moderator")
            page.get_by_role("button", name="Ban bob").click()
            expect(page.get_by_text("bob is banned, and out within a minute.")).to_be_visible()
            picture(page, tmp_path, "hosted-banned")

            expect(board.get_by_text("bob may not take part any more").first).to_be_visible(timeout=60_000)  # no reload
            picture(board, tmp_path, "hosted-dashboard-banned")
            expect(bob.outputs(1).get_by_text(REASON).first).to_be_visible(timeout=OUT * 1000)
            bob.picture("hosted-bob", 1)
            see_samples(ada, more_than=see_samples(ada))

            before, epoch = host.credit_of("ada"), host.state()["now"]["epoch"]
            host.kill()
            host.start()
            assert host.peer_id == peer_id, "the address that volunteers know"
            wait_until(lambda: host.state()["now"]["epoch"] >= epoch, UP, "the monitor goes on where the run is")
            assert host.credit_of("ada") >= before > 0
            page = moderator_at(browser, host)
            expect(page.get_by_text("ada", exact=True).first).to_be_visible()
            expect(page.get_by_text(REASON).first).to_be_visible()
            see_samples(ada, more_than=see_samples(ada))
            wait_until(lambda: host.credit_of("ada") > before, CREDITED, "credit goes on")
            picture(board, tmp_path, "hosted-dashboard-again")
    finally:
        host.close()
