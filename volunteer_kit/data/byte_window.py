"""A large file behind ranges of bytes, for readers that jump about in it: few requests, bounded memory."""

from __future__ import annotations

import io
from bisect import bisect_right
from collections.abc import Callable, Sequence
from typing import BinaryIO, NamedTuple

from .source import ShardError

HELD = 16 * 2**20  # bytes that are fetched at once and wait in memory
SMALL = 2 * 2**20  # bytes that are fetched at once even where the whole is too much
GAP = 128 * 2**10  # bytes that nobody wants, and that are cheaper to read than another request


class Span(NamedTuple):
    """The bytes [start, stop) of a file."""

    start: int
    stop: int


class _Run(NamedTuple):
    start: int
    stop: int
    is_held: bool


class Window(io.RawIOBase):
    """A seekable file of `size` bytes of which only `spans` will be read, each from its beginning to its end.

    Small spans are fetched together and held; of a large one the connection stays open and gives what is asked for,
    so that a span of gigabytes costs one request and no memory. `watch(start, data)` sees all that is read.
    """

    watch: Callable[[int, bytes], None] | None = None

    def __init__(self, size: int, open_range: Callable[[int, int], BinaryIO], spans: Sequence[Span]) -> None:
        self._size, self._open_range, self._at = size, open_range, 0
        self._runs = _plan(spans)
        self._starts = [run.start for run in self._runs]
        self._held: dict[_Run, bytes] = {}
        self._streams: dict[_Run, tuple[BinaryIO, int]] = {}  # and the byte it gives next

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._at

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        self._at = offset + (0, self._at, self._size)[whence]
        return self._at

    def read(self, size: int = -1) -> bytes:
        """As of any file; what is outside the spans is fetched too, for a request each time."""
        stop = self._size if size < 0 else min(self._at + size, self._size)
        if stop - self._at > 2 * HELD and self._run_at(self._at) is None:
            raise ShardError("bad_shard", f"a damaged file: {stop - self._at} bytes where none should be")
        pieces = []
        while self._at < stop:
            piece = self._piece(self._at, stop)
            if self.watch is not None:
                self.watch(self._at, piece)
            pieces.append(piece)
            self._at += len(piece)
        return pieces[0] if len(pieces) == 1 else b"".join(pieces)

    def _run_at(self, place: int) -> _Run | None:
        number = bisect_right(self._starts, place) - 1
        return self._runs[number] if number >= 0 and place < self._runs[number].stop else None

    def _piece(self, start: int, stop: int) -> bytes:
        """Bytes from `start` up to `stop` or to the end of what lies together."""
        run = self._run_at(start)
        if run is None:
            following = bisect_right(self._starts, start)
            stop = min([stop, *self._starts[following : following + 1]])
            return self._fetch(start, stop)
        stop = min(stop, run.stop)
        if not run.is_held:
            return self._stream(run, start, stop)
        if run not in self._held:
            self._held[run] = self._fetch(run.start, run.stop)
        return self._held[run][start - run.start : stop - run.start]

    def _fetch(self, start: int, stop: int) -> bytes:
        with self._open_range(start, stop) as stream:
            return _read(stream, start, stop)

    def _stream(self, run: _Run, start: int, stop: int) -> bytes:
        stream, at = self._streams.pop(run, (None, -1))
        if stream is None or at != start:
            if stream is not None:
                stream.close()
            stream = self._open_range(start, run.stop)
        self._streams[run] = (stream, stop)
        return _read(stream, start, stop)

    def close(self) -> None:
        if not self.closed:
            for stream, _ in self._streams.values():
                stream.close()
            self._streams.clear()
            self._held.clear()
        super().close()


def _read(stream: BinaryIO, start: int, stop: int) -> bytes:
    data = stream.read(stop - start)
    if len(data) != stop - start:
        raise ShardError("cut_shard", f"it ends after {start + len(data)} bytes, before byte {stop}")
    return data


def _plan(spans: Sequence[Span]) -> list[_Run]:
    is_little = sum(span.stop - span.start for span in spans) <= HELD
    runs: list[_Run] = []
    for start, stop in sorted(spans):
        is_held = is_little or stop - start <= SMALL
        last = runs[-1] if runs else None
        if last and is_held and last.is_held and start - last.stop <= GAP and stop - last.start <= 2 * HELD:
            runs[-1] = _Run(last.start, max(stop, last.stop), True)
        else:
            runs.append(_Run(start, stop, is_held))
    return [run for run in runs if run.start < run.stop]
