"""One peer that convicts others and honours what they convict, a process of its own; it trains nothing.

argv[1]: JSON settings, with an authority those of tests/peer_questions.py:membership; `keys` makes it the monitor.
stdin: questions in JSON. stdout: one JSON event a line.
"""

import functools
import json
import sys
from pathlib import Path
from types import SimpleNamespace

from hivemind.p2p import PeerID

from tests.convicting import strike_of
from tests.peer_questions import Questions, membership
from tests.somebody import record_of
from volunteer_kit.monitor.convictions import Convictions
from volunteer_kit.monitor.notes import Notes
from volunteer_kit.monitor.people import Bans
from volunteer_kit.swarm.net.peer import Peer, PeerConfig, start_peer
from volunteer_kit.swarm.records.host_credentials import HostMembership
from volunteer_kit.swarm.records.peer_record import PeerBoard
from volunteer_kit.swarm.verification.convictions import ConvictionBoard
from volunteer_kit.swarm.verification.enforcement import ConvictionKeeper
from volunteer_kit.worker import own_stdin

say = functools.partial(print, flush=True)


class Convicting(Questions):
    def __init__(self, peer: Peer, run_key: str):
        super().__init__(peer)
        self.records = PeerBoard(peer.dht, run_key, lifetime=600.0)
        self.board = ConvictionBoard(peer.dht, run_key)
        self.keeper: ConvictionKeeper | None = None

    def take_part(self) -> dict:
        self.records.publish(record_of(self.peer.peer_id))
        return {}

    def seen(self) -> dict:
        return {"seen": [str(peer) for peer in self.records.fetch()]}

    def convict(self, peer: str) -> dict:
        accused = PeerID.from_base58(peer)
        return {"stored": self.board.publish(accused, [strike_of(accused)]).result(20)}

    def look(self) -> dict:
        """Now, not when it is time."""
        self.keeper.look()
        return {"condemned": [str(peer) for peer in self.keeper.condemned]}


def monitor_membership(settings: dict) -> HostMembership:
    where = (settings["authority"], settings["public_key"], settings["keys"], settings["identity"])
    return HostMembership(settings["run_id"], *where, "monitor")


def main() -> None:
    settings, stdin = json.loads(sys.argv[1]), own_stdin()
    member = monitor_membership(settings) if "keys" in settings else membership(settings)
    config = PeerConfig(
        initial_peers=settings.get("initial_peers", []), host_maddrs=["/ip4/127.0.0.1/tcp/0"],
        identity_path=settings.get("identity"), client_mode=False,
    )  # fmt: skip
    peer = start_peer(config, member.admission)
    questions = Convicting(peer, "test")
    if "keys" in settings:
        folder = Path(settings["identity"]).parent
        notes = Notes(folder / "journal.sqlite")
        notes.do("set_members", [{"peer_id": "x", "username": "mallory", "device": "", "here": True}])
        bans = Bans(folder / "bans.json", settings["run_id"], notes)
        member.keep(peer, on_bans=bans.take)
        about = SimpleNamespace(
            membership=member, peer=peer, run_key="test", admission=member.admission, board=questions.records
        )
        questions.keeper = Convictions(about, notes, member.admission.username_of, bans.explain)._keeper
    else:
        member.keep(peer)
        questions.keeper = ConvictionKeeper(questions.board, member.admission, questions.records.fetch)
    say(json.dumps({"event": "connected", "maddrs": peer.visible_maddrs(), "peer_id": str(peer.peer_id)}))
    for line in stdin:
        say(json.dumps({"event": "answer", **questions.answer(json.loads(line))}))


if __name__ == "__main__":
    main()
