"""What of a peer's word on its progress could be true, whoever says it: by the run's devices, by the time, and by what
others say. What is believed of its samples is in believed_progress.py."""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass
from statistics import median

from hivemind.optim.progress_tracker import LocalTrainingProgress

from volunteer_kit.swarm.records import MAX_EPOCH

PACE = 0.8  # of the median of the last epochs' durations
MOST_SAID = 4  # target batches that one peer can say it has


@dataclass(frozen=True)
class Limits:
    """What a run's devices and time allow one peer to claim.

    :param max_samples_per_second: of one peer; a generous bound of the fastest machine anybody may bring
    :param target_batch_size: samples of an epoch; nobody can have accumulated many times of it
    :param min_epoch_seconds: the swarm cannot do epochs faster than this
    :param inflation: times what it weighs in the round that a claim may be
    """

    target_batch_size: int
    max_samples_per_second: float = 10_000.0
    min_epoch_seconds: float = 0.2
    inflation: float = 2.0


def is_plausible(claim: LocalTrainingProgress, limits: Limits, now: float, lifetime: float) -> bool:
    """Could this progress be true, whatever the others say?"""
    return (
        math.isfinite(claim.time)
        and now - 2 * lifetime <= claim.time <= now + 5.0  # s; hivemind lets clocks differ by 3
        and math.isfinite(claim.samples_per_second)
        and claim.samples_per_second <= limits.max_samples_per_second
        and claim.samples_accumulated <= MOST_SAID * limits.target_batch_size
        and claim.epoch < MAX_EPOCH
    )


def believed_epoch(
    claims: Iterable[tuple[int, Hashable]],
    own_epoch: int,
    max_advance: int,
    of_clients: Iterable[tuple[int, Hashable]] = (),
) -> int:
    """The swarm's epoch from what peers claim: the highest that time allows, or that most accounts have reached.

    One peer that claims a million would otherwise be everybody's `global_epoch`, and nobody would average again; and so
    would two, if two were enough to confirm each other. What most say is believed whatever our clock says: it stands
    still in a laptop that sleeps.

    :param claims: (epoch, account) of the other peers, each plausible by itself
    :param own_epoch: where we are
    :param max_advance: epochs that can have passed since we last knew
    :param of_clients: likewise, of peers that nobody can follow: they confirm what others claim, or do not
    """
    claims, of_clients = list(claims), list(of_clients)
    reached: dict[Hashable, int] = {}
    for epoch, account in (*claims, *of_clients):
        reached[account] = max(epoch, reached.get(account, epoch))
    only_witness = len(reached) == 1 and own_epoch == 0  # we just came: there is nobody else to ask
    followable = {epoch for epoch, _ in claims}
    highest = max(followable, default=0)
    # where epochs are short, clients' words of a moment ago confirm less than what somebody claims now
    confirmable = {epoch for epoch, _ in of_clients if epoch <= highest}
    for epoch in sorted(followable | confirmable, reverse=True):
        there = sum(epoch <= other for other in reached.values())
        confirmed = there > 1 and 2 * there > len(reached)
        possible = epoch in followable and epoch <= own_epoch + max_advance
        if possible or confirmed or only_witness:
            return max(own_epoch, epoch)
    return own_epoch


def epochs_ahead(seconds: float, durations: Sequence[float], min_epoch_seconds: float) -> int:
    """How far ahead of us a few accounts can be believed to be, `seconds` after our epoch began.

    One that claims the next epoch makes everybody end theirs at once, with the samples of a moment. Most accounts are
    believed as soon as they say it, and fewer when the epoch has lasted PACE of what the last ones did.

    :param durations: s, of the last epochs; while none is known the shortest that a run can have
    """
    if not durations:
        return 2 + int(seconds / min_epoch_seconds)
    return int(seconds / max(min_epoch_seconds, PACE * median(durations)))
