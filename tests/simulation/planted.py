"""Faults that the simulator has to find: each breaks one rule of the protocol, in the core or in a peer's process.

A simulator that finds nothing in a core has proven something only if it would have found these.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from typing import Any, NamedTuple
from unittest import mock

from tests.simulation.process import Process
from volunteer_kit.swarm.sync import certificates, judging, leading
from volunteer_kit.swarm.sync import core as core_module
from volunteer_kit.swarm.sync.ballots import Ballot
from volunteer_kit.swarm.sync.beliefs import Beliefs
from volunteer_kit.swarm.sync.branches import Fork, Suffix
from volunteer_kit.swarm.sync.certificates import Certificate, Membership
from volunteer_kit.swarm.sync.config import SyncConfig
from volunteer_kit.swarm.sync.contributions import Accounts, Ledger
from volunteer_kit.swarm.sync.core import SyncCore
from volunteer_kit.swarm.sync.entries import Entry
from volunteer_kit.swarm.sync.judging import Judge
from volunteer_kit.swarm.sync.leading import Leadership
from volunteer_kit.swarm.sync.log import Log
from volunteer_kit.swarm.sync.messages import (
    BallotRecord,
    HeadRecord,
    Items,
    Persist,
    Propose,
    Snapshot,
    Timer,
)
from volunteer_kit.swarm.sync.phases import Phase
from volunteer_kit.swarm.sync.promises import LOWEST, Acceptor


class Planted(NamedTuple):
    """A fault, where it shows, and how to plant it."""

    mode: str  # the mode whose seeds find it
    rule: str  # that it breaks
    patches: tuple[tuple[Any, str, Any], ...]


def patched(name: str) -> ExitStack:
    """Plant the fault of this name until the stack is closed."""
    stack = ExitStack()
    for target, attribute, value in PLANTED[name].patches:
        stack.enter_context(mock.patch.object(target, attribute, value))
    return stack


def around(target: Any, name: str, wrapper: Callable[..., Any]) -> tuple[Any, str, Any]:
    """Replace a function by one that also gets the original."""
    original = getattr(target, name)

    def replacement(*arguments: Any, **named: Any) -> Any:
        return wrapper(original, *arguments, **named)

    return target, name, replacement


# --- in the core ---


def _applies_at_once(original: Any, self: Any, body: Any) -> None:
    original(self, body)
    if body.entry.parent == self.head.lineage:
        certificate = Certificate(body.entry.lineage, body.ballot, frozenset({self.me.peer}))
        self._commit(self.log.last.after_entry(body.entry, certificate))


def _accepts_anything(original: Any, self: Any, ballot: Any, entry: Any) -> bool:
    return bool(ballot >= self.promised)


def _needs_no_promises(original: Any, self: Any) -> None:
    original(self)
    if self._slot.lead is not None:
        self._slot.lead.active = True


def _does_not_promise(original: Any, self: Any, ballot: Ballot) -> Any:
    return self.record


def _born_again(original: Any, self: Any, lead: Leadership, entry: Entry) -> None:
    original(self, lead, replace(entry, birth=lead.ballot))


def _accepts_born_again(original: Any, self: Judge, body: Propose) -> Any:
    bound, _ = self.bound_entry(body.promises, body.goodbyes, body.ballot)
    if bound is not None and replace(bound, birth=body.entry.birth) == body.entry:
        return None
    return original(self, body)


def _leaves_at_any_ballot(original: Any, self: Membership, goodbyes: Any, slot: bytes, ballot: Ballot) -> Any:
    return original(self, [replace(each, promised=LOWEST) for each in goodbyes], slot, ballot)


def _counts_twice(original: Any, self: Ledger, lineage: bytes, peer: str, answers: Any) -> Any:
    before = dict(self._live)
    settled = original(self, lineage, peer, answers)
    for number, each in before.items():
        self._live.setdefault(number, each)
        self._live[number] = each._replace(sealed=True)
    return settled


def _never_sets_the_phase_timer(original: Any, self: Any, timer: Timer, at: Any) -> None:
    if timer is not Timer.PHASE:
        original(self, timer, at)


def _one_name_for_two_timers(original: Any, self: Any, timer: Timer, at: Any) -> None:
    original(self, Timer.PHASE, at)


def _deaf_while_voting(original: Any, self: Any, sender: str, body: Items) -> None:
    if self.phase is not Phase.VOTING:
        original(self, sender, body)


def _switches_piece_by_piece(original: Any, self: Any, sender: str, suffix: Suffix) -> None:
    if suffix.order_place is None and suffix.base.head != self.head and suffix.head.beats(self.head):
        place = [item.head for item in self.log.items].index(suffix.base.head)
        self.log = Log(self.log.items[: place + 1], self.config.kept_entries)
        self._persist(HeadRecord(Snapshot(self.log.items, self.accounts)))
        self._enter_slot()
    original(self, sender, suffix)


def _half_is_enough(electorate: Any, agreeing: Any, left: Any = frozenset()) -> bool:
    voters = electorate - left
    return bool(voters) and 2 * len(voters & agreeing) >= len(voters)


def _first_order_wins(original: Any, self: Any, order: Any) -> None:
    if self.head is not None and order.generation > self.head.generation:
        original(self, order)


def _nothing_expires(original: Any, self: Any) -> None:
    return None


def _returns_nothing(original: Any, self: Ledger) -> None:
    for number, each in list(self._live.items()):
        self._live[number] = each._replace(in_flight=0)


# --- in a process ---


def _forgets(**fields: Any) -> Any:
    def start(original: Any, self: Process) -> None:
        if self.disk.ballot is not None:
            self.disk.ballot = replace(self.disk.ballot, **fields)
        original(self)

    return start


def _forgets_its_proposal(original: Any, self: Process) -> None:
    ballot = self.disk.ballot
    if ballot is not None and ballot.proposed_at is not None:
        self.disk.ballot = BallotRecord(ballot.slot, LOWEST)
    original(self)


def _keeps_no_answers(original: Any, self: Process, action: Persist) -> None:
    held = set(self.disk.held)
    original(self, action)
    if any(isinstance(record, BallotRecord) for record in action.records):
        self.disk.held = held


def _writes_twice(original: Any, self: Process, action: Persist) -> None:
    for record in action.records:
        if self.crash_after is not None and len(action.records) > 1:
            self.crash_after -= 1
            if self.crash_after < 0:
                self.crash()
                return
        original(self, Persist((record,)))


def _serves_no_accounts(original: Any, self: Process) -> Any:
    found = original(self)
    return None if found is None else (Snapshot(found[0].items, Accounts()), found[1])


PLANTED: dict[str, Planted] = {
    "apply before the certificate": Planted(
        "nasty", "a step needs a certificate", (around(SyncCore, "_accept", _applies_at_once),)
    ),
    "vote twice": Planted(
        "liar", "one entry for each ballot, none below a promise", (around(Acceptor, "accepts", _accepts_anything),)
    ),
    "forget a vote after a crash": Planted(
        "nasty",
        "a vote is written before it is said",
        (around(Process, "start", _forgets(accepted=None, accepted_at=None)),),
    ),
    "forget a promise after a crash": Planted(
        "nasty", "a promise is written before it is said", (around(Process, "start", _forgets(promised=LOWEST)),)
    ),
    "forget a proposal after a crash": Planted(
        "nasty", "nobody leads a ballot again", (around(Process, "start", _forgets_its_proposal),)
    ),
    "no question at a higher ballot": Planted(
        "nasty", "a higher ballot asks a quorum first", (around(SyncCore, "_stand", _needs_no_promises),)
    ),
    "a question without a promise": Planted(
        "nasty", "an answer to a question binds", (around(Acceptor, "promise", _does_not_promise),)
    ),
    "no proposal is made again": Planted(
        "nasty",
        "the highest accepted proposal is proposed again",
        (
            (leading, "bound_entry", lambda *arguments: (None, frozenset())),
        ),
    ),
    "the ballot is inside the lineage": Planted(
        "nasty",
        "a proposal is made again unchanged",
        (
            around(SyncCore, "_propose", _born_again),
            around(Judge, "why_not_accept", _accepts_born_again),
        ),
    ),
    "answers are not kept with the vote": Planted(
        "nasty", "a voter keeps the bytes", (around(Process, "_persist", _keeps_no_answers),)
    ),
    "a goodbye is applied locally": Planted(
        "nasty",
        "a leaver that accepted something votes for that",
        ((Membership, "left", lambda self, goodbyes, slot, ballot: frozenset(each.peer for each in goodbyes)),),
    ),
    "a goodbye counts at any ballot": Planted(
        "nasty", "a goodbye counts from the leaver's promise on", (around(Membership, "left", _leaves_at_any_ballot),)
    ),
    "nobody greets the silent": Planted(
        "broad", "branches meet again", ((SyncCore, "_greet_somebody", lambda self: None),)
    ),
    "head and accounts in two writes": Planted(
        "broad", "head, accounts and contributions change in one write", (around(Process, "_persist", _writes_twice),)
    ),
    "a snapshot without accounts": Planted(
        "broad", "a snapshot says what was committed", (around(Process, "snapshot", _serves_no_accounts),)
    ),
    "a contribution is counted twice": Planted(
        "broad",
        "what an entry holds is committed",
        (around(Ledger, "commit", _counts_twice), (Accounts, "committed", lambda self, peer, number: 0)),
    ),
    "a timer that never fires": Planted(
        "broad", "every phase has a bound", (around(SyncCore, "_set_timer", _never_sets_the_phase_timer),)
    ),
    "two timers under one name": Planted(
        "broad", "a timer has one owner", (around(SyncCore, "_set_timer", _one_name_for_two_timers),)
    ),
    "no exit from voting for an entry ahead": Planted(
        "broad", "an entry ahead ends any phase", (around(SyncCore, "_on_items", _deaf_while_voting),)
    ),
    "a branch is switched piece by piece": Planted(
        "broad", "a branch is switched in one step", (around(SyncCore, "_compare_suffix", _switches_piece_by_piece),)
    ),
    "half is a quorum": Planted(
        "broad",
        "two quorums share a member",
        (
            (core_module, "is_quorum", _half_is_enough),
            (certificates, "is_quorum", _half_is_enough),
            (judging, "is_quorum", _half_is_enough),
        ),
    ),
    "the first rollback order wins": Planted(
        "broad", "of two orders the higher sequence wins", (around(SyncCore, "_follow_order", _first_order_wins),)
    ),
    "nothing expires": Planted(
        "broad", "a contribution is as old as the run allows", (around(SyncCore, "_expire_stale", _nothing_expires),)
    ),
    "a failed round loses its parts": Planted(
        "broad", "late is not lost", (around(Ledger, "return_all", _returns_nothing),)
    ),
    "any weight is believed": Planted(
        "liar",
        "a weight is what a device can compute",
        (
            (Beliefs, "why_refused", lambda self, *arguments: None),
            (Beliefs, "limit", lambda self, *arguments: float("inf")),
            (SyncConfig, "most_epochs", property(lambda self: 1 << 40)),
        ),
    ),
    "any branch is believed": Planted(
        "liar",
        "a branch counts with the samples that are believed",
        (
            (SyncCore, "_may_join_branch", lambda self, suffix: True),
            (Fork, "is_plausible", True),
            (Fork, "they_win", property(lambda self: self.suffix.head.beats(self.log.last.head))),
        ),
    ),
    "every identity votes": Planted(
        "liar",
        "one vote for each account, with the third entry",
        ((Membership, "electorate", property(lambda self: frozenset(self.view))),),
    ),
}
