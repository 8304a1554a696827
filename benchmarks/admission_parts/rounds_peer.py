"""One member of a swarm that only averages, a process of its own: rounds on demand, with or without admission.

argv[1]: JSON settings, see tests/peer_questions.py:membership, and "values": how many are averaged. A line on stdin: a
round.
"""

from __future__ import annotations

import json
import sys
import time

import psutil
import torch

from tests.orders import say
from tests.peer_questions import membership
from volunteer_kit.swarm.codec import make_codec
from volunteer_kit.swarm.grad_averager import SwarmGradientAverager
from volunteer_kit.swarm.peer import PeerConfig, start_peer
from volunteer_kit.worker import own_stdin

PATIENCE = 30.0  # s for a round


def main() -> None:
    settings = json.loads(sys.argv[1])
    torch.set_num_threads(1)
    stdin, member = own_stdin(), membership(settings)
    config = PeerConfig(
        initial_peers=settings.get("initial_peers", []),
        host_maddrs=["/ip4/127.0.0.1/tcp/0"],
        identity_path=settings.get("identity"),
        client_mode=False,
    )
    peer = start_peer(config, member.admission)
    member.keep(peer)
    say("connected", maddrs=peer.visible_maddrs(), peer_id=str(peer.peer_id))
    averager = SwarmGradientAverager(
        [torch.nn.Parameter(torch.randn(2**16)) for _ in range(settings["values"] // 2**16)],
        dht=peer.dht,
        prefix="rounds",
        admission=peer.admission,
        compression=make_codec("float16", "uniform8", 512),
        client_mode=False,
        min_matchmaking_time=5.0,
        allreduce_timeout=20.0,
        warn=False,
        start=True,
    )
    averager.expected_group_size = settings["group"]
    say("ready")
    for number, _ in enumerate(stdin):
        say("answer", number=number, **one_round(averager))
    averager.shutdown()
    member.close()
    peer.shutdown()


def one_round(averager: SwarmGradientAverager) -> dict:
    """s in all and without matchmaking, CPU s of all this peer's processes, and members."""
    before, started = cpu_seconds(), time.perf_counter()
    try:
        outcome = averager.step(weight=1.0, timeout=PATIENCE)
    except Exception as error:
        return {"failure": repr(error)}
    seconds = time.perf_counter() - started
    return {
        "seconds": seconds,
        "without_matchmaking": outcome.seconds,
        "cpu": cpu_seconds() - before,
        "members": len(outcome),
        "received": outcome.received,
    }


def cpu_seconds() -> float:
    """Of this process and those that it has started."""
    own = psutil.Process()
    times = [process.cpu_times() for process in (own, *own.children(recursive=True))]
    return sum(one.user + one.system for one in times)


if __name__ == "__main__":
    main()
