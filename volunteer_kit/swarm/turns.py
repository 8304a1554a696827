"""How many of a step's samples are for this peer to compute, so that quick peers do not all compute the whole of it.

Peers tell their progress a few times a second. Where a step takes less, each would have target_batch_size samples of
its own before it heard of the others'. So each computes its share of the step without asking; beyond it only what the
others will not have, by what they brought to the last rounds. What one batch each would overshoot is divided by turns:
a place in the order of the peers' names, which moves on by one with each epoch.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Sequence
from dataclasses import dataclass

EVEN = 1e-6  # of a batch: floats


class CountsOn(enum.Enum):
    """How much of the others' samples a peer counts on: less, the longer it has waited for them."""

    SHARES = "what they are expected to bring"
    TOLD = "what they say that they have"
    NOTHING = "nobody"


@dataclass(frozen=True)
class Other:
    """Another peer at work.

    `samples` that it has of our epoch, as it said last; `usual`: the most that it brought to one of the last rounds,
    None: not known; `waits`: it has done what it means to do, for now; `place` in this epoch's order; `speed` that it
    says of its device, samples/s, 0: not told; `is_in_round`: it brings no more to this step, whatever is missing.
    """

    samples: float
    usual: float | None
    waits: bool
    place: int
    speed: float = 0.0
    is_in_round: bool = False


def share_of(place: int, peers: int, batch: float, target: float) -> float:
    """Samples of a step that the peer at this place computes unasked, in whole batches; all peers' shares together hold
    less than one batch too many."""
    batches = target / batch
    each, needed = math.floor(batches / peers + EVEN), math.ceil(batches - EVEN)
    return batch * (each + (place < needed - peers * each))


def may_compute(
    own: float,
    batch: float,
    target: float,
    place: int,
    others: Sequence[Other],
    ahead: float = math.inf,
    counts_on: CountsOn = CountsOn.SHARES,
) -> bool:
    """Is another batch of ours wanted, or will the others bring the rest of the step?

    :param own: samples of ours in this step so far; `batch`: of our next batch
    :param place: ours in this epoch's order, from 0
    :param ahead: s until our next batch is done and we have heard of the others': what they cannot do by then is not
        waited for, or a slow device would have the quick ones stand still
    """
    peers = 1 + len(others)
    if counts_on is CountsOn.NOTHING:
        return True
    if counts_on is CountsOn.TOLD:
        return own + sum(other.samples for other in others) < target
    if peers == 1 or own + batch <= share_of(place, peers, batch, target) + EVEN * batch:
        return True
    if all(other.waits or other.is_in_round for other in others):  # one of those who wait has to begin
        is_first = all(other.place > place for other in others if not other.is_in_round)
        return is_first and own + sum(other.samples for other in others) < target
    soon = sum(other.samples + lacking_of(other, peers, batch, target, ahead) for other in others)
    return own + batch + soon <= target


def lacking_of(other: Other, peers: int, batch: float, target: float, ahead: float) -> float:
    """Samples that it is expected to bring on top of those that it has."""
    share = share_of(other.place, peers, batch, target)
    expected = 0.0 if other.waits or other.is_in_round else share if other.usual is None else min(share, other.usual)
    lacking = max(0.0, expected - other.samples)
    return min(lacking, other.speed * ahead) if other.speed > 0.0 else lacking


def seconds_of_others(batch: float, target: float, others: Sequence[Other], ahead: float) -> float:
    """Time that the slowest of those who said their speed needs for what it is expected to bring; at most `ahead`. One
    that would bring less than half a batch by then changes nothing, and is not waited for."""
    lacking = [(lacking_of(one, 1 + len(others), batch, target, ahead), one.speed) for one in others if one.speed > 0.0]
    return max((samples / speed for samples, speed in lacking if samples >= batch / 2), default=0.0)


def takes_turns(peers: int, batch: float, target: float) -> bool:
    """Does a step hold fewer batches than there are peers?"""
    return peers * batch > target + EVEN * batch
