"""One more donor of a signed state: a file on the Hub, read by ranges in a thread beside what peers give."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable

from hivemind.utils.logging import get_logger

from volunteer_kit.swarm.chunks import ChunkStore
from volunteer_kit.swarm.manifest import Manifest

logger = get_logger(__name__)
AT_ONCE = 8  # chunks in one request; each request costs a redirect
PATIENCE = 5.0  # s that peers have to give the list of hashes, before the whole file is read for it


class HubDonor:
    """Fills a store from `fetch`: (manifest, offset, length) -> bytes. Starts at once; stop() lets it end.

    A file with one wrong chunk is left alone from then on.
    """

    def __init__(self, fetch: Callable[[Manifest, int, int], bytes], manifest: Manifest, store: ChunkStore):
        self._fetch, self._manifest, self._store = fetch, manifest, store
        self._over = threading.Event()
        self.given = 0
        threading.Thread(target=self._run, name="hub chunks", daemon=True).start()

    def stop(self) -> None:
        self._over.set()

    def _run(self) -> None:
        try:
            deadline = time.monotonic() + PATIENCE
            while self._store.hashes is None and time.monotonic() < deadline and not self._over.wait(0.1):
                pass
            if self._store.hashes is None:
                self._read_all()
            start = random.randrange(self._store.num_chunks)
            while not self._over.is_set() and self._read_some(start):
                pass
        except Exception as e:  # whatever the line and the Hub come up with; peers may have it all
            logger.warning(f"The signed state cannot be read from the Hub: {e}")

    def _read_some(self, start: int) -> bool:
        """The next missing chunks from `start` on, round the end. :returns: whether there were any."""
        missing = self._store.missing()
        if not missing:
            return False
        first = next((index for index in missing if index >= start), missing[0])
        last = first
        while last + 1 in missing and last + 1 - first < AT_ONCE:
            last += 1
        for index, data in self._get(first, last):
            if not self._store.put(index, data):
                raise ValueError("it holds other bytes than the monitor signed")
            self.given += 1
        return True

    def _read_all(self) -> None:
        """No peer gives the list: make it of the whole file, which is kept if it is what was signed."""
        hashes = []
        for first in range(0, self._store.num_chunks, AT_ONCE):
            for index, data in self._get(first, min(first + AT_ONCE, self._store.num_chunks) - 1):
                hashes.append(self._store.put_unchecked(index, data))
            if self._over.is_set() or self._store.hashes is not None:
                return
        if not self._store.put_hashes(b"".join(hashes)):
            raise ValueError("it holds other bytes than the monitor signed")
        self._store.verify_all()
        self.given += len(hashes)

    def _get(self, first: int, last: int) -> list[tuple[int, bytes]]:
        size, store = self._store.chunk_size, self._store
        data = self._fetch(self._manifest, first * size, sum(map(store.size_of, range(first, last + 1))))
        pieces = [data[i * size : i * size + store.size_of(index)] for i, index in enumerate(range(first, last + 1))]
        return list(zip(range(first, last + 1), pieces, strict=True))
