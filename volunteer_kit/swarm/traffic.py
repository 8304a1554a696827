"""What this peer's averagers send and receive: counted, and held below a cap, by all its processes together."""

from __future__ import annotations

import asyncio
import ctypes
import time
from collections.abc import AsyncIterator, Callable
from typing import TypeVar

from volunteer_kit.swarm.fork_context import FORK
from volunteer_kit.swarm.line_speed import LineSpeed
from volunteer_kit.swarm.surviving_lock import SurvivingLock

Message = TypeVar("Message")
# s; who oversleeps catches up as much. The cap holds over longer times than this
SLACK = 0.5
SENT, RECEIVED = 0, 1


class Traffic:
    """Bytes of tensors that went out and came in (rounds of averaging, states), and one cap on them.

    Made before the averagers' processes are, and inherited by them. Each message takes its turn in the shared time line
    of its direction and waits until its turn is over: whoever is slower than the cap waits for nothing.

    :param max_mbps: Mbit/s in each direction; None: no cap. Set it when the line is needed for something else
    """

    def __init__(self, max_mbps: float | None = None):
        self.speed = LineSpeed(max_mbps)
        self._seconds_per_byte = 8 / (1e6 * max_mbps) if max_mbps else 0.0
        self._totals = FORK.Array(ctypes.c_int64, 2, lock=SurvivingLock())
        # monotonic s, the same clock in all processes
        self._free_at = FORK.Array(ctypes.c_double, 2, lock=SurvivingLock())

    @property
    def totals(self) -> tuple[int, int]:
        """(bytes sent, bytes received) since the start."""
        return self._totals[SENT], self._totals[RECEIVED]

    async def send(self, num_bytes: int) -> None:
        """To be awaited before a message of this size goes out."""
        await self._take_turn(SENT, num_bytes)

    async def receive(self, num_bytes: int) -> None:
        """To be awaited before the next message is read: whoever sends is held up by it, hop by hop."""
        await self._take_turn(RECEIVED, num_bytes)

    async def received(
        self, stream: AsyncIterator[Message], num_bytes: Callable[[Message], int]
    ) -> AsyncIterator[Message]:
        """`stream`, counted and paced. Outside of timeouts: our own cap is nobody's silence."""
        async for message in stream:
            await self.receive(num_bytes(message))
            yield message

    async def _take_turn(self, direction: int, num_bytes: int) -> None:
        with self._totals.get_lock():
            self._totals[direction] += num_bytes
        if not self._seconds_per_byte:
            return
        now = time.monotonic()
        with self._free_at.get_lock():
            start = max(self._free_at[direction], now - SLACK)
            end = self._free_at[direction] = start + num_bytes * self._seconds_per_byte
        if end > now:
            await asyncio.sleep(end - now)
