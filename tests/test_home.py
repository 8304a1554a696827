"""The folder that a volunteer comes back to."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from volunteer_kit.home import MAX_KNOWN_PEERS, Home, Totals

PEER = "/ip4/203.0.113.5/tcp/31337/p2p/12D3KooW"


def test_runs_and_their_settings_have_folders_of_their_own(tmp_path, monkeypatch):
    monkeypatch.setenv("VOLUNTEER_KIT_HOME", str(tmp_path))
    paths = {Home(None, "demo", "a" * 32).path, Home(None, "demo", "b" * 32).path, Home(None, "emoji", "a" * 32).path}
    assert len(paths) == 3 and all(path.parent == tmp_path / "runs" for path in paths)
    assert Home(tmp_path / "own").path == tmp_path / "own"


def test_what_is_saved_comes_back(tmp_path):
    home = Home(tmp_path / "new" / "home")
    assert home.totals() == Totals() and home.known_peers() == [] and home.status() == {}
    home.save_totals(Totals(7, 2, 3.5))
    home.save_known_peers([PEER] * 40)
    home.save_status({"state": "training"})
    again = Home(home.path)
    assert again.totals() == Totals(7, 2, 3.5) and again.status() == {"state": "training"}
    assert again.known_peers() == [PEER] * MAX_KNOWN_PEERS
    assert sorted(path.name for path in home.path.iterdir()) == ["peers.json", "status.json", "totals.json"]


@pytest.mark.parametrize("damage", ["", "{", "[]", '{"samples": "many"}', '{"samples": null}', "\x00" * 100])
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
        holder.wait(30)
        home = Home(tmp_path)
        assert home.lock("volunteer") and not home.lock("worker")
        holder.stdin.close()
        assert home.lock("worker", patience=20)
        home.unlock()
        assert Home(tmp_path).lock("worker")
    finally:
        holder.kill()
