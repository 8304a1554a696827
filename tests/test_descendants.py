"""What a test or benchmark has started ends with it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import psutil

from benchmarks.netlab_parts.descendants import NAME

ROOT = Path(__file__).parents[1]
PARENT = r"""
import json, subprocess, sys, time
from pathlib import Path
from benchmarks.netlab_parts.descendants import end_descendants_with_us
end_descendants_with_us()
from tests.local_swarm import LocalPeer
peer = LocalPeer(Path(sys.argv[1]))
sleep = [sys.executable, "-S", "-c", "import subprocess, time; subprocess.Popen(['sleep', '600']); time.sleep(600)"]
others = [subprocess.Popen(sleep), subprocess.Popen(sleep, start_new_session=True, stdin=subprocess.DEVNULL)]
peer.wait_event("connected")
print(json.dumps([peer.process.pid, *(other.pid for other in others)]), flush=True)
time.sleep(600)
"""


def test_all_that_a_killed_test_has_started_ends_with_it(tmp_path):
    """A real peer with its forks and p2pd; children of children; in sessions of their own, or without a stdin."""
    command = [sys.executable, "-c", PARENT, str(tmp_path / "peer.log")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=ROOT, start_new_session=True) as parent:
        started = [psutil.Process(pid) for pid in json.loads(parent.stdout.readline())]
        family = [process for one in started for process in (one, *one.children(recursive=True))]
        assert len(family) >= 6 and any(process.name() == "p2pd" for process in family)
        parent.send_signal(signal.SIGKILL)
        assert not psutil.wait_procs(family, timeout=120)[1]


def test_this_very_test_has_such_a_watcher():
    """The conftest's: every process that any test starts carries the mark."""
    commands = [child.cmdline() for child in psutil.Process().children()]
    watchers = [command for command in commands if "benchmarks.netlab_parts.descendants" in command]
    assert os.environ[NAME].startswith(f"{os.getpid()}-") and any(os.environ[NAME] in words for words in watchers)
