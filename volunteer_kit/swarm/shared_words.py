"""What the training process and its averager's process tell each other of rounds, beside the pipe between them."""

from __future__ import annotations

import ctypes
import math
import time

from hivemind.p2p import PeerID

from volunteer_kit.swarm.attendance import SILENT
from volunteer_kit.swarm.believed_speed import Limits
from volunteer_kit.swarm.fork_context import FORK
from volunteer_kit.swarm.surviving_lock import SurvivingLock

MAX_GROUP_SIZE = 1024


class SharedWords:
    """Part of SwarmAverager."""

    def _share_words(self) -> None:
        """To be called before the averager's process is made."""
        self._expected_group_size = FORK.Value(ctypes.c_int32, 0, lock=False)
        self._least_group_size = FORK.Value(ctypes.c_int32, 0, lock=False)
        # and time.monotonic() when it was said
        self._awaited_group_size = FORK.Array(ctypes.c_double, [0, -math.inf], lock=SurvivingLock())
        self._group_order = FORK.Value(ctypes.c_int64, 0, lock=False)
        self._led_apart = FORK.Value(ctypes.c_int64, 0, lock=False)
        self._learnt_patience = FORK.Value(ctypes.c_double, 0.0, lock=False)
        # time.monotonic(), one for all processes
        self._last_in_a_group = FORK.Value(ctypes.c_double, -math.inf, lock=False)
        self._weight_limits = Limits()  # in the averager's process

    @property
    def expected_group_size(self) -> int:
        """Peers that should meet in the next round; when all of them have, nobody waits for matchmaking_time."""
        return self._expected_group_size.value

    @expected_group_size.setter
    def expected_group_size(self, value: int) -> None:
        self._expected_group_size.value = min(value, MAX_GROUP_SIZE)

    @property
    def least_group_size(self) -> int:
        """Peers without whom we would rather not average; what most of a group say counts."""
        return self._least_group_size.value

    @least_group_size.setter
    def least_group_size(self, value: int) -> None:
        self._least_group_size.value = min(value, MAX_GROUP_SIZE)

    @property
    def awaited_group_size(self) -> int:
        """Of these, the ones that are here and will come, with us: a group waits for them longer than for the rest. 0
        if that was said long ago: where devices wait for the round, nobody looks meanwhile."""
        size, said_at = self._awaited_group_size[:]
        return int(size) if time.monotonic() - said_at <= SILENT else 0

    @awaited_group_size.setter
    def awaited_group_size(self, value: int) -> None:
        self._awaited_group_size[:] = min(value, MAX_GROUP_SIZE), time.monotonic()

    @property
    def patience(self) -> float:
        """s that we have learnt to wait for who is expected, matchmaking_time at most."""
        return self._learnt_patience.value

    @property
    def without_group(self) -> float:
        """s since somebody last waited with us for more, whoever leads; in the round under way."""
        return time.monotonic() - self._last_in_a_group.value

    @property
    def order(self) -> int:
        """Sequence of the monitor's order that members of our groups have obeyed, as we have; 0: there was none."""
        return self._group_order.value

    @order.setter
    def order(self, sequence: int) -> None:
        self._group_order.value = sequence

    def limit_weights(self, limits: Limits) -> None:
        """What each sender can have earned for the next round; where it is not known, `max_weight` is believed."""
        peers = {peer.to_bytes(): weight for peer, weight in limits.peers.items()}
        self._outer_pipe.send(("_take_weight_limits", [peers, limits.others], {}))

    async def _take_weight_limits(self, peers: dict[bytes, float], others: float | None) -> None:
        self._weight_limits = Limits({PeerID(peer): weight for peer, weight in peers.items()}, others)

    @property
    def led_apart(self) -> int:
        """Rounds that ended because the leader had told members different groups, or a lie of us."""
        return self._led_apart.value
