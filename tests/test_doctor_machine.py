"""`volunteer-kit doctor` on machines that have a fault: real processes that stand stopped, servers that say "later",
peers with other kits."""

from __future__ import annotations

import contextlib
import json
import os
import shlex
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest

from volunteer_kit import __version__
from volunteer_kit.doctor import doctor, line, logs, looks, process, records, start_method, stopped, verdicts
from volunteer_kit.doctor.line import Line
from volunteer_kit.home import MAX_LOG
from volunteer_kit.runs import PROTOCOL_VERSION
from volunteer_kit.swarm.net.identity import ensure_identity
from volunteer_kit.swarm.net.peer import PeerConfig, start_peer
from volunteer_kit.swarm.net.same_key import KeyWatch
from volunteer_kit.swarm.records.peer_record import PeerBoard, PeerRecord

ROOT = Path(__file__).parents[1]
PATIENCE = 120.0  # s
HOLDS = """
import sys, time
from volunteer_kit.home import Home
held = [Home(sys.argv[1]) for _ in sys.argv[2:]]
assert all(home.lock(name) for home, name in zip(held, sys.argv[2:]))
print("held", flush=True)
time.sleep(600)
"""


@contextlib.contextmanager
def holder(folder: Path, *locks: str) -> Iterator[psutil.Popen]:
    """A process that holds these locks of the folder, until the end of the block."""
    command = [sys.executable, "-c", HOLDS, str(folder), *locks]
    held = psutil.Popen(command, stdout=subprocess.PIPE, text=True, env={**os.environ, "PYTHONPATH": str(ROOT)})
    try:
        assert held.stdout.readline() == "held\n"
        yield held
    finally:
        held.kill()
        held.wait()
        held.stdout.close()


def stop(held: psutil.Popen) -> None:
    held.suspend()
    deadline = time.monotonic() + PATIENCE
    while held.status() != psutil.STATUS_STOPPED and time.monotonic() < deadline:
        time.sleep(0.01)


# --- Ctrl-Z ---


def test_a_volunteer_that_stands_stopped_is_named_with_the_commands_that_mend_it(tmp_path):
    with holder(tmp_path, "volunteer") as held:
        runs = stopped.look("volunteer", [tmp_path])
        assert runs.level == "ok" and f"process {held.pid} runs" in runs.text
        stop(held)
        found = stopped.look("volunteer", [tmp_path / "another", tmp_path])
        assert found.level == "problem"
        assert f"process {held.pid} (volunteer) stands stopped" in found.text and f"it holds {tmp_path}" in found.text
        go_on, end = found.way_out.splitlines()
        assert "fg " in go_on and f"kill -CONT {held.pid}" in go_on and f"kill {held.pid}" in end
        subprocess.run(shlex.split(f"kill -CONT {held.pid}"), check=True)
        assert stopped.look("volunteer", [tmp_path]).level == "ok"
    assert stopped.look("volunteer", [tmp_path]).text == "none runs on this machine"


def test_a_worker_alone_that_stands_stopped_is_named(tmp_path):
    with holder(tmp_path, "volunteer"), holder(tmp_path, "worker") as worker:
        assert stopped.is_at_work(tmp_path)
        stop(worker)
        found = stopped.look("volunteer", [tmp_path])
        assert f"process {worker.pid} (worker) stands stopped" in found.text
        assert found.way_out == f"Go on: kill -CONT {worker.pid}"
        assert not stopped.is_at_work(tmp_path)  # so a peer that answers under its key is another machine's


def test_the_checkup_of_a_machine_names_the_stopped_volunteer_and_the_start_method(tmp_path, monkeypatch):
    """The whole of it, as a volunteer reads it."""
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:1")
    said: list[str] = []
    with holder(tmp_path, "volunteer") as held:
        stop(held)
        found = {one.name: one for one in doctor(home=tmp_path, say=said.append)}
    assert found["volunteer"].level == "problem" and f"kill -CONT {held.pid}" in "\n".join(said)
    assert found["start method"].level == "ok" and found["logs"].text == "none yet"
    assert said[-1].startswith("To be mended first: volunteer")


# --- start method ---


@pytest.mark.parametrize("method", ["fork", "spawn", "forkserver"])
def test_the_start_method_is_named_and_the_kits_own_processes_are_forked(method, tmp_path, monkeypatch):
    """As in Python 3.14, or where a script has set another one: before any program begins."""
    (tmp_path / "sitecustomize.py").write_text(f"import multiprocessing as m\nm.set_start_method({method!r})\n")
    monkeypatch.setenv("PYTHONPATH", f"{ROOT}{os.pathsep}{tmp_path}")
    found = start_method.start_method(PATIENCE)
    assert found.level == "ok" and found.text.startswith(method) and "it works" in found.text
    assert ("the kit forks its own" in found.text) == (method != "fork")


def test_a_machine_that_cannot_fork_has_a_problem():
    found = start_method.verdict("fork", "Resource temporarily unavailable")
    assert found.level == "problem" and "temporarily" in found.text and "ulimit -u" in found.way_out


# --- who is away, and whose fault it is ---


@pytest.fixture
def server():
    """It answers `status` with `retry_after` and `body`."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self):
            self.send_response(made.status)
            if made.retry_after:
                self.send_header("Retry-After", made.retry_after)
            self.send_header("Content-Length", str(len(made.body)))
            self.end_headers()
            self.wfile.write(made.body)

        def log_message(self, *_):
            pass

    made = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    made.status, made.retry_after, made.body = 200, "", b""
    made.url = f"http://127.0.0.1:{made.server_port}"
    threading.Thread(target=made.serve_forever, daemon=True).start()
    yield made
    made.shutdown()
    made.server_close()


def run_at(url: str) -> SimpleNamespace:
    """As much of a run as the authority's look needs."""
    return SimpleNamespace(run_id="demo", authority=SimpleNamespace(url=url, public_key=f"ed25519:{'E' * 43}"))


@pytest.mark.parametrize(
    ("status", "words"),
    [(429, "asked too often from this network"), (503, "it is up, and has trouble of its own"), (404, "HTTP 404")],
)
def test_a_server_that_answers_is_not_said_to_be_silent(server, status, words):
    server.status, server.retry_after = status, "120"
    passes = status != 404
    for found in (looks.hub(server.url, needed=True), looks.authority(run_at(server.url))[0]):
        assert found.level == "problem" and f"answers with HTTP {status}" in found.text and words in found.text
        assert "does not answer" not in found.text and "again in 2 min" in found.text
        assert ("Wait" in found.way_out) == passes


def test_a_server_that_is_away_is_said_to_be_silent():
    for found in (looks.hub("http://127.0.0.1:1", True), looks.authority(run_at("http://127.0.0.1:1"))[0]):
        assert found.level == "problem" and "does not answer: Connection refused" in found.text


@pytest.mark.parametrize(
    ("answered", "silent", "level", "words"),
    [
        (["the Hub (h)"], ["the authority (a)"], "ok", "it is not the line's fault that the authority (a) does not"),
        (["the Hub (h)", "b"], [], "ok", "online: the Hub (h) and b answer"),
        ([], ["the Hub (h)", "b"], "warning", "nobody who was asked answers (the Hub (h) and b)"),
        ([], [], "ok", "nobody else's machine was asked"),
    ],
)
def test_the_line_is_judged_by_all_that_were_asked(answered, silent, level, words):
    asked = Line()
    for who in (*answered, *silent):
        asked.note(who, who in answered)
    found = asked.finding("a home line")
    assert found.level == level and words in found.text and found.text.startswith("a home line")


def test_a_machine_without_a_network_is_named():
    assert line.verdict("", [], ["the Hub (h)"]).text.startswith("this machine has no network")


def test_a_clock_that_is_far_off_is_told_in_hours():
    assert "1 h ahead of a.org" in verdicts.clock(-3600.0, 0.5, "a.org", None).text


# --- kits, settings, keys ---


@pytest.mark.parametrize(
    ("said", "kit"),
    [
        (json.dumps({"kit": "0.99.0"}), "0.99.0"), ("{}", ""), ("[]", ""), ("no JSON", ""),
        ('{"kit": 3}', ""), (json.dumps({"kit": "rm -rf"}), ""), ("[" * 60_000, ""),
    ],
    ids=["told", "untold", "list", "text", "number", "no version", "deep"],
)  # fmt: skip
def test_the_hosts_kit_is_read_from_its_authority(server, said, kit):
    server.body = said.encode()
    found, told = looks.authority(run_at(server.url))
    assert found.level == "ok" and told == kit


@pytest.mark.parametrize(
    ("others", "level", "words"),
    [
        (["0.99.0"], "warning", "your kit is older: the others have volunteer_kit 0.99.0, this machine has 0.2.0"),
        (["0.1.0", "", "0.1.0"], "warning", "the others' kit is older"),
        (["0.1.0", "0.2.0"], "ok", "volunteer_kit 0.2.0, as the run's peers have"),
        ([], "ok", "what the run's peers have is not known"),
    ],
    ids=["older", "newer", "same", "unknown"],
)
def test_which_kit_is_older(others, level, words):
    found = records.kit(others, "0.2.0", "the run's peers")
    assert found.level == level and words in found.text and bool(found.way_out) == (level == "warning")


def test_other_settings_are_named_only_where_nobody_has_ours():
    assert records.settings([], "a" * 12) is None and records.settings(["b" * 12, "a" * 12], "a" * 12) is None
    found = records.settings(["b" * 12, "b" * 12, "c" * 12], "a" * 12)
    assert found.level == "problem" and "bbbbbbbb" in found.text and "aaaaaaaa" in found.text


@pytest.fixture
def copy_of_the_key(peer, tmp_path):
    """A peer that nobody can call, under the key of tmp_path; it renews its records until the test's end."""
    before = PeerBoard(peer.dht, "kept")
    config = PeerConfig(
        peer.visible_maddrs(), ["/ip4/127.0.0.1/tcp/0"], identity_path=str(tmp_path / "identity.key"),
        check_identity=False, client_mode=True, startup_timeout=PATIENCE,
    )  # fmt: skip
    made, ended = start_peer(config), threading.Event()
    board, watch = PeerBoard(made.dht, "kept"), KeyWatch(made.dht, "kept", made.peer_id, skew=0.0)
    record = PeerRecord(
        peer_id=made.peer_id.to_bytes(), fingerprint="f" * 12, name="ada", device="CPU", epoch=3, total_samples=4,
        samples_per_second=1.0, loss=2.0, client_mode=True, protocol=PROTOCOL_VERSION,
    )  # fmt: skip

    def live() -> None:
        while not ended.wait(1.0):
            board.publish(record)
            watch.look()

    thread = threading.Thread(target=live)
    thread.start()
    deadline = time.monotonic() + PATIENCE
    while not before.fetch() and time.monotonic() < deadline:
        time.sleep(0.2)
    yield made
    ended.set()
    thread.join()
    made.shutdown()


def test_peers_of_an_open_run_tell_their_kit_and_a_copy_of_our_key(peer, copy_of_the_key, tmp_path):
    told = records.records("kept", tmp_path / "identity.key", peer.visible_maddrs(), PATIENCE)
    assert [*told.kits] == [__version__] and [*told.fingerprints] == ["f" * 12]
    assert told.is_key_taken is True and told.wrong_clock == ""
    ensure_identity(tmp_path / "other.key")
    assert records.records("kept", tmp_path / "other.key", peer.visible_maddrs(), PATIENCE).is_key_taken is False


# --- what the kit leaves on a disk ---


def test_a_log_that_has_grown_is_named_and_the_command_mends_it(tmp_path):
    folder = tmp_path / "a home"
    (folder / "logs").mkdir(parents=True)
    (folder / "worker.log").write_bytes(b"all is well\n")
    assert logs.logs([folder, tmp_path / "nowhere"]).level == "ok"
    large = folder / "logs" / "authority.log"
    with large.open("wb") as file:
        file.truncate(5 * MAX_LOG)
    found = logs.logs([folder])
    assert found.level == "warning" and f"{large} (50 MB)" in found.text and "worker.log" not in found.text
    subprocess.run(shlex.split(found.way_out), check=True)
    assert logs.logs([folder]).level == "ok"


def test_an_open_folder_does_not_hide_an_open_umask(tmp_path):
    found = process.rights(0, tmp_path)
    assert str(tmp_path) in found.text and "umask is 000" in found.text
    assert found.way_out.splitlines() == [f"chmod go-w {tmp_path}", "umask 022"]


# --- all at once ---


@pytest.mark.slow
@pytest.mark.timeout(1500)
def test_all_is_named_on_a_machine_that_has_all_of_it():
    command = [sys.executable, str(ROOT / "benchmarks" / "prepared_machine.py")]
    done = subprocess.run(command, capture_output=True, text=True)
    assert "Traceback" not in done.stderr, done.stderr
    if "{" not in done.stdout:
        pytest.skip(done.stderr[-500:])  # no namespaces here, as the program says in words
    result = json.loads(done.stdout.splitlines()[-1])
    assert result["named"] == result["items"] == 10, done.stdout
    assert all(result.values()), done.stdout
