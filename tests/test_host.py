"""`volunteer-kit host`: what it keeps up, with stand-ins for its processes; and once with a real first peer."""

from __future__ import annotations

import contextlib
import os
import queue
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.request
from pathlib import Path

import psutil
import pytest

from tests.free_ports import free_ports
from volunteer_kit.host import door
from volunteer_kit.host.folder import NO_GROUP, HostFolder
from volunteer_kit.host.settings import PEER_PORT
from volunteer_kit.host.watch import News, Watch
from volunteer_kit.process_group import find, kill_all

ROOT = Path(__file__).parents[1]
UP, TIMEOUT = "Ctrl-C stops it", 120.0


class Hosted:
    """tests/hosted.py in a process of its own, and what it says."""

    def __init__(self, folder: Path, *, ports: list[int] | None = None, run: str | Path = "demo", **environment: str):
        self.folder, self.ports = HostFolder(folder), ports
        extra = {"PYTHONPATH": str(ROOT), "PORTS": " ".join(map(str, ports or ())), **environment}
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tests.hosted", str(run), str(folder)],
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env={**os.environ, **extra},
            cwd=folder.parent, start_new_session=True,
        )  # fmt: skip
        self.text = ""
        self._lines: queue.SimpleQueue[str] = queue.SimpleQueue()
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        for line in self.process.stdout:
            self._lines.put(line)
        self._lines.put("")

    def wait_for(self, word: str) -> str:
        """What it said until `word`."""
        deadline = time.monotonic() + TIMEOUT
        while word not in self.text:
            line = self._lines.get(timeout=max(0.1, deadline - time.monotonic()))
            assert line, self.text
            self.text += line
        return self.text

    def parts(self) -> list[psutil.Process]:
        return [psutil.Process(pid) for pid in find(NO_GROUP, self.folder.mark)]

    def part(self, verb: str) -> psutil.Process:
        return next(p for p in self.parts() if verb in p.cmdline() and "volunteer_kit.host.child" in p.cmdline())

    def starts(self, verb: str) -> int:
        (file,) = self.folder.path.rglob(f"{verb}.starts")
        return len(file.read_text())

    def end(self, number: int = signal.SIGTERM) -> int:
        self.process.send_signal(number)
        return self.process.wait(timeout=TIMEOUT)

    def kill(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()

    def close(self) -> None:
        self.kill()
        left = kill_all(NO_GROUP, self.folder.mark, TIMEOUT)
        assert not left, f"processes {left} live on"


@pytest.fixture
def hosts(tmp_path):
    """Makes hosts in tmp_path/F, or in `place`; none of their processes stays."""
    made = []

    def make(place: Path | None = None, **settings) -> Hosted:
        made.append(Hosted(place or tmp_path / "F", **settings))
        return made[-1]

    yield make
    for host in made:  # all of them first: a host that lives starts its parts again
        host.kill()
    for host in made:
        host.close()


def get(url: str) -> str:
    with urllib.request.urlopen(url, timeout=TIMEOUT) as answer:
        return answer.read().decode()


def until(condition, what: str) -> None:
    deadline = time.monotonic() + TIMEOUT
    while not condition():
        assert time.monotonic() < deadline, what
        time.sleep(0.02)


def copy_of_living(folder: Path, place: Path, lock: str) -> None:
    """Copy a folder in which somebody is at work; a file that was replaced meanwhile is copied again."""
    deadline = time.monotonic() + TIMEOUT
    while True:
        try:
            shutil.copytree(folder, place, ignore=lambda *_: {lock}, dirs_exist_ok=True)
            return
        except shutil.Error as error:
            assert time.monotonic() < deadline, error


# --- from start to end ---


def test_it_says_how_to_join_serves_the_run_file_and_ends_in_order(hosts):
    chosen = free_ports(3)
    host = hosts(ports=chosen)
    text = host.wait_for(UP)
    url = f"http://127.0.0.1:{chosen[0]}"
    assert f"volunteer-kit join {url}" in text and f"{url}/join.ipynb" in text and f"  {url}\n" in text
    assert f'pip install "{url}/kit/volunteer_kit-' in text and "volunteer-kit setup" in text
    assert not any(word in text for word in ("Colab", "Kaggle", "OWNER")), "nobody there could reach this machine"
    assert f"http://127.0.0.1:{chosen[0]}/moderate" in text and f"http://127.0.0.1:{chosen[1]}/" in text
    served = get(f"{url}/run.yaml")
    assert served == host.folder.run_file.read_text()
    assert f"/ip4/127.0.0.1/tcp/{chosen[2]}/p2p/QmPeer" in served and "ed25519:" in served
    assert "# 32x32 pixels -> 8x8 codes" in served  # the author's comments
    groups = {os.getpgid(p.pid) for p in host.parts()}
    assert len(groups) == 4 and os.getpgid(host.process.pid) not in groups  # Ctrl-C reaches the host alone
    assert host.end(signal.SIGINT) == 0
    assert not host.parts()
    ended = (host.folder.path.parent / "ends").read_text() + (host.folder.path / "ends").read_text()
    assert sorted(ended.split()) == ["authority", "dashboard", "first-peer", "monitor"]
    assert (host.folder.path.parent / "ends").read_text().split() == ["authority", "first-peer"]


def test_killed_nothing_stays_and_the_next_start_is_the_same(hosts):
    """Without ports named: those of the first start are remembered."""
    host = hosts()
    host.wait_for(UP)
    before = host.folder.run_file.read_text(), (host.folder.keys / "root.pem").read_bytes(), host.folder.read()
    assert before[2]["peer_id"] == "QmPeer" and before[2]["port"] and before[2]["dashboard_port"]
    left = host.parts()
    assert len(left) == 4
    host.process.kill()
    host.process.wait()
    assert not psutil.wait_procs(left, timeout=TIMEOUT)[1]
    again = hosts()
    again.wait_for(UP)
    assert before == (
        again.folder.run_file.read_text(),
        (again.folder.keys / "root.pem").read_bytes(),
        again.folder.read(),
    )
    assert again.end() == 0


def test_any_port_is_the_same_one_at_every_start(hosts):
    """Volunteers that are here know it, and look for the run there."""
    chosen = [*free_ports(3)[:2], 0]
    with contextlib.ExitStack() as usual:
        with contextlib.suppress(OSError):  # somebody has it: as well
            usual.enter_context(socket.create_server(("", PEER_PORT)))
        host = hosts(ports=chosen)
        host.wait_for(UP)
    before = host.folder.run_file.read_text()
    assert host.end() == 0 and f"/tcp/{PEER_PORT}/" not in before
    again = hosts(ports=chosen)
    again.wait_for(UP)
    assert again.folder.run_file.read_text() == before


@pytest.mark.slow
def test_what_a_killed_host_left_behind_is_gone_before_the_next_begins(hosts, tmp_path):
    """A part that does not hear SIGTERM holds its port until it is killed."""
    (tmp_path / "F").mkdir()
    (tmp_path / "F" / "authority.deaf").touch()
    host = hosts(ports=free_ports(3))
    host.wait_for(UP)
    deaf = host.part("authority")
    deaf.suspend()  # so that it does not end by itself either, however long the next host takes to come
    host.process.kill()
    host.process.wait()
    assert deaf.is_running()
    again = hosts()
    text = again.wait_for(UP)
    assert "What an earlier host left behind has ended" in text
    assert not psutil.wait_procs([deaf], timeout=TIMEOUT)[1]


def test_what_dies_is_started_again(hosts):
    host = hosts(ports=free_ports(3))
    host.wait_for(UP)
    others = {p.pid for p in host.parts()} - {host.part("monitor").pid}
    host.part("monitor").kill()
    text = host.wait_for("monitor is up again")
    assert "monitor was killed (SIGKILL)" in text and "starts again in" in text
    assert host.starts("monitor") == 2 and host.starts("authority") == 1
    assert others < {p.pid for p in host.parts()}


def test_a_first_start_is_told_once_however_quick_the_parts_are(tmp_path, monkeypatch):
    """A part whose news was still waiting when all were up was said to be up again, though it had never died."""

    class Quick(Watch):
        running = False

        def start(self) -> None:
            self.ready = {"peer_id": "QmPeer", "maddrs": ["/ip4/127.0.0.1/tcp/1/p2p/QmPeer"]}
            self._tell(News("ready", self.part.name))

    class SomeNewsLater(threading.Event):
        asked = 0

        def is_set(self) -> bool:
            self.asked += any(UP in line for line in said)
            return self.asked > 6

    said: list[str] = []
    monkeypatch.setattr(door, "Watch", Quick)
    door.host_run("demo", folder=tmp_path / "F", stop=SomeNewsLater(), say=said.append)
    assert said[-1] == "Stopping." and sum(UP in line for line in said) == 1
    assert not [line for line in said if "again." in line], said


def test_what_dies_again_and_again_is_tried_now_and_then_and_the_rest_goes_on(hosts, tmp_path):
    (tmp_path / "F" / "monitor").mkdir(parents=True)
    (tmp_path / "F" / "monitor" / "dashboard.dies").touch()
    chosen = free_ports(3)
    host = hosts(ports=chosen)
    text = host.wait_for(UP)
    assert "dashboard ended with exit code 3, too often: from now on" in text and "The reason is in line 7." in text
    assert "Without: dashboard" in text
    assert "run_id: demo" in get(f"http://127.0.0.1:{chosen[0]}/run.yaml")
    until(lambda: host.starts("dashboard") > 3, "it was given up")
    (tmp_path / "F" / "monitor" / "dashboard.dies").unlink()
    assert host.wait_for("dashboard is up again").count("too often") == 1
    assert host.end() == 0


def test_without_its_first_peer_a_run_cannot_begin(hosts, tmp_path):
    (tmp_path / "F").mkdir()
    (tmp_path / "F" / "first-peer.dies").touch()
    host = hosts(ports=free_ports(3))
    host.wait_for("The reason is in line 7.")
    assert host.process.wait(timeout=TIMEOUT) == 2 and not host.parts()


def test_two_hosts_of_one_folder_do_not_run_at_once(hosts):
    host = hosts(ports=free_ports(3))
    host.wait_for(UP)
    second = hosts()
    assert "Another host runs in" in second.wait_for("--folder PATH")
    assert second.process.wait(timeout=TIMEOUT) == 2
    assert host.process.poll() is None and len(host.parts()) == 4


def test_another_runs_folder_is_refused(hosts, tmp_path):
    (tmp_path / "F").mkdir()
    (tmp_path / "F" / "host.json").write_text('{"run_id": "other"}')
    host = hosts()
    assert "is of the run 'other', not 'demo'" in host.wait_for("run file of that run")


def test_a_port_that_somebody_has_is_told_before_anything_starts(hosts):
    chosen = free_ports(3)
    with socket.create_server(("127.0.0.1", chosen[1])):
        host = hosts(ports=chosen)
        assert f"Port {chosen[1]} (--dashboard-port) is taken" in host.wait_for("choose another port")
    assert not list(host.folder.path.rglob("*.starts"))


def test_a_token_of_the_environment_is_for_the_monitor_only(hosts):
    host = hosts(ports=free_ports(3), HF_TOKEN="hf_secret", PUSH_TO="org/model")
    host.wait_for(UP)
    has_it = {p.cmdline()[5] for p in host.parts() if p.environ().get("HF_TOKEN")}
    assert has_it == {"monitor"}
    assert "org/model" in host.part("monitor").cmdline() and host.folder.read()["push_to"] == "org/model"


def test_a_monitor_that_pushes_nothing_gets_no_token(hosts):
    host = hosts(ports=free_ports(3), HF_TOKEN="hf_secret")
    host.wait_for(UP)
    assert not any(p.environ().get("HF_TOKEN") for p in host.parts())


@pytest.mark.slow
def test_a_real_first_peer_has_the_same_address_after_a_kill(hosts):
    host = hosts(ports=free_ports(3), REAL_PEER="1")
    host.wait_for(UP)
    peer_id, run_file = host.folder.read()["peer_id"], host.folder.run_file.read_text()
    assert f"/p2p/{peer_id}" in run_file and host.folder.identity.stat().st_mode & 0o077 == 0
    left = host.parts()
    assert len(left) > 5  # the peer's own
    host.process.kill()
    host.process.wait()
    assert not psutil.wait_procs(left, timeout=TIMEOUT)[1]
    again = hosts(REAL_PEER="1")
    again.wait_for(UP)
    assert again.folder.run_file.read_text() == run_file
    left = again.parts()
    assert again.end() == 0 and not psutil.wait_procs(left, timeout=TIMEOUT)[1]


@pytest.mark.slow
def test_a_copy_of_a_hosts_folder_does_not_start_while_the_other_one_is_up(hosts, tmp_path):
    """As on a cloned machine: each would have volunteers of its own, under the same peer id."""
    host = hosts(ports=free_ports(3), REAL_PEER="1")
    host.wait_for(UP)
    copy_of_living(host.folder.path, tmp_path / "G", "host.lock")
    copy = hosts(ports=free_ports(3), REAL_PEER="1", place=tmp_path / "G")
    said = copy.wait_for("end the other one first")
    assert "under the key of this one, and was here before" in said and UP not in said
    assert copy.process.wait(timeout=TIMEOUT) == 2
    assert host.process.poll() is None and len(host.parts()) > 5
