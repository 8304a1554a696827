"""This module forks the programs of tests from a process that has a peer's modules: each starts seconds sooner.

    child = start("tests.swarm_peer", ["{}"], log=tmp_path / "log", environment=dict(os.environ))
    child.stdout.readline()
    child.wait(10)

A child is a process of its own as `python -m MODULE` is: session, environment, arguments, pipes, locks, random numbers
and the way it ends. Only its command line is this module's.
"""

from __future__ import annotations

import functools
import gc
import importlib
import json
import multiprocessing
import os
import runpy
import select
import signal
import socket
import subprocess
import sys
import threading
from multiprocessing import synchronize
from pathlib import Path
from typing import Any

from volunteer_kit.process_group import kill_all

ROOT = Path(__file__).parents[1]
# Most peers import these modules. None of them may read the environment at import, for each child has its own.
IMPORTED = ("volunteer_kit.session", "benchmarks.netlab", "tests.peer_questions")
READ_THE_ENVIRONMENT = {"huggingface_hub", "transformers", "datasets"}
MOST = 2**17  # bytes of one order
_lock = threading.Lock()


class Child:
    """A forked program, with the names of subprocess.Popen: `pid`, `returncode`, `stdin` and `stdout` (text)."""

    def __init__(self, stdin: int, stdout: int, told: int):
        self.stdin, self.stdout = open(stdin, "w"), open(stdout)
        self.returncode: int | None = None
        self._told = open(told, "rb", buffering=0)
        self.pid = int(self._told.readline())

    def wait(self, timeout: float | None = None) -> int:
        if self.returncode is None:
            if not select.select([self._told], [], [], timeout)[0]:
                raise subprocess.TimeoutExpired(f"child {self.pid}", timeout or 0.0)
            said = self._told.readline()  # nothing: the process that awaits the child was killed, as was the child
            self.returncode = int(said or -signal.SIGKILL)
            self._told.close()
        return self.returncode

    def poll(self) -> int | None:
        try:
            return self.wait(0)
        except subprocess.TimeoutExpired:
            return None

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


def start(module: str, arguments: list[str], *, log: Path | None = None, environment: dict[str, str]) -> Child:
    """`python -m module arguments` at the root of the repository.

    :param log: a file for its stderr; without one it writes to ours
    """
    order = json.dumps({"module": module, "arguments": arguments, "environment": environment}).encode()
    (stdin, to_stdin), (from_stdout, stdout), (from_told, told) = os.pipe(), os.pipe(), os.pipe()
    stderr = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600) if log else os.dup(2)
    theirs = [stdin, stdout, stderr, told]
    with _lock:
        socket.send_fds(_nursery(environment.get("PYTHONPATH", "")), [order], theirs)
    for end in theirs:
        os.close(end)
    return Child(to_stdin, from_stdout, from_told)


@functools.cache
def _nursery(path: str) -> socket.socket:
    """Start the nursery of this PYTHONPATH, which ends with us. :returns: the socket for orders"""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with theirs:
        subprocess.Popen(
            [sys.executable, "-m", "tests.nursery", str(theirs.fileno())],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            pass_fds=[theirs.fileno()],
            cwd=ROOT,
            env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"},
            start_new_session=True,  # Ctrl-C is not for it
        )
    return ours


def kill_group(leader: int) -> None:
    """SIGKILL everything in a child's session, as a lost VM."""
    left = kill_all(leader, timeout=60.0)
    assert not left, f"processes {left} live on"


# --- in the nursery ---


def serve(orders: socket.socket) -> dict[str, Any] | None:
    """Fork for each order, until nobody can give one any more. :returns: in a child its order, else None"""
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    while True:
        message, ends, _, _ = socket.recv_fds(orders, MOST, 4)
        if not message:
            return None
        if os.fork() == 0:
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            orders.close()
            *stdio, told = ends
            child = os.fork()
            if child == 0:
                os.setsid()
                os.write(told, f"{os.getpid()}\n".encode())
                os.close(told)
                for number, end in enumerate(stdio):
                    os.dup2(end, number)
                    os.close(end)
                return json.loads(message)
            _wait_for(child, stdio, told)
        for end in ends:
            os.close(end)


def _wait_for(child: int, stdio: list[int], told: int) -> None:
    """Tell how the child ended, to the one that ordered it; then exit."""
    for end in stdio:
        os.close(end)
    _, status = os.waitpid(child, 0)
    os.write(told, f"{os.waitstatus_to_exitcode(status)}\n".encode())
    os._exit(0)


def become(order: dict[str, Any]) -> None:
    """This process is the program from here on."""
    os.environ.clear()
    os.environ.update(order["environment"])
    gc.unfreeze()  # the kit freezes at a fork; frozen objects are not listed
    for lock in [each for each in gc.get_objects() if isinstance(each, synchronize.SemLock)]:
        type(lock).__init__(lock, ctx=multiprocessing.get_context())  # else all children share what hivemind made
    sys.modules["numpy"].random.seed()  # else they draw the same numbers; Python's own generator sees to that itself
    sys.argv = [order["module"], *order["arguments"]]
    runpy.run_module(order["module"], run_name="__main__", alter_sys=True)


def main() -> None:
    orders = socket.socket(fileno=int(sys.argv[1]))
    for module in IMPORTED:
        importlib.import_module(module)
    assert not READ_THE_ENVIRONMENT & sys.modules.keys(), "a child would have the nursery's settings"
    assert len(os.listdir("/proc/self/task")) == 1, "a fork would lack its threads"
    order = serve(orders)
    if order is not None:
        become(order)


if __name__ == "__main__":
    main()
