"""The pace of bulk, on a line that is simulated: buffers that hold megabytes, and that empty in leaps."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from contextlib import suppress
from typing import Any

import pytest

from tests.virtual_time import run_in_virtual_time
from volunteer_kit.swarm.node.pacing import FAST, LEAST_WINDOW, MOST_WINDOW, Flight, PaceKeeper, TimeLine, Window

WRITE = 16_384  # bytes
MBIT = 1e6 / 8  # bytes
STEP = 0.01  # s


class Line:
    """A peer's uplink. Each receiver has a buffer before it; all that are not empty share the line. A write that finds
    its buffer full is taken when a part of that has gone out.

    :param rate: bytes/s
    :param room: bytes of each buffer
    :param leap: bytes
    """

    def __init__(self, rate: float, room: float = 1.5e6, leap: float = 0.5e6, **settings: float):
        self.rate, self.room, self.leap = rate, room, leap
        self.loop = asyncio.get_running_loop()
        self.keeper = PaceKeeper(clock=self.loop.time, **settings)
        self.slow: dict[str, float] = {}  # receiver -> bytes/s that it takes
        self.taken: dict[str, int] = {}  # bytes
        self.waits: list[float] = []  # s that a small message would have waited, once for each step
        self.shows_queue = True  # in heartbeats
        self._queues: dict[str, float] = {}  # bytes
        self._served = asyncio.Condition()
        self._tasks = {self.loop.create_task(self._serve())}

    async def _serve(self) -> None:
        steps = 0
        while True:
            await asyncio.sleep(STEP)
            steps += 1
            left = self.rate * STEP
            waiting = sorted(self._queues, key=lambda peer: min(self._queues[peer], self.slow.get(peer, 1e12) * STEP))
            for i, peer in enumerate(waiting):
                gone = min(self._queues[peer], self.slow.get(peer, 1e12) * STEP, left / (len(waiting) - i))
                self._queues[peer] -= gone
                left -= gone
            queue = sum(held for peer, held in self._queues.items() if peer not in self.slow)
            self.waits.append(queue / self.rate)
            if steps % 300 == 0 and self.shows_queue:
                self.keeper.delay = self.waits[-1]
            async with self._served:
                self._served.notify_all()

    async def _write(self, peer: str) -> None:
        self._queues.setdefault(peer, 0.0)
        while True:
            await self.keeper.turn(peer, WRITE)
            blocked = self._queues[peer] + WRITE > self.room
            if blocked:
                async with self._served:
                    await self._served.wait_for(lambda: self._queues[peer] <= self.room - self.leap)
            self._queues[peer] += WRITE
            self.taken[peer] = self.taken.get(peer, 0) + WRITE
            self.keeper.wrote(peer, WRITE, blocked)
            if not blocked:
                await asyncio.sleep(2e-5)

    async def write_for(self, seconds: float, *peers: str) -> float:
        """:returns: bytes/s that were taken of all"""
        before = sum(self.taken.values())
        writing = [self.loop.create_task(self._write(peer)) for peer in peers or ("a",)]
        await asyncio.sleep(seconds)
        for task in writing:
            task.cancel()
        await asyncio.gather(*writing, return_exceptions=True)
        return (sum(self.taken.values()) - before) / seconds

    @property
    def mbps(self) -> float | None:
        return self.keeper.uplink_mbps


def run(story: Callable[[], Coroutine[Any, Any, None]]) -> None:
    run_in_virtual_time(story, timeout=10_000)


@pytest.mark.parametrize("receivers", ["a", "abc"])
@pytest.mark.parametrize("mbps", [5, 10, 40])
def test_bulk_takes_most_of_the_uplink_and_leaves_its_buffers_empty(mbps, receivers):
    async def story():
        line = Line(mbps * MBIT)
        await line.write_for(60, *receivers)
        line.waits.clear()
        rate = await line.write_for(120, *receivers)
        assert 0.75 < rate / line.rate < 1.0
        assert line.mbps == pytest.approx(mbps, rel=0.4)
        waits = sorted(line.waits)
        assert waits[len(waits) // 2] < 0.1 and waits[int(0.9 * len(waits))] < 0.5  # s; unpaced it is the full buffer

    run(story)


def test_the_first_measurement_is_what_the_line_carries_and_not_what_its_buffers_took():
    async def story():
        line, told = Line(8 * MBIT), []
        line.keeper.on_measured = told.append
        assert line.mbps is None
        await line.write_for(6)
        assert told[0] == pytest.approx(8, rel=0.1)

    run(story)


def test_a_line_that_is_never_full_is_not_paced():
    async def story():
        line = Line(2 * FAST, room=1e9)
        assert await line.write_for(1) > FAST and line.mbps is None

    run(story)


def test_a_fast_line_is_measured_and_not_paced():
    async def story():
        line = Line(1.2 * FAST, room=2e6, leap=1e6)
        await line.write_for(3)
        assert await line.write_for(3) == pytest.approx(line.rate, rel=0.05)
        assert line.mbps == pytest.approx(line.rate / MBIT, rel=0.1)

    run(story)


def test_a_slow_receiver_among_others_is_not_taken_for_the_line_and_holds_nobody_up():
    async def story():
        line = Line(20 * MBIT)
        await line.write_for(30, "b", "c")
        line.slow["a"] = 0.5 * MBIT
        others = -line.taken["b"] - line.taken["c"]
        await line.write_for(60, "a", "b", "c")
        others += line.taken["b"] + line.taken["c"]
        assert others / 60 > 0.7 * line.rate and line.mbps > 15

    run(story)


def test_a_slow_receiver_that_was_taken_for_the_line_is_made_up_for():
    async def story():
        line = Line(20 * MBIT)
        await line.write_for(30)
        line.slow["a"] = 1 * MBIT
        await line.write_for(60)
        assert line.mbps < 5
        await line.write_for(10, "b")
        assert line.mbps > 15

    run(story)


def test_a_first_receiver_that_is_slow_is_not_taken_for_the_line_for_ever():
    async def story():
        line = Line(20 * MBIT)
        line.slow["a"] = 4 * MBIT
        await line.write_for(20)
        assert line.mbps < 5
        await line.write_for(120, "b")
        assert line.mbps > 15

    run(story)


def test_what_one_receiver_took_holds_up_no_others():
    """In a run's first round all send to its founder, whose line is then measured seven times."""

    async def story():
        line = Line(20 * MBIT)
        line.slow["a"] = 2 * MBIT
        await line.write_for(20)
        assert line.mbps < 3
        assert await line.write_for(5, "b", "c", "d") > 0.7 * line.rate
        assert line.mbps > 15
        await line.write_for(20)
        assert line.mbps > 15, "others took more together"

    run(story)


@pytest.mark.parametrize("shows_queue", [True, False])
def test_a_line_that_got_worse_is_believed_and_one_that_got_better_is_found_out(shows_queue):
    async def story():
        line = Line(20 * MBIT)
        line.shows_queue = shows_queue
        await line.write_for(30)
        line.rate = 5 * MBIT
        await line.write_for(60)
        assert line.mbps < 9
        line.rate = 20 * MBIT
        await line.write_for(200)
        assert line.mbps > 14

    run(story)


def test_what_the_owner_allows_is_never_exceeded_and_is_the_uplink_until_less_is_measured():
    async def story():
        line = Line(40 * MBIT, max_mbps=8)
        assert line.mbps == 8
        assert await line.write_for(20) == pytest.approx(8 * MBIT, rel=0.01)
        assert line.mbps == 8
        line.rate = 4 * MBIT
        await line.write_for(60)
        assert line.mbps < 6

    run(story)


def test_heartbeats_of_a_busy_machine_never_stop_bulk():
    async def story():
        line = Line(20 * MBIT)
        await line.write_for(30)
        line.shows_queue = False
        for _ in range(20):
            line.keeper.delay = 2.0
            await line.write_for(3)
            line.keeper.delay = 0.0
            await line.write_for(3)
        assert line.mbps > 8

    run(story)


class Path:
    """The way to one peer, which answers a heartbeat when all that was written before has arrived.

    :param rate: bytes/s
    :param line: that it shares with others
    """

    def __init__(self, flight: Flight, rate: float, round_trip: float = 0.04, line: Path | None = None):
        self.window, self.rate, self.round_trip = Window(flight), rate, round_trip
        self._line = line or self
        self.loop = asyncio.get_running_loop()
        self.has_stream, self.sent, self.longest = True, 0, 0.0  # longest: s that a heartbeat waited behind bulk
        self._free_at = 0.0

    def ping(self) -> bool:
        if self.has_stream:
            sent_at, queue = self.loop.time(), max(0.0, self._line._free_at - self.loop.time())
            self.longest = max(self.longest, queue)
            self.window.mark(sent_at)
            self.loop.call_later(self.round_trip + queue, self.window.passed, sent_at, queue)
        return self.has_stream

    async def write_for(self, seconds: float, urgency: int = 0) -> None:
        end = self.loop.time() + seconds
        while self.loop.time() < end:
            async with self.window.turn(WRITE, self.ping, urgency):
                self._line._free_at = max(self._line._free_at, self.loop.time()) + WRITE / self.rate
                self.sent += WRITE
                await asyncio.sleep(2e-5)


async def tick(*paths: Path) -> None:
    """As the links do."""
    while True:
        await asyncio.sleep(0.25)
        for path in paths:
            path.window.write_off(path.loop.time())
            if path.window.unanswered_since is None:
                path.ping()


def test_a_slow_path_holds_no_more_than_the_least_window():
    async def story():
        path = Path(Flight(), 1 * MBIT)
        await path.write_for(60)
        assert path.sent / 60 == pytest.approx(path.rate, rel=0.1)
        assert path.longest <= (LEAST_WINDOW + WRITE) / path.rate

    run(story)


def test_a_fast_path_is_not_held_up_by_its_window():
    async def story():
        path = Path(Flight(), 400 * MBIT)
        await path.write_for(1)
        path.sent = 0
        await path.write_for(2)
        assert path.sent / 2 > 0.7 * path.rate

    run(story)


def test_many_paths_together_hold_no_more_than_one_slow_line_carries_in_seconds():
    async def story():
        flight = Flight()
        paths = [Path(flight, 0.1 * MBIT) for _ in range(10)]
        writing = [asyncio.create_task(path.write_for(60)) for path in paths]
        await asyncio.sleep(30)
        assert 0 < flight.bytes <= LEAST_WINDOW + WRITE
        for task in writing:
            task.cancel()

    run(story)


def test_heartbeats_from_before_the_bulk_open_no_line():
    """Those to seven peers came back at once when a round began. Each doubled what may be on the way, and the next
    heartbeats waited for seven seconds."""

    async def story():
        flight = Flight()
        first = Path(flight, 3.5 * MBIT)
        paths = [first, *(Path(flight, first.rate, line=first) for _ in range(6))]
        for path in paths:
            path.ping()
        for _ in range(3):
            writing = [asyncio.create_task(path.write_for(12)) for path in paths]
            await asyncio.gather(*writing)
            await asyncio.sleep(10)
            for path in paths:
                path.ping()
        assert max(path.longest for path in paths) < 2.0
        assert sum(path.sent for path in paths) / 36 == pytest.approx(first.rate, rel=0.1)

    run(story)


def test_heartbeats_to_peers_that_are_sent_little_open_no_line():
    """Each connection has a queue of its own: one with little to carry answers at once, however full the line is."""

    async def story():
        flight = Flight()
        paths = [Path(flight, 0.5 * MBIT) for _ in range(6)]
        little = Path(flight, 0.5 * MBIT)
        writing = [asyncio.create_task(path.write_for(60)) for path in paths]
        for _ in range(200):
            async with little.window.turn(WRITE, little.ping):
                little.ping()
            await asyncio.sleep(0.25)
        assert flight.size == LEAST_WINDOW and max(path.longest for path in paths) < 3.0
        for task in writing:
            task.cancel()

    run(story)


def test_what_is_urgent_goes_out_first_and_what_its_receiver_holds_up_holds_up_nothing():
    async def story():
        flight = Flight()
        first = Path(flight, 4 * MBIT)
        other, *urgent = (Path(flight, first.rate, line=first) for _ in range(4))
        stuck = Path(flight, 0.01 * MBIT)
        tasks = [asyncio.create_task(other.write_for(40, 1)), asyncio.create_task(tick(other, *urgent, stuck))]
        await asyncio.sleep(10)
        before = other.sent
        await asyncio.gather(*(path.write_for(10) for path in urgent))
        sent = sum(path.sent for path in urgent)
        assert sent / 10 > 0.8 * first.rate and other.sent - before < 0.4 * sent
        before = other.sent
        with suppress(asyncio.TimeoutError):
            await asyncio.wait_for(stuck.write_for(20), 20)  # it waits for its own receiver
        assert (other.sent - before) / 20 > 0.6 * first.rate
        for task in tasks:
            task.cancel()

    run(story)


def test_a_path_without_heartbeats_has_no_window_and_a_new_stream_begins_a_new_one():
    async def story():
        flight = Flight()
        path = Path(flight, 1 * MBIT)
        path.has_stream = False
        for _ in range(2 * MOST_WINDOW // WRITE):
            async with path.window.turn(WRITE, path.ping) as has_waited:
                assert not has_waited
        path.window.reset()
        assert flight.bytes == 0
        path.has_stream = True
        await path.write_for(1)
        held = flight.bytes
        path.window.reset()
        assert held > 0 == flight.bytes and path.window.unanswered_since is None

    run(story)


def test_turns_are_given_in_the_order_of_the_calls():
    async def story():
        order, loop = [], asyncio.get_running_loop()
        line = TimeLine(1000.0, clock=loop.time)
        since = loop.time()
        await line.turn(500)

        async def write(name: str) -> None:
            for _ in range(3):
                await line.turn(500)
                order.append(name)

        await asyncio.gather(write("a"), write("b"), write("c"))
        assert order == ["a", "b", "c"] * 3
        # who comes after a pause has 0.05 s to its credit, so that who oversleeps catches up
        assert loop.time() - since == pytest.approx(9 * 0.5 - 0.05)

    run(story)


def test_no_rate_is_no_wait():
    assert TimeLine(None).reserve(10**9) == 0.0


def test_is_busy_while_bulk_goes_out():
    async def story():
        line = Line(40 * MBIT)
        assert not line.keeper.is_busy
        await line.write_for(1)
        assert line.keeper.is_busy
        await asyncio.sleep(60)
        assert not line.keeper.is_busy

    run(story)


@pytest.mark.parametrize("answers", [False, True])
def test_a_receiver_whose_line_was_cut_measures_no_line(answers):
    """A write to it waits for 20 s. The other receiver takes all that there is for it, and a write to it blocks now and
    then, as on a busy machine. With heartbeats that are answered, the cut one is only slow."""
    now = 100.0
    keeper = PaceKeeper(clock=lambda: now)
    keeper.wrote("cut", WRITE, True)
    with keeper.writing("cut"):
        keeper.reserve("cut", WRITE)
        for step in range(2000):
            now += STEP
            if step * STEP > 2.5 and not answers:
                keeper.tell_silent("cut")
            with keeper.writing("other"):
                keeper.reserve("other", WRITE)
                now += STEP / 10
                keeper.wrote("other", WRITE, not answers and step % 200 == 0)
        keeper.wrote("cut", WRITE, True)
    assert keeper.uplink_mbps is None and keeper.reserve("other", WRITE) == 0.0


@pytest.mark.parametrize("ticks_first", [False, True])
def test_a_process_that_was_stopped_measures_no_line(ticks_first):
    """It was stopped for 30 s in the midst of a write that blocked. The loop may look at the write first, or tick."""
    now = 100.0
    keeper = PaceKeeper(clock=lambda: now)

    def write(seconds: float) -> None:
        nonlocal now
        for _ in range(round(seconds / STEP)):
            with keeper.writing("other"):
                keeper.reserve("other", WRITE)
                now += STEP
                keeper.tick()
                keeper.wrote("other", WRITE, True)

    write(5.0)
    before = keeper.uplink_mbps
    for _ in range(3):
        with keeper.writing("other"):
            keeper.reserve("other", WRITE)
            now += 30.0
            if ticks_first:
                keeper.tick()
            keeper.wrote("other", WRITE, True)
        write(3.0)
    assert keeper.uplink_mbps == pytest.approx(before, rel=0.1)
