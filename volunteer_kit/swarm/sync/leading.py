"""Hold the state of a leader of a slot, and plan its rounds."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Final

from volunteer_kit.swarm.sync.ballots import Ballot, is_quorum
from volunteer_kit.swarm.sync.certificates import Goodbye
from volunteer_kit.swarm.sync.contributions import Answer
from volunteer_kit.swarm.sync.entries import Entry, Member
from volunteer_kit.swarm.sync.messages import Promise, Round, Vote

MOST_BANDWIDTH: Final = 4.0  # times the median: what a reducer says of its line is not measured


@dataclass
class Leadership:
    """One ballot of this peer. It is active at once at turn 0, else when a quorum has promised."""

    ballot: Ballot
    active: bool
    since: float  # s
    promises: dict[str, Promise] = field(default_factory=dict)
    refusals: dict[str, bool] = field(default_factory=dict)  # peers that follow another ballot: are they bound to it?
    strays: dict[str, int] = field(default_factory=dict)  # how often each reported a higher turn
    attempts: int = 0  # rounds begun
    held: dict[str, tuple[Answer, ...]] = field(default_factory=dict)  # answers that members have, of this round
    proposal: Entry | None = None
    votes: dict[str, Vote] = field(default_factory=dict)
    fetching_since: float | None = None  # s; it waits for the bytes of an accepted proposal
    outbid: Ballot | None = None  # a member that it hears has promised this higher one


def bound_entry(
    promises: Sequence[tuple[str, Promise]],
    goodbyes: Sequence[Goodbye],
    electorate: frozenset[str],
    left: frozenset[str],
    is_right: Callable[[Entry], bool],
) -> tuple[Entry | None, frozenset[str]]:
    """The entry that a leader has to propose again, and the peers that reported it; None: it is free.

    Of the entries that may have been certified it is the one that was accepted at the highest ballot. A peer that
    promised without having accepted an entry at a ballot never votes for it there; if the others are no quorum, the
    entry was not certified at that ballot. So one liar that reports what nobody proposed binds nobody.

    :param goodbyes: those with an accepted entry of this slot
    :param left: members out of the denominator
    :param is_right: whether an entry follows the head; one that does not was never accepted by an honest peer
    """
    reports = [(peer, each.accepted_at, each.accepted) for peer, each in promises]
    reports += [(each.peer, each.accepted_at, each.accepted) for each in goodbyes]
    accepted = {(at, entry.lineage): entry for _, at, entry in reports if at is not None and entry is not None}
    for (ballot, lineage), entry in sorted(accepted.items(), key=lambda each: each[0], reverse=True):
        reporters = {peer for peer, at, each in reports if at == ballot and each and each.lineage == lineage}
        above = {peer for peer, at, _ in reports if at is not None and at > ballot}
        leavers = {each.peer for each in goodbyes if each.accepted is not None and each.accepted.lineage == lineage}
        may_have_voted = electorate - {peer for peer, _, _ in reports} | reporters | above | leavers
        if is_quorum(electorate, may_have_voted, left) and is_right(entry):
            return entry, frozenset(reporters)
    return None, frozenset()


def fingerprint(content: Sequence[object]) -> bytes:
    """Hash of all that the leader says when a round begins."""
    text = json.dumps(["round", *content], default=bytes.hex, separators=(",", ":"))
    return hashlib.sha256(text.encode()).digest()


def make_round(
    slot: bytes,
    ballot: Ballot,
    attempt: int,
    group: Sequence[tuple[Member, int, float]],
    cells: int,
    exchange_seconds: float,
    vote_seconds: float,
) -> Round:
    """Plan a round.

    :param group: each member with its pending samples and its bandwidth in Mbit/s
    """
    ordered = sorted(group)
    members = tuple(member for member, _, _ in ordered)
    samples = tuple(samples for _, samples, _ in ordered)
    slices = share_out(cells, [(member.peer, mbit) for member, _, mbit in ordered if member.public], ballot.leader)
    content = (slot, ballot, attempt, members, samples, slices, exchange_seconds, vote_seconds)
    return Round(*content, fingerprint(content))


def share_out(cells: int, reducers: Sequence[tuple[str, float]], leader: str) -> tuple[tuple[str, int], ...]:
    """Slices of neighbouring cells in proportion to bandwidths; the leader takes what nobody has bandwidth for."""
    usual = median([mbit for _, mbit in reducers if mbit > 0] or [0.0])
    capped = [(peer, min(mbit, MOST_BANDWIDTH * usual)) for peer, mbit in reducers]
    total = sum(mbit for _, mbit in capped)
    if total <= 0:
        return ((leader, (1 << cells) - 1),)
    slices, begin, passed = [], 0, 0.0
    for peer, mbit in capped:
        passed += mbit
        end = round(cells * passed / total)
        if end > begin:
            slices.append((peer, ((1 << (end - begin)) - 1) << begin))
        begin = max(begin, end)
    return tuple(slices)


def is_genuine(round: Round, cells: int) -> bool:
    """Whether a round's fingerprint is of what it says, and its slices cover every cell once with reducers of it."""
    if round.fingerprint != fingerprint(round[:-1]) or len(round.samples) != len(round.group):
        return False
    callable_members = {member.peer for member in round.group if member.public}
    covered = 0
    for reducer, mask in round.slices:
        if reducer not in callable_members or mask & covered:
            return False
        covered |= mask
    return covered == (1 << cells) - 1


def merged_answers(round: Round, held: Iterable[tuple[Answer, ...]]) -> tuple[Answer, ...]:
    """One answer for each slice of the round that any member has; of two different ones the first."""
    slices = dict(round.slices)
    found: dict[str, Answer] = {}
    for answers in held:
        for answer in answers:
            if slices.get(answer.reducer) == answer.cells:
                found.setdefault(answer.reducer, answer)
    return tuple(sorted(found.values(), key=lambda answer: answer.cells))
