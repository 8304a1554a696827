"""Compare the wall clock with clocks that only count, to notice that it jumped or that the machine slept.

Records of the DHT and access tokens carry the wall clock's time. If the clock jumps, all records of others end at once,
and the others refuse ours: it looks as if nobody answered, while the line is well. A machine that slept has a right
clock and dead connections.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from datetime import datetime, timezone

LIMIT = 3.0  # s; hivemind refuses the records of a peer whose clock is further off
SLEPT = 10.0  # s; shorter ones break no connection
AWAKE_FOR = 60.0  # s after a sleep in which it is still what silence comes from
UNDENIED = 300.0  # s after which a lone peer believes a clock that nobody denies
LONG = 60.0  # s that a wrong clock may last without harm: records that it has dated wrongly stay in the DHT
SET_CLOCK = "sudo timedatectl set-ntp true"


def running_clock() -> float:
    """s that go on while the machine sleeps, and that nobody can set (Linux: CLOCK_BOOTTIME)."""
    clock = getattr(time, "CLOCK_BOOTTIME", None)
    if clock is None and sys.platform == "darwin":
        clock = time.CLOCK_MONOTONIC_RAW  # goes on in sleep there, as time.monotonic() does not
    return time.clock_gettime(clock) if clock is not None else time.monotonic()


class ClockWatch:
    """The wall clock is believed as it is at the start: nobody joins with another one than the others'.

    :param wall: s since 1970
    :param running: s; goes on while the machine sleeps
    :param awake: s; stands still meanwhile
    :ivar why_afresh: why the process should begin afresh, in words, "" while there is no reason
    """

    def __init__(
        self,
        wall: Callable[[], float] = lambda: time.time(),  # looked up with each call
        running: Callable[[], float] = running_clock,
        awake: Callable[[], float] = time.monotonic,
    ):
        self._wall, self.running, self._awake = wall, running, awake
        self._right = wall() - running()
        self._slept_before = running() - awake()
        self._woke_at = float("-inf")  # by `awake`
        self._slept = 0.0  # s, the last time
        self._wrong_since: float | None = None  # by `awake`
        self._is_confirmed = False  # a peer of the swarm has another time than we
        self.why_afresh = ""

    def look(self) -> str | None:
        """Why others may not believe what we date, in words; None while the clock is as it was. Takes microseconds."""
        asleep = self.running() - self._awake()
        if asleep - self._slept_before > SLEPT:
            self._slept, self._woke_at = asleep - self._slept_before, self._awake()
        self._slept_before = asleep
        jumped = self._wall() - self.running() - self._right
        if abs(jumped) <= LIMIT:
            self._come_right()
            return None
        if self._wrong_since is None:
            self._wrong_since = self._awake()
        way = "forward" if jumped > 0 else "back"
        reads = datetime.fromtimestamp(self._wall(), timezone.utc).strftime("%Y-%m-%d %H:%M:%S UTC")
        return (
            f"This machine's clock has jumped {way} by {in_words(abs(jumped))} and reads {reads}. The others refuse "
            f"what it dates, so nothing is stepped until it is right again: {SET_CLOCK}"
        )

    @property
    def woke(self) -> str | None:
        """That the machine has slept, in words, shortly after; None otherwise."""
        if self._awake() - self._woke_at > AWAKE_FOR:
            return None
        return f"This machine slept for {in_words(self._slept)}, and its connections with it: it calls the others anew."

    def heard(self, offset: float) -> None:
        """A peer's time, `offset` s after ours. Where ours has jumped, one peer that has the same time makes it right:
        a machine that was stopped whole has got the true time back by its jump."""
        if self._wrong_since is None:
            return
        if abs(offset) <= LIMIT:
            self._right = self._wall() - self.running()
            self._wrong_since, self._is_confirmed = None, False
        else:
            self._is_confirmed = True

    def believe_unless_denied(self) -> None:
        """Believe the clock where no other peer can be asked. A virtual machine that was stopped whole has the true
        time after its jump, and would stand still for ever."""
        since = self._wrong_since
        if since is not None and not self._is_confirmed and self._awake() - since > UNDENIED:
            self._right, self._wrong_since = self._wall() - self.running(), None

    def _come_right(self) -> None:
        if self._wrong_since is None:
            return
        if self._is_confirmed or self._awake() - self._wrong_since > LONG:
            self.why_afresh = (
                "This machine's clock was wrong and is right again. This peer begins afresh: it had dated its "
                "records wrongly."
            )
        self._wrong_since, self._is_confirmed = None, False


def in_words(seconds: float) -> str:
    """12 s, 5 min, 1 h, 1 h 30 min, 2 d."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    if minutes < 60:
        return f"{minutes} min"
    hours, rest = divmod(minutes, 60)
    if hours >= 24 and not rest and hours % 24 == 0:
        return f"{hours // 24} d"
    return f"{hours} h {rest} min" if rest else f"{hours} h"
