"""Hold a peer's state in the slot at its head: the turn, the round, and the proposal.

A new head makes a new slot, so nothing of an earlier one can stay behind.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final

from volunteer_kit.swarm.sync.ballots import Ballot, leader_order
from volunteer_kit.swarm.sync.branches import OpeningAttempt
from volunteer_kit.swarm.sync.contributions import Slice
from volunteer_kit.swarm.sync.leading import Leadership
from volunteer_kit.swarm.sync.log import LogItem
from volunteer_kit.swarm.sync.messages import BallotRecord, CommitmentsHeard, Propose, Round
from volunteer_kit.swarm.sync.promises import Acceptor

LONGEST_TRIES: Final = 3  # doublings of the time between two ballots of one leader
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
    apart: set[str] = field(default_factory=set)  # peers that refused `round`, which this peer leads
    exchange_ended: bool = False  # its time is over, the process was asked for what is there
    commitments: CommitmentsHeard | None = None  # of `round`
    fitting: set[Slice] = field(default_factory=set)  # their bytes are here, and were decoded as these cells
    refused_answers: set[Slice] = field(default_factory=set)
    considered: Propose | None = None  # its answers are being fetched
    may_wait_until: float | None = None  # s; most peers in touch are catching up
    opening: OpeningAttempt | None = None
    unsigned: dict[str, int] = field(default_factory=dict)  # openings that each peer did not sign
    left_out_until: dict[str, float] = field(default_factory=dict)  # s; of openings
    opener: tuple[str, float] | None = None  # whose opening this peer waits for, and since when
    ballots: dict[str, Ballot] = field(default_factory=dict)  # the last one of each leader
    tries: dict[str, int] = field(default_factory=dict)  # ballots of each leader
    next_ballot_at: dict[str, float] = field(default_factory=dict)  # s, when a leader may have another one

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
        """This ballot's leader speaks. To count higher gives it no more time and no more rounds."""
        if self.lead is not None and self.lead.ballot != ballot:
            self.lead = None
        if ballot.turn != self.turn:
            followed = self.followed if self.followed is not None and self.followed.turn == self.turn else None
            began, failed = self.turn_began, self.rounds_failed
            self.follow_turn(ballot.turn, now)
            if followed is not None and followed.leader == ballot.leader:
                self.turn_began, self.rounds_failed = began, failed
        self.followed = ballot

    def note_ballot(self, ballot: Ballot, now: float, timeout: float) -> bool:
        """A leader speaks at this ballot: another one of its own has to wait, longer each time.

        :returns: whether it is the first one of this leader
        """
        if ballot <= self.ballots.get(ballot.leader, Ballot(-1, "")):
            return self.tries[ballot.leader] == 1
        self.ballots[ballot.leader] = ballot
        tries = self.tries[ballot.leader] = self.tries.get(ballot.leader, 0) + 1
        self.next_ballot_at[ballot.leader] = now + timeout * 2 ** min(tries, LONGEST_TRIES)
        return tries == 1

    def is_hasty(self, ballot: Ballot, now: float) -> bool:
        """Whether a leader counts higher again before its last ballot had time. The only public member may."""
        last = self.ballots.get(ballot.leader)
        alone = set(self.order) <= {ballot.leader}
        return last is not None and ballot > last and not alone and now < self.next_ballot_at[ballot.leader]

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
