"""What the members' devices can have done by now, from what they say of themselves: for the round, and for the swarm's
progress. Looked up in the background; generous, for who is above it loses a round's samples."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from hivemind.p2p import PeerID
from hivemind.utils.logging import get_logger

from volunteer_kit.swarm.credit_bounds import Bounds, speed_bound
from volunteer_kit.swarm.receipts import AccountOf, machines_of
from volunteer_kit.swarm.records import PeerRecord

logger = get_logger(__name__)
SLACK = 3.0  # a machine that was busy with something else when it measured itself
UNMEASURED_SLACK = 15.0  # one that has not said its speed yet, and is taken for as fast as the others
REFRESH = 10.0  # s between looks at the records
NOBODY = PeerID(b"")  # what is believed of who has no record


@dataclass(frozen=True)
class Limits:
    """Samples, or samples/s, that each peer can have: those of `peers`, and `others` for everybody else; None: not
    known."""

    peers: Mapping[PeerID, float] = field(default_factory=dict)
    others: float | None = None

    def of(self, peer: PeerID) -> float | None:
        return self.peers.get(peer, self.others)

    def within(self, seconds: float, bounds: Bounds) -> Limits:
        """Speeds -> the samples of this time, and a microbatch that was under way when it began."""

        def samples(speed: float) -> float:
            return bounds.microbatch + speed * (max(0.0, seconds) + bounds.late)

        return Limits(
            {peer: samples(speed) for peer, speed in self.peers.items()},
            None if self.others is None else samples(self.others),
        )


def believed_speeds(
    records: Mapping[PeerID, PeerRecord], account_of: AccountOf | None, max_samples_per_second: float
) -> Limits:
    """Samples/s that can be believed of each peer, with slack. Nothing is known while nobody has said a speed."""
    machines = machines_of(records, account_of)
    if not any(machine.speed > 0 for machine in machines.values()):
        return Limits()

    def believed(peer: PeerID) -> float:
        measured = peer in machines and machines[peer].speed > 0
        return (SLACK if measured else UNMEASURED_SLACK) * speed_bound(peer, machines, max_samples_per_second)

    return Limits({peer: believed(peer) for peer in machines}, believed(NOBODY))


class Speeds:
    """Keeps what is believed of all peers up to date, in a thread of its own.

    :param records: what the peers say of themselves, PeerBoard.fetch; may take seconds
    :param account_of: whose peer it is; None: every peer counts as an account of its own
    """

    def __init__(
        self,
        bounds: Bounds,
        records: Callable[[], Mapping[PeerID, PeerRecord]],
        account_of: AccountOf | None = None,
        refresh: float = REFRESH,
    ):
        self.bounds, self._records, self._account_of, self._refresh = bounds, records, account_of, refresh
        self.speeds = Limits()
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._look, name="speeds", daemon=True)
        self._thread.start()

    def samples_within(self, seconds: float) -> Limits:
        """That each can have done in so many seconds."""
        return self.speeds.within(seconds, self.bounds)

    def close(self) -> None:
        self._closed.set()
        self._thread.join(5.0)

    def _look(self) -> None:
        while True:
            try:
                self.speeds = believed_speeds(self._records(), self._account_of, self.bounds.max_samples_per_second)
            except Exception as e:  # of hivemind's DHT, in its process
                logger.debug(f"the others' records could not be fetched: {e!r}")
            if self._closed.wait(self._refresh):
                return
