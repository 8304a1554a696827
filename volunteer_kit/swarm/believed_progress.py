"""How much of what peers say they have accumulated counts: the swarm steps when their claims add up to a batch.

A claim costs nothing, so one liar could make every epoch end after its first microbatch. Two things are known of a
claimant: what its device can have done since the epoch began (believed_speed.py), and what its claims were worth in the
rounds before, where they had to become weights.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from statistics import median_low

from hivemind.p2p import PeerID

INFLATION = 2.0  # times what it weighed, that a claim may be: a microbatch that came too late, a round that was missed
DECAY = 0.9  # of what was before, an epoch: of a lie of ten batches half is remembered seven epochs later
TRUST = 1.25  # usual claims that everybody is taken to have kept before: who misses its first round is no liar yet
FORGIVEN = 0.1  # of its claims, for each epoch in which it kept its word
MOST = 8.0  # target batches that a claim by speed is remembered as
MAX_PEERS = 10_000
EPOCHS_KNOWN = 2  # of each peer: with delay_grad_averaging it claims samples of the next one while a round is under way


@dataclass(frozen=True)
class Worth:
    """What a peer claimed in the last epochs, and what of it there was, in samples; and what share is believed since
    it came into a round with far less than its claim.

    :ivar inflation: times what it weighs that a claim may be
    """

    claimed: float = 0.0
    delivered: float = 0.0
    caught: float = 1.0
    inflation: float = INFLATION

    def after(self, claimed: float, delivered: float, expected: float = 0.0) -> Worth:
        """With one epoch more. Who delivers more than it claimed earns nothing for later lies.

        Nothing delivered is a round that was missed, which happens; a part of the claim is a lie.

        :param expected: samples that it was taken to have at last, by what it claimed and how fast it said to be; it
            can be more than honest claims without a lie, when the others' round begins before ours
        """
        lied = 0 < self.inflation * delivered < claimed
        caught = min(self.caught, delivered / claimed) if lied else min(1.0, self.caught + FORGIVEN * (delivered > 0))
        most = max(claimed, expected)
        claimed, delivered = DECAY * self.claimed + most, DECAY * self.delivered + min(delivered, most)
        return replace(self, claimed=claimed, delivered=delivered, caught=caught)

    @property
    def share(self) -> float:
        """The part of its claims that is believed: all, unless they were far more than what came of them."""
        if self.claimed <= self.inflation * self.delivered:
            return self.caught
        return min(self.caught, self.delivered / self.claimed)


def believed_samples(claimed: float, share: float, limit: float | None) -> float:
    """:param limit: what its device can have done since the epoch began; None: not known"""
    believed = share * claimed
    return believed if limit is None else min(believed, limit)


@dataclass(frozen=True)
class Claim:
    """The most that a peer said of one epoch."""

    samples: float = 0.0
    expected: float = 0.0  # with those since, by its speed

    def with_more(self, samples: float, expected: float) -> Claim:
        return Claim(max(self.samples, samples), max(self.expected, expected))


class Claims:
    """What peers claimed, and what it was worth. One thread notes claims, another settles rounds."""

    def __init__(self, inflation: float = INFLATION):
        self._unknown = Worth(inflation=inflation)
        self._known: OrderedDict[PeerID, dict[int, Claim]] = OrderedDict()  # by epoch
        self._worth: dict[PeerID, Worth] = {}

    def share(self, peer: PeerID) -> float:
        return self._worth.get(peer, self._unknown).share

    def is_new(self, peer: PeerID) -> bool:
        """Others have been in rounds with us, and this one has not."""
        return bool(self._worth) and peer not in self._worth

    def note(self, peer: PeerID, epoch: int, samples: float, expected: float) -> None:
        known = self._known.setdefault(peer, {})
        known[epoch] = known.get(epoch, Claim()).with_more(samples, expected)
        if len(known) > EPOCHS_KNOWN:
            del known[min(other for other in known if other != epoch)]
        self._known.move_to_end(peer)
        while len(self._known) > MAX_PEERS:
            gone, _ = self._known.popitem(last=False)
            self._worth.pop(gone, None)

    def of(self, peer: PeerID, epoch: int) -> Claim | None:
        return self._known.get(peer, {}).get(epoch)

    def of_all(self, epoch: int) -> dict[PeerID, Claim]:
        found = {peer: known.get(epoch) for peer, known in list(self._known.items())}
        return {peer: claim for peer, claim in found.items() if claim is not None}

    def weight_of_a_sample(self, epoch: int, weights: Mapping[PeerID, float]) -> float:
        """As most senders of a round of `epoch` weigh them, at most 1; for who has none of its own to know it by."""
        claims = {peer: claim.samples for peer, claim in self.of_all(epoch).items()}
        known = [weight / claims[peer] for peer, weight in weights.items() if weight > 0 and claims.get(peer)]
        return min(1.0, median_low(known)) if known else 1.0

    def settle(self, epoch: int, group: Collection[PeerID], weights: Mapping[PeerID, float], target: float) -> None:
        """A round of `epoch` is over: what became of the claims?

        Who claimed and did not come delivered nothing; unless most did not come, for then it is we who are apart. Once
        that is forgiven: whose claims are not believed has its epochs end before the others', and misses the next ones.

        :param weights: samples of those whose parts entered our slice; empty: we reduced nothing, and know nothing
        :param target: samples of an epoch
        """
        claims = self.of_all(epoch)
        if not weights or 2 * len(claims.keys() & set(group)) < len(claims):
            return
        usual = median_low([claim.samples for claim in claims.values() if claim.samples] or [0.0])
        for peer, claim in claims.items():
            delivered, expected = weights.get(peer, 0.0), min(claim.expected, MOST * target)
            trust = 0.0 if delivered else TRUST * usual
            worth = self._worth.get(peer, replace(self._unknown, claimed=trust, delivered=trust))
            self._worth[peer] = worth.after(claim.samples, delivered, expected)
