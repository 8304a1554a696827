"""What a process prints must not end it: a terminal without the characters, a closed pipe, a full disk, no stdout."""

from __future__ import annotations

import codecs
import errno
import io
import os
import select
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress

PLAIN = "volunteer-kit-plain"  # name of the error handler that writes "..." where a terminal has no "…"
SLOW = 10.0  # s that a reader who does not wait may take until what is written is dropped
_GONE = (errno.EPIPE, errno.EIO, errno.ENXIO, errno.ECONNRESET, errno.EBADF)  # nobody will read any more
_SIGNS = {
    "–": "-", "—": "-", "−": "-", "‑": "-", "…": "...", "“": '"', "”": '"', "„": '"', "‘": "'", "’": "'", "→": "->",
    "←": "<-", "●": "*", "•": "*", "×": "x", "≤": "<=", "≥": ">=", "≈": "~", "✓": "v", "━": "-", "─": "-", "│": "|",
    **dict(zip("▁▂▃▄▅▆▇█", "__..--==", strict=True)),
}  # fmt: skip


def keep_up() -> None:
    """Make stdout and stderr last as long as the process: for the first line of a program.

    Characters that the terminal lacks become similar ones. What nobody can take any more (a closed pipe, a terminal
    that is gone, a full disk) is dropped. Standard streams that were closed are opened to nowhere: else the next file
    that the process opens would get their number, and everything that any library prints.
    """
    _occupy()
    for name in ("stdout", "stderr"):
        setattr(sys, name, _lasting(getattr(sys, name), name))


@contextmanager
def kept_up() -> Iterator[None]:
    """The same within a call of the library. What a notebook or a test put in place of the streams stays."""
    before = {name: getattr(sys, name) for name in ("stdout", "stderr")}
    lasting = {name: _lasting(stream, name) for name, stream in before.items() if stream is not None}
    for name, stream in lasting.items():
        setattr(sys, name, stream)
    try:
        yield
    finally:
        for name, stream in lasting.items():
            with suppress(OSError, ValueError):
                stream.flush()
            if getattr(sys, name) is stream:
                setattr(sys, name, before[name])


def say(line: str = "") -> None:
    """Print a line at once, as well as the terminal can show it; without one, nowhere."""
    try:
        try:
            print(line, flush=True)
        except UnicodeEncodeError:
            encoding = sys.stdout.encoding
            print(line.encode(encoding, PLAIN).decode(encoding), flush=True)
    except (OSError, ValueError):  # closed
        pass


def _lasting(stream: io.TextIOBase | None, name: str) -> io.TextIOBase:
    """A stream to the same place; the same one where that is no file of the system, or it lasts already."""
    number = {"stdout": 1, "stderr": 2}[name]
    if stream is None:
        return _open(number, "utf-8", is_line_buffered=True)
    try:
        lasts = isinstance(getattr(stream.buffer, "raw", None), _Lasting)
        if lasts or not isinstance(stream, io.TextIOWrapper) or stream.fileno() != number:
            return stream
    except (AttributeError, OSError, ValueError):
        return stream
    with suppress(OSError, ValueError):
        stream.flush()
    return _open(number, stream.encoding, stream.line_buffering or stream.write_through or number == 2)


def _open(number: int, encoding: str, is_line_buffered: bool) -> io.TextIOWrapper:
    raw = _Lasting(number, "w", closefd=False)
    return io.TextIOWrapper(io.BufferedWriter(raw), encoding, PLAIN, line_buffering=is_line_buffered)


class _Lasting(io.FileIO):
    """A file that takes whatever is written to it."""

    def write(self, data) -> int:
        try:
            while (written := super().write(data)) is None:  # another process has made the pipe one that does not wait
                if not select.select([], [self], [], SLOW)[1]:
                    return len(data)
            return written
        except OSError as error:
            if error.errno in _GONE:
                _to_nowhere(self.fileno())
            return len(data)


def _occupy() -> None:
    for number in (0, 1, 2):
        try:
            os.fstat(number)
        except OSError:
            _to_nowhere(number)
    if sys.stdin is None:
        sys.stdin = open(0, encoding="utf-8", closefd=False)


def _to_nowhere(number: int) -> None:
    with suppress(OSError):
        nowhere = os.open(os.devnull, os.O_RDWR)
        if nowhere != number:
            os.dup2(nowhere, number)
            os.close(nowhere)
        os.set_inheritable(number, True)


def _plain(error: UnicodeError) -> tuple[str, int]:
    if not isinstance(error, UnicodeEncodeError):
        raise error
    signs = error.object[error.start : error.end]
    return "".join(_SIGNS.get(sign, "?") for sign in signs), error.end


codecs.register_error(PLAIN, _plain)
