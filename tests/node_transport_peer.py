"""A node's transport in a process of its own, with its own p2pd: it answers each message with the same one.

argv[1]: JSON settings: identity (a file), listen (a multiaddr), first (multiaddrs). It prints its multiaddrs.
"""

import asyncio
import json
import sys

from hivemind.p2p import P2P

from volunteer_kit.swarm.node.transport import Transport


async def main(settings: dict) -> None:
    p2p = await P2P.create(
        initial_peers=settings["first"],
        host_maddrs=[settings["listen"]],
        identity_path=settings["identity"],
        check_if_identity_free=False,
        startup_timeout=60,
    )
    transport = await Transport.start(str(p2p.daemon_listen_maddr), run_key="run")
    transport.on_message = transport.send
    print(json.dumps([str(maddr) for maddr in await p2p.get_visible_maddrs()]), flush=True)
    await transport.lost


asyncio.run(main(json.loads(sys.argv[1])))
