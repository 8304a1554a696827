"""A cell without training: what each machine finds out, and whether those who would reduce can be called by all others.

All in this process, with a thread in each namespace.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any, NamedTuple

from hivemind.p2p import P2P, PeerID
from hivemind.utils.multiaddr import Multiaddr

from benchmarks.netlab_parts.kernel import enter
from benchmarks.reachability_parts.cells import PORT, Cell, machines
from volunteer_kit.addressing import LISTEN
from volunteer_kit.swarm.net.peer import PeerConfig, find_client_mode

PATIENCE = 240.0  # s; far less, but on a busy machine
CALL_WITHIN = 20.0  # s for one call; one that is dropped without a word takes longer


class Found(NamedTuple):
    """Report, for each machine of one cell, whether it takes itself for a client, and why; `meets`: of those that
    others shall call all others can; `seconds` of the slowest machine to find out."""

    client_modes: tuple[bool, ...]
    whys: tuple[str, ...]
    meets: bool
    seconds: float


def look(cell: Cell) -> Found:
    """Raises NoNetlab."""
    with machines(cell) as names:
        return _in_namespace(names[0], lambda: _look(cell, names))


def _in_namespace(name: str, work: Callable[[], Awaitable[Any]]) -> Any:
    """Run a coroutine in a thread of its own that lives there; raises what it does."""
    outcome: list[Any] = []

    def live() -> None:
        try:
            enter(name)
            outcome.append(asyncio.run(asyncio.wait_for(work(), PATIENCE)))
        except BaseException as error:
            outcome.append(error)

    thread = threading.Thread(target=live)
    thread.start()
    thread.join()
    if isinstance(outcome[0], BaseException):
        raise outcome[0]
    return outcome[0]


@asynccontextmanager
async def _daemon(maddrs: list[str]):
    p2p = await P2P.create(host_maddrs=maddrs, startup_timeout=60.0)
    try:
        yield p2p
    finally:
        await p2p.shutdown()


async def _look(cell: Cell, names: list[str]) -> Found:
    """In the first machine's thread; the others have threads meanwhile, one step of all after the other."""
    async with _daemon([maddr.replace("/tcp/0", f"/tcp/{PORT}") for maddr in LISTEN]) as first:
        peers = [f"{start}/tcp/{PORT}/p2p/{first.peer_id}" for start in cell.first]

        def find() -> tuple[bool, str, float]:
            began = time.monotonic()
            return *find_client_mode(PeerConfig(initial_peers=peers)), time.monotonic() - began

        async def find_there() -> tuple[bool, str, float]:
            return await asyncio.to_thread(find)

        told = [(False, "the first peer", 0.0), *await _in_each(names[1:], find_there)]
        modes = [mode for mode, _, _ in told]
        async with AsyncExitStack() as stack:
            called = {0: peers}
            for index, name in enumerate(names[1:], start=1):
                if not modes[index]:
                    called[index] = await stack.enter_async_context(_listening(name))
            meets = await _in_each(names, lambda: _can_call(called))
    return Found(tuple(modes), tuple(why for _, why, _ in told), all(meets), max(s for _, _, s in told))


async def _in_each(names: list[str], work: Callable[[], Awaitable[Any]]) -> list[Any]:
    return await asyncio.gather(*(asyncio.to_thread(_in_namespace, name, work) for name in names))


@asynccontextmanager
async def _listening(name: str):
    """A peer there, with its addresses."""
    told: list[list[str]] = []
    up, done = threading.Event(), threading.Event()

    async def listen() -> None:
        async with _daemon([*LISTEN]) as p2p:
            told.append([str(maddr) for maddr in await p2p.get_visible_maddrs()])
            up.set()
            await asyncio.to_thread(done.wait)

    living = asyncio.create_task(asyncio.to_thread(_in_namespace, name, listen))
    await asyncio.to_thread(up.wait, PATIENCE)
    try:
        yield told[0]
    finally:
        done.set()
        await living


async def _can_call(called: dict[int, list[str]]) -> bool:
    """Whether a peer that lives here, and is a client of its own, can call all of these."""
    async with _daemon([*LISTEN]) as p2p:
        for maddrs in called.values():
            peer = PeerID.from_base58(maddrs[0].rpartition("/p2p/")[2])
            try:
                plain = [Multiaddr(maddr.rpartition("/p2p/")[0]) for maddr in maddrs]
                await asyncio.wait_for(p2p._client.connect(peer, plain), CALL_WITHIN)
            except Exception:
                return False
        return True
