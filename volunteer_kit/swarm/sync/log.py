"""The log: entries, certificates, lineages, and what follows from the log alone.

An entry is one optimizer step of the whole swarm. Its lineage is the hash of its content and its parent's lineage, so
equal lineages mean equal histories and equal parameters. The ballot at which an entry is certified is no part of it: a
later leader proposes it again unchanged.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields, replace
from functools import cached_property
from typing import Final, NamedTuple

from volunteer_kit.swarm.sync.ballots import Ballot, is_quorum
from volunteer_kit.swarm.sync.contributions import Answer

VOTES_FROM: Final = 3  # entries that a peer takes part in before it votes
SLOTS_KEPT: Final = 4  # a leaver's goodbye may come from one of them
FEW_VOTERS: Final = 3  # while there are fewer, the oldest newcomers vote too


class Member(NamedTuple):
    """A peer in a group."""

    peer: str
    account: str  # who answers for it: a user name in a run with access control, else the peer id itself
    public: bool  # whether others can call it


class Verdict(NamedTuple):
    """A ban with its proof, as verified averaging or an equivocation brings it."""

    peer: str
    proof: bytes


class _Hashed:
    """What a lineage is computed from: every field, in order, behind the name of the kind."""

    parent: bytes

    @cached_property
    def lineage(self) -> bytes:
        """SHA-256 of the content and the parent's lineage."""
        content = [getattr(self, each.name) for each in fields(self)]  # type: ignore[arg-type]
        text = json.dumps([type(self).__name__, content], default=bytes.hex, separators=(",", ":"))
        return hashlib.sha256(text.encode()).digest()


@dataclass(frozen=True)
class Entry(_Hashed):
    """One step. `epoch` is the parent's; the step leads to `epoch + 1`."""

    generation: int
    sequence: int
    epoch: int
    parent: bytes
    birth: Ballot
    fingerprint: bytes  # of the round
    group: tuple[Member, ...]
    answers: tuple[Answer, ...]
    missing: int  # cells whose reducer died before anybody had its answer: zero in this step
    gone: tuple[str, ...] = ()  # members that said goodbye
    verdicts: tuple[Verdict, ...] = ()

    @cached_property
    def sample_cells(self) -> int:
        """Samples of each cell, summed over the cells."""
        return sum(share.samples * share.cells.bit_count() for answer in self.answers for share in answer.shares)


@dataclass(frozen=True)
class Opening(_Hashed):
    """Survivors without a quorum go on by themselves; every member signs it."""

    generation: int
    sequence: int
    epoch: int
    parent: bytes
    attempt: int
    members: tuple[Member, ...]


@dataclass(frozen=True)
class RollbackOrder(_Hashed):
    """The monitor restores an older checkpoint. The epoch goes on, the generation rises; it names its own view.

    Of two orders with one generation the one with the higher sequence wins.
    """

    generation: int
    sequence: int
    epoch: int
    parent: bytes  # lineage of the checkpoint
    members: tuple[Member, ...]
    banned: tuple[str, ...] = ()


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


class Head(NamedTuple):
    """Where a peer is. `sample_cells` is what its branch committed in this generation."""

    generation: int
    sequence: int
    epoch: int
    lineage: bytes
    sample_cells: int

    @property
    def seed(self) -> bytes:
        """What the order of leaders follows from: nobody can choose it by what an entry holds."""
        return f"{self.generation}.{self.sequence}.{self.epoch}".encode()

    @property
    def order(self) -> tuple[int, int]:
        """Rank of the rollback order behind it: the higher one wins whatever the branches hold."""
        return (self.generation, self.sequence)

    def beats(self, other: Head) -> bool:
        """Whether this branch wins against the other one, if neither continues the other."""
        mine = (*self.order, self.sample_cells)
        theirs = (*other.order, other.sample_cells)
        return mine > theirs or (mine == theirs and self.lineage < other.lineage)


@dataclass(frozen=True)
class Membership:
    """Who is in the run and who votes: a function of the log alone."""

    founders: frozenset[str]
    recent: tuple[tuple[Member, ...], ...]  # the groups of the last two entries, less those that are gone
    entries: Mapping[str, int]  # entries that a peer of the view took part in, VOTES_FROM at most
    since: Mapping[str, int]  # epoch of its first one
    banned: frozenset[str] = frozenset()
    slots: tuple[bytes, ...] = ()  # the last ones before this

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
        return Membership(self.founders - away, recent, entries, since, banned, self._slots_before(entry.parent))

    def _slots_before(self, parent: bytes) -> tuple[bytes, ...]:
        return (*self.slots, parent)[-SLOTS_KEPT:]

    def opened(self, opening: Opening) -> Membership:
        """The membership behind an opening: those that it lists, and all of them vote."""
        group = tuple(sorted(member for member in opening.members if member.peer not in self.banned))
        return Membership(
            self.founders,
            (group,),
            {each.peer: VOTES_FROM for each in group},
            {each.peer: self.since.get(each.peer, 0) for each in group},
            self.banned,
            self._slots_before(opening.parent),
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


@dataclass(frozen=True)
class LogItem:
    """One step of the log with what proves it, and where it leads."""

    step: Entry | Opening | RollbackOrder | None  # None: the genesis
    certificate: Certificate | None  # of an entry
    signers: frozenset[str]  # of an opening
    head: Head
    membership: Membership

    @staticmethod
    def genesis(members: Iterable[Member]) -> LogItem:
        """Where a run begins."""
        group = tuple(sorted(members))
        lineage = hashlib.sha256(json.dumps(["genesis", group]).encode()).digest()
        return LogItem(None, None, frozenset(), Head(0, 0, 0, lineage, 0), Membership.genesis(group))

    def after_entry(self, entry: Entry, certificate: Certificate) -> LogItem:
        """The next item behind this one."""
        head = self.head
        total = head.sample_cells + entry.sample_cells
        return LogItem(
            entry,
            certificate,
            frozenset(),
            Head(head.generation, head.sequence, head.epoch + 1, entry.lineage, total),
            self.membership.after(entry),
        )

    def after_opening(self, opening: Opening, signers: frozenset[str]) -> LogItem:
        """The next item behind this one: the epoch stays, the lineage changes."""
        head = self.head._replace(lineage=opening.lineage)
        return LogItem(opening, None, signers, head, self.membership.opened(opening))

    def after_order(self, order: RollbackOrder) -> LogItem:
        """Where a rollback order leads: whatever came before, everybody has the same membership behind it."""
        head = Head(order.generation, order.sequence, order.epoch, order.lineage, 0)
        membership = replace(Membership.genesis(order.members), banned=frozenset(order.banned))
        return LogItem(order, None, frozenset(), head, membership)

    def leads_to(self, item: LogItem) -> bool:
        """Whether `item` is a proven step behind this one (invariant I2)."""
        step = item.step
        if step is None or step.parent != self.head.lineage:
            return False
        if (step.generation, step.sequence, step.epoch) != (*self.head.order, self.head.epoch):
            return False
        if isinstance(step, Entry):
            certificate = item.certificate
            return (
                certificate is not None
                and self.membership.certifies(certificate, step)
                and self.after_entry(step, certificate) == item
            )
        if isinstance(step, Opening):
            return self.may_open(step, item.signers) and self.after_opening(step, item.signers) == item
        return False

    def may_open(self, opening: Opening, signers: frozenset[str]) -> bool:
        """Whether the opening is whole: every member signed, one of them can be called, and all are of the view, or
        nobody is."""
        view = self.membership.view
        known = sum(view.get(each.peer) == each for each in opening.members)
        return (
            {each.peer for each in opening.members} == signers
            and known in (0, len(opening.members))
            and any(each.public for each in opening.members)
        )


class Log:
    """The last items, oldest first, at most `kept` of them."""

    def __init__(self, items: Iterable[LogItem], kept: int):
        self.items = tuple(items)
        self.kept = kept
        self._places = {item.head.lineage: place for place, item in enumerate(self.items)}

    @property
    def last(self) -> LogItem:
        """Where this peer is."""
        return self.items[-1]

    def __contains__(self, lineage: object) -> bool:
        return lineage in self._places

    def item(self, lineage: bytes) -> LogItem:
        """:raises KeyError: if the log does not have it, or no longer"""
        return self.items[self._places[lineage]]

    def behind(self, lineage: bytes) -> tuple[LogItem, ...]:
        """The items behind this one.

        :raises KeyError: if the log does not have it, or no longer
        """
        return self.items[self._places[lineage] + 1 :]

    def extended(self, item: LogItem) -> Log:
        """The log with one item more."""
        return Log((*self.items, item)[-self.kept :], self.kept)

    def last_common(self, lineages: Iterable[bytes]) -> bytes | None:
        """The newest of these lineages, newest first, that the log has."""
        return next((lineage for lineage in lineages if lineage in self._places), None)


def is_chain(items: tuple[LogItem, ...]) -> bool:
    """Whether each item leads to the next one; a rollback order may follow anything."""
    return all(
        before.after_order(after.step) == after if isinstance(after.step, RollbackOrder) else before.leads_to(after)
        for before, after in zip(items, items[1:], strict=False)
    )
