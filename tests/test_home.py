"""The folder that a volunteer comes back to."""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
import time

import pytest

from volunteer_kit import home as home_module
from volunteer_kit.home import MAX_KNOWN_PEERS, SHORT_WHILE, Home, Totals, log_end, open_log

PEER = "/ip4/203.0.113.5/tcp/31337/p2p/12D3KooW"


def test_runs_and_their_settings_have_folders_of_their_own(tmp_path, monkeypatch):
    monkeypatch.setenv("VOLUNTEER_KIT_HOME", str(tmp_path))
    paths = {Home(None, "demo", "a" * 32).path, Home(None, "demo", "b" * 32).path, Home(None, "emoji", "a" * 32).path}
    assert len(paths) == 3 and all(path.parent == tmp_path / "runs" for path in paths)
    assert Home(tmp_path / "own").path == tmp_path / "own"


def test_what_is_saved_comes_back(tmp_path):
    home = Home(tmp_path / "new" / "home")
    assert home.totals() == Totals() and home.known_peers() == [] and home.status() == {}
    given = Totals(7, 2, 3.5, {"rounds": 4}, {"opening": (3, 1)})
    home.save_totals(given)
    home.save_known_peers([PEER] * 40)
    home.save_status({"state": "training"})
    again = Home(home.path)
    assert again.totals() == given and again.status() == {"state": "training"}
    assert again.known_peers() == [PEER] * MAX_KNOWN_PEERS
    assert sorted(path.name for path in home.path.iterdir()) == ["peers.json", "status.json", "totals.json"]


@pytest.mark.parametrize(
    "damage",
    ["", "{", "[]", '{"samples": "many"}', '{"samples": null}', "\x00" * 100,
     '{"samples": 7, "epochs": 2, "seconds": 3.5, "waiting": [5]}',
     '{"samples": 7, "epochs": 2, "seconds": 3.5, "waiting": {"x": 5}}'],
)  # fmt: skip
def test_damaged_files_are_as_none(tmp_path, damage):
    home = Home(tmp_path)
    for name in ("totals.json", "peers.json", "status.json"):
        (tmp_path / name).write_text(damage)
    assert home.totals() == Totals() and home.known_peers() == []
    assert isinstance(home.status(), dict)


def test_addresses_that_are_none_are_not_dialled(tmp_path):
    peers = [PEER, "host:31337", 7, None, "/ip4/1.2.3.4/tcp/5", "/" + "x" * 400 + "/p2p/y"]
    (tmp_path / "peers.json").write_text(json.dumps({"peers": peers}))
    assert Home(tmp_path).known_peers() == [PEER]


def test_a_full_disk_keeps_what_was_saved_and_leaves_nothing_lying_about(tmp_path):
    home = Home(tmp_path)
    home.save_totals(Totals(7, 2, 3.5))
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4, before[1]))  # bytes of a file
    try:
        with pytest.raises(OSError):
            home.save_totals(Totals(8, 3, 4.5))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert os.listdir(tmp_path) == ["totals.json"] and home.totals() == Totals(7, 2, 3.5)


def test_a_restart_is_told_from_a_new_stay(tmp_path, monkeypatch):
    home = Home(tmp_path)
    assert not home.was_here("a" * 32)
    home.save_stay("a" * 32)
    assert home.was_here("a" * 32) and not home.was_here("b" * 32)
    now = time.time()
    monkeypatch.setattr(home_module.time, "time", lambda: now + 2 * SHORT_WHILE)
    assert not home.was_here("a" * 32)
    (tmp_path / "stay.json").write_text('{"fingerprint": 7, "time": "never"}')
    assert not home.was_here("a" * 32)


def test_a_log_is_cut_at_a_line_and_appended_to(tmp_path, monkeypatch):
    monkeypatch.setattr(home_module, "MAX_LOG", 100)
    monkeypatch.setattr(home_module, "LOG_KEPT", 50)
    path = tmp_path / "worker.log"
    for count, kept in ((10, 10), (11, 4)):  # lines of 10 bytes
        path.write_text("".join(f"line {number:04}\n" for number in range(count)))
        with open_log(path) as log:
            log.write(b"new\n")
        assert path.read_text() == "".join(f"line {number:04}\n" for number in range(count - kept, count)) + "new\n"
    assert log_end(path).splitlines()[-1] == "  | new" and log_end(tmp_path / "none") == ""


def test_a_log_that_cannot_be_written_is_none(tmp_path):
    with open_log(tmp_path / "no folder" / "worker.log") as log:
        log.write(b"into nothing")
    assert os.listdir(tmp_path) == []


HOLDER = """
import sys, os
from volunteer_kit.home import Home
home = Home(sys.argv[1])
print(home.lock("worker"), flush=True)
if os.fork() == 0:
    sys.stdin.read()
    os._exit(0)
os._exit(0)
"""


def test_the_lock_is_free_when_the_last_process_of_its_holder_is_gone(tmp_path):
    """A killed worker's forked children still speak under its identity."""
    holder = subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(tmp_path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    try:
        assert holder.stdout.readline().strip() == "True"
        holder.wait(120)
        home = Home(tmp_path)
        assert home.lock("volunteer") and not home.lock("worker")
        holder.stdin.close()
        assert home.lock("worker", patience=120)
        home.unlock()
        assert Home(tmp_path).lock("worker")
    finally:
        holder.kill()
