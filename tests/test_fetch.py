"""The model of a running swarm, fetched by a peer that takes no part in it."""

from __future__ import annotations

import contextlib
import os
import signal
from pathlib import Path

import psutil
import pytest

from tests.demo_volunteer import demo_volunteer
from volunteer_kit.checkpoint import load_checkpoint
from volunteer_kit.fetch import Wanted, _read, fetch_checkpoint
from volunteer_kit.generate import generate_images
from volunteer_kit.home import Home
from volunteer_kit.run_reader import RunError
from volunteer_kit.runs import load_run
from volunteer_kit.swarm.errors import SwarmError

NOBODY = "/ip4/127.0.0.1/tcp/9/p2p/12D3KooWLcCbAJZGyAPZ1WuvgvQuSMJ1nZ3XgFBnTCdQCmhGTVTG"


def test_where_nobody_is_known_it_says_whom_to_ask():
    with pytest.raises(RunError, match="nobody to ask(.|\n)*1\\.(.|\n)*2\\.(.|\n)*3\\."):
        fetch_checkpoint("demo")


def test_dead_peers_are_told_as_such(tmp_path):
    with pytest.raises(SwarmError, match="None of the run's first peers answered") as caught:
        fetch_checkpoint("demo", initial_peers=[NOBODY], out=tmp_path)
    assert caught.value.kind == "dead_peers"


# As hivemind's: forked processes that hold the pipe of the one that was started.
WITH_CHILDREN = """
import os, subprocess, sys, time
sleep = [sys.executable, "-S", "-c", "import time; time.sleep(600)"]
children = [subprocess.Popen(sleep), subprocess.Popen(sleep, start_new_session=True)]
sys.stdin.readline()
print('{"say": "%d %d %d"}' % (os.getpid(), children[0].pid, children[1].pid), flush=True)
time.sleep(600)
"""


@pytest.mark.parametrize(("deadlines", "is_killed"), [((3.0, 20.0, 80.0), False), ((600.0,), True)])
@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="finds processes through /proc")
def test_a_process_that_dies_or_takes_too_long_is_the_end(tmp_path, monkeypatch, deadlines, is_killed):
    (tmp_path / "with_children.py").write_text(WITH_CHILDREN)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    family: list[int] = []

    def say(line: str) -> None:
        family.extend(map(int, line.split()))
        if is_killed:  # as for want of memory
            os.kill(family[0], signal.SIGKILL)

    wanted = Wanted(run={}, initial_peers=[], out=str(tmp_path), timeout=1.0)
    for deadline in deadlines:  # until it has told of its children; how long that takes is the machine's affair
        with pytest.raises(SwarmError, match="without an answer \\(exit code -9"):
            _read(wanted, deadline, say, module="with_children")
        if family:
            break
    assert len(family) == 3
    for pid in family:
        with contextlib.suppress(psutil.NoSuchProcess):
            assert psutil.Process(pid).status() == psutil.STATUS_ZOMBIE


@pytest.fixture(scope="module")
def volunteer(tmp_path_factory):
    with demo_volunteer(tmp_path_factory.mktemp("volunteer")) as volunteer:
        yield volunteer


@pytest.mark.slow
def test_the_model_of_a_running_swarm(volunteer, tmp_path):
    volunteer.wait_epoch(3)
    lines: list[str] = []
    path = fetch_checkpoint("demo", initial_peers=volunteer.maddrs, out=tmp_path / "fetched", say=lines.append)
    after = volunteer.wait_epoch(volunteer.epoch + 3)
    found = load_checkpoint(path, fingerprint=load_run("demo").fingerprint)
    assert 3 <= found.epoch and any(f"epoch {found.epoch}" in line for line in lines)
    assert after["group_size"] == 1 and after["cause"] is None  # whoever only asks is not waited for
    drawn = generate_images(["a large red circle"], checkpoint=path, run="demo", out=tmp_path / "drawn")
    assert drawn.epoch == found.epoch and drawn.grid.exists()


@pytest.mark.slow
def test_peers_that_this_machine_has_met_are_asked(volunteer, tmp_path, monkeypatch):
    monkeypatch.setenv("VOLUNTEER_KIT_HOME", str(tmp_path / "home"))
    config = load_run("demo")
    volunteer.wait_epoch(1)
    Home(None, config.run_id, config.fingerprint).save_known_peers(volunteer.maddrs)
    assert load_checkpoint(fetch_checkpoint("demo", out=tmp_path / "fetched")).epoch >= 1


@pytest.mark.slow
def test_a_swarm_of_another_run_has_no_model_for_us(volunteer, tmp_path):
    other = load_run("demo").model_copy(update={"seed": 5})
    with pytest.raises(SwarmError, match="none gave the model(.|\n)*same run file") as caught:
        fetch_checkpoint(other, initial_peers=volunteer.maddrs, out=tmp_path, timeout=3)
    assert caught.value.kind == "no_state"
