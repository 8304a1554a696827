"""Who says nothing costs its group the patience of a stage, each round again; who does it often is let into none."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable

from hivemind.p2p import PeerID

FORGIVEN, REMEMBERED_FOR = 2, 3600.0  # times, within s: lines break
REFUSED_FOR = 300.0  # s since the last time


class KeptWaiting:
    """What one averager remembers of those who left its groups waiting."""

    def __init__(self, clock: Callable[[], float] = time.monotonic):
        self._clock = clock
        self._times: dict[PeerID, list[float]] = {}

    def note(self, peers: Iterable[PeerID]) -> None:
        """They were in the group, and did not go through the round."""
        now = self._clock()
        for peer in peers:
            self._times[peer] = [*self._times.get(peer, ()), now]
        recent = {peer: [at for at in times if now - at < REMEMBERED_FOR] for peer, times in self._times.items()}
        self._times = {peer: times for peer, times in recent.items() if times}

    def is_refused(self, peer: PeerID) -> bool:
        times = self._times.get(peer, ())
        return len(times) > FORGIVEN and self._clock() - times[-1] < REFUSED_FOR
