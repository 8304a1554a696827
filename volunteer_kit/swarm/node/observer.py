"""Take the newest state of a run from its nodes as an observer: with the checks of a joiner, and without a vote."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final

from volunteer_kit.swarm.node.access import Access
from volunteer_kit.swarm.node.proofs import read_proof, why_not_proven
from volunteer_kit.swarm.node.signatures import Signatures
from volunteer_kit.swarm.node.training_state import UnusableState
from volunteer_kit.swarm.node.transfers import NEWEST, Carrier, TransferFailed, Transfers
from volunteer_kit.swarm.sync.entries import Head
from volunteer_kit.swarm.wire import WireError

logger = logging.getLogger(__name__)

OPENS_WITHIN: Final = 8.0  # s for a channel to another peer
LOOK_AGAIN: Final = 1.0  # s; who just came has no state yet


class Observer:
    """A peer without a node of its own.

    :param carrier: the transport
    :param elements: of the parameter vector, which bound a state's bytes
    :param take: of a file and what its log says that it is; raises UnusableState. In a thread
    """

    def __init__(
        self,
        carrier: Carrier,
        signatures: Signatures,
        access: Access,
        elements: int,
        take: Callable[[Path, Head], None],
        on_bytes: Callable[[int, int], None] = lambda done, total: None,
    ):
        self._signatures, self._access = signatures, access
        self._take, self._on_bytes = take, on_bytes
        self._transfers = Transfers(
            carrier,
            answer=_no_answer,
            keep_answer=lambda digest, data: None,
            largest_answer=0,
            elements=elements,
        )
        self.refused: dict[str, str] = {}  # peer -> why its state could not be used

    async def fetch(self, find: Callable[[], Sequence[str]], path: Path, patience: float) -> Head | None:
        """Take the newest state that somebody gives. :returns: what it is; None: nobody gave any in time.

        :param find: the run's nodes, the most advanced first; may take seconds
        :param path: where the file may lie meanwhile
        :param patience: s
        """
        deadline = time.monotonic() + patience
        while True:
            peers = await asyncio.get_running_loop().run_in_executor(None, find)
            for peer in peers:
                left = deadline - time.monotonic()
                if peer in self.refused or left <= 0:
                    continue
                try:
                    return await asyncio.wait_for(self._ask(peer, path), left)
                except (TransferFailed, asyncio.TimeoutError) as error:  # it may have one later
                    logger.info("No model came from %s: %s", peer, error)
                except (UnusableState, WireError) as error:
                    self.refused[peer] = str(error)
                    logger.warning("The model of %s is not taken: %s", peer, error)
            if time.monotonic() + LOOK_AGAIN > deadline:
                return None
            await asyncio.sleep(LOOK_AGAIN)

    async def _ask(self, peer: str, path: Path) -> Head:
        offer = await self._transfers.fetch_state(peer, path, OPENS_WITHIN, self._on_bytes, NEWEST)
        proof = read_proof(offer.signatures)
        why = why_not_proven(offer.snapshot, proof, self._access, self._signatures)
        if why:
            raise UnusableState(why)
        await asyncio.get_running_loop().run_in_executor(None, self._take, path, offer.snapshot.head)
        return offer.snapshot.head


def _no_answer(digest: bytes) -> bytes:
    raise KeyError(digest)
