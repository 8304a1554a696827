"""A group that is killed leaves neither processes nor shared memory."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
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
MARK = f"MARK_OF_TEST=shares-{os.getpid()}"  # no other run of the tests on this machine has it


@pytest.fixture
def leader() -> Iterator[psutil.Popen]:
    """It shares a tensor, and has a child in a session of its own."""
    command = [sys.executable, "-c", SHARES]
    name, _, value = MARK.partition("=")
    environment = {"PATH": "/usr/bin:/bin", name: value}
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
    assert kill_all(leader.pid, MARK, PATIENCE) == []
    assert leader.wait(PATIENCE) == -signal.SIGKILL
    assert not shared_by(leader.pid)
    assert not psutil.wait_procs(processes, PATIENCE)[1]


def test_a_helper_that_does_not_end_is_killed_too(leader):
    janitor = janitor_of(leader)
    janitor.suspend()
    assert kill_all(leader.pid, MARK, 20.0) == []
    assert not psutil.wait_procs([janitor], PATIENCE)[1]
    for path in shared_by(leader.pid):
        path.unlink()


TERMINAL = """
import os, signal, sys, time
from volunteer_kit import process_group
from volunteer_kit.process_group import sigterm_as_interrupt, start, stops_as_one
with sigterm_as_interrupt(), stops_as_one(lambda line: print(line, flush=True)):
    process = start("code", "MARK_OF_TEST=" + str(os.getpid()), stderr=-3)
    process.stdin.write(b"import os\\nif os.fork() == 0: os.setsid()\\n\\nprint('forked', flush=True)\\n")
    process.stdin.flush()
    for _ in range(2):
        process.stdout.readline()
    print(process.pid, flush=True)
    while True:
        time.sleep(0.1)
"""


@pytest.fixture
def terminal() -> Iterator[psutil.Popen]:
    """The kit's process as a shell's job: what it has started has a session of its own, a child of that another one."""
    process = psutil.Popen(
        [sys.executable, "-c", TERMINAL], stdout=subprocess.PIPE, text=True, preexec_fn=os.setpgrp,
        env={**os.environ, "PYTHONPATH": os.getcwd()},
    )  # fmt: skip
    yield process
    for one in [*process.children(recursive=True), process] if process.is_running() else []:
        one.kill()
    process.wait()
    process.stdout.close()


def are_stopped(processes: list[psutil.Process], wanted: bool) -> bool:
    """Waits for it: a signal needs a moment."""
    deadline = time.monotonic() + PATIENCE
    while any((process.status() == psutil.STATUS_STOPPED) != wanted for process in processes):
        if time.monotonic() > deadline:
            return not wanted
        time.sleep(0.01)
    return wanted


def test_ctrl_z_stops_all_and_fg_continues_all(terminal):
    worker = psutil.Process(int(terminal.stdout.readline()))
    started = [worker, *worker.children(recursive=True)]
    assert len(started) == 2 and not are_stopped([terminal, *started], False)
    for _ in range(2):
        os.killpg(terminal.pid, signal.SIGTSTP)
        assert os.WIFSTOPPED(os.waitpid(terminal.pid, os.WUNTRACED)[1])
        assert are_stopped([terminal, *started], True)
        assert terminal.stdout.readline().startswith("Stopped, and the training stands still too")
        os.killpg(terminal.pid, signal.SIGCONT)
        assert terminal.stdout.readline().startswith("All of it goes on")
        assert not are_stopped(started, False)


def test_what_is_stopped_ends_when_the_terminals_process_is_killed(terminal):
    """Else it would keep identity, lock and memory, and never see that nobody is left."""
    worker = psutil.Process(int(terminal.stdout.readline()))
    started = [worker, *worker.children(recursive=True)]
    os.killpg(terminal.pid, signal.SIGTSTP)
    os.waitpid(terminal.pid, os.WUNTRACED)
    terminal.kill()
    assert not psutil.wait_procs(started, PATIENCE)[1]


def test_what_is_ended_while_it_stands_stopped_can_say_goodbye(terminal):
    """`kill` and then `kill -CONT`, or a shutdown of the machine: the worker must run to leave in good order."""
    worker = psutil.Process(int(terminal.stdout.readline()))
    started = [worker, *worker.children(recursive=True)]
    os.killpg(terminal.pid, signal.SIGTSTP)
    os.waitpid(terminal.pid, os.WUNTRACED)
    assert are_stopped(started, True)
    terminal.terminate()
    terminal.resume()
    stopped = psutil.wait_procs(started, PATIENCE)[1]  # they run again, see that nobody is left, and end
    for one in stopped:
        one.kill()
    assert not stopped


def test_a_closed_terminal_is_a_goodbye():
    program = "import time\nfrom volunteer_kit.process_group import sigterm_as_interrupt as s\nwith s():\n  try:\n"
    # in short pieces: a signal that comes just before a sleep begins is heard when that is over
    program += "    print('here', flush=True); [time.sleep(0.1) for _ in range(6000)]\n"
    program += "  except KeyboardInterrupt: print('goodbye')"
    for before, said in ((signal.SIG_DFL, "goodbye\n"), (signal.SIG_IGN, "")):  # nohup
        with subprocess.Popen(
            [sys.executable, "-c", program], stdout=subprocess.PIPE, text=True,
            env={**os.environ, "PYTHONPATH": os.getcwd()}, preexec_fn=lambda before=before: signal.signal(1, before),
        ) as process:  # fmt: skip
            assert process.stdout.readline() == "here\n"
            process.send_signal(signal.SIGHUP)
            if not said:
                process.send_signal(signal.SIGKILL)
            assert process.stdout.read() == said
