"""Whom a group waits for longer than it usually takes: who is here, and came to the last rounds.

A record in the DHT outlives its peer, so a few who are expected may be gone; these cost a group the patience that it
has learnt. But who tells its progress every second will come: its last round ended later than ours, or it makes up for
one. To go without it is to be apart from it, and it would be as late for the next round, and the next.
"""

from __future__ import annotations

import math
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Collection
from dataclasses import dataclass, field

from hivemind.p2p import PeerID

SILENT = 5.0  # s without a word, at least: words take two to spread, and are looked for every two
GAPS, TIMES_THE_GAP = 4, 3.0  # who speaks once in a microbatch of a minute is silent after three
MAX_PEERS = 10_000
# rounds in a row to which it did not come, though it was here. Then it is awaited in the 4th, 8th, 16th... again: in a
# swarm whose rounds follow each other at once, who is behind by one is late for each that does not wait for it
ABSENCES = 3


@dataclass
class Heard:
    told: float  # its own time of its last word
    at: float  # ours
    gaps: deque[float] = field(default_factory=lambda: deque(maxlen=GAPS))  # s between its words
    absences: int = 0
    has_come: bool = False


class Attendance:
    """One thread hears, another notes rounds."""

    def __init__(self, clock: Callable[[], float] = time.monotonic):
        self._clock = clock
        self._known: OrderedDict[PeerID, Heard] = OrderedDict()  # also of those whose record is gone: it may come again

    def heard(self, peer: PeerID, told: float) -> None:
        """:param told: the time that its record bears; another one is another word. Only our clock counts"""
        now, known = self._clock(), self._known.get(peer)
        if known is None:
            self._known[peer] = Heard(told, now)
        elif told != known.told:
            known.gaps.append(now - known.at)
            known.told, known.at = told, now
        self._known.move_to_end(peer)
        while len(self._known) > MAX_PEERS:
            self._known.popitem(last=False)

    def is_awaited(self, peer: PeerID) -> bool:
        known = self._known.get(peer)
        if known is None or not self._is_heard(known):
            return False
        return known.absences < ABSENCES or known.absences.bit_count() == 1

    def _is_heard(self, known: Heard) -> bool:
        return self._clock() - known.at <= max(SILENT, TIMES_THE_GAP * max(known.gaps, default=-math.inf))

    def is_regular(self, peer: PeerID) -> bool:
        """It has come to one of the last rounds, whether anything is heard of it now or not."""
        known = self._known.get(peer)
        return known is not None and known.has_come and known.absences < ABSENCES

    def met(self, group: Collection[PeerID], awaited: Collection[PeerID]) -> None:
        """A round had this group. If it was the smaller part, it is we who were absent."""
        if 2 * len({*awaited} & {*group}) < len(awaited):
            return
        for peer, known in list(self._known.items()):
            if peer in group:
                known.absences, known.has_come = 0, True
            elif peer in awaited or (known.absences >= ABSENCES and self._is_heard(known)):
                known.absences += 1
