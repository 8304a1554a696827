"""What this peer's line carries, measured in rounds, and told to the group that shares out the work by it.

Most of a round says nothing about a line: a fast one carries no more than slow members send it. But when a reducer's
last part is reduced, all members await its answers at once, and each hangs up when it has them (see
admitted_averager.LINGER): until then the reducer's uplink is what they wait for. A member with a slow downlink is one
of several, so the slowest quarter is not waited for.

It is the uplink that is measured. A reducer receives about as much as it sends, and a home's downlink is the wider one;
where it is not, the slice is late, and the others say so (shares.py).
"""

from __future__ import annotations

import ctypes
import math
import time
from collections.abc import Callable

from volunteer_kit.swarm.fork_context import FORK
from volunteer_kit.swarm.surviving_lock import SurvivingLock

KEPT, LEAST = 8, 3  # rounds whose speed is remembered: a line that got worse is believed after KEPT / 4 of these
QUARTILE = 0.75  # of these: others' lines and busy machines only ever make a line look slower
AWAITED = 0.75  # of the members; how long these took is what counts
SHORTEST = 0.1  # s; what takes less is latency. Rounds so small say of all lines that they are alike
LEAST_BYTES = 16_000  # fewer come behind what is on its way to all others, and take as long: 460 of them took 4 s
STEPS = 4  # told in powers of 2 ** (1 / STEPS), or each round would cut the tensors anew
STAYS_WITHIN = 0.75  # steps; a speed on the edge of two is told as before


def told_step(mbps: float, before: int | None) -> int:
    """The power of 2 ** (1 / STEPS) that a speed is told as, `before` if it is near enough."""
    exact = STEPS * math.log2(mbps)
    return before if before is not None and abs(exact - before) <= STAYS_WITHIN else round(exact)


class LineSpeed:
    """Made before the averagers' processes are, and inherited by them: what one measures, all tell.

    :param max_mbps: this peer's own cap, beyond which its line is nobody's
    """

    def __init__(self, max_mbps: float | None = None):
        self.max_mbps = max_mbps
        self._measured = FORK.Array(ctypes.c_double, KEPT, lock=SurvivingLock())  # Mbit/s, a ring
        self._count = FORK.Value(ctypes.c_int64, 0, lock=False)
        self._step = FORK.Value(ctypes.c_int64, 0, lock=False)  # told last, once something was

    def note(self, mbps: float) -> None:
        if not (math.isfinite(mbps) and mbps > 0):
            return
        with self._measured.get_lock():
            self._measured[self._count.value % KEPT] = mbps
            self._count.value += 1
            count = self._count.value
            if count >= LEAST:
                known = sorted(self._measured[: min(count, KEPT)])
                usual = known[min(len(known) - 1, int(QUARTILE * len(known)))]
                self._step.value = told_step(usual, self._step.value if count > LEAST else None)

    @property
    def mbps(self) -> float | None:
        """Mbit/s that this peer can answer with; None: not measured yet, as fast as the others are."""
        if self._count.value < LEAST:
            return self.max_mbps
        measured = 2.0 ** (self._step.value / STEPS)
        return measured if self.max_mbps is None else min(measured, self.max_mbps)


class Answers:
    """One round's answers on their way: bytes, and who has them all.

    :param members: whom they go to
    :param note: told the speed, in Mbit/s, once it is known
    """

    def __init__(self, members: int, note: Callable[[float], None], clock: Callable[[], float] = time.monotonic):
        self._members, self._note, self._clock = members, note, clock
        self._since: float | None = None  # the last part was reduced
        self._bytes: dict[object, int] = {}  # sent since then, to each
        self._whole: dict[object, int] = {}  # of whom has hung up

    def answer(self, member: object, num_bytes: int, is_last: bool) -> None:
        if is_last and self._since is None:
            self._since = self._clock()
        if self._since is not None:
            self._bytes[member] = self._bytes.get(member, 0) + num_bytes

    def hung_up(self, member: object) -> None:
        """It has all of its answers. Whoever hung up before had given up."""
        if member not in self._bytes or member in self._whole:
            return
        self._whole[member] = self._bytes[member]
        if len(self._whole) == max(1, math.ceil(AWAITED * self._members)):
            num_bytes = sum(self._whole.values())
            if num_bytes >= LEAST_BYTES:
                self._note(8e-6 * num_bytes / max(SHORTEST, self._clock() - self._since))
