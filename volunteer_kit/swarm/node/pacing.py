"""Pace bulk data below the rate of the uplink, so that small messages find no queue.

Data that a program has written lie in the buffers of the system, of p2pd and of the router, some megabytes on a line of
10 Mbit/s: a heartbeat waits behind them for seconds. A sender that stays at 85 % of the uplink leaves them empty.

The uplink is measured where writes block. The buffers are then full, and they are as full when the next write has
blocked: what was taken in between is what the line has carried. Where the program had nothing to write to this receiver
for a part of that time, or the receiver answered no heartbeat, it is what the program had, and only more than is known
says something about the line. Time in which this process did not run says nothing. A line at which no write blocks for
a while is tried a little faster. Heartbeats that take longer than usual say sooner that this was too much: bulk then
yields until the queue is gone.

p2pd alone buffers megabytes for each peer, in front of the heartbeats: 8 s on a line of 1 Mbit/s that nobody has
measured yet, or to a receiver that is slow, and a peer that is silent for 5 s is given up. So there is a window for
each peer, and one for all: what was written since the last heartbeat that was answered. Both grow while heartbeats come
back in time, and shrink when they are late.

A measurement by one receiver alone may be of that receiver's line. It paces what goes to this receiver, and it is
forgotten when data go to others.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections import Counter, deque
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass

SHARE = 0.85  # of the uplink that bulk takes
SLACK = 0.05  # s; who oversleeps catches up as much at once
# bytes/s; all buffers on the way hold some 4 MB, which pass in less than 0.1 s on such a line: nothing to be gained
FAST = 50e6
SLOWEST = 2_000.0  # bytes/s; an estimate is never lower, or the next write would take a minute
SPAN, LEAST_BYTES = 1.0, 256_000  # s and bytes of one measurement at least; buffers empty in leaps of a megabyte
PAUSE = 0.5  # s without a write: the buffers may have run empty, and the measurement begins anew
KEPT = 8  # measurements that are remembered
PROBE, REGAIN = 1.1, 2.0  # times as fast: beyond the best that is known, and up to it
HOLD, HOLD_AFTER_PROBE = 20, 3  # spans without another probe: the buffers empty meanwhile, or fill
QUEUED = 0.15  # s that heartbeats of all peers take longer than usual while our own queue is long
YIELD, LEAST_SHARE = 0.8, 0.5  # times as fast for each span with a queue, and what bulk takes at least
FLOOR = 0.5  # of the last measurement: a busy machine answers heartbeats late as well
ALONE = 0.8  # of the bytes of a measurement that went to one receiver: it may be its line that was measured
IDLE = 0.1  # of a measurement in which there was nothing to write
FORGOTTEN = 60.0  # s after the last write to a peer
STOPPED = 1.0  # s between two ticks: the process was stopped, or had no processor
OVERDUE = 2.5  # s without an answer: what is on the way to this peer no longer keeps others waiting
LEAST_WINDOW, MOST_WINDOW = 2**18, 2**23  # bytes; 2 s of 1 Mbit/s, and 50 MB/s to a peer that answers after 0.16 s


class TimeLine:
    """Turns of one direction, at a rate.

    :param rate: bytes/s; None: no turn waits
    """

    def __init__(
        self,
        rate: float | None = None,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], Awaitable[object]] = asyncio.sleep,
    ):
        self.rate, self._clock, self._sleep = rate, clock, sleep
        self._free_at = 0.0

    def reserve(self, num_bytes: int) -> float:
        """Take the next turn. :returns: s until it begins"""
        if self.rate is None:
            return 0.0
        now = self._clock()
        start = max(self._free_at, now - SLACK)
        self._free_at = start + num_bytes / self.rate
        return max(0.0, start - now)

    async def turn(self, num_bytes: int) -> None:
        """Return when the next turn begins. Turns are given in the order of the calls, so that all who call share."""
        if (wait := self.reserve(num_bytes)) > 0.0:
            await self._sleep(wait)


class Growth:
    """A number of bytes that doubles while heartbeats behind them come back without delay, and is halved when they come
    late. A heartbeat that was sent before the last change says nothing: those to many peers are on the way at once, and
    each would change it."""

    def __init__(self, most: int) -> None:
        self.size = LEAST_WINDOW
        self._most = most
        self._last = self._before = -math.inf  # s: of the last heartbeat, and of the last one before the change

    def mark(self, sent_at: float) -> None:
        """A heartbeat was sent."""
        self._last = max(self._last, sent_at)

    def grow(self, sent_at: float, behind: int) -> bool:
        """A heartbeat came back without delay, from behind so many bytes. :returns: whether it counts"""
        if sent_at <= self._before or 2 * behind < self.size:
            return False
        self.size, self._before = min(self._most, 2 * self.size), self._last
        return True

    def shrink(self, sent_at: float) -> None:
        """A heartbeat came late."""
        if sent_at > self._before:
            self.size, self._before = max(LEAST_WINDOW, self.size // 2), self._last


class Flight:
    """The bytes that may be on the way to all peers together. They start at two seconds of a slow line, grow while its
    queue is short, and shrink when heartbeats to all peers are late: then it is our own queue in which they wait."""

    def __init__(self) -> None:
        self._growth = Growth(8 * MOST_WINDOW)
        self._in_time = -math.inf  # s, when the last heartbeat was sent that came back in time
        self.bytes = 0
        self.was_full = False
        self.room = asyncio.Event()  # something has arrived, or a write is over
        self.wanting: Counter[int] = Counter()  # writes that no window of their own holds up, by urgency

    def yields(self, urgency: int) -> bool:
        """Return whether more urgent writes come first."""
        return any(count > 0 and other < urgency for other, count in self.wanting.items())

    @property
    def size(self) -> int:
        return self._growth.size

    @property
    def is_full(self) -> bool:
        return self.bytes >= self.size

    def mark(self, sent_at: float) -> None:
        """A heartbeat was sent to some peer."""
        self._growth.mark(sent_at)

    def passed(self, sent_at: float, delay: float, behind: int) -> None:
        """It was answered. :param delay: s longer than usual; `behind`: bytes on the way to all peers when it was sent
        """
        if delay < QUEUED:
            self._in_time = max(self._in_time, sent_at)
            if self.was_full and self._growth.grow(sent_at, behind):
                self.was_full = False
        elif delay > 2 * QUEUED and self._in_time < sent_at - SPAN:
            self._growth.shrink(sent_at)


class Window:
    """The bytes that may be on the way to one peer. They grow while heartbeats behind them come back without delay.

    A heartbeat is known by the time at which it was sent. Without a stream for heartbeats there is no limit.

    :param flight: shared by the windows of all peers
    """

    def __init__(self, flight: Flight) -> None:
        self._flight = flight
        self._growth = Growth(MOST_WINDOW)
        self._was_full = False
        self._sent = self._marked = self._passed = 0  # bytes: written, before the last heartbeat, before an answer
        self._counted = 0  # bytes of ours in the flight
        # of heartbeats: when it was sent, our bytes by then, and what was on the way, of ours and of all
        self._marks: deque[tuple[float, int, int, int]] = deque()

    @property
    def unanswered_since(self) -> float | None:
        """When the first heartbeat was sent that is still to be answered."""
        return self._marks[0][0] if self._marks else None

    @asynccontextmanager
    async def turn(self, num_bytes: int, ping: Callable[[], bool], urgency: int = 0) -> AsyncIterator[bool]:
        """Enter when there is room for a write and no more urgent one waits; the write takes place inside. Yields
        whether there was no room.

        :param ping: sends a heartbeat, and calls `mark`; False where there is no stream
        :param urgency: of the write; 0 comes before 1
        """
        has_waited, wants, flight = False, False, self._flight
        try:
            while True:
                is_full = self._is_full
                if wants == is_full:
                    wants = not is_full
                    flight.wanting[urgency] += 1 if wants else -1
                lacks_room = is_full or flight.is_full
                if not lacks_room and not flight.yields(urgency):
                    break
                if lacks_room and (self._sent > self._marked or is_full and not self._marks) and not ping():
                    self.reset()
                    break
                has_waited |= lacks_room
                self._was_full |= is_full
                flight.was_full |= flight.is_full or lacks_room and self._growth.size > flight.size // 2
                flight.room.clear()
                await flight.room.wait()
            self._sent += num_bytes
            self._counted += num_bytes
            flight.bytes += num_bytes
            if self._sent - self._marked >= self._most // 3:
                self._marked = self._sent
                ping()
            yield has_waited
        finally:
            flight.wanting[urgency] -= wants
            flight.room.set()

    @property
    def _is_full(self) -> bool:
        """A peer fills half of the flight at most: one that has died leaves room for the others."""
        return self._sent - self._passed >= self._most

    @property
    def _most(self) -> int:
        return min(self._growth.size, self._flight.size // 2)

    def is_overdue(self, now: float) -> bool:
        """Return whether the peer has not answered a heartbeat for a while."""
        return bool(self._marks) and now - self._marks[0][0] > OVERDUE

    def write_off(self, now: float) -> None:
        """To be called several times a second: the flight does not wait for a peer that does not answer."""
        if self._counted and self.is_overdue(now):
            self._flight.bytes -= self._counted
            self._counted = 0
            self._flight.room.set()

    def mark(self, sent_at: float) -> None:
        """A heartbeat was sent."""
        self._marked = self._sent
        self._marks.append((sent_at, self._sent, self._sent - self._passed, self._flight.bytes))
        self._growth.mark(sent_at)
        self._flight.mark(sent_at)

    def passed(self, sent_at: float, delay: float) -> None:
        """It was answered. :param delay: s longer than usual"""
        behind = behind_all = 0
        while self._marks and self._marks[0][0] <= sent_at:
            _, before, behind, behind_all = self._marks.popleft()
            self._pass(before)
        if delay > 2 * QUEUED:
            self._growth.shrink(sent_at)
        elif delay < QUEUED and self._was_full:
            self._growth.grow(sent_at, behind)
        if 4 * behind >= self._most:  # one behind little says nothing: each peer's data wait in a queue of their own
            self._flight.passed(sent_at, delay, behind_all)
        self._was_full = False
        self._flight.room.set()

    def reset(self) -> None:
        """The stream for heartbeats is another one, or none."""
        self._marks.clear()
        self._marked = self._sent
        self._pass(self._sent)
        self._flight.room.set()

    def _pass(self, passed: int) -> None:
        self._passed = passed
        left = min(self._counted, self._sent - passed)
        self._flight.bytes -= self._counted - left
        self._counted = left


@dataclass
class _Receiver:
    """The way to one peer, as far as it is known.

    :ivar bytes: that it was written
    :ivar writers: writes that wait or are under way
    :ivar idle: s without any
    :ivar full: when its buffers were full, all bytes that were written by then, those to it, and `idle`
    """

    wrote_at: float
    blocked_at: float = 0.0
    bytes: int = 0
    writers: int = 0
    idle: float = 0.0
    idle_since: float | None = None
    full: tuple[float, int, int, float] | None = None


class PaceKeeper:
    """Paces the writes of all bulk channels together, and measures the uplink by them.

    :param max_mbps: Mbit/s that are never exceeded; None: as much as the line carries
    :ivar on_measured: told the uplink in Mbit/s when it has changed by 5 %
    :ivar delay: s that heartbeats take longer than usual, the least of all peers: the owner sets it
    """

    def __init__(
        self,
        max_mbps: float | None = None,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], Awaitable[object]] = asyncio.sleep,
    ):
        self.on_measured: Callable[[float], None] = lambda mbps: None
        self.delay = 0.0
        self._cap = max_mbps * 1e6 / 8 if max_mbps else None
        self._clock, self._sleep = clock, sleep
        self._line = TimeLine(self._cap, clock, sleep)
        self._receivers: dict[str, _Receiver] = {}
        self._estimate: float | None = None  # bytes/s
        self._measured: deque[float] = deque(maxlen=KEPT)  # bytes/s
        self._drained = 0.0  # bytes/s, the last one of these
        # nothing is known but by this receiver, whose own line may have been measured; "": nor by it any more
        self._sole: str | None = None
        self._hold = 0  # spans until the next probe
        self._yielding = 1.0  # of SHARE
        self._is_queued = False
        self._told = 0.0  # bytes/s
        self._total = 0  # bytes that were written
        self._wrote_at: float | None = None  # s
        self._ticked_at: float | None = None  # s
        self._begin_span(clock())

    @property
    def uplink_mbps(self) -> float | None:
        """Mbit/s that the line carries upwards, no more than `max_mbps`; None: never was there more to send."""
        known = [rate for rate in (self._estimate, self._cap) if rate is not None]
        return min(known) * 8 / 1e6 if known else None

    @property
    def is_busy(self) -> bool:
        """Whether bulk went out lately."""
        return self._wrote_at is not None and self._clock() - self._wrote_at < 2 * SPAN

    @contextmanager
    def writing(self, peer: str) -> Iterator[None]:
        """Around a write with all that it waits for: outside of it the program has nothing to send to `peer`."""
        now = self._clock()
        receiver = self._receiver(peer, now)
        if not receiver.writers and receiver.idle_since is not None:
            receiver.idle += now - receiver.idle_since
        receiver.writers += 1
        try:
            yield
        finally:
            receiver.writers -= 1
            if not receiver.writers:
                receiver.idle_since = self._clock()

    def tick(self) -> None:
        """To be called several times a second. Where it is not, this process did not run meanwhile."""
        now = self._clock()
        self._notice_stop(now)
        self._ticked_at = now

    def _notice_stop(self, now: float) -> None:
        if self._ticked_at is not None and now - self._ticked_at > STOPPED:
            self._ticked_at = now
            for receiver in self._receivers.values():
                receiver.full = None
            self._begin_span(now)

    def tell_silent(self, peer: str) -> None:
        """To be called several times a second while `peer` answers no heartbeat: that a write to it waits does not
        measure a line."""
        if (receiver := self._receivers.get(peer)) is not None:
            receiver.full = None

    def reserve(self, peer: str, num_bytes: int) -> float:
        """Take the next turn for a write to `peer`. :returns: s until it begins"""
        now = self._clock()
        if self._sole and peer != self._sole:
            self._sole, self._line.rate = "", self._cap
        wait = self._line.reserve(num_bytes)
        receiver = self._receiver(peer, now + wait)
        if now - receiver.wrote_at > PAUSE:
            receiver.full = None
        self._waited += wait > 0.0
        self._turns += 1
        return wait

    async def turn(self, peer: str, num_bytes: int) -> None:
        """Return when a write to `peer` may begin."""
        if (wait := self.reserve(peer, num_bytes)) > 0.0:
            await self._sleep(wait)

    def wrote(self, peer: str, num_bytes: int, blocked: bool) -> None:
        """The write has been taken. :param blocked: whether it had to wait for room in the buffers"""
        now = self._clock()
        self._notice_stop(now)
        self._total += num_bytes
        receiver = self._receiver(peer, now)
        receiver.wrote_at = self._wrote_at = now
        receiver.bytes += num_bytes
        if blocked:
            receiver.blocked_at = now
            self._measure(peer, receiver, now)
            if not self._only_it_is_slow(peer, now - SPAN):
                self._hold = HOLD
                self._begin_span(now)
        if now - self._since >= SPAN and self._total - self._from >= LEAST_BYTES:
            self._end_span(now)

    def _only_it_is_slow(self, peer: str, since: float) -> bool:
        """Whether other peers took all that they were sent: then it is this receiver that is slow, and not our line."""
        others = (other for name, other in self._receivers.items() if name != peer)
        return any(other.wrote_at > since >= other.blocked_at for other in others)

    def _measure(self, peer: str, receiver: _Receiver, now: float) -> None:
        if receiver.full is None:
            receiver.full = (now, self._total, receiver.bytes, receiver.idle)
            return
        since, total, own, idle = receiver.full
        if now - since < SPAN or self._total - total < LEAST_BYTES:
            return
        receiver.full = (now, self._total, receiver.bytes, receiver.idle)
        rate = (self._total - total) / (now - since)
        if receiver.idle - idle > IDLE * (now - since) and rate <= (self._estimate or math.inf):
            return
        is_alone = receiver.bytes - own > ALONE * (self._total - total)
        is_news = is_alone if self._estimate is None else rate > self._estimate
        if is_news or not self._only_it_is_slow(peer, since):
            if is_alone and self._sole is None and rate <= (self._estimate or 0.0):
                return  # others took more together
            before = None if self._sole is not None and (self._sole != peer or not is_alone) else self._estimate
            if before is None:
                self._measured.clear()
            if is_alone and (self._sole is not None or before is None):
                self._sole = peer
            else:
                self._sole = None
            self._drained = rate
            self._measured.append(rate)
            self._set(rate if before is None else (before + rate) / 2)

    def _end_span(self, now: float) -> None:
        """No write has blocked in it. Where it was not our own estimate that held bulk up, nothing is learnt."""
        estimate, is_paced = self._estimate, 2 * self._waited >= self._turns and self._line.rate != self._cap
        self._begin_span(now)
        if estimate is None or not is_paced:
            return
        best = sorted(self._measured)[-2:][0]
        was_queued, self._is_queued = self._is_queued, self.delay > QUEUED
        if self._is_queued:
            if not was_queued:
                estimate = min(estimate, max(FLOOR * self._drained, estimate / PROBE))
                self._measured = deque((min(rate, estimate) for rate in self._measured), maxlen=KEPT)
                self._hold = HOLD
            self._yielding = max(LEAST_SHARE, YIELD * self._yielding)
        elif self._yielding < 1.0:
            self._yielding = min(1.0, self._yielding / YIELD)
        elif estimate < best / PROBE:  # a slow receiver was taken for the line
            estimate = min(REGAIN * estimate, best)
        elif self._hold > 0:
            self._hold -= 1
        else:
            estimate *= PROBE
            self._hold = HOLD_AFTER_PROBE
        self._set(estimate)

    def _begin_span(self, now: float) -> None:
        self._since, self._from = now, self._total
        self._waited = self._turns = 0

    def _set(self, estimate: float) -> None:
        self._estimate = max(SLOWEST, estimate)
        paced = self._yielding * SHARE * self._estimate if self._estimate < FAST else None
        self._line.rate = min((rate for rate in (paced, self._cap) if rate is not None), default=None)
        if abs(self._estimate - self._told) > 0.05 * self._told:
            self._told = self._estimate
            mbps = self.uplink_mbps
            assert mbps is not None
            self.on_measured(mbps)

    def _receiver(self, peer: str, now: float) -> _Receiver:
        if peer not in self._receivers:
            self._forget_old(now)
            self._receivers[peer] = _Receiver(now)
        return self._receivers[peer]

    def _forget_old(self, now: float) -> None:
        receivers = self._receivers.items()
        for peer in [name for name, known in receivers if now - known.wrote_at > FORGOTTEN and not known.writers]:
            del self._receivers[peer]
