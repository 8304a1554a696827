"""What a peer keeps while it leads a slot, and how it plans a round."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from volunteer_kit.swarm.sync.ballots import Ballot
from volunteer_kit.swarm.sync.contributions import Answer
from volunteer_kit.swarm.sync.log import Entry, Goodbye, Member
from volunteer_kit.swarm.sync.messages import Promise, Round, Vote


@dataclass
class Leadership:
    """One ballot of this peer. It is active at once at turn 0, else when a quorum has promised."""

    ballot: Ballot
    active: bool
    since: float  # s
    promises: dict[str, Promise] = field(default_factory=dict)
    refusals: set[str] = field(default_factory=set)  # peers that follow another ballot
    strays: dict[str, int] = field(default_factory=dict)  # how often each reported a higher turn
    attempts: int = 0  # rounds begun
    held: dict[str, tuple[Answer, ...]] = field(default_factory=dict)  # answers that members have, of this round
    proposal: Entry | None = None
    votes: dict[str, Vote] = field(default_factory=dict)
    fetching_since: float | None = None  # s; it waits for the bytes of an accepted proposal
    may_wait_until: float | None = None  # s; most peers in touch are catching up

    def highest_accepted(self, goodbyes: Iterable[Goodbye], own: Promise) -> tuple[Entry | None, frozenset[str]]:
        """The accepted entry that has to be proposed again, and the peers that reported it."""
        reported = [(peer, each.accepted_at, each.accepted) for peer, each in self.promises.items()]
        reported += [(each.peer, each.accepted_at, each.accepted) for each in goodbyes]
        reported.append((self.ballot.leader, own.accepted_at, own.accepted))
        highest = max((at for _, at, _ in reported if at is not None), default=None)
        if highest is None:
            return None, frozenset()
        entry = next(entry for _, at, entry in reported if at == highest)
        return entry, frozenset(peer for peer, at, _ in reported if at == highest)


def has_to_propose(promises: Sequence[Promise], goodbyes: Iterable[Goodbye]) -> Entry | None:
    """The entry that these promises of a quorum bind a leader to; None: it is free."""
    accepted = [(each.accepted_at, each.accepted) for each in promises]
    accepted += [(each.accepted_at, each.accepted) for each in goodbyes]
    highest = max((at for at, _ in accepted if at is not None), default=None)
    return None if highest is None else next(entry for at, entry in accepted if at == highest)


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
    total = sum(mbit for _, mbit in reducers)
    if total <= 0:
        return ((leader, (1 << cells) - 1),)
    slices, begin, passed = [], 0, 0.0
    for peer, mbit in reducers:
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
