"""Buttons work while a cell runs: the kernel's waiting messages are served from inside the blocking cell.

A kernel handles one shell message at a time, so a click (a `comm_msg`) waits until the cell ends. pump() takes what
waits, serves widget messages and the questions that a freshly loaded page asks, and hands everything else back in its
order. Where JupyterLab sends clicks to a thread of the kernel (ipykernel 7, JupyterLab >= 4.4), they arrive without
this; callbacks therefore only set flags, which the main thread reads.
"""

from __future__ import annotations

import contextlib
import inspect
import os
import re
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

SERVED = {"comm_open", "comm_msg", "comm_close", "comm_info_request", "kernel_info_request"}
RUN_AGAIN = re.compile(r"\bjoin_swarm\s*\(")
CAME_ALONG = 1.5  # s; cells that "Run All" sent after ours arrive within this, and are not the user running it again
SLICE = 0.05  # s between two looks at the queue
PATIENCE = 1.0  # s that a callback may take once stop was pressed

Message = list[Any]  # zmq frames


def find_kernel() -> Any | None:
    """The ipykernel that this code runs in, or None."""
    ipython = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython else None
    return getattr(shell, "kernel", None)


def kernel_events(kernel: Any | None = None) -> KernelEvents | None:
    """Events of `kernel` (None: the one we are in), or None where it is of a make that cannot be served.

    VS Code holds widget messages back while a cell runs, so there is nothing to serve there.
    """
    kernel = kernel or find_kernel()
    if kernel is None or is_vscode() or threading.current_thread() is not threading.main_thread():
        return None
    needed = ("session", "dispatch_shell", "set_parent", "get_parent", "io_loop", "_parent_ident", "_publish_status")
    if any(not hasattr(kernel, name) for name in needed):
        return None
    for queue in (_MessageQueue, _ShellSocket):
        if (found := queue.of(kernel)) is not None:
            return KernelEvents(kernel, found)
    return None


def is_vscode() -> bool:
    """Whether the kernel was started by VS Code."""
    return any(name in os.environ for name in ("VSCODE_PID", "VSCODE_CWD", "VSCODE_IPC_HOOK_CLI"))


class KernelEvents:
    """Serves one kernel; use it from the main thread only."""

    def __init__(self, kernel: Any, waiting: _MessageQueue | _ShellSocket) -> None:
        self._kernel, self._waiting = kernel, waiting
        self._began = time.monotonic()
        self._judged: set[str] = set()
        self._has_looked = False
        self._flushes = False
        self.run_again = False  # the user has run our cell once more: it waits behind us

    def pump(self, seconds: float = 0.0) -> None:
        """Serve what waits, for `seconds`. Raises KeyboardInterrupt if the user pressed stop."""
        until = time.monotonic() + seconds
        while True:
            self._serve_waiting()
            left = until - time.monotonic()
            if left <= 0:
                return
            self._waiting.wait(min(left, SLICE))

    def _serve_waiting(self) -> None:
        self._flush_after_the_cell()
        with _interrupts() as interrupts:
            ours, others = [], []
            for taken in self._waiting.take():
                (ours if self._is_ours(self._waiting.frames(taken)) else others).append(taken)
            self._waiting.give_back(others)
            self._has_looked = True
            if ours:
                self._serve([self._waiting.frames(taken) for taken in ours], interrupts)

    def _is_ours(self, message: Message) -> bool:
        """Look at the header without checking its signature: the kernel does, once, when it dispatches."""
        try:
            _, frames = self._kernel.session.feed_identities(message, copy=False)
            header = self._kernel.session.unpack(frames[1].bytes)
            kind, name = header["msg_type"], header["msg_id"]
            if kind == "execute_request" and name not in self._judged:
                self._judged.add(name)
                self._judge(self._kernel.session.unpack(frames[4].bytes)["code"])
            return kind in SERVED
        except Exception:  # not a message as we know it: the kernel's own affair
            return False

    def _judge(self, code: str) -> None:
        came_along = not self._has_looked or time.monotonic() - self._began < CAME_ALONG
        if RUN_AGAIN.search(code) and not came_along:
            self.run_again = True

    def _serve(self, messages: list[Message], interrupts: _Interrupts) -> None:
        kernel = self._kernel
        parent, ident = kernel.get_parent("shell"), kernel._parent_ident["shell"]
        try:
            with _without_hooks(kernel):
                for message in messages:
                    interrupts.run(_finish, kernel.dispatch_shell(message))
        finally:  # or what the cell prints next would go to the button that was clicked
            kernel.set_parent(ident, parent, channel="shell")
            kernel._publish_status("busy", "shell")

    def _flush_after_the_cell(self) -> None:
        """zmq tells of a message once; one that we woke for and an interrupt kept us from taking would lie unseen."""
        if self._flushes:
            return
        self._flushes = True
        self._kernel.io_loop.add_callback(self._flush)

    def _flush(self) -> None:
        """Behind what was given back meanwhile: the order is kept."""
        self._flushes = False
        self._kernel.io_loop.add_callback(self._waiting.stream.flush)


class _MessageQueue:
    """ipykernel 6: the shell's stream is read in the main thread into a queue."""

    def __init__(self, kernel: Any) -> None:
        self.stream, self._queue = kernel.shell_stream, kernel.msg_queue

    @classmethod
    def of(cls, kernel: Any) -> _MessageQueue | None:
        queue, stream = getattr(kernel, "msg_queue", None), getattr(kernel, "shell_stream", None)
        can = hasattr(queue, "get_nowait") and hasattr(queue, "qsize") and hasattr(stream, "flush")
        return cls(kernel) if can else None

    def wait(self, seconds: float) -> None:
        self.stream.socket.poll(1000 * seconds)

    def take(self) -> list[Any]:
        self.stream.flush()
        return [self._queue.get_nowait() for _ in range(self._queue.qsize())]

    def frames(self, taken: Any) -> Message:
        """(number, dispatch, (frames,)); what else is queued has no frames."""
        return taken[-1][0] if taken[-1] else []

    def give_back(self, taken: list[Any]) -> None:
        for item in taken:
            self._queue.put_nowait(item)


class _ShellSocket:
    """ipykernel 7: a thread reads the shell's socket and hands messages on through a pair of sockets."""

    def __init__(self, stream: Any, io_loop: Any) -> None:
        self.stream, self._io_loop = stream, io_loop

    @classmethod
    def of(cls, kernel: Any) -> _ShellSocket | None:
        thread = getattr(kernel, "shell_channel_thread", None)
        pair = getattr(getattr(thread, "manager", None), "_shell_channel_to_main", None)
        stream = getattr(pair, "to_stream", None)
        can = hasattr(stream, "flush") and getattr(stream, "_recv_callback", None) is not None
        return cls(stream, kernel.io_loop) if can else None

    def wait(self, seconds: float) -> None:
        self.stream.socket.poll(1000 * seconds)

    def take(self) -> list[Message]:
        import zmq

        taken = []
        with contextlib.suppress(zmq.Again):
            while True:
                taken.append(self.stream.socket.recv_multipart(zmq.NOBLOCK, copy=False))
        return taken

    def frames(self, taken: Message) -> Message:
        return taken

    def give_back(self, taken: list[Message]) -> None:
        for message in taken:  # they wait for the cell's lock, in this order
            self._io_loop.add_callback(self.stream._recv_callback, message)


class _Interrupts:
    """Keeps SIGINT from hitting between taking and giving back; nothing is lost, and the interrupt comes after.

    A callback that hangs (somebody else's button) is broken off after PATIENCE.
    """

    def __init__(self) -> None:
        self.arrived = False
        self._breaks: float | None = None  # monotonic s from when on an interrupt breaks the callback off

    def note(self, *_: object) -> None:
        self.arrived = True
        if self._breaks is None:
            return
        if time.monotonic() >= self._breaks:
            raise KeyboardInterrupt
        again = threading.Timer(PATIENCE, signal.pthread_kill, (threading.main_thread().ident, signal.SIGINT))
        again.daemon = True
        self._timers.append(again)
        again.start()

    def run(self, function: Callable[..., None], *args: Any) -> None:
        """Call somebody's callback, which a person may have to interrupt; the kernel swallows that, we do not."""
        self._timers: list[threading.Timer] = []
        try:
            self._breaks = time.monotonic() + PATIENCE
            function(*args)
        except KeyboardInterrupt:
            self.arrived = True
        finally:
            self._breaks = None
            for timer in self._timers:
                timer.cancel()


@contextlib.contextmanager
def _interrupts() -> Iterator[_Interrupts]:
    interrupts = _Interrupts()
    before = signal.signal(signal.SIGINT, interrupts.note)
    try:
        yield interrupts
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler if before is None else before)
        if interrupts.arrived:
            raise KeyboardInterrupt


@contextlib.contextmanager
def _without_hooks(kernel: Any) -> Iterator[None]:
    """The hooks swap SIGINT handlers and remember one only: nested, they would leave an idle kernel killable by it."""
    mine = {name: kernel.__dict__.get(name) for name in ("pre_handler_hook", "post_handler_hook")}
    for name in mine:
        setattr(kernel, name, lambda: None)
    try:
        yield
    finally:
        for name, before in mine.items():
            if before is None:
                kernel.__dict__.pop(name, None)
            else:
                setattr(kernel, name, before)


def _finish(dispatch: Any) -> None:
    """Run a coroutine that does not really wait: handlers of SERVED messages answer at once."""
    if not inspect.iscoroutine(dispatch):
        return
    try:
        dispatch.send(None)
    except StopIteration:
        return
    dispatch.close()
