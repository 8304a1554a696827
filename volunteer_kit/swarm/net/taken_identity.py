"""Ask the swarm whether another peer runs under a key that this machine is about to use."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hivemind.p2p import P2P, PeerID
from hivemind.p2p.p2p_daemon_bindings.utils import ControlFailure
from hivemind.utils.multiaddr import Multiaddr

from volunteer_kit.addressing import loopback_maddr

START_WITHIN = 45.0  # s; p2pd alone needs more than 15 s on a busy Colab VM
CONNECT_WITHIN = 30.0  # s; p2pd asks the peers that it knows, and dials all addresses that they tell

CALL_WITHIN = 10.0  # s; a router may drop a machine's call to its own public address without a word


async def is_taken(identity_path: str | Path, initial_peers: Sequence[str], within: float = CONNECT_WITHIN) -> bool:
    """Whether a peer under the key in this file is found through `initial_peers`. A peer that nobody can call is not
    found this way; one that has joined finds it by its records (same_key.py). Raises P2PDaemonError where none of
    `initial_peers` answers.

    :param within: s for the call
    """
    return await _answers(identity_path, [], within, initial_peers=[*initial_peers])


async def is_at(identity_path: str | Path, addresses: Sequence[str], within: float = CALL_WITHIN) -> bool:
    """Whether a peer under the key in this file answers at one of these addresses.

    :param within: s for the call
    """
    plain = [Multiaddr(address.partition("/p2p/")[0]) for address in addresses]
    return await _answers(identity_path, plain, within)


async def _answers(
    identity_path: str | Path, addresses: Sequence[Multiaddr], within: float, **options: Any
) -> bool:
    p2p = await P2P.create(
        host_maddrs=[loopback_maddr()],  # hivemind's default is 127.0.0.1, and there may be no IPv4
        dht_mode="client",
        startup_timeout=START_WITHIN,
        **options,
    )
    try:
        peer_id = PeerID.from_identity(Path(identity_path).read_bytes())
        await asyncio.wait_for(p2p._client.connect(peer_id, addresses), within)
        return True
    except (ControlFailure, asyncio.TimeoutError):  # nobody knows it, or it does not answer
        return False
    finally:
        await p2p.shutdown()


class AnyFamilyP2P(P2P):
    """hivemind's P2P, whose look for another peer under its identity needs no IPv4."""

    @classmethod
    async def is_identity_taken(
        cls, identity_path: str, *, initial_peers: Sequence[Any] | None, **options: Any
    ) -> bool:
        return await is_taken(identity_path, [str(maddr) for maddr in initial_peers or ()])
