"""Have first peers of a run call this machine back before it joins, by short-lived p2pds.

There is one for each address family, because p2pd dials a peer by any address that it knows, and a peer calls back the
address of our call.
"""

from __future__ import annotations

import asyncio
import random
import threading
from collections.abc import Mapping, Sequence
from contextlib import suppress

from hivemind.p2p import P2P, PeerID
from hivemind.utils.logging import get_logger
from hivemind.utils.multiaddr import Multiaddr

from volunteer_kit.swarm.net.autonat import SILENT, call_back
from volunteer_kit.swarm.net.reachability import (
    FAMILIES,
    NOT_REACHED,
    REACHED,
    Machine,
    Place,
    as_ip,
    host_of,
    is_local_swarm,
    kind_of,
    majority,
)

logger = get_logger(__name__)
ASKED = 5  # first peers for each family; one that lies is outvoted
START_WITHIN = 15.0  # s for p2pd, which takes a third of one where cores are idle
CONNECT_WITHIN = 4.0  # s
# s; who can reach us says so after a few round trips. A peer whose call is dropped without a word waits for 15 s
ANSWER_WITHIN = 6.0


def ask_first_peers(machine: Machine, places: Sequence[Place], host_maddrs: Sequence[str]) -> dict[str, list[str]]:
    """What first peers say that have tried to call this machine: family -> answers, as reachability.by_answers takes
    them. Nobody is asked in a local swarm, nor for a family that this machine or the run has not. Takes as long as a
    p2pd needs to start, and ANSWER_WITHIN + CONNECT_WITHIN s at most.

    :param host_maddrs: where this peer is going to listen; nobody else may do so yet
    """
    wanted = {family: whom_to_ask(family, machine, places) for family in FAMILIES}
    wanted = {family: peers for family, peers in wanted.items() if peers}
    if not wanted or is_local_swarm(machine, places):
        return {}
    answers: dict[str, list[str]] = {}
    thread = _Loop(_ask_by_each(wanted, host_maddrs, answers))
    thread.run_within(START_WITHIN + CONNECT_WITHIN + ANSWER_WITHIN)
    for family, said in answers.items():
        logger.info(f"Asked to call this machine back by {FAMILIES[family]}, first peers said: {said}")
    return dict(answers)


def whom_to_ask(family: str, machine: Machine, places: Sequence[Place]) -> dict[str, list[str]]:
    """Peer id -> its addresses of this family, of ASKED peers at most, the same ones not each time."""
    if family not in machine.listens & machine.calls:
        return {}
    found: dict[str, list[str]] = {}
    for place in places:
        if family in place.families and not place.is_local:
            maddr = place.maddr
            if kind_of(maddr) == "dnsaddr":
                continue  # p2pd would call by either family
            if kind_of(maddr) == "dns":
                maddr = f"/dns{family[2:]}/{maddr.removeprefix('/dns/')}"
            found.setdefault(place.peer_id, []).append(maddr)
    return {peer: found[peer] for peer in random.sample(sorted(found), min(ASKED, len(found)))}


class _Loop:
    """A thread with an event loop of its own, for the calling one may have a running one, as in a notebook."""

    def __init__(self, work):
        self._work, self._loop, self._task = work, asyncio.new_event_loop(), None
        self._thread = threading.Thread(target=self._run, name="dial back", daemon=True)

    def run_within(self, seconds: float) -> None:
        """Run it to its end, or break it off; what fails is logged."""
        self._thread.start()
        try:
            self._thread.join(seconds)
        finally:
            if self._thread.is_alive():
                with suppress(RuntimeError):  # it has just ended
                    self._loop.call_soon_threadsafe(self._cancel)
                self._thread.join(5.0)

    def _cancel(self) -> None:
        if self._task is not None:
            self._task.cancel()

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        try:
            self._task = self._loop.create_task(self._work)
            self._loop.run_until_complete(self._task)
        except (Exception, asyncio.CancelledError) as error:
            logger.info(f"No first peer could be asked to call back: {error!r}")
        finally:
            self._loop.run_until_complete(self._loop.shutdown_asyncgens())
            self._loop.close()


async def _ask_by_each(
    wanted: Mapping[str, Mapping[str, Sequence[str]]], host_maddrs: Sequence[str], answers: dict[str, list[str]]
) -> None:
    """All families at the same time; once IPv4 is known to work the other one does not matter."""
    tasks = {asyncio.create_task(ask_by(family, peers, host_maddrs, answers.setdefault(family, []))): family
             for family, peers in wanted.items()}  # fmt: skip
    pending = set(tasks)
    try:
        while pending:
            done, pending = await asyncio.wait(pending, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                if task.exception() is not None:
                    logger.info(f"Nobody could be asked by {FAMILIES[tasks[task]]}: {task.exception()!r}")
            if any(tasks[task] == "ip4" and majority(answers["ip4"]) for task in done):
                return
    finally:
        for task in pending:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def ask_by(
    family: str, peers: Mapping[str, Sequence[str]], host_maddrs: Sequence[str], answers: list[str]
) -> None:
    """Dial `peers` (id -> addresses) by this family and have them call back.

    :param answers: gets what each says as it comes; the rest is not awaited once most have reached us
    """
    here = [maddr for maddr in host_maddrs if (address := as_ip(host_of(maddr))) and f"ip{address.version}" == family]
    p2p = await P2P.create(host_maddrs=here, startup_timeout=START_WITHIN)
    try:
        own = [str(maddr).partition("/p2p/")[0] for maddr in await p2p.get_visible_maddrs()]
        asked = [asyncio.create_task(_ask(p2p, peer, maddrs, own)) for peer, maddrs in peers.items()]
        try:
            for said in asyncio.as_completed(asked):
                answers.append(await said)
                if 2 * answers.count(REACHED) > len(asked):
                    return
        finally:
            for task in asked:
                task.cancel()
            await asyncio.gather(*asked, return_exceptions=True)
    finally:
        await p2p.shutdown()


async def _ask(p2p: P2P, peer: str, maddrs: Sequence[str], own: Sequence[str]) -> str:
    peer_id = PeerID.from_base58(peer)
    plain = [Multiaddr(maddr.rpartition("/p2p/")[0]) for maddr in maddrs]
    try:
        await asyncio.wait_for(p2p._client.connect(peer_id, plain), CONNECT_WITHIN)
    except Exception as error:
        return f"it could not be called: {str(error)[:120] or type(error).__name__}"
    answer = await call_back(p2p, peer_id, own, ANSWER_WITHIN)
    return NOT_REACHED if answer.status == SILENT else answer.status
