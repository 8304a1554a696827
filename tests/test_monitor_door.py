"""`volunteer-kit monitor rollback` where no monitor runs, and how its process ends; with a stand-in."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.local_swarm import ROOT
from volunteer_kit.run_reader import RUN_FILES

PEER = "/ip4/127.0.0.1/tcp/1/p2p/QmX"
SCRIPT = """
import sys, time
from types import SimpleNamespace
import typer
from volunteer_kit.cli import _plain_errors
from volunteer_kit import cli_monitor
from volunteer_kit.monitor import door

door.FAREWELL, door.SERVE_FOR, door.MEET_WITHIN, door.TROUBLES = 0.3, 0.1, 0.1, 1
answer, others, goodbye = eval(sys.argv[1])

class Monitor:
    why_over = answer if isinstance(answer, str) else None
    def __init__(self, run, home, keys, addresses, **_):
        self.run = run
        print("peers", *addresses.initial_peers, flush=True)
        record = SimpleNamespace(fingerprint=run.fingerprint)
        board = SimpleNamespace(fetch=lambda: {name: record for name in ["us", *others]})
        peer = SimpleNamespace(peer_id="us", visible_maddrs=list)
        self.member = SimpleNamespace(peer=peer, board=board)
    def turn(self):
        if answer is None:
            raise OSError("the floor is wet")
    def go_back_by_hand(self, to_epoch):
        return answer
    def close(self):
        time.sleep(goodbye)

door.Monitor = Monitor
app = typer.Typer()
cli_monitor.add_verbs(app, _plain_errors)
app(["monitor", *sys.argv[2:]])
"""


def act(folder: Path, stand_in: str, *words: str) -> subprocess.CompletedProcess[str]:
    """:param stand_in: its answer to the order, None: its turns fail, a text: why it has to end; who else
    is there; s that its goodbye takes"""
    return subprocess.run(
        [sys.executable, "-c", SCRIPT, stand_in, *words], capture_output=True, text=True, cwd=folder, timeout=120,
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
    )  # fmt: skip


@pytest.fixture
def host(tmp_path):
    """The host's own file, which names no peers, and the folder beside it where a monitor was once."""
    (tmp_path / "demo-host" / "monitor").mkdir(parents=True)
    (tmp_path / "my-run.yaml").write_text((RUN_FILES / "demo.yaml").read_text() + "authority: {open: true}\n")
    return tmp_path


def written(host: Path, *peers: str) -> None:
    text = (RUN_FILES / "demo.yaml").read_text() + "".join(f"\ninitial_peers: [{peer}]\n" for peer in peers)
    (host / "demo-host" / "run.yaml").write_text(text)


def order(host: Path, stand_in: str) -> subprocess.CompletedProcess[str]:
    return act(host, stand_in, "rollback", "my-run.yaml", "--to", "7")


@pytest.mark.parametrize("goodbye", [0.0, 30.0])
def test_the_order_goes_to_the_peers_of_the_written_file_and_is_said_before_the_goodbye(host, goodbye):
    written(host, PEER)
    done = order(host, f"((True, 'It goes back.'), ['ada'], {goodbye})")
    assert done.returncode == 0 and f"peers {PEER}\n" in done.stdout and "It goes back." in done.stdout, done


@pytest.mark.parametrize("goodbye", [0.0, 30.0])
def test_a_refused_order_is_told_and_fails(host, goodbye):
    written(host, PEER)
    done = order(host, f"((False, 'There is no checkpoint of step 7.'), ['ada'], {goodbye})")
    assert done.returncode == 2 and done.stderr.count("There is no checkpoint of step 7.") == 1, done


def test_an_order_that_nobody_would_hear_is_not_given(host):
    written(host)
    done = order(host, "((True, 'It goes back.'), [], 0)")
    assert done.returncode == 2 and "No peer of the run 'demo' is known" in done.stderr and "It goes" not in done.stdout
    written(host, PEER)
    done = order(host, "((True, 'It goes back.'), [], 0)")
    assert done.returncode == 2 and "No other peer of the run" in done.stderr and "It goes" not in done.stdout


def test_what_ended_a_monitor_is_seen_however_long_its_goodbye_takes(host):
    done = act(host, "(None, [], 30)", "watch", "demo")
    assert done.returncode == 1 and "the floor is wet" in done.stderr


@pytest.mark.parametrize("goodbye", [0.0, 30.0])
def test_a_monitor_whose_key_another_one_has_ends_and_says_why(host, goodbye):
    done = act(host, f"('Another monitor has its key.', [], {goodbye})", "watch", "demo")
    assert done.returncode == 2 and done.stderr.count("Another monitor has its key.") == 1, done
