"""One peer that leases, a process of its own, on a real DHT whose line can be cut, and that can forget a peer.

argv[1]: JSON settings. stdin: one JSON order a line, {"do": ...}. stdout: one JSON event a line, an "answer" each.
"""

import json
import sys

from hivemind.p2p import PeerID
from hivemind.utils import ValueWithExpiration

from volunteer_kit.data.leases import Lease
from volunteer_kit.swarm.leases.client import SwarmLeases
from volunteer_kit.swarm.net.peer import PeerConfig, start_peer
from volunteer_kit.worker import own_stdin


class CutDHT:
    """A DHT whose line can be cut: then it finds and stores nothing, as on the other side of a partition."""

    def __init__(self, dht):
        self._dht, self.cut, self.forgotten = dht, False, b""

    def __getattr__(self, name):
        return getattr(self._dht, name)

    def get(self, *args, **kwargs):
        found = None if self.cut else self._dht.get(*args, **kwargs)
        if found is not None and self.forgotten:
            kept = {key: value for key, value in found.value.items() if value.value["peer_id"] != self.forgotten}
            found = ValueWithExpiration(kept, found.expiration_time)
        return found

    def store(self, *args, **kwargs):
        return None if self.cut else self._dht.store(*args, **kwargs)


def main() -> None:
    settings, stdin = json.loads(sys.argv[1]), own_stdin()
    peer = start_peer(
        PeerConfig(
            initial_peers=settings.get("initial_peers", []),
            host_maddrs=["/ip4/127.0.0.1/tcp/0"],
            client_mode=False,
            identity_path=settings.get("identity_path"),
        )
    )
    dht = CutDHT(peer.dht)
    leases = SwarmLeases(dht, "test", Lease, lifetime=settings.get("lifetime", 60.0))
    print(json.dumps({"event": "connected", "maddrs": peer.visible_maddrs(), "peer_id": str(peer.peer_id)}), flush=True)
    for number, line in enumerate(stdin):
        order = json.loads(line)
        verb = order.pop("do")
        if verb in ("resume", "holds", "ended", "applied", "earns"):
            order["lease"] = Lease(*order["lease"])
        if verb == "cut":
            dht.cut = order["cut"]
            result = None
        elif verb == "forget":
            dht.forgotten = PeerID.from_base58(order["peer_id"]).to_bytes()
            result = None
        elif verb == "counts":
            result = dict(leases.counts)
        elif verb == "renew":
            result = leases._renew()
        else:
            result = getattr(leases, verb)(*order.values())
        if verb in ("applied", "renew"):  # told in the background; here until it is
            for key in leases._mine:
                leases._publish(key, wait=True)
        print(json.dumps({"event": "answer", "number": number, "result": result}), flush=True)
    peer.shutdown()


if __name__ == "__main__":
    main()
