"""Start a node process, and hold the training process's end of the pipe to it."""

from __future__ import annotations

import os
import queue
import socket
import subprocess
import sys
import threading
import traceback
from contextlib import suppress
from multiprocessing.connection import Connection
from typing import TYPE_CHECKING, Any, Final

from volunteer_kit.packages import with_kit_path
from volunteer_kit.swarm.node.talk import ROLE, Broken, NodeSpec, Progress

if TYPE_CHECKING:  # a worker launches its node before it loads its own libraries
    from volunteer_kit.swarm.errors import SwarmError
    from volunteer_kit.swarm.net.children import PeerProcesses

ENDS_WITHIN: Final = 5.0  # s, of the node process when its pipe is closed


class LastWords:
    """The words that a node left about its end."""

    def __init__(self) -> None:
        self.text = ""

    def read(self) -> str:
        return self.text


class Link:
    """The pipe to the node: its messages in order, and ours to it. Threads may share it.

    It is a WatchedProcess of swarm/net/children.py, too.

    :param sentinel: a pipe that the node holds open; we close it
    """

    def __init__(self, process: subprocess.Popen[bytes], pipe: socket.socket, sentinel: int):
        self._process, self._pipe, self.sentinel = process, pipe, sentinel
        self.last_words = LastWords()
        self._watch: PeerProcesses | None = None
        self._connection = Connection(os.dup(pipe.fileno()))
        self._heard: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._sending = threading.Lock()
        self._closed = False
        self.progress: Progress | None = None  # the newest one
        threading.Thread(target=self._listen, name="node", daemon=True).start()

    @property
    def pid(self) -> int:
        """The process id of the node."""
        return self._process.pid

    @property
    def exitcode(self) -> int | None:
        """As multiprocessing's."""
        return self._process.poll()

    def join(self, timeout: float | None = None) -> None:
        """Wait for its end, `timeout` s at most."""
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(timeout)

    def kill(self) -> None:
        """End it at once."""
        self._process.kill()

    def break_off(self, error: SwarmError) -> None:
        """Nothing has to be done: who receives hears of the end."""

    def watch_with(self, processes: PeerProcesses) -> None:
        """Let its death end the peer, until the link is closed."""
        self._watch = processes
        processes.add(self, ROLE)

    def send(self, message: Any) -> None:
        """Tell the node something; where it is gone, `receive` says so."""
        with self._sending, suppress(OSError):  # a closed pipe is one as well
            self._connection.send(message)

    def receive(self, timeout: float | None = None) -> Any | None:
        """The next message; None: none came in time.

        :param timeout: s; 0: do not wait; None: wait for as long as it takes
        """
        try:
            if timeout == 0:
                return self._heard.get_nowait()
            return self._heard.get(timeout=timeout)
        except queue.Empty:
            return None

    def close(self) -> None:
        """End the node process; again: nothing."""
        if self._closed:
            return
        self._closed = True
        if self._watch is not None:
            self._watch.remove(self)
        with suppress(OSError):
            self._pipe.shutdown(socket.SHUT_RDWR)  # the listener hears the end, and so does the node
        self._pipe.close()
        try:
            self._process.wait(ENDS_WITHIN)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        os.close(self.sentinel)

    def _listen(self) -> None:
        while True:
            try:
                message = self._connection.recv()
            except Exception as error:  # its end, or a message that makes no sense
                if not isinstance(error, (OSError, EOFError)):
                    traceback.print_exc()
                    self._process.kill()  # the two are of one start, so it cannot go on
                self._connection.close()
                break
            if isinstance(message, Progress):
                self.progress = message
            if isinstance(message, Broken):
                self.last_words.text = message.why
            self._heard.put(message)
        if not self._closed:
            self._heard.put(Broken(self._how_it_ended()))

    def _how_it_ended(self) -> str:
        from volunteer_kit.swarm.net.children import end_in_words

        try:
            code = self._process.wait(ENDS_WITHIN)
        except subprocess.TimeoutExpired:
            return f"The pipe to {ROLE[0].lower()}{ROLE[1:]} broke"
        return f"{ROLE} {end_in_words(code)}"


def launch_node(log: str | None = None) -> Link:
    """Start a node process, which loads its libraries and then waits for a `NodeSpec`. It ends with this process, or
    when the link is closed.

    :param log: from which level on it logs, such as "WARNING"; None: its own
    """
    environment = with_kit_path(dict(os.environ))
    if log is not None:
        environment.setdefault("VOLUNTEER_KIT_NODE_LOG", log)
    ours, its = socket.socketpair()
    sentinel, held = os.pipe()
    try:
        with its:
            process = subprocess.Popen(
                [sys.executable, "-m", "volunteer_kit.swarm.node", str(its.fileno())],
                pass_fds=(its.fileno(), held),
                stdin=subprocess.DEVNULL,
                stdout=_errors(),  # a worker's stdout has its events
                env=environment,
            )
    finally:
        os.close(held)
    return Link(process, ours, sentinel)


def _errors() -> int:
    """Descriptor of stderr; a notebook's has none of its own."""
    try:
        return sys.stderr.fileno()
    except (AttributeError, OSError, ValueError):
        return 2


def start_node(spec: NodeSpec, launched: Link | None = None, watched_by: PeerProcesses | None = None) -> Link:
    """A node that runs.

    :param launched: a process that waits for its spec; None: a new one
    :param watched_by: its peer's processes: its death is theirs, and theirs is told in its place
    """
    link = launched or launch_node()
    if watched_by is not None:
        link.watch_with(watched_by)
    link.send(spec)
    return link
