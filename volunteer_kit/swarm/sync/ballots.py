"""Ballots: the order of leaders in a slot, and the rule for a quorum.

The rules are those of single-decree Paxos (Lamport, "The Part-Time Parliament", 1998), one instance per slot, with
dynamic-linear voting (Jajodia and Mutchler, "Dynamic Voting Algorithms", 1990) as the quorum.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Set
from typing import NamedTuple


class Ballot(NamedTuple):
    """A turn to lead a slot; a higher one has the larger turn, then the larger leader."""

    turn: int
    leader: str


def leader_order(seed: bytes, public: Iterable[str]) -> tuple[str, ...]:
    """Public members in the order of their turns: rendezvous hashing (Thaler and Ravishankar, 1998), so that one peer
    that leaves does not move the others."""
    return tuple(sorted(public, key=lambda peer: hashlib.sha256(seed + b"/" + peer.encode()).digest()))


def may_lead(ballot: Ballot, order: tuple[str, ...]) -> bool:
    """Whether this ballot's turn belongs to this leader. After everybody's turn any public peer may lead."""
    if ballot.turn < 0:
        return False
    return ballot.turn >= len(order) or order[ballot.turn] == ballot.leader


def is_quorum(electorate: Set[str], agreeing: Set[str], left: Set[str] = frozenset()) -> bool:
    """Whether `agreeing` decides for the electorate.

    More than half of it does; exactly half does if it holds the smallest peer id.

    :param left: members that promised never to vote in this slot; they do not count in the denominator
    """
    voters = electorate - left
    votes = len(voters & agreeing)
    if 2 * votes == len(voters):
        return bool(voters) and min(voters) in agreeing
    return 2 * votes > len(voters)
