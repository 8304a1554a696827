"""Several monitors of one run: which of them signs.

Each holds the state, judges it and keeps states, so that any of them can go on; the one with the lowest peer id signs.
It says every few seconds that it is there, and when it is silent the next one takes over. For some seconds two may
believe that it is their turn (or none): sequence numbers decide then, and an order is obeyed once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from hivemind.dht import DHT
from hivemind.p2p import PeerID

from volunteer_kit.swarm.records.peer_record import PeerBoard, PeerRecord

SAY_EVERY = 5.0  # s
SILENCE = 25.0  # s after which a monitor is taken for dead


def whose_turn(monitors: Iterable[PeerID]) -> PeerID:
    """Of those that are there."""
    return min(monitors, key=lambda peer: peer.to_bytes())


class MonitorBoard:
    """Who watches.

    :param is_monitor: by its access token; anybody may say that it is one
    """

    def __init__(self, dht: DHT, run_id: str, fingerprint: str, is_monitor: Callable[[PeerID], bool]):
        self._board = PeerBoard(dht, f"{run_id}_monitors", lifetime=SILENCE)
        self._own_id, self._is_monitor = dht.peer_id, is_monitor
        self._record = PeerRecord(
            peer_id=dht.peer_id.to_bytes(), fingerprint=fingerprint, name="", device="", epoch=0, total_samples=0,
            samples_per_second=0.0, loss=None, client_mode=False,
        )  # fmt: skip

    def say(self, epoch: int) -> None:
        self._board.publish(self._record.copy(update={"epoch": epoch}))

    def others(self) -> list[PeerID]:
        """Blocks for a look into the DHT."""
        return [peer for peer in self._board.fetch() if peer != self._own_id and self._is_monitor(peer)]

    def is_our_turn(self, others: Iterable[PeerID]) -> bool:
        return whose_turn([self._own_id, *others]) == self._own_id

    def leave(self) -> None:
        self._board.publish(None)
