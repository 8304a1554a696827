"""A run with a real authority over HTTP, peers of it that train, and others who knock; all on loopback."""

from __future__ import annotations

import contextlib
import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from hivemind.p2p import PeerID

from tests.hub import Hub
from tests.local_authority import RUN, Authority, add_person, make_authority, served, this_hub
from tests.local_swarm import LocalPeer
from tests.trust import make_identity
from volunteer_kit.auth.access_token import AccessToken, KeyFolder, issue_token
from volunteer_kit.auth.authority_client import AuthorityClient
from volunteer_kit.auth.authorizer import Authorizer
from volunteer_kit.auth.moderation import Allowlist
from volunteer_kit.swarm.net.identity import ensure_identity

STRANGER = "benchmarks.admission_parts.stranger"
MODERATOR = "Mona"
START = 120.0  # s until all peers average together, on two busy cores


class Run:
    """The run's authority, its moderator, and everybody's processes."""

    def __init__(self, folder: Path, hub: Hub, authority: Authority, url: str):
        self.folder, self.hub, self.authority, self.url = folder, hub, authority, url
        self.peers: list[LocalPeer] = []
        self.started: list[LocalPeer] = []  # strangers too
        self._client = AuthorityClient(url)
        token = add_person(hub, MODERATOR)
        self._session = self._client.post("/v1/moderate/session", {"hf_token": token})["session"]

    # --- the swarm ---

    def add_peer(self, **settings: Any) -> LocalPeer:
        """The first is the host's, which leads in spreading the bans; the others are volunteers who log in."""
        number = len(self.peers)
        identity = self.folder / f"peer-{number}.key"
        make_identity(identity)
        ours = {"identity": str(identity), "run_id": RUN, "public_key": self.authority.public_key}
        ours["authority"] = self.url
        if number == 0:
            ours["keys"] = str(self.authority.keys.path)
        else:
            ours["hf_token"] = add_person(self.hub, f"peer{number}")
            ours["initial_peers"] = self.peers[0].wait_event("connected")["maddrs"]
        peer = LocalPeer(self.folder / f"peer-{number}.log", seed=number + 1, **ours, **settings)
        self.peers.append(peer)
        self.started.append(peer)
        return peer

    def wait_until_all_average(self) -> None:
        try:
            for peer in self.peers:
                peer.wait_epoch(1, group_size=len(self.peers), timeout=START)
        except AssertionError:  # whoever is missing tells nothing to the others
            stories = "\n\n".join(f"{peer.ask(ask='refused', timeout=5)}\n{peer.story()}" for peer in self.peers)
            raise AssertionError(f"they do not all average together\n{stories}") from None

    @property
    def ids(self) -> list[str]:
        return [peer.wait_event("connected")["peer_id"] for peer in self.peers]

    # --- those who knock ---

    def add_stranger(self, name: str) -> LocalPeer:
        """A process of hivemind's alone. `id_of` says who it is."""
        identity = self.identity_of(name)
        if not identity.exists():
            make_identity(identity)
        maddrs = [maddr for peer in self.peers for maddr in peer.wait_event("connected")["maddrs"]]
        stranger = LocalPeer(self.folder / f"{name}.log", module=STRANGER, maddrs=maddrs, identity=str(identity))
        self.started.append(stranger)
        stranger.wait_event("connected")
        return stranger

    def identity_of(self, name: str) -> Path:
        return self.folder / f"{name}.key"

    def join(self, name: str) -> bytes:
        """By the authority's HTTP, as a volunteer does. :returns: the token"""
        held: list[bytes] = []
        key = ensure_identity(self.identity_of(name))
        login = add_person(self.hub, name)
        Authorizer(self.url, self.authority.trust, RUN, key, login, on_token=held.append).join()
        return held[0]

    # --- the moderator ---

    def ban(self, name: str) -> float:
        """:returns: time.monotonic() of the authority's answer"""
        self._client.post("/v1/moderate/ban", {"username": name, "reason": "for the benchmark"}, self._session)
        return time.monotonic()


def token(keys: KeyFolder, peer_id: str, name: str, seconds: float, run_id: str = RUN) -> bytes:
    """What the holder of these keys can issue, whether anybody would take it or not."""
    peer = PeerID.from_base58(peer_id).to_bytes()
    signer = keys.signer("authority")
    return issue_token(signer, AccessToken(name, peer, b"k" * 32, run_id, "volunteer", time.time() + seconds))


def keys_of_another_run(folder: Path, root_of: KeyFolder | None = None) -> KeyFolder:
    """With a root key of its own, or with that of `root_of`: a host may have several runs."""
    if root_of is not None:
        folder.mkdir(parents=True)
        shutil.copy(root_of.path / "root.pem", folder / "root.pem")
    keys = KeyFolder(folder)
    keys.create("another-run")
    return keys


def forgers_keys(folder: Path) -> KeyFolder:
    """Made by somebody who calls his run ours."""
    keys = KeyFolder(folder)
    keys.create(RUN)
    return keys


@contextlib.contextmanager
def run(folder: Path, peers: int, **settings: Any) -> Iterator[Run]:
    """A swarm of so many peers that average together, or an authority that waits for some; all is ended after it."""
    with Hub() as hub, this_hub(hub):  # the authority's, in this process
        authority = make_authority(folder, allowlist=Allowlist.of(is_open=True, moderators=[MODERATOR]))
        with served(authority) as url:
            running = Run(folder, hub, authority, url)
            try:
                for _ in range(peers):
                    running.add_peer(**settings)
                if peers:
                    running.wait_until_all_average()
                yield running
            finally:
                for process in running.started:
                    process.kill()
