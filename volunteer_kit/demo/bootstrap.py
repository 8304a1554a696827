"""The demo's first peer, in a process of its own: `python -m volunteer_kit.demo.bootstrap`.

Prints one line of JSON with its addresses and stays until its stdin ends: if the demo dies, so does this.
"""

from __future__ import annotations

import json
import signal
import sys
import threading

from volunteer_kit import output
from volunteer_kit.addressing import loopback_maddr
from volunteer_kit.swarm.errors import SwarmError
from volunteer_kit.swarm.net.children import end_program
from volunteer_kit.swarm.net.peer import PeerConfig, start_peer


def main() -> int:
    """Returns the exit code: 2 if the peer cannot start, after a line with the reason."""
    output.keep_up()
    try:
        peer = start_peer(PeerConfig(host_maddrs=[loopback_maddr()], client_mode=False))
    except SwarmError as error:
        print(json.dumps({"error": str(error)}), flush=True)
        return 2
    peer.processes.when_broken(_end_broken)
    stop = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: stop.set())
    threading.Thread(target=lambda: (sys.stdin.read(), stop.set()), daemon=True).start()
    try:
        print(json.dumps({"maddrs": peer.visible_maddrs()}), flush=True)
        while not stop.wait(0.5):
            pass
    finally:
        peer.shutdown()
    return 0


def _end_broken(why: str) -> None:
    end_program(lambda: print(f"{why}.", file=sys.stderr), 1)


if __name__ == "__main__":
    sys.exit(main())
