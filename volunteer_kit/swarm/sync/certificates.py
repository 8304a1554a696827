"""Certificates: compute the electorate, and check that a quorum of it has voted.

The electorate is a function of the log alone; a leaver's goodbye takes the place of its vote.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Set
from dataclasses import dataclass
from functools import cached_property
from typing import Final, NamedTuple

from volunteer_kit.swarm.sync.ballots import Ballot, is_quorum
from volunteer_kit.swarm.sync.entries import Entry, Member, Opening

VOTES_FROM: Final = 3  # entries that a peer takes part in before it votes
SLOTS_KEPT: Final = 4  # a leaver's goodbye may come from one of them
MOST_OBSERVERS: Final = 2  # members of a view that need not bring samples
FEW_VOTERS: Final = 3  # while there are fewer, the oldest newcomers vote too
OPENINGS_KEPT: Final = 32  # of a branch; what waits for an older one is given up


@dataclass(frozen=True)
class Goodbye:
    """A signed promise never to vote again, with what the leaver promised and accepted in its slot.

    In that slot it counts at ballots from `promised` on, as the leaver would have voted at no other. A leaver that
    accepted nothing is out of the denominator there; one that accepted an entry promises and votes for that one only.
    In later slots it is out of the denominator.
    """

    peer: str
    slot: bytes
    promised: Ballot
    accepted: Entry | None = None
    accepted_at: Ballot | None = None

    def agrees(self, slot: bytes, ballot: Ballot, entry: Entry | None) -> bool:
        """Whether it is a promise to the leader that proposes this entry, and a vote for it."""
        same = self.slot == slot and self.accepted is not None and self.promised <= ballot
        return same and self.accepted == entry


class Certificate(NamedTuple):
    """Votes of a quorum for an entry, and the ballot at which they were given."""

    entry: bytes  # lineage
    ballot: Ballot
    voters: frozenset[str]
    goodbyes: tuple[Goodbye, ...] = ()


class Unconfirmed(NamedTuple):
    """A branch on which too few have been seen: those that are missing may have gone on as a quorum."""

    electorate: frozenset[str]  # at its first opening that is not confirmed
    view: frozenset[str]
    seen: frozenset[str]  # members of the opening, and of the groups behind it

    def after(self, group: Set[str]) -> Unconfirmed | None:
        """Add the members of the next entry. Return None once the branch is confirmed: a quorum of the electorate has
        been seen, or a newcomer has joined, who would have found the missing members if they were there."""
        seen = self.seen | group
        is_confirmed = bool(group - self.view) or is_quorum(self.electorate, seen)
        return None if is_confirmed else self._replace(seen=frozenset(seen & self.view))


@dataclass(frozen=True)
class Membership:
    """Who is in the run and who votes: a function of the log alone."""

    founders: frozenset[str]
    recent: tuple[tuple[Member, ...], ...]  # the groups of the last two entries, less those that are gone
    entries: Mapping[str, int]  # entries that a peer of the view took part in, VOTES_FROM at most
    since: Mapping[str, int]  # epoch of its first one
    banned: frozenset[str] = frozenset()
    slots: tuple[bytes, ...] = ()  # the last ones before this
    openings: tuple[bytes, ...] = ()  # lineages of the branch's last openings
    unconfirmed: Unconfirmed | None = None  # the branch may lose against that of those who are missing

    @staticmethod
    def genesis(members: Iterable[Member]) -> Membership:
        """The founders, whom the run's first peer signs."""
        group = tuple(sorted(members))
        return Membership(
            frozenset(each.peer for each in group),
            (group,),
            {each.peer: VOTES_FROM for each in group},
            {each.peer: 0 for each in group},
        )

    @cached_property
    def view(self) -> dict[str, Member]:
        """Members of the last two entries."""
        return {each.peer: each for group in self.recent for each in group}

    @cached_property
    def public(self) -> tuple[str, ...]:
        """Members that others can call."""
        return tuple(sorted(peer for peer, member in self.view.items() if member.public))

    def may_observe(self, group: Iterable[Member]) -> frozenset[str]:
        """Those of a group that are new to the view and need not bring samples: monitors, as many as there is room for,
        the smallest peer ids first. Everybody else pays for its place with samples."""
        room = MOST_OBSERVERS - sum(member.observes for member in self.view.values())
        new = sorted(member.peer for member in group if member.observes and member.peer not in self.view)
        return frozenset(new[: max(0, room)])

    @cached_property
    def electorate(self) -> frozenset[str]:
        """Members that vote: one for each account, the oldest. While fewer than `FEW_VOTERS` have taken part often
        enough, the oldest newcomers fill up, so that a flood of new identities never makes a quorum."""
        voting: dict[str, str] = {}  # account -> peer
        oldest_first = sorted(self.view, key=lambda peer: (self.since[peer], peer))
        for established in (True, False):
            for peer in oldest_first:
                if not established and len(voting) >= FEW_VOTERS:
                    break
                if (self.entries[peer] >= VOTES_FROM) == established:
                    voting.setdefault(self.view[peer].account, peer)
        return frozenset(voting.values())

    def after(self, entry: Entry) -> Membership:
        """The membership behind this entry."""
        banned = self.banned | {each.peer for each in entry.verdicts}
        away = banned | set(entry.gone)
        previous = self.recent[-1:] if self.recent else ()
        recent = tuple(
            tuple(member for member in group if member.peer not in away) for group in (*previous, entry.group)
        )
        view = {each.peer for group in recent for each in group}
        present = {each.peer for each in recent[-1]}
        entries = {
            peer: min(VOTES_FROM, self.entries.get(peer, self._start(peer)) + (peer in present)) for peer in view
        }
        since = {peer: self.since.get(peer, entry.epoch) for peer in view}
        slots = self._slots_before(entry.parent)
        unconfirmed = self.unconfirmed.after(present) if self.unconfirmed is not None else None
        return Membership(self.founders - away, recent, entries, since, banned, slots, self.openings, unconfirmed)

    def _slots_before(self, parent: bytes) -> tuple[bytes, ...]:
        return (*self.slots, parent)[-SLOTS_KEPT:]

    def opened(self, opening: Opening) -> Membership:
        """The membership behind an opening: those that it lists, and all of them vote."""
        group = tuple(sorted(member for member in opening.members if member.peer not in self.banned))
        unconfirmed = self.unconfirmed
        if unconfirmed is None:
            unconfirmed = Unconfirmed(self.electorate, frozenset(self.view), frozenset())
        return Membership(
            self.founders,
            (group,),
            {each.peer: VOTES_FROM for each in group},
            {each.peer: self.since.get(each.peer, 0) for each in group},
            self.banned,
            self._slots_before(opening.parent),
            (*self.openings, opening.lineage)[-OPENINGS_KEPT:],
            unconfirmed.after({each.peer for each in group}),
        )

    def left(self, goodbyes: Iterable[Goodbye], slot: bytes, ballot: Ballot) -> frozenset[str]:
        """Leavers that do not count in the denominator at this ballot of the slot."""
        return frozenset(
            each.peer
            for each in goodbyes
            if each.slot in self.slots or (each.slot == slot and each.accepted is None and each.promised <= ballot)
        )

    def _start(self, peer: str) -> int:
        return VOTES_FROM if peer in self.founders else 0

    def certifies(self, certificate: Certificate, entry: Entry) -> bool:
        """Whether the certificate's votes are a quorum of this electorate for the entry."""
        slot, ballot = entry.parent, certificate.ballot
        left = self.left(certificate.goodbyes, slot, ballot)
        for_it = frozenset(each.peer for each in certificate.goodbyes if each.agrees(slot, ballot, entry))
        return certificate.entry == entry.lineage and is_quorum(
            self.electorate, (certificate.voters - left) | for_it, left
        )
