"""Schedule requests for chunks among many donors, and drop donors that fail. Knows no network.

Each donor has a window: as many requests as it has earned by answering. A slow donor keeps its one request, while
others get the rest; at the end a second donor gets the requests that hang. After one wrong byte a donor gets none.
"""

from __future__ import annotations

import asyncio
import random
import statistics
import time
from collections import Counter, deque
from collections.abc import Awaitable, Callable, Hashable, Iterable
from contextlib import suppress
from dataclasses import dataclass, field

from volunteer_kit.swarm.state.chunk_store import ChunkStore

MAX_WINDOW = 2  # requests at once to one donor, which answers in turn: one travels while it reads the next
MAX_STRIKES = 3  # silences after which a donor is taken for dead
AT_ONCE = 12  # donors; more would divide our own line into slower answers
LOOK_AGAIN = 5.0  # s between looks for donors
RESTING = 1.0  # s that a busy donor, or one without the chunk, is let alone
HANGING = 4.0  # times the usual; what takes longer may be asked of another, when nothing else is left
SLOWEST_USUAL = 2.0  # s; answers are compared with this at least
HASHES = -1  # the index under which the list of hashes is asked for

Donor = Hashable
Ask = Callable[[Donor, int], Awaitable[bytes]]


class NotNow(Exception):
    """The donor has no place free, or not this chunk (`lacks`)."""

    def __init__(self, lacks: bool = False):
        super().__init__("it has not got it" if lacks else "it is busy")
        self.lacks = lacks


@dataclass
class Turn:
    """What a donor has earned."""

    window: int = 1
    flying: set[asyncio.Task] = field(default_factory=set)
    strikes: int = 0
    rests_until: float = 0.0  # loop time
    lacks: dict[int, float] = field(default_factory=dict)  # chunk -> until when it is not asked for it
    given: int = 0
    failed_at: float = float("-inf")


@dataclass
class Fetched:
    """How a fetch went.

    `again`: chunks asked for again of which bytes may have been here: a wrong one, one that a second donor was asked
    for because the first hung, and the one that a donor was at when it fell silent (it answers in turn: what was in
    line behind that has cost nothing, nor has a donor that never answered). `corrupt`: donors that gave other bytes
    than were signed.
    """

    complete: bool = False
    chunks: int = 0
    again: int = 0
    corrupt: list = field(default_factory=list)
    given: dict = field(default_factory=dict)  # donor -> chunks
    seconds: float = 0.0


class ChunkFetch:
    """Fills a store.

    :param ask: (donor, index) -> the chunk; HASHES gives the list. Raises NotNow, or whatever breaks a call
    :param timeout: s for one answer
    :param on_chunk: told after each chunk
    """

    def __init__(self, store: ChunkStore, ask: Ask, timeout: float = 30.0, on_chunk: Callable[[], None] = lambda: None):
        self.store, self._ask, self._timeout, self._on_chunk = store, ask, timeout, on_chunk
        self.found = Fetched()
        self._turns: dict[Donor, Turn] = {}
        self._dropped: set[Donor] = set()
        self._wanted: deque[int] = deque()
        self._flying: dict[asyncio.Task, tuple[Donor, int, float]] = {}
        self._asked: Counter[int] = Counter()
        self._took: deque[float] = deque(maxlen=64)  # s of the last answers

    async def run(
        self,
        find_donors: Callable[[], Awaitable[Iterable[Donor]]],
        is_over: Callable[[], bool] = lambda: False,
    ) -> Fetched:
        """Until the store is complete or `is_over` says so. :returns: how it went."""
        started = time.monotonic()
        looking = asyncio.create_task(self._keep_looking(find_donors))
        try:
            if await self._get_hashes(is_over):
                await asyncio.to_thread(self.store.fill_zeros)
                missing = self.store.missing()
                random.shuffle(missing)  # joiners of one moment have other chunks to give each other
                self._wanted.extend(missing)
                while not is_over() and not self._is_done():
                    self._give_out()
                    await self._wait()
        finally:
            for task in (looking, *self._flying):
                task.cancel()
        with suppress(OSError):
            self.found.complete = self.store.is_complete
        self.found.again = sum(count - 1 for count in self._asked.values() if count > 1)
        self.found.given = {donor: turn.given for donor, turn in self._turns.items() if turn.given}
        self.found.seconds = time.monotonic() - started
        return self.found

    @property
    def has_lost_all(self) -> bool:
        """Return whether donors were found and each of them is dropped."""
        return bool(self._turns) and not self._turns.keys() - self._dropped

    async def _keep_looking(self, find_donors: Callable[[], Awaitable[Iterable[Donor]]]) -> None:
        while True:
            with suppress(Exception):
                for donor in await find_donors():
                    alive = len(self._turns.keys() - self._dropped)
                    if donor not in self._turns and alive < AT_ONCE:
                        self._turns[donor] = Turn()
            await asyncio.sleep(LOOK_AGAIN if self._turns.keys() - self._dropped else min(1.0, LOOK_AGAIN))

    def _is_done(self) -> bool:
        """Another process may fill the store as well."""
        if self._flying:
            return False
        self._wanted = deque(self.store.missing())
        return not self._wanted

    # --- the list of hashes ---

    async def _get_hashes(self, is_over: Callable[[], bool]) -> bool:
        while self.store.hashes is None and not is_over():
            for donor in self._free_donors():
                self._send(donor, HASHES)
            await self._wait()
        for task in [task for task, (_, index, _) in self._flying.items() if index == HASHES]:
            self._forget(task)
        return self.store.hashes is not None

    # --- who is asked for what ---

    def _free_donors(self) -> list[Donor]:
        now = time.monotonic()
        free = [
            donor
            for donor, turn in self._turns.items()
            if donor not in self._dropped and len(turn.flying) < turn.window and turn.rests_until <= now
        ]
        random.shuffle(free)
        return sorted(free, key=lambda donor: len(self._turns[donor].flying))

    def _give_out(self) -> None:
        there = self.store.have()
        for donor in self._free_donors():
            turn = self._turns[donor]
            while len(turn.flying) < turn.window:
                index = self._next_for(turn, there)
                if index is None:
                    break
                self._send(donor, index)

    def _next_for(self, turn: Turn, there: bytes) -> int | None:
        now = time.monotonic()
        for _ in range(len(self._wanted)):
            index = self._wanted.popleft()
            if there[index]:
                continue
            if turn.lacks.get(index, 0.0) > now:
                self._wanted.append(index)
                continue
            return index
        if self._wanted:
            return None
        usual = max(SLOWEST_USUAL, statistics.median(self._took) if self._took else self._timeout)
        flying = Counter(index for _, index, _ in self._flying.values())
        hanging = [
            (since, index)
            for task, (_, index, since) in self._flying.items()
            if now - since > HANGING * usual and flying[index] == 1 and task not in turn.flying
        ]
        return min(hanging)[1] if hanging else None

    def _send(self, donor: Donor, index: int) -> None:
        task = asyncio.ensure_future(asyncio.wait_for(self._ask(donor, index), self._timeout))
        self._turns[donor].flying.add(task)
        self._flying[task] = (donor, index, time.monotonic())
        if index != HASHES:
            self._asked[index] += 1

    async def _wait(self) -> None:
        if not self._flying:
            await asyncio.sleep(0.05)
            return
        done, _ = await asyncio.wait(self._flying, timeout=0.5, return_when=asyncio.FIRST_COMPLETED)
        for task in done:
            if task in self._flying:  # its twin may have been first
                self._take(task)

    # --- what comes of it ---

    def _take(self, task: asyncio.Task) -> None:
        donor, index, since = self._flying[task]
        turn = self._turns[donor]
        self._forget(task, cancel=False)
        try:
            data = task.result()
        except NotNow as e:
            self._asked[index] -= index != HASHES
            if e.lacks and index != HASHES:
                turn.lacks[index] = time.monotonic() + LOOK_AGAIN
            else:
                turn.rests_until = time.monotonic() + RESTING
                turn.window = max(1, turn.window // 2)
        except (Exception, asyncio.CancelledError):
            now = time.monotonic()
            if index != HASHES and (not turn.given or now - turn.failed_at < RESTING):
                self._asked[index] -= 1
            turn.failed_at = now
            turn.strikes, turn.window = turn.strikes + 1, 1
            turn.rests_until = time.monotonic() + RESTING
            if turn.strikes >= MAX_STRIKES:
                self._dropped.add(donor)
        else:
            self._keep(donor, turn, index, data, time.monotonic() - since)
        if index != HASHES and not any(other == index for _, other, _ in self._flying.values()):
            if not self.store.have()[index]:
                self._wanted.appendleft(index)

    def _keep(self, donor: Donor, turn: Turn, index: int, data: bytes, took: float) -> None:
        right = self.store.put_hashes(data) if index == HASHES else self.store.put(index, data)
        if not right:
            self._dropped.add(donor)
            self.found.corrupt.append(donor)
            for task in list(turn.flying):
                _, lost, _ = self._flying[task]
                self._forget(task)
                if lost != HASHES:
                    self._wanted.appendleft(lost)
            return
        turn.strikes = 0
        if index == HASHES:
            return
        turn.given, turn.window = turn.given + 1, min(MAX_WINDOW, turn.window + 1)
        self._took.append(took)
        self.found.chunks += 1
        for twin in [task for task, (_, other, _) in self._flying.items() if other == index]:
            self._forget(twin)
        self._on_chunk()

    def _forget(self, task: asyncio.Task, cancel: bool = True) -> None:
        donor, *_ = self._flying.pop(task)
        self._turns[donor].flying.discard(task)
        if cancel:
            task.cancel()
