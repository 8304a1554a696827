"""A peer that only asks: it counts nothing, averages nothing, and shares no state."""

from __future__ import annotations

import asyncio
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from volunteer_kit.auth.access_token import Trust
from volunteer_kit.checkpoint import OPTIMIZER, save_checkpoint
from volunteer_kit.runs import RunConfig, run_key_of
from volunteer_kit.session.node_parts import layout_of, node_parts
from volunteer_kit.swarm.errors import SwarmError
from volunteer_kit.swarm.net.identity import load_private_key
from volunteer_kit.swarm.net.peer import PeerConfig, start_peer
from volunteer_kit.swarm.node.access import Access
from volunteer_kit.swarm.node.discovery import nodes_of
from volunteer_kit.swarm.node.observer import Observer
from volunteer_kit.swarm.node.signatures import Signatures
from volunteer_kit.swarm.node.training_state import TrainingState
from volunteer_kit.swarm.node.transport import Transport
from volunteer_kit.swarm.sync.entries import Head

SAY_EVERY = 2.0  # s


def download_checkpoint(
    config: RunConfig, initial_peers: Sequence[str], out: str, timeout: float, say: Callable[[str], None]
) -> Path:
    """Save the swarm's parameters in the folder `out`. Must run in the main thread of a process of its own.

    Raises SwarmError, CheckpointError.
    """
    say(f"Looking for the run {config.run_id} ...")
    epoch, named = _ask(config, initial_peers, Words(config, timeout, say))
    say(f"The model of epoch {epoch} is here.")
    meta = {"run_id": config.run_id, "fingerprint": config.fingerprint, "run": config.model_dump(mode="json")}
    return save_checkpoint(out, named, {**meta, "epoch": epoch})


class Words:
    """Report the progress of a download, and build the error for one that brought nothing.

    :param timeout: s
    """

    def __init__(self, config: RunConfig, timeout: float, say: Callable[[str], None]):
        self._config, self.timeout, self._say = config, timeout, say
        self._said_at = float("-inf")

    def on_download(self, done: int, total: int) -> None:
        """Report progress, in bytes."""
        if time.monotonic() - self._said_at >= SAY_EVERY:
            self._said_at = time.monotonic()
            self._say(f"{done / 1e6:,.0f} of {total / 1e6:,.0f} MB")

    def nothing_came(self) -> SwarmError:
        return SwarmError(
            f"Peers of the swarm answer, but none gave the model of the run {self._config.run_id!r} within "
            f"{self.timeout:.0f} s.\n"
            "1. Is anybody training it? Its first peer alone has no model.\n"
            "2. Is it the same run file? Only peers with the fingerprint "
            f"{self._config.fingerprint[:12]} are asked.\n"
            "3. On a slow line, give it longer: fetch_checkpoint(..., timeout=3600).",
            kind="no_state",
        )


def _ask(config: RunConfig, initial_peers: Sequence[str], words: Words) -> tuple[int, dict[str, torch.Tensor]]:
    """:returns: epoch, and tensors by name"""
    parts, run_key = node_parts(config), run_key_of(config)
    layout = layout_of(config, parts)
    codec = layout if layout.goes_by_steps else None
    state = TrainingState(parts.groups, parts.optimizer, parts.scheduler, parts.names, codec)
    with tempfile.TemporaryDirectory(prefix="volunteer-kit-") as scratch:
        identity = Path(scratch) / "identity.key"
        peer = start_peer(PeerConfig(initial_peers=[*initial_peers], client_mode=True, identity_path=str(identity)))

        async def ask() -> Head | None:
            key = load_private_key(identity.read_bytes())
            access = Access(Trust.of(config.run_id, config.authority.public_key) if config.authority else None)
            transport = await Transport.start(peer.daemon_address(), access=access, run_key=run_key)
            try:
                signatures = Signatures(key, transport.peer_id, run_key)
                observer = Observer(
                    transport,
                    signatures,
                    access,
                    parts.elements,
                    lambda path, head: state.load(path, head.lineage, head.epoch),
                    words.on_download,
                )
                return await observer.fetch(nodes_of(peer.dht, run_key), Path(scratch) / "state", words.timeout)
            finally:
                await transport.close()

        try:
            head = asyncio.run(ask())
        finally:
            peer.shutdown()
    if head is None:
        raise words.nothing_came()
    named = parts.for_checkpoint(state.named())
    return head.epoch, {name: tensor for name, tensor in named.items() if not name.startswith(OPTIMIZER)}

