"""How many samples one sender of a round can have had: what a reducer signs at most.

A sender declares its own weight, and the averager takes it as long as it is below two target batches. Credit is not
given by it: gradients that enter a round are of the model that the last round left, so nobody can have more samples
than its device does between two rounds. How fast a device is, only its owner says; but everybody's word is signed and
public, and many people own the same device.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from statistics import median

from hivemind.p2p import PeerID

OWN_SLACK = 1.5  # a device's speed is an average over its last ten microbatches
RARE_SLACK = 20.0  # a device that hardly anybody has: an H100 among T4s is 10 to 15 times as fast
DEVICE_SLACK = 4.0  # the same device in another machine: other precision, other batch, a faster processor beside it


@dataclass(frozen=True)
class Machine:
    """What a peer says of itself, signed. `speed` in samples/s, 0: it has not said yet."""

    account: bytes
    device: str
    speed: float


@dataclass(frozen=True)
class Bounds:
    """What a run and its devices allow.

    :param target_batch_size: samples of an epoch
    :param max_samples_per_second: of one peer, whatever its device
    :param microbatch: samples that anybody does at once, at most: what was under way when a round began comes on top.
        Raise it if devices with much memory are credited less than they did
    :param overshoot: target batches that an epoch can have; peers learn late that it is full
    :param late: s until everybody has learned that an epoch is full, or over; several refresh periods
    """

    target_batch_size: int
    max_samples_per_second: float = 10_000.0
    microbatch: int = 64
    overshoot: float = 1.25
    late: float = 2.0


def speed_bound(peer: PeerID, machines: Mapping[PeerID, Machine], max_speed: float) -> float:
    """Samples/s that `peer` can be believed to do: the least of what it says itself, what other accounts' machines of
    its kind do, and what the run allows anybody. To say nothing does not help: it is then measured by all the others.
    """
    own = machines.get(peer)
    others = {p: m for p, m in machines.items() if p != peer and (own is None or m.account != own.account)}
    alike = _median_of_accounts(m for m in others.values() if own is not None and m.device == own.device)
    bounds = [max_speed]
    if own is not None and own.speed > 0:
        bounds.append(OWN_SLACK * own.speed)
        rare = _median_of_accounts(others.values()) if alike is None else None
        bounds += [] if rare is None else [RARE_SLACK * rare]
    elif alike is None:
        alike = _median_of_accounts(others.values(), at_least=1)
    if alike is not None:
        bounds.append(DEVICE_SLACK * alike)
    return min(bounds)


def _median_of_accounts(machines: Iterable[Machine], at_least: int = 2) -> float | None:
    """Each account has one voice, or fifty machines that do not exist would set the median."""
    by_account: dict[bytes, list[float]] = {}
    for machine in machines:
        if machine.speed > 0:
            by_account.setdefault(machine.account, []).append(machine.speed)
    return median(map(median, by_account.values())) if len(by_account) >= at_least else None


def believed_weights(
    declared: Mapping[PeerID, float], window: float, machines: Mapping[PeerID, Machine], bounds: Bounds
) -> dict[PeerID, float]:
    """Declared weights, each and all together no more than can be true.

    :param window: s since the last round began, in which a sender can have done its samples
    """
    weights, expected, late = {}, {}, 0.0
    seconds = max(0.0, window) + bounds.late
    typical = _median_of_accounts(machines.values(), at_least=1) or bounds.max_samples_per_second
    for peer, weight in declared.items():
        if not math.isfinite(weight) or weight <= 0:
            continue
        speed = speed_bound(peer, machines, bounds.max_samples_per_second)
        weights[peer] = min(weight, speed * seconds + bounds.microbatch)
        said = machines[peer].speed if peer in machines and machines[peer].speed > 0 else speed
        speed = min(speed, said, DEVICE_SLACK * typical)  # one that claims a device of its own raises no limit
        expected[peer] = speed * seconds
        late += bounds.microbatch + speed * bounds.late
    return fit(weights, expected, bounds.overshoot * bounds.target_batch_size + late)


def fit(weights: Mapping[PeerID, float], expected: Mapping[PeerID, float], limit: float) -> dict[PeerID, float]:
    """Cut `weights` until they sum to `limit`: first what exceeds a sender's own signed speed, then the largest.

    Cut in proportion, one liar's weight would be taken from everybody's credit.
    """
    excess = {peer: max(0.0, weight - expected.get(peer, 0.0)) for peer, weight in weights.items()}
    too_much, to_spare = sum(weights.values()) - limit, sum(excess.values())
    if too_much <= 0:
        return dict(weights)
    share = min(1.0, too_much / to_spare) if to_spare > 0 else 0.0
    cut = {peer: weight - share * excess[peer] for peer, weight in weights.items()}
    return level(cut, limit)


def level(weights: Mapping[PeerID, float], limit: float) -> dict[PeerID, float]:
    """Cap all weights at one level, the highest at which they sum to `limit` at most."""
    left, count = limit, len(weights)
    for weight in sorted(weights.values()):
        if weight * count >= left:
            return {peer: min(w, left / count) for peer, w in weights.items()}
        left, count = left - weight, count - 1
    return dict(weights)
