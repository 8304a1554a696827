"""Add up how the swarm's rounds went, from what all peers count of theirs."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from hivemind.p2p import PeerID

from volunteer_kit.monitor.notes import Notes
from volunteer_kit.swarm.records.failures import RoundCounts
from volunteer_kit.swarm.records.peer_record import PeerRecord

MORE = 3  # rounds beside the swarm's own steps that a peer can have been in between two records
MOST = 20_000  # peers that are remembered


class Rounds:
    """Only what comes is added, so that the sums never fall when somebody leaves; and no more than the swarm has made
    steps meanwhile, whatever a peer says. Of one thread.
    """

    def __init__(self, notes: Notes):
        self._notes = notes
        self._last: dict[PeerID, tuple[RoundCounts, int]] = {}  # and the swarm's epoch when it was told

    def look(self, records: Mapping[PeerID, PeerRecord], peers: Iterable[str], epoch: int) -> None:
        """:param peers: whose word counts, :param epoch: the swarm's"""
        peers, came = frozenset(peers), RoundCounts()
        for peer, record in records.items():
            if record.rounds is None or str(peer) not in peers:
                continue
            told = RoundCounts.read(record.rounds.dict())
            before, since = self._last.get(peer, (told, epoch))  # first seen: how it had gone elsewhere is not added
            if peer not in self._last or told != before:
                came.add(told.since(before, epoch - since + MORE))
                self._last.pop(peer, None)
                self._last[peer] = (told, epoch)
        while len(self._last) > MOST:
            del self._last[next(iter(self._last))]
        if came.rounds:
            self._notes.do("add_rounds", came.rounds, came.complete_groups, came.failed)
