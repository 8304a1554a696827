"""Decide how much of a step each peer computes, and whose turn it is where a step holds few batches."""

from __future__ import annotations

import math
from collections.abc import Sequence

EVEN = 1e-6  # of a batch: floats
ALIKE = 1.25  # times the mean speed: peers so close to it bring equal shares, whatever they measured
MOST_FASTER = 16.0  # times our speed: what is believed of another peer


def share_of(own: float, others: Sequence[float], peers: int) -> float:
    """Return the part of a step that this peer brings, so that all end with theirs at one time.

    :param own: samples/s of this peer's device, 0: not measured
    :param others: samples/s, as the others say; who says none is taken for as fast as this peer
    :param peers: that compute, this one included
    """
    if own <= 0 or peers <= 1:
        return 1 / max(1, peers)
    known = [min(speed, MOST_FASTER * own) if speed > 0 else own for speed in others]
    mean = sum(known) / len(known) if known else own
    total = own + (peers - 1) * mean
    relative = own * peers / total
    return 1 / peers if 1 / ALIKE <= relative <= ALIKE else relative / peers


def takes_turns(peers: int, batch: float, target: float) -> bool:
    """Does a step hold fewer batches than there are peers?"""
    return peers * batch > target + EVEN * batch


def is_turn(place: int, peers: int, batch: float, target: float, epoch: int) -> bool:
    """Is it this peer's turn in this epoch? As many peers compute as the step holds batches, the next ones each time.

    :param place: of this peer, from 0
    """
    if not takes_turns(peers, batch, target):
        return True
    seats = max(1, math.ceil(target / batch - EVEN))
    return (place - epoch * seats) % peers < seats
