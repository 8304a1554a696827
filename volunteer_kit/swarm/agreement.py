"""Do peers hold the same model, and who has to follow whom?

Equal answers make equal steps, so peers that begin equal stay equal; a kill, a lost part or a missed round sets one
apart. Every member of a round therefore tells the others its epoch, a sketch of its parameters, and its lineage: a
digest of the rounds that its steps came of. The sketch says whether the values are the same but for rounding; but two
steps can be nearer than that while the learning rate is small, and drift away later, so the lineage says whether they
were the same steps. All members read the same list by the same rule, so whoever is apart knows it at once, and knows
whose state to take.

When the monitor orders all back to an earlier state, some obey a second before others. Who has obeyed tells the order's
sequence number with the rest. Members under another order are out of step, and nobody follows anybody under another
one, in either direction: who has obeyed is not voted back, and who has not yet obeys the monitor, not a member.
"""

from __future__ import annotations

import hashlib
import os
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from hivemind.p2p import PeerID

MAX_EPOCH = 2**31
MAX_SEQUENCE = 2**53
SKETCH_SIZE = 16  # numbers: a distance is estimated within a factor of two, which is enough to tell 1e-7 from 1e-3
PAST = 128  # epochs of which a state remembers what it was, 9 KB
FRESH_SIZE = 256  # numbers, a power of two: a distance is estimated within 15 %
CHUNK = 2**22  # elements sketched at once, 16 MB
# Relative distance. Processors round differently, 1e-7 a step, and are equal still. LAMB moves a tensor by the learning
# rate times its norm, so another step can be as near as this while the rate is small: that is the lineage's to tell.
TOLERANCE = 1e-4
LINEAGE_SIZE = 8  # bytes
BEGINNING = bytes(LINEAGE_SIZE)  # of a model that was begun with, or put back: the sketch alone describes it


# --- the sketch ---


def sketch(tensors: Iterable[torch.Tensor], seed: int) -> bytes:
    """A few numbers whose distance estimates the distance of all values: sums with random signs.

    Source: Achlioptas 2003, "Database-friendly random projections". The signs are numpy's raw PCG64 bits, the same on
    all versions.

    :param seed: the epoch, so that no difference stays unseen for long
    :returns: SKETCH_SIZE little-endian float32
    """
    total = torch.zeros(SKETCH_SIZE, dtype=torch.float64)
    bits = np.random.PCG64(seed)
    for tensor in tensors:
        flat = tensor.detach().reshape(-1)
        for part in flat.split(CHUNK):
            part = part.to("cpu", torch.float32)
            rows = torch.nn.functional.pad(part, (0, -len(part) % SKETCH_SIZE)).view(-1, SKETCH_SIZE)
            total += (_signs(bits, len(rows)) @ rows).double()
    return total.numpy().astype("<f4").tobytes()


def fresh_sketch(tensors: Iterable[torch.Tensor], seed: int) -> bytes:
    """The same for one question, with a seed that nobody knew before, and more exact: each value goes with a random
    sign into one of FRESH_SIZE sums, so that no pattern of a difference can hide or stand out.

    Source: Charikar et al. 2002, "Finding frequent items in data streams".

    :returns: FRESH_SIZE little-endian float32
    """
    total, bits = np.zeros(FRESH_SIZE), np.random.PCG64(seed)
    for tensor in tensors:
        for part in tensor.detach().reshape(-1).split(CHUNK):
            values = part.to("cpu", torch.float32).numpy()
            drawn = bits.random_raw(-(-len(values) // 4)).astype("<u8").view("<u2")[: len(values)]
            signed = np.where(drawn & FRESH_SIZE, -values, values)
            total += np.bincount(drawn % FRESH_SIZE, weights=signed, minlength=FRESH_SIZE)
    return total.astype("<f4").tobytes()


def _signs(bits: np.random.PCG64, count: int) -> torch.Tensor:
    raw = bits.random_raw(-(-count // 64)).astype("<u8").view(np.uint8)
    return torch.from_numpy(np.unpackbits(raw)[:count].astype(np.float32) * 2 - 1)


def distance(one: np.ndarray, other: np.ndarray) -> float:
    """Relative distance of two sketches of one seed."""
    size = max(float(np.linalg.norm(one)), float(np.linalg.norm(other)))
    return float(np.linalg.norm(one - other)) / size if size > 0 else 0.0


# --- the lineage ---


def advance(lineage: bytes, round_name: bytes | None) -> bytes:
    """The lineage after a step.

    :param round_name: equal on the members that got the same of one round; None: the step is nobody else's
    """
    return hashlib.blake2b(lineage + (round_name or os.urandom(16)), digest_size=LINEAGE_SIZE).digest()


# --- what a peer tells: [epoch, sketch, lineage], and the sequence of the order it has obeyed, if there was one ---


@dataclass(frozen=True)
class Told:
    """What a peer says it holds; `sketch` is None if it says nothing that can be read."""

    epoch: int
    sketch: np.ndarray | None = None
    lineage: bytes = BEGINNING
    order: int = 0  # sequence of the last order to roll back that it has obeyed

    def words(self) -> list:
        """As it is told."""
        words = [self.epoch, self.sketch.astype("<f4").tobytes(), self.lineage]
        return [*words, self.order] if self.order else words

    def is_same(self, other: Told, tolerance: float = TOLERANCE) -> bool:
        """The same model, of one epoch."""
        if self.sketch is None or other.sketch is None:
            return False
        made_alike = (self.epoch, self.lineage, self.order) == (other.epoch, other.lineage, other.order)
        return made_alike and distance(self.sketch, other.sketch) <= tolerance


def read_told(told: Any) -> Told | None:
    """A stranger's [epoch, sketch, lineage] or [epoch, sketch, lineage, order], or None."""
    if not isinstance(told, (list, tuple)) or not told:
        return None
    epoch, values, lineage = told[:3] if len(told) in (3, 4) else (told[0], None, None)
    order = told[3] if len(told) == 4 else 0
    if type(epoch) is not int or not 0 <= epoch < MAX_EPOCH or type(order) is not int or not 0 <= order < MAX_SEQUENCE:
        return None
    if not isinstance(values, bytes) or len(values) != 4 * SKETCH_SIZE:
        return Told(epoch, order=order)
    if not isinstance(lineage, bytes) or len(lineage) != LINEAGE_SIZE:
        return Told(epoch, order=order)
    numbers = np.frombuffer(values, "<f4").astype(np.float64)
    return Told(epoch, numbers if np.isfinite(numbers).all() else None, lineage, order)


def read_all(told: Mapping[PeerID, Any]) -> dict[PeerID, Told]:
    """Those of `told` that can be read."""
    read = {peer: read_told(raw) for peer, raw in told.items()}
    return {peer: said for peer, said in read.items() if said is not None}


def read_past(past: Any) -> dict[int, Told]:
    """What a stranger's state says that it was after its last epochs; {} if it cannot be read."""
    if not isinstance(past, (list, tuple)) or len(past) > PAST:
        return {}
    return {said.epoch: said for said in map(read_told, past) if said is not None and said.sketch is not None}


def last_in_common(ours: Mapping[int, Told], theirs: Mapping[int, Told]) -> int:
    """The latest epoch at which two states were the same, -1 if it is not known."""
    same = [epoch for epoch in ours.keys() & theirs.keys() if ours[epoch].is_same(theirs[epoch])]
    return max(same, default=-1)


# --- who is right ---


def common_order(said: Mapping[PeerID, Told]) -> int:
    """The order that most members have obeyed, the later one in a tie.

    A member that invents one is alone with it, unless it brings half of the group's peers: then the honest half's parts
    do not enter that round. That those who obeyed first find themselves outvoted costs them a round and nothing else,
    for they do not follow.
    """
    orders = Counter(one.order for one in said.values())
    return max(orders, key=lambda order: (orders[order], order), default=0)


def under_order(schema_hash: bytes, order: int) -> bytes:
    """What members of a group must have in common: their tensors, and the order that they have obeyed. Peers under
    different orders never form a group, so no round mixes gradients of the state that is left with the other's."""
    return schema_hash if not order else hashlib.blake2b(schema_hash + b"order %d" % order).digest()


def under(order: int, said: Mapping[PeerID, Told]) -> dict[PeerID, Told]:
    """Those of `said` that have obeyed this order and no later one."""
    return {peer: one for peer, one in said.items() if one.order == order}


def common_epoch(said: Mapping[PeerID, Told], donors: Collection[PeerID]) -> int | None:
    """The epoch that most are at and one of `donors` too, the later one in a tie; None if no donor says.

    hivemind forms groups without asking: a peer one epoch behind would average gradients of an old model for ever. And
    a peer in client mode that is ahead alone is nobody's future: its state cannot be had.
    """
    epochs = Counter(one.epoch for one in said.values())
    known = {one.epoch for peer, one in said.items() if peer in donors}
    return max(known, key=lambda epoch: (epochs[epoch], epoch), default=None)


def prevailing(
    said: Mapping[PeerID, Told], epoch: int, donors: Collection[PeerID], tolerance: float = TOLERANCE
) -> frozenset[PeerID]:
    """The peers at `epoch` that hold what most of them hold; in a tie, what the smallest peer id holds.

    Only what one of `donors` holds can prevail: nobody could take a state that nobody gives. Each member is compared
    with all others as rows of one table: a leader may name a thousand, all strangers' inventions.
    """
    alike: dict[tuple[bytes, int], list[PeerID]] = {}
    for peer, one in said.items():
        if one.epoch == epoch and one.sketch is not None:
            alike.setdefault((one.lineage, one.order), []).append(peer)
    best: frozenset[PeerID] = frozenset()
    first: PeerID | None = None  # the smallest id of a donor that holds it
    asked = set(donors)
    for peers in alike.values():
        table = np.stack([said[peer].sketch for peer in peers])  # (peers, SKETCH_SIZE)
        norms = np.linalg.norm(table, axis=1)
        places = {peer: place for place, peer in enumerate(peers)}
        for peer in sorted(places.keys() & asked):
            own = places[peer]
            is_near = np.linalg.norm(table - table[own], axis=1) <= tolerance * np.maximum(norms, norms[own])
            size = int(is_near.sum())
            if size > len(best) or (size == len(best) and first is not None and peer < first):
                best, first = frozenset(peers[place] for place in np.flatnonzero(is_near)), peer
    return best


@dataclass(frozen=True)
class Follow:
    """Our state is not the others'. Take that of one of `donors`, of epoch `at_least` or later."""

    at_least: int
    donors: tuple[PeerID, ...]
    why: str


def whom_to_follow(told: Mapping[PeerID, Any], own_id: PeerID, donors: Collection[PeerID]) -> Follow | None:
    """After a round: is ours the state that the step belongs to (None), or whose is?

    Of donors at different epochs the later one is followed, by those that see its progress record; so a donor that is
    ahead of its group follows nobody. Unless it is ahead by one step, which it may have taken alone, and most members
    hold one state: had they seen its record they would have come, and it would go on beside them by itself.

    :param told: what each member told before the round
    :param donors: members that share their state (not in client mode)
    """
    said = read_all(told)
    own = said.get(own_id)
    if own is None or own.order != common_order(said):
        return None  # nobody follows across an order: it is obeyed, not voted for
    said = under(own.order, said)
    epoch = common_epoch(said, donors)
    if epoch is None:
        return None
    right = prevailing(said, epoch, donors)
    if own_id in right or (own.epoch == epoch and not right):
        return None
    if own.epoch > epoch and own_id in donors and (own.epoch > epoch + 1 or 2 * len(right) <= len(said)):
        return None
    why = f"at epoch {own.epoch}, the others at {epoch}" if own.epoch != epoch else "our model is not the others'"
    return Follow(epoch + 1, tuple(sorted(right & frozenset(donors))), why)


def holders(told: Mapping[PeerID, Any], own_id: PeerID) -> int:
    """How many hold what we hold, ourselves among them?"""
    said = read_all(told)
    own = said.get(own_id)
    return sum(one.is_same(own) for one in said.values()) if own is not None else 0


def out_of_step(told: Mapping[PeerID, Any], donors: Collection[PeerID]) -> dict[PeerID, str]:
    """Members of a round whose parts belong to another epoch -> why they are left out."""
    said = read_all(told)
    order = common_order(said)
    out = {
        peer: f"under the monitor's order {one.order}, the others under {order}"
        for peer, one in said.items()
        if one.order != order
    }
    said = under(order, said)
    epoch = common_epoch(said, donors)
    if epoch is None:
        return out
    late = {peer: f"at epoch {one.epoch}, the others at {epoch}" for peer, one in said.items() if one.epoch != epoch}
    return {**out, **late}


def apart(told: Mapping[PeerID, Any], donors: Collection[PeerID]) -> frozenset[PeerID]:
    """Members of a round that hold another model than most; nobody, where no model prevails."""
    said = read_all(told)
    said = under(common_order(said), said)
    epoch = common_epoch(said, donors)
    right = prevailing(said, epoch, donors) if epoch is not None else frozenset()
    return frozenset(told) - right if right else frozenset()


def rank_donors(told: Mapping[PeerID, Any], shuffled: Sequence[PeerID], order: int | None = None) -> list[PeerID]:
    """Donors to ask, best first: of the latest epoch, then among those that hold what most of that epoch hold; the rest
    in the order of `shuffled`, so that one of a hundred veterans does not serve all newcomers.

    :param order: only those that have obeyed this one; None: any
    """
    said = read_all(told)
    said = said if order is None else under(order, said)
    right = {epoch: prevailing(said, epoch, said) for epoch in {one.epoch for one in said.values()}}
    places = {peer: place for place, peer in enumerate(shuffled)}
    known = [peer for peer in said if peer in places]
    return sorted(known, key=lambda peer: (-said[peer].epoch, peer not in right[said[peer].epoch], places[peer]))
