"""Writes down which functions run while a window is open. It begins with the interpreter, as `sitecustomize`.

round_trace.py copies this file into a folder on PYTHONPATH, so each process that a peer starts is traced, and the
package knows nothing of it. A window is a number in a mapped file that all processes of a peer share; 0: it is closed.
Each process appends to a file of its own, one line for each window and function, so that SIGKILL loses nothing.
It imports nothing but the standard library, for it runs before everything else.
"""

from __future__ import annotations

import mmap
import os
import sys
import threading

FOLDER = "ROUND_TRACE_FOLDER"  # the peer's files
WINDOW = "window"
ROOTS = ("/volunteer_kit/", "/hivemind/")  # whose functions are written down


class Tracer:
    """The tracer of one process and of its forks."""

    def __init__(self, folder: str):
        self._folder = folder
        self.window = open_window(folder)
        self._begin()
        os.register_at_fork(after_in_child=self._begin)

    def _begin(self) -> None:
        self._seen: set[int] = set()
        self._number = 0
        self._file: int | None = None

    def record(self, frame, event: str, _) -> None:
        """Take an event of sys.setprofile."""
        if event != "call":
            return
        number = self.window[0]
        if not number:
            return
        if number != self._number:
            self._number, self._seen = number, set()
        code = frame.f_code
        if id(code) in self._seen:  # hashing the code object itself takes microseconds
            return
        self._seen.add(id(code))
        if any(root in code.co_filename for root in ROOTS):
            name = getattr(code, "co_qualname", f"{code.co_firstlineno}.{code.co_name}")  # as of Python 3.11
            self._write(f"{number}\t{process_name()}\t{code.co_filename}\t{name}\n")

    def _write(self, line: str) -> None:
        if self._file is None:
            path = os.path.join(self._folder, f"{os.getpid()}.trace")
            self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC)
        os.write(self._file, line.encode())


def process_name() -> str:
    """The module that was started, and the class of the process where multiprocessing made it."""
    words = sys.orig_argv
    module = words[words.index("-m") + 1] if "-m" in words else "-c" if "-c" in words else os.path.basename(words[-1])
    multiprocessing = sys.modules.get("multiprocessing.process")
    kind = type(multiprocessing.current_process()).__name__ if multiprocessing else "_MainProcess"
    return module if kind == "_MainProcess" else kind


def open_window(folder: str) -> memoryview:
    """The window of this folder's peer: one int64, shared."""
    with open(os.path.join(folder, WINDOW), "r+b") as file:
        return memoryview(mmap.mmap(file.fileno(), 8)).cast("q")


if __name__ == "sitecustomize" and FOLDER in os.environ:
    _tracer = Tracer(os.environ[FOLDER])
    threading.setprofile(_tracer.record)
    sys.setprofile(_tracer.record)
