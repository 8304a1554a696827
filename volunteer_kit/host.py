"""The run's first peer: it never trains, it is the address that volunteers are given."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Sequence
from pathlib import Path

from volunteer_kit.runs import RunConfig, load_run
from volunteer_kit.swarm.peer import PeerConfig, start_peer

LOCAL = ("/ip4/127.", "/ip6/::1/")


def host_run(
    run: str | Path | RunConfig,
    *,
    identity_path: str | Path | None = None,
    host_maddrs: Sequence[str] = ("/ip4/0.0.0.0/tcp/0",),
    announce_maddrs: Sequence[str] = (),
    initial_peers: Sequence[str] = (),
    stop: threading.Event | None = None,
    say: Callable[[str], None] = print,
) -> None:
    """Keep a bootstrap peer up until Ctrl-C, SIGTERM or `stop`; prints its addresses and how to join.

    With `identity_path` the peer id, and so the address, stays the same after a restart; name a port in
    `host_maddrs` for the same reason. Behind a router, listen on 0.0.0.0 and announce the public address.
    Raises RunError, SwarmError.
    """
    config = run if isinstance(run, RunConfig) else load_run(run)
    stop = stop or threading.Event()
    peer = start_peer(
        PeerConfig(
            host_maddrs=[*host_maddrs],
            announce_maddrs=[*announce_maddrs],
            initial_peers=[*initial_peers],
            identity_path=str(identity_path) if identity_path else None,
        )
    )
    try:
        if threading.current_thread() is threading.main_thread():  # only now: the peer's processes would inherit it
            for number in (signal.SIGINT, signal.SIGTERM):
                signal.signal(number, lambda *_: stop.set())
        name = config.run_id if isinstance(run, RunConfig) else str(run)
        for line in invitation(name, peer.visible_maddrs()):
            say(line)
        while not stop.wait(0.5):
            pass
        say("Stopping.")
    finally:
        peer.shutdown()


def invitation(run: str, addresses: Sequence[str]) -> list[str]:
    """What to print: the addresses, the command for volunteers, and a warning if nobody outside can use it."""
    public = [address for address in addresses if not address.startswith(LOCAL)]
    lines = ["This peer is up. Its addresses:", *(f"  {address}" for address in addresses)]
    lines += ["Volunteers join with:", f"  volunteer-kit join {run} --initial-peers {(public or addresses)[0]}"]
    if not public:
        lines.append("Only this machine can reach it: for others, use --host-maddrs /ip4/0.0.0.0/tcp/PORT")
    return [*lines, "Ctrl-C stops it."]
