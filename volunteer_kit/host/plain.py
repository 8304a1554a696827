"""A run without an authority: one peer that is the address, and whoever knows it takes part. For tests and for
machines that all are one's own."""

from __future__ import annotations

import queue
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from volunteer_kit.addressing import LISTEN

if TYPE_CHECKING:
    from volunteer_kit.runs import RunConfig

AGAIN = "1. Start it again: give the same command.\n2. If it happens again, report these lines."
LOCAL = ("/ip4/127.", "/ip6/::1/")


def host_peer_only(
    run: str | Path | RunConfig,
    *,
    identity_path: str | Path | None,
    host_maddrs: Sequence[str],
    announce_maddrs: Sequence[str],
    initial_peers: Sequence[str],
    stopped: Callable[[], bool],
    say: Callable[[str], None],
    on_start: Callable[[], None],
) -> None:
    """Keep a peer up in this process until `stopped()`. Raises RunError, SwarmError (identity_taken: another machine
    has a first peer of this run under its key, and was here before).

    :param on_start: called when the peer is up: signal handlers set earlier would be inherited by its processes
    """
    from volunteer_kit.runs import RunConfig, load_run
    from volunteer_kit.swarm.errors import SwarmError
    from volunteer_kit.swarm.net.peer import PeerConfig, start_peer
    from volunteer_kit.swarm.net.same_key import OF_FIRST_PEERS, KeyWatch, Sharing, TwinWatch
    from volunteer_kit.swarm.records.peer_record import PeerBoard

    config = run if isinstance(run, RunConfig) else load_run(run)
    peer = start_peer(
        PeerConfig(
            host_maddrs=[*host_maddrs],
            announce_maddrs=[*announce_maddrs],
            initial_peers=[*initial_peers],
            identity_path=str(identity_path) if identity_path else None,
        )
    )
    news: queue.SimpleQueue[Sharing] = queue.SimpleQueue()
    twins: TwinWatch | None = None
    try:
        PeerBoard(peer.dht, config.run_id)  # a node that cannot check signed records keeps none for others
        twins = TwinWatch(KeyWatch(peer.dht, config.run_id, peer.peer_id), news.put)
        on_start()
        name = config.run_id if isinstance(run, RunConfig) else str(run)
        for line in invitation(name, peer.visible_maddrs()):
            say(line)
        while not stopped():
            peer.processes.raise_if_broken(AGAIN)
            with suppress(queue.Empty):
                sharing = news.get(block=False)
                if sharing is Sharing.LATER:
                    raise SwarmError(OF_FIRST_PEERS[sharing], kind="identity_taken")
                say(OF_FIRST_PEERS[sharing])
            time.sleep(0.2)
        say("Stopping.")
    finally:
        if twins is not None:
            twins.close()
        peer.shutdown()


def invitation(run: str, addresses: Sequence[str]) -> list[str]:
    """What to print: the addresses, the command for volunteers, and a warning if nobody outside can use it."""
    public = [address for address in addresses if not address.startswith(LOCAL)]
    lines = ["This peer is up. Its addresses:", *(f"  {address}" for address in addresses)]
    lines += ["Volunteers join with:", f"  volunteer-kit join {run} --initial-peers {(public or addresses)[0]}"]
    if not public:
        everywhere = ",".join(maddr.replace("/tcp/0", "/tcp/PORT") for maddr in LISTEN)
        lines.append(f"Only this machine can reach it: for others, use --host-maddrs {everywhere}")
    return [*lines, "Ctrl-C stops it."]
