"""A run's keys for tests: tokens for any peer, good and bad, without an authority around them."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from pathlib import Path

from hivemind.p2p import P2P, PeerID

from volunteer_kit.auth.access_token import (
    AccessToken,
    BanList,
    KeyFolder,
    Signer,
    Trust,
    account_digest,
    issue_token,
    sign_bans,
)
from volunteer_kit.swarm.net.access.control import Admission
from volunteer_kit.swarm.net.identity import load_private_key


@dataclass
class RunKeys:
    """Keys of one run, in a folder."""

    folder: Path
    run_id: str = "test"
    bans: BanList = field(default_factory=BanList)

    def __post_init__(self):
        self.keys = KeyFolder(self.folder / self.run_id)
        self.public_key = self.keys.create(self.run_id)
        self.trust = Trust.of(self.run_id, self.public_key)

    @property
    def signer(self) -> Signer:
        return self.keys.signer("authority")

    def token(self, peer_id: PeerID, username: str = "ada", seconds: float = 600.0, role: str = "volunteer") -> bytes:
        key_hash = b"k" * 32
        expires = time.time() + seconds
        return issue_token(self.signer, AccessToken(username, peer_id.to_bytes(), key_hash, self.run_id, role, expires))

    def admission(self, *, own: PeerID | None = None, username: str = "ada", **others: PeerID) -> Admission:
        """What a peer knows to whom `others` (username=peer) have shown their tokens."""
        admission = Admission(self.trust)
        if own is not None:
            admission.set_own(self.token(own, username))
        for name, peer_id in others.items():
            assert admission.show(self.token(peer_id, name), peer_id) is None
        return admission

    def ban(self, *usernames: str) -> tuple[BanList, bytes]:
        """A newer list, and the authority's word for it."""
        accounts = self.bans.accounts | {account_digest(self.run_id, name) for name in usernames}
        self.bans = BanList(self.bans.version + 1, accounts)
        return self.bans, self.statement()

    def statement(self, seconds: float = 120.0) -> bytes:
        return sign_bans(self.signer, self.bans, time.time(), time.time() + seconds)


def make_identity(path: Path) -> PeerID:
    """A libp2p identity file, and whose it is."""
    P2P.generate_identity(str(path))
    return peer_id_of_file(path)


def peer_id_of_file(path: Path) -> PeerID:
    from volunteer_kit.auth.access_token import peer_id_of_key

    return PeerID(peer_id_of_key(load_private_key(path.read_bytes()).get_public_key().to_bytes()))
