"""`volunteer-kit doctor`: what facts mean, by tables; and real looks at real peers and servers."""

from __future__ import annotations

import email.utils
import json
import os
import socket
import subprocess
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from tests.free_ports import free_port
from volunteer_kit.doctor import doctor, looks, verdicts
from volunteer_kit.doctor.door import host_side
from volunteer_kit.doctor.finding import Finding, report
from volunteer_kit.doctor.looks import Look
from volunteer_kit.doctor.memory_limit import limit_of_memory
from volunteer_kit.home import Home
from volunteer_kit.host.init import Answers, write
from volunteer_kit.packages import Lack
from volunteer_kit.run_reader import RUN_FILES

ROOT = Path(__file__).parents[1]
GB = 10**9
A, B = "/ip4/203.0.113.5/tcp/1/p2p/QmA", "/ip4/203.0.113.6/tcp/1/p2p/QmB"
TORCH, HIVEMIND = Lack("torch", "torch>=2.5", "2.4"), Lack("hivemind", "hivemind<1.1.13,>=1.1.12")
WIDGETS, DALLE = Lack("ipywidgets", "ipywidgets>=7.7"), Lack("dalle-pytorch", "dalle-pytorch==1.6.6")

TABLE = [
    (verdicts.python((3, 11, 7)), "ok", "3.11.7"),
    (verdicts.python((3, 9, 1)), "problem", "3.10"),
    (verdicts.packages([], [], {"torch": "2.13.0+cpu", "hivemind": None}, ""), "ok", "torch 2.13.0+cpu"),
    (verdicts.packages([TORCH], [TORCH], {}, "setup"), "problem", "torch 2.4 (needs >=2.5)"),
    (verdicts.packages([HIVEMIND, DALLE], [HIVEMIND, DALLE], {}, "setup"), "problem", "hivemind, dalle-pytorch"),
    (verdicts.packages([WIDGETS], [], {}, "setup"), "warning", "missing: ipywidgets"),
    (verdicts.host_packages([], "", True), "ok", "all are there"),
    (verdicts.host_packages([Lack("fastapi", "fastapi")], "setup host", True), "problem", "missing: fastapi"),
    (verdicts.host_packages([Lack("fastapi", "fastapi")], "setup host", False), "ok", "only a host needs them"),
    (verdicts.device("Tesla T4", "cuda", 14.7, ()), "ok", "14.7 GB free"),
    (verdicts.device("CPU (2 cores)", "cpu", 9, ()), "ok", "slowly"),
    (verdicts.device("CPU", "cpu", 9, ("The P100 is too old.\n1. Use T4",)), "warning", "P100"),
    (verdicts.memory(26 * GB, 20 * GB, None), "ok", "needs about 1.5"),
    (verdicts.memory(26 * GB, 20 * GB, 125_900_000), "ok", "needs about 8.4"),
    (verdicts.memory(13 * GB, 5 * GB, 125_900_000), "warning", "5.0 of 13.0 GB"),
    (verdicts.memory(4 * GB, 4 * GB, 125_900_000), "problem", "8.4"),
    (verdicts.disk("/x", 50 * GB, None, None), "ok", "50.0 GB"),
    (verdicts.disk("/x", 3 * GB, None, 2 * GB // 3), "warning", "5.0 are needed"),
    (verdicts.disk("/x", 0.2 * GB, None, None), "problem", "0.2 GB"),
    (verdicts.open_files(float("inf")), "ok", "no limit"),
    (verdicts.open_files(65_536), "ok", "65536"),
    (verdicts.open_files(20_000), "warning", "20000"),
    (verdicts.open_files(1024), "problem", "1024"),
    (verdicts.clock(0.2, 0.6, "a.org", True), "ok", "0.2 s behind a.org"),
    (verdicts.clock(-3.4, 0.6, "a.org", None), "warning", "3.4 s ahead of a.org"),
    (verdicts.clock(0.2, 0.6, "a.org", False), "warning", "not set from the network"),
    (verdicts.clock(9.0, 0.6, "a.org", True), "problem", "more than 3 s off"),
    (verdicts.clock(None, 0, "", True), "ok", "set from the network"),
    (verdicts.clock(None, 0, "", None), "warning", "nobody"),
    (verdicts.hub("https://h", None, 0.4, True), "ok", "0.4 s"),
    (verdicts.hub("https://h", "no route", 1, False), "warning", "no route"),
    (verdicts.hub("https://h", "no route", 1, True), "problem", "no route"),
    (verdicts.run_file(None, "demo", "b2a4c4df00", True), "ok", "b2a4c4df; everybody"),
    (verdicts.run_file("There is no run 'x'.\n1. Look"), "problem", "no run 'x'"),
    (verdicts.first_peers({A: "", B: ""}), "ok", "2 of 2"),
    (verdicts.first_peers({A: "", B: "no answer"}), "warning", "1 of 2"),
    (verdicts.first_peers({A: "no answer"}), "problem", "0 of 1"),
    (verdicts.first_peers({}), "warning", "names none"),
    (verdicts.first_peers({}, is_host=True), "ok", "no others"),
    (verdicts.reach(False, "public", {"IPv4": "reached"}), "ok", "by IPv4"),
    (verdicts.reach(True, "not all have that", {"IPv4": "not reached", "IPv6": "reached"}, "a line"), "ok",
     "a line: a peer of the run reached this machine by IPv6, none by IPv4, though not all have that"),
    (verdicts.reach(True, "behind a router", {"IPv4": "not reached"}), "ok", "by IPv4; it trains in client mode"),
    (verdicts.reach(False, "public", {"IPv6": "not reached"}), "warning", "client mode"),
    (verdicts.reach(False, "public", {"IPv4": "not reached"}, is_host=True), "problem", "could not reach"),
    (verdicts.reach(True, "behind a router", {"IPv4": "asked too often"}), "ok", "could not be checked (IPv4: asked"),
    (verdicts.reach(False, "first", {}, is_host=True), "warning", "could not be checked (there is no peer"),
    (verdicts.authority("https://a", None, 60), "ok", "60 days"),
    (verdicts.authority("https://a", None, 3), "warning", "3 days"),
    (verdicts.authority("http://127.0.0.1:1", None, None), "ok", "clear text"),
    (verdicts.authority("https://a", "HTTP 502", None), "problem", "HTTP 502"),
    (verdicts.ports({}, False), "ok", "free"),
    (verdicts.ports({"authority": 8000}, False), "problem", "8000 (authority)"),
    (verdicts.ports({"authority": 8000}, True), "ok", "is running"),
    (verdicts.late("Hub", 25), "warning", "25 s"),
]


@pytest.mark.parametrize(
    ("found", "level", "words"), TABLE, ids=lambda value: getattr(value, "text", None) or str(value)
)
def test_what_facts_mean(found, level, words):
    assert found.level == level and words in found.text
    if level == "problem":
        assert found.way_out
    assert "\n" not in found.text


def test_the_report_is_for_a_person():
    lines = report([Finding("disk", "problem", "none left", "rm a\nrm b"), Finding("clock", "warning", "odd")])
    assert lines[0] == "problem  disk   none left" and lines[1].endswith("-> rm a") and lines[2].endswith("-> rm b")
    assert lines[-1] == "To be mended first: disk."
    assert report([Finding("a", "ok", "b")])[-1] == "All is well."


# --- looks ---


@pytest.fixture(autouse=True)
def patience(monkeypatch):
    """A busy machine takes long to start what a look starts."""
    for name in ("SHORT", "LOADING", "PEERS"):
        monkeypatch.setattr(f"volunteer_kit.doctor.door.{name}", 240.0)


def test_a_check_that_hangs_or_breaks_does_not_hold_up_the_others():
    began = time.monotonic()
    hangs = Look("x", 0.2, lambda: threading.Event().wait() or None)
    breaks = Look("y", 600, lambda: 1 / 0)
    assert hangs.finding() == verdicts.late("x", 0.2)
    assert breaks.finding() == Finding("y", "warning", "could not be checked: division by zero")
    assert time.monotonic() - began < 60


@pytest.fixture
def server():
    """An HTTP server whose clock is `offset` s ahead, and which answers `status`."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self):
            self.send_response_only(made.status)
            self.send_header("Date", email.utils.formatdate(time.time() + made.offset, usegmt=True))
            self.send_header("Content-Length", "0")
            self.end_headers()

        do_HEAD = do_GET

        def log_message(self, *_):
            pass

    made = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    made.offset, made.status = 0.0, 200
    made.url = f"http://127.0.0.1:{made.server_port}"
    threading.Thread(target=made.serve_forever, daemon=True).start()
    yield made
    made.shutdown()
    made.server_close()


@pytest.mark.parametrize(("offset", "level"), [(0, "ok"), (60, "problem"), (-60, "problem")])
def test_the_clock_is_compared_with_the_authoritys(server, offset, level, monkeypatch):
    monkeypatch.setattr(looks, "_synchronized", lambda: None)
    server.offset = offset
    found = looks.clock(["http://127.0.0.1:1", server.url])
    assert found.level == level and ("behind" in found.text) == (
        offset > 0 or found.level == "ok" and "behind" in found.text
    )


def test_a_server_that_answers_with_an_error_is_told(server):
    assert looks.hub(server.url, needed=True).level == "ok"
    server.status = 502
    assert looks.hub(server.url, needed=True).text.startswith(f"{server.url} answers with HTTP 502")
    assert "refused" in looks.hub("http://127.0.0.1:1", needed=False).text.lower()


def test_this_machine():
    assert looks.packages().level == "ok"
    assert looks.memory(None).level in ("ok", "warning")  # of what others on it leave free
    assert looks.disk(Path("/nowhere/at/all"), None, None).level in ("ok", "warning")


@pytest.mark.parametrize(
    ("error", "words"),
    [
        ("dial tcp4 127.0.0.1:1: connect: connection refused", "no peer runs on that port"),
        ("failed to negotiate: peer id mismatch: expected A, but remote key matches B", "another peer"),
        ("failed to dial QmA: all dials failed", "no call gets through"),
        ("", "cannot be called"),
    ],
)
def test_p2pds_words(error, words):
    from volunteer_kit.doctor.probe import in_words

    assert words in in_words(error)


# --- the whole ---


def run_file(folder: Path, peers: list[str], authority: str | None = None) -> Path:
    lines = ["", "initial_peers:", *(f"  - {peer}" for peer in peers)]
    if authority:
        lines += ["authority:", f"  url: {authority}", f"  public_key: ed25519:{'E' * 43}"]
    path = folder / "run.yaml"
    path.write_text((RUN_FILES / "demo.yaml").read_text() + "\n".join(lines) + "\n")
    return path


def test_a_real_run_seen_from_a_volunteers_machine(peer, server, tmp_path, monkeypatch):
    """One of two first peers is there; its authority too, and the Hub is not."""
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:1")
    alive = next(maddr for maddr in peer.visible_maddrs() if "127.0.0.1" in maddr)
    said: list[str] = []
    with socket.socket() as silent:  # nobody else can take its port, and it refuses calls
        silent.bind(("127.0.0.1", 0))
        port = alive.split("/")[4]
        dead = alive.replace(f"/tcp/{port}/", f"/tcp/{silent.getsockname()[1]}/")
        path = run_file(tmp_path, [alive, dead], server.url)
        found = {one.name: one for one in doctor(path, home=tmp_path, say=said.append)}
    assert found["first peers"].level == "warning" and "1 of 2" in found["first peers"].text, found["first peers"]
    assert f"{dead}: its machine is there, but no peer runs" in found["first peers"].way_out
    assert found["reachable"].level == "ok" and "public addresses only" in found["reachable"].text, found["reachable"]
    assert found["authority"].level == "ok" and found["run file"].level == "ok"
    assert found["Hub"].level == "problem" and "127.0.0.1 " in found["clock"].text
    assert said[-1].startswith("To be mended first: Hub")


def test_the_command_line(tmp_path):
    """In a process of its own: nothing of it stays, and the exit code tells."""
    script = (
        "import typer\nfrom volunteer_kit.cli_machine import add_verbs\n"
        "app = typer.Typer()\nadd_verbs(app, lambda verb: verb)\napp()\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script, "doctor", "no-such-run"], capture_output=True, text=True, timeout=240,
        env={**os.environ, "PYTHONPATH": str(ROOT), "HF_ENDPOINT": "http://127.0.0.1:1"}, cwd=tmp_path,
    )  # fmt: skip
    assert (
        done.returncode == 1 and "problem  run file" in done.stdout and "There is no run 'no-such-run'" in done.stdout
    )


def test_the_hosts_side_is_found_by_its_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "demo-host"
    folder.mkdir()
    taken = ThreadingHTTPServer(("127.0.0.1", 0), BaseHTTPRequestHandler)
    port = taken.server_port
    saved = {"run_id": "demo", "peer_id": "QmX", "port": port, "host_maddrs": [f"/ip4/0.0.0.0/tcp/{free_port()}"]}
    (folder / "host.json").write_text(json.dumps(saved))
    assert host_side("demo", "other", None) is None
    for place in (host_side("demo", "demo", None), host_side(folder / "run.yaml", "demo", None)):
        assert place and not place.is_running and place.saved["port"] == port
    home = Home(folder)
    assert home.lock("host") and host_side("demo", "demo", folder).is_running
    home.unlock()
    own = f"/ip4/127.0.0.1/tcp/{free_port()}/p2p/QmX"
    with taken:
        found = {one.name: one for one in doctor(run_file(tmp_path, [own]), say=lambda line: None)}
    assert found["ports"].level == "problem" and str(port) in found["ports"].text
    assert found["first peers"].level == "ok"  # its own is not asked for before it is up


def looked_at(path: Path) -> tuple[list[str], dict[str, Finding]]:
    said: list[str] = []
    return said, {one.name: one for one in doctor(path, say=said.append)}


@pytest.mark.parametrize("by", ["init", "hand"])
def test_a_host_that_was_not_started_yet_is_no_problem(by, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    path = Path("my-run.yaml")
    if by == "init":
        write(path, Answers(name="2024"))
    else:  # as in the notebook: address and key are filled in by the host
        path.write_text((RUN_FILES / "demo.yaml").read_text() + "authority: {open: true, moderators: [ada]}\n")
    said, found = looked_at(path)
    assert found["run file"].level == "ok" and "authority" not in found and "ports" not in found
    assert any("not started yet: volunteer-kit host my-run.yaml" in line for line in said)
    assert not {"host", "first peers", "reachable"} & {n for n, one in found.items() if one.level == "problem"}
    assert "sk the host" not in "".join(said)


def test_mistakes_in_a_hosts_own_file_are_told_with_their_lines(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    text = (RUN_FILES / "demo.yaml").read_text().replace("target_batch_size: 256", "target_batch_size: many")
    Path("my-run.yaml").write_text(text + "authority: {open: true}\n")
    _, found = looked_at(Path("my-run.yaml"))
    line = next(number for number, words in enumerate(text.splitlines(), 1) if "many" in words)
    assert found["run file"].level == "problem" and f"my-run.yaml, line {line}" in found["run file"].text


def test_a_hosts_own_file_leads_to_the_one_that_volunteers_have(server, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "demo-host"
    folder.mkdir()
    run_file(folder, [f"/ip4/127.0.0.1/tcp/{free_port()}/p2p/QmX"], server.url)
    (folder / "host.json").write_text(json.dumps({"run_id": "demo", "peer_id": "QmX"}))
    home = Home(folder)
    assert home.lock("host")
    monkeypatch.setattr("volunteer_kit.doctor.looks.first_peers_and_reach", lambda peers, *_: (
        Finding("first peers", "ok", str(peers)), Finding("reachable", "ok", "")
    ))  # fmt: skip
    Path("my-run.yaml").write_text((RUN_FILES / "demo.yaml").read_text() + "authority: {open: true}\n")
    _, found = looked_at(Path("my-run.yaml"))
    home.unlock()
    assert found["authority"].level == "ok" and server.url in found["authority"].text
    assert "/p2p/QmX" in found["first peers"].text and "host" not in found
    run_file(folder, ["/ip4/127.0.0.1/tcp/1/p2p/QmX"], "http://127.0.0.1:1")
    assert home.lock("host")
    _, found = looked_at(Path("my-run.yaml"))
    home.unlock()
    assert found["authority"].level == "problem" and "authority.log" in found["authority"].way_out


def test_a_containers_limit_is_compared_with_what_training_needs(tmp_path):
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "sys/fs/cgroup").mkdir(parents=True)
    (tmp_path / "proc/self/cgroup").write_text("0::/\n")
    (tmp_path / "proc/meminfo").write_text("MemTotal: 16000000 kB\n")
    assert limit_of_memory(None, tmp_path).level == "ok"
    (tmp_path / "sys/fs/cgroup/memory.max").write_text("2000000000\n")
    assert limit_of_memory(1000, tmp_path).level == "ok"
    found = limit_of_memory(20_000_000, tmp_path)
    assert found.level == "problem" and "leaves 2.0 GB; training needs about 2.6" in found.text
    assert "docker run --memory=4g" in found.way_out
    (tmp_path / "sys/fs/cgroup/memory.events").write_text("oom_kill 2\n")
    assert limit_of_memory(1000, tmp_path).level == "warning"
