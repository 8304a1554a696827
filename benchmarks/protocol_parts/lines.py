"""Home lines in virtual time: one uplink and one downlink for each peer, shared by all that it sends and gets."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import NamedTuple

from tests.simulation.clock import Clock
from tests.simulation.network import MEGABIT, Network

CHUNK = 250_000  # bytes; transfers of one line take turns with so many
PACED = 0.85  # of the uplink, so that small messages do not wait behind tensors (docs/protocol.md, transport rule 5)
AGAIN = 0.25  # s until a line looks again whether somebody can be reached


class Speed(NamedTuple):
    """A line in Mbit/s."""

    down: float
    up: float


class Transfer:
    """Bytes from one peer to another one."""

    __slots__ = ("sender", "to", "left", "arrived", "over")

    def __init__(self, sender: str, to: str, size: float, arrived: Callable[[], None]):
        self.sender = sender
        self.to = to
        self.left = size  # bytes
        self.arrived = arrived
        self.over = False  # it arrived, or nobody wants it any more


class Lines:
    """Everybody's lines. A transfer through a cut waits until the line is back, as TCP does; others pass it meanwhile.

    :param is_stopped: whether a peer's process stands still, so that it sends nothing
    """

    def __init__(self, clock: Clock, network: Network, is_stopped: Callable[[str], bool]):
        self.speeds: dict[str, Speed] = {}
        self.sent = 0.0  # bytes
        self._clock = clock
        self._network = network
        self._is_stopped = is_stopped
        self._queues: dict[str, deque[Transfer]] = {}
        self._sending: dict[str, Transfer] = {}  # by sender, of which a chunk is on the line
        self._waiting: set[str] = set()  # peers that look again, since nobody can be reached
        self._free_from: dict[str, float] = {}  # when a downlink has taken all that is on its way

    def send(self, sender: str, to: str, size: float, arrived: Callable[[], None]) -> Transfer:
        """Queue a transfer."""
        transfer = Transfer(sender, to, size, arrived)
        self._queues.setdefault(sender, deque()).append(transfer)
        if sender not in self._sending:
            self._next(sender)
        return transfer

    def seconds(self, sender: str, size: float) -> float:
        """How long an uplink needs for so many bytes."""
        return size / (PACED * MEGABIT * self.speeds[sender].up)

    def end_of(self, peer: str) -> None:
        """A process ended, and with it all that it sends and gets."""
        for transfer in (*self._sending.values(), *(each for queue in self._queues.values() for each in queue)):
            if peer in (transfer.sender, transfer.to):
                transfer.over = True
        self._queues.get(peer, deque()).clear()
        self._free_from.pop(peer, None)

    def _next(self, sender: str) -> None:
        """Send the next chunk of the first transfer that can go on."""
        queue = self._queues[sender]
        for _ in range(len(queue)):
            transfer = queue.popleft()
            if transfer.over:
                continue
            if self._is_stopped(sender) or self._network.is_cut(sender, transfer.to):
                queue.append(transfer)
                continue
            size = min(CHUNK, transfer.left)
            self._sending[sender] = transfer
            self._clock.after(self.seconds(sender, size), self._sent, transfer, size)
            return
        if queue and sender not in self._waiting:
            self._waiting.add(sender)
            self._clock.after(AGAIN, self._look_again, sender)

    def _look_again(self, sender: str) -> None:
        self._waiting.discard(sender)
        if sender not in self._sending:
            self._next(sender)

    def _sent(self, transfer: Transfer, size: float) -> None:
        sender, to = transfer.sender, transfer.to
        if not transfer.over:
            if not self._network.is_cut(sender, to):
                transfer.left -= size
                self.sent += size
                self._arrive(transfer, size)
            if transfer.left > 0:
                self._queues[sender].append(transfer)
        del self._sending[sender]
        self._next(sender)

    def _arrive(self, transfer: Transfer, size: float) -> None:
        """The chunk goes through the receiver's downlink."""
        to = transfer.to
        begun = max(self._clock.now - size / (MEGABIT * self.speeds[transfer.sender].up), self._free_from.get(to, 0.0))
        through = begun + size / (MEGABIT * self.speeds[to].down)
        self._free_from[to] = through
        if transfer.left <= 0:
            at = max(self._clock.now, through) + self._network.latency(transfer.sender, to)
            self._clock.at(at, self._over, transfer)

    @staticmethod
    def _over(transfer: Transfer) -> None:
        if not transfer.over:
            transfer.over = True
            transfer.arrived()
