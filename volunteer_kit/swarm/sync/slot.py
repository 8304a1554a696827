"""What a peer knows of the slot at its head: whose turn it is, and the round and the proposal in hand.

A new head makes a new slot, so nothing of an earlier one can stay behind.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final

from volunteer_kit.swarm.sync.ballots import Ballot, leader_order
from volunteer_kit.swarm.sync.branches import OpeningAttempt
from volunteer_kit.swarm.sync.leading import Leadership
from volunteer_kit.swarm.sync.log import LogItem
from volunteer_kit.swarm.sync.messages import BallotRecord, Propose, Round
from volunteer_kit.swarm.sync.promises import Acceptor

LONGEST_PAUSE: Final = 8  # heartbeats between two rounds of a slot that fail


@dataclass
class Slot:
    """The slot behind one head."""

    acceptor: Acceptor
    order: tuple[str, ...]  # public members of the view, as they take their turns
    began: float  # s, when this peer came to the head
    turn: int
    heard: float  # s, when the leader was heard last
    turn_began: float  # s
    in_time: bool = False  # whether the peer came by a commit, at the slot's beginning
    lead: Leadership | None = None  # while this peer leads, or asks for promises
    followed: Ballot | None = None
    refused: set[Ballot] = field(default_factory=set)  # their leaders do not keep the rules
    rounds_failed: int = 0  # at the ballot that is followed
    failures: int = 0
    pause_until: float = 0.0  # s
    reported: int = 0  # samples: the most that this peer reported
    round: Round | None = None
    exchange_ended: bool = False  # its time is over, the process was asked for what is there
    considered: Propose | None = None  # its answers are being fetched
    may_wait_until: float | None = None  # s; most peers in touch are catching up
    opening: OpeningAttempt | None = None

    @staticmethod
    def behind(item: LogItem, now: float, record: BallotRecord | None = None) -> Slot:
        """The slot behind `item`: nobody has been heard, and only a record of this slot binds."""
        acceptor = Acceptor(item.head.lineage, record)
        order = leader_order(item.head.seed, item.membership.public)
        return Slot(acceptor, order, now, acceptor.first_turn, now, now, pause_until=now)

    def follow_turn(self, turn: int, now: float) -> None:
        """It is this turn, as far as this peer knows; its leader has time to be heard."""
        self.turn, self.heard, self.turn_began = turn, now, now
        self.lead = None
        self.rounds_failed = 0

    def follow(self, ballot: Ballot, now: float) -> None:
        """This ballot's leader speaks."""
        if self.lead is not None and self.lead.ballot != ballot:
            self.lead = None
        if ballot.turn != self.turn:
            self.follow_turn(ballot.turn, now)
        self.followed = ballot

    def turn_after(self, out: set[str]) -> int:
        """The next turn; members that are `out` lose theirs."""
        turn = self.turn + 1
        while turn < len(self.order) and self.order[turn] in out:
            turn += 1
        return turn

    def pause(self, now: float, heartbeat: float) -> None:
        """A round failed: the next one waits, longer each time."""
        self.failures += 1
        self.pause_until = now + heartbeat * min(LONGEST_PAUSE, 2 ** (self.failures - 1))
