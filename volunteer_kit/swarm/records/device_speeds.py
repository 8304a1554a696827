"""Estimate the speed of the members' devices from their own records.

Only its owner says how fast a device is; but everybody's word is signed and public, and many people own the same
device. The estimate is generous, for a peer that is faster than that loses samples; those who judge allow twice as
much at once (`sync/beliefs.py`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from statistics import median

from hivemind.p2p import PeerID

from volunteer_kit.swarm.net.identity import peer_digest
from volunteer_kit.swarm.records.peer_record import PeerRecord

OWN_SLACK = 3.0  # a mean over its last microbatches, of a machine that may have been busy with something else
RARE_SLACK = 15.0  # a device that hardly anybody has: an H100 among T4s is 10 to 15 times as fast
DEVICE_SLACK = 2.0  # the same device in another machine: other precision, other batch, a faster processor beside it
MAX_SAMPLES_PER_SECOND = 10_000.0  # more than this, claimed by one peer, is not believed
NOBODY = PeerID(b"")  # what is believed of who has no record

AccountOf = Callable[[PeerID], "bytes | None"]  # None: not known here


@dataclass(frozen=True)
class Machine:
    """The peer's signed statement about itself. `speed` in samples/s, 0: it has not said yet."""

    account: bytes
    device: str
    speed: float


@dataclass(frozen=True)
class Limits:
    """Samples, or samples/s, that each peer can have: those of `peers`, and `others` for everybody else; None: not
    known."""

    peers: Mapping[PeerID, float] = field(default_factory=dict)
    others: float | None = None

    def of(self, peer: PeerID) -> float | None:
        return self.peers.get(peer, self.others)

    def times(self, factor: float) -> Limits:
        """Return the limits in other units."""
        others = None if self.others is None else factor * self.others
        return Limits({peer: factor * limit for peer, limit in self.peers.items()}, others)


def believed_speeds(
    records: Mapping[PeerID, PeerRecord], account_of: AccountOf | None, max_samples_per_second: float
) -> Limits:
    """Samples/s that can be believed of each peer, with slack. Nothing is known while nobody has said a speed."""
    machines = machines_of(records, account_of)
    if not any(machine.speed > 0 for machine in machines.values()):
        return Limits()
    speeds = {peer: speed_bound(peer, machines, max_samples_per_second) for peer in machines}
    return Limits(speeds, speed_bound(NOBODY, machines, max_samples_per_second))


def machines_of(records: Mapping[PeerID, PeerRecord], account_of: AccountOf | None) -> dict[PeerID, Machine]:
    """Records of peers whose account is known."""
    machines = {}
    for peer, record in records.items():
        account = peer_digest(peer) if account_of is None else account_of(peer)
        if account is not None and math.isfinite(record.samples_per_second):
            machines[peer] = Machine(account, record.device, record.samples_per_second)
    return machines


def speed_bound(peer: PeerID, machines: Mapping[PeerID, Machine], max_speed: float) -> float:
    """Samples/s that `peer` can be believed to do: the least of what it says itself, what other accounts' machines do,
    and what the run allows anybody. Two other accounts with its kind of device are the measure, else all others. A peer
    gains nothing if it says nothing: then one other account is enough.
    """
    own = machines.get(peer)
    others = {p: m for p, m in machines.items() if p != peer and (own is None or m.account != own.account)}
    alike = _median_of_accounts(m for m in others.values() if own is not None and m.device == own.device)
    measured = own is not None and own.speed > 0
    rare = _median_of_accounts(others.values(), at_least=2 if measured else 1)
    bounds = [max_speed]
    if own is not None and measured:
        bounds.append(OWN_SLACK * own.speed)
    if alike is not None:
        bounds.append(DEVICE_SLACK * alike)
    elif rare is not None:
        bounds.append(RARE_SLACK * rare)
    return min(bounds)


def _median_of_accounts(machines: Iterable[Machine], at_least: int = 2) -> float | None:
    """Each account has one voice, or fifty machines that do not exist would set the median."""
    by_account: dict[bytes, list[float]] = {}
    for machine in machines:
        if machine.speed > 0:
            by_account.setdefault(machine.account, []).append(machine.speed)
    return median(map(median, by_account.values())) if len(by_account) >= at_least else None
