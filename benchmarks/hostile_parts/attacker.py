"""The attacker's process: bare hivemind, a fresh identity for each attack.

stdin: one order in JSON a line, {"do": "perform", "name", "token", "identity", ...}, answered by an event "answer";
{"do": "release"} ends what is held open, of which an event "holding" tells.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import sys
import time
from typing import Any

from hivemind.p2p import P2P

from benchmarks.hostile_parts.hostile_peer import HostilePeer, Target
from benchmarks.hostile_parts.table import by_name
from volunteer_kit.swarm.net.peer import raise_file_limit

NICE = 5  # an attacker has a machine of its own; but training, which is nicer, leaves it enough of the two cores


def say(event: str, **fields: Any) -> None:
    sys.stdout.write(json.dumps({"event": event, **fields}) + "\n")
    sys.stdout.flush()


class Attacker:
    def __init__(self) -> None:
        self.released = asyncio.Event()

    async def hold(self, seconds: float) -> None:
        """Until we are told that it is enough, and for `seconds` at least."""
        say("holding")
        await asyncio.sleep(seconds)
        await self.released.wait()

    async def perform(self, order: dict[str, Any]) -> str:
        attack = by_name(order["name"])
        random.seed(0)
        self.released.clear()
        targets = [Target(**target) for target in order["targets"]]
        p2p = await P2P.create(
            initial_peers=[targets[0].maddr], identity_path=order["identity"], startup_timeout=60,
            check_if_identity_free=False,
        )  # fmt: skip
        try:
            about = {name: order[name] for name in ("prefix", "protocol", "authority", "dashboard")}
            deadline = time.monotonic() + attack.seconds
            peer = HostilePeer(
                p2p, bytes.fromhex(order["token"]), targets, deadline=deadline, hold=self.hold, **about
            )  # fmt: skip
            await peer.connect()
            say("begun")
            return await asyncio.wait_for(attack.perform(peer), attack.seconds + 15.0)
        except asyncio.TimeoutError:
            return "its time was over"
        except Exception as error:
            return f"{type(error).__name__}: {error}"[:200]
        finally:
            await p2p.shutdown()


async def main() -> None:
    os.nice(NICE)
    raise_file_limit()
    attacker = Attacker()
    say("ready")
    running: asyncio.Task | None = None

    async def answer(order: dict[str, Any]) -> None:
        say("answer", said=await attacker.perform(order))

    while line := await asyncio.to_thread(sys.stdin.readline):
        order = json.loads(line)
        if order["do"] == "release":
            attacker.released.set()
        else:
            running = asyncio.ensure_future(answer(order))
    if running is not None:
        running.cancel()


if __name__ == "__main__":
    asyncio.run(main())
