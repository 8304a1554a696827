"""A group that is killed leaves neither processes nor shared memory."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from volunteer_kit.process_group import JANITOR, kill_all

SHARES = """
import os, time, torch
torch.multiprocessing.set_sharing_strategy("file_system")  # hivemind's
shared = torch.zeros(1000).share_memory_()
if os.fork() == 0:
    os.setsid()
print(os.getpid(), flush=True)
time.sleep(600)
"""
PATIENCE = 120.0  # s


@pytest.fixture
def leader() -> Iterator[psutil.Popen]:
    """It shares a tensor, and has a child in a session of its own."""
    command = [sys.executable, "-c", SHARES]
    environment = {"PATH": "/usr/bin:/bin", "MARK": "here"}
    process = psutil.Popen(command, stdout=subprocess.PIPE, text=True, start_new_session=True, env=environment)
    assert {int(process.stdout.readline()) for _ in range(2)} > {process.pid}
    yield process
    process.stdout.close()


def shared_by(pid: int) -> list[Path]:
    return list(Path("/dev/shm").glob(f"torch_{pid}_*"))


def janitor_of(process: psutil.Popen) -> psutil.Process:
    [janitor] = [child for child in process.children() if child.name() == JANITOR]
    return janitor


def test_all_are_killed_and_their_shared_memory_is_gone(leader):
    processes = [leader, *leader.children(recursive=True)]
    assert len(processes) == 3 and shared_by(leader.pid)
    assert kill_all(leader.pid, "MARK=here", PATIENCE) == []
    assert leader.wait(PATIENCE) == -signal.SIGKILL
    assert not shared_by(leader.pid)
    assert not psutil.wait_procs(processes, PATIENCE)[1]


def test_a_helper_that_does_not_end_is_killed_too(leader):
    janitor = janitor_of(leader)
    janitor.suspend()
    assert kill_all(leader.pid, "MARK=here", 20.0) == []
    assert not psutil.wait_procs([janitor], PATIENCE)[1]
    for path in shared_by(leader.pid):
        path.unlink()
