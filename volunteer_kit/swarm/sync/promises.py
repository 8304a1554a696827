"""Keep a peer's promise, accepted entry and proposal in its slot: the durable half of voting (invariant I6).

The rules are the acceptor's of single-decree Paxos. Each change returns the record to write; the peer says nothing of
it before the record is on the disk.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Final

from volunteer_kit.swarm.sync.ballots import Ballot
from volunteer_kit.swarm.sync.entries import Entry
from volunteer_kit.swarm.sync.messages import BallotRecord, Promise

LOWEST: Final = Ballot(0, "")  # below every ballot of a leader: the leader of turn 0 needs no promise


class Acceptor:
    """One slot of one peer."""

    def __init__(self, slot: bytes, record: BallotRecord | None = None):
        self.record = record if record is not None and record.slot == slot else BallotRecord(slot, LOWEST)

    @property
    def promised(self) -> Ballot:
        """The lowest ballot that this peer still accepts."""
        return self.record.promised

    @property
    def accepted(self) -> Entry | None:
        """The entry that it accepted last."""
        return self.record.accepted

    def promise(self, ballot: Ballot) -> BallotRecord:
        """Accept nothing below `ballot` from now on."""
        assert ballot >= self.promised
        self.record = replace(self.record, promised=ballot)
        return self.record

    def answer(self, ballot: Ballot) -> Promise:
        """The promise as it is said."""
        return Promise(ballot, self.record.accepted, self.record.accepted_at)

    def accepts(self, ballot: Ballot, entry: Entry) -> bool:
        """Whether it may accept: at most one entry for each ballot, none below the promise."""
        if ballot == self.record.accepted_at:
            return self.record.accepted == entry
        return ballot >= self.promised

    def accept(self, ballot: Ballot, entry: Entry) -> BallotRecord:
        """Accept the entry; the bytes of its answers are written with the record."""
        assert self.accepts(ballot, entry)
        self.record = replace(self.record, promised=ballot, accepted=entry, accepted_at=ballot)
        return self.record

    def may_propose(self, ballot: Ballot) -> bool:
        """Whether this peer may lead at `ballot`: it never proposed there, not even before a crash."""
        proposed = self.record.proposed_at
        return ballot >= self.promised and (proposed is None or ballot > proposed)

    def propose(self, ballot: Ballot, entry: Entry) -> BallotRecord:
        """Propose the entry at our own ballot, and accept it."""
        self.accept(ballot, entry)
        self.record = replace(self.record, proposed_at=ballot)
        return self.record

    @property
    def first_turn(self) -> int:
        """The turn at which a process that starts again goes on."""
        proposed = self.record.proposed_at
        return max(self.promised.turn, 0 if proposed is None else proposed.turn + 1)
