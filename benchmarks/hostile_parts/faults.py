"""Faults of the machine itself: processes that are killed, sockets that a cleaner removes."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from benchmarks.hostile_parts.attack import MACHINE, Attack
from benchmarks.hostile_parts.processes import DAEMON, DHT, MAIN, NODE, HonestPeer, One, sockets_of

if TYPE_CHECKING:
    from benchmarks.hostile_parts.swarm import SwarmRun

Fault = Callable[["SwarmRun"], HonestPeer]  # does it, and says to whom


def _kill(peer: HonestPeer, role: str) -> HonestPeer:
    one: One = peer.look()[role]
    os.kill(one.pid, signal.SIGKILL)
    return peer


def kills(role: str, of: str) -> Fault:
    def fault(run: SwarmRun) -> HonestPeer:
        return _kill(run.peer(of), role)

    fault.__doc__ = f"SIGKILL to {role} of {of}"
    return fault


def sockets_removed(run: SwarmRun) -> HonestPeer:
    """The control socket of p2pd and those where the peer's processes are called back, wherever they are."""
    peer = run.peer("volunteer 2")
    for one in peer.look().values():
        for path in sockets_of(one.pid):
            if "hivemind" in path.name or "p2p" in path.name:
                with contextlib.suppress(OSError):
                    path.unlink()
    return peer


def stopped_daemon(run: SwarmRun) -> HonestPeer:
    """p2pd lives and answers nobody for a while, then dies: a machine without memory."""
    peer = run.peer("volunteer 3")
    one = peer.look()[DAEMON]
    os.kill(one.pid, signal.SIGSTOP)
    time.sleep(3.0)
    os.kill(one.pid, signal.SIGKILL)
    return peer


ATTACKS = [
    Attack("kill-dht", "a volunteer's DHT process", 2, kills(DHT, "volunteer 1"), (MACHINE,), is_quick=True),
    Attack("kill-p2pd", "a volunteer's p2pd", 2, kills(DAEMON, "volunteer 2"), (MACHINE,)),
    Attack("kill-node", "a volunteer's node", 2, kills(NODE, "volunteer 3"), (MACHINE,)),
    Attack("kill-worker", "a volunteer's worker", 2, kills(MAIN, "volunteer 2"), (MACHINE,)),
    Attack("stop-p2pd", "a volunteer's p2pd", 2, stopped_daemon, (MACHINE,)),
    Attack("sockets-removed", "p2pd's sockets", 2, sockets_removed, (MACHINE,)),
    Attack("kill-first-peers-dht", "the first peer's DHT process", 2, kills(DHT, "first peer"), (MACHINE,)),
    Attack("kill-monitors-dht", "the monitor's DHT process", 2, kills(DHT, "monitor"), (MACHINE,)),
]
