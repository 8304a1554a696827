"""Samples made ready in the background, a bounded number of them."""

from __future__ import annotations

import queue
import threading
from collections import deque
from collections.abc import Iterator
from typing import Generic, TypeVar

T = TypeVar("T")
HANDFUL = 16  # items handed over at once, if the user is not waiting: each handing over costs two switches of threads


class ReadAhead(Generic[T]):
    """An iterator that a thread runs ahead of its user. What it raises is raised to the user, once.

    Start it after other processes were forked: a child would inherit the locks that the thread holds.
    """

    def __init__(self, items: Iterator[T], size: int) -> None:
        self._items, self._ready = items, queue.Queue[tuple[list[T], BaseException | None]](max(1, size // HANDFUL))
        self._handful, self._here = min(size, HANDFUL), deque[T]()
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._run, name="read-ahead", daemon=True)
        self._thread.start()

    def __iter__(self) -> ReadAhead[T]:
        return self

    def __next__(self) -> T:
        while not self._here:
            if self._closed.is_set():
                raise StopIteration
            items, error = self._ready.get()
            if error is not None:
                self._closed.set()
                raise error
            self._here.extend(items)
        return self._here.popleft()

    def close(self, patience: float = 1.0) -> None:
        """Stop reading; a read under way is waited for `patience` s, and then left to its timeout."""
        self._closed.set()
        while self._thread.is_alive() and patience > 0:
            self._drain()
            self._thread.join(0.05)
            patience -= 0.05

    def _drain(self) -> None:
        while not self._ready.empty():
            self._ready.get_nowait()

    def _run(self) -> None:
        held: list[T] = []
        try:
            for item in self._items:
                held.append(item)
                if len(held) < self._handful and not self._ready.empty():
                    continue
                if not self._put((held, None)):
                    return
                held = []
            self._put((held, None))
            self._put(([], StopIteration()))
        except BaseException as error:
            self._put((held, None))
            self._put(([], error))
        finally:
            self._items.close()

    def _put(self, what: tuple[list[T], BaseException | None]) -> bool:
        while not self._closed.is_set():
            try:
                self._ready.put(what, timeout=0.2)
                return True
            except queue.Full:
                continue
        return False
