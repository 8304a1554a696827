"""Sign tokens for the host's own peers (first peer, monitor), which have the run's keys beside them and ask nobody."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path

from hivemind.p2p import PeerID
from hivemind.utils.crypto import RSAPublicKey
from hivemind.utils.logging import get_logger

from volunteer_kit.auth.access_token import (
    MAX_LIFETIME,
    AccessToken,
    BanList,
    KeyFolder,
    Trust,
    issue_token,
    key_hash,
    peer_id_of_key,
)
from volunteer_kit.auth.authorizer import Authorizer
from volunteer_kit.swarm.net.access.control import Admission
from volunteer_kit.swarm.net.identity import ensure_identity
from volunteer_kit.swarm.net.peer import Peer
from volunteer_kit.swarm.records.credentials import AdmissionKeeper

logger = get_logger(__name__)
NAMES = {"host": "(host)", "monitor": "(monitor)"}  # the Hub's accounts have no parentheses


class HostMembership:
    """Issues tokens for one peer with the authority's key, and leads in spreading the bans.

    :param url: of the authority, which knows who is banned
    :param keys: the run's KeyFolder
    :param role: "host" or "monitor"
    :ivar on_news: called, in a thread, when there is a new token or a newer list of bans
    Raises KeysError, SwarmError (identity).
    """

    def __init__(self, run_id: str, url: str, public_key: str, keys: str | Path, identity_path: str | Path, role: str):
        self._keys, self._role, self._run_id = KeyFolder(keys), role, run_id
        key = ensure_identity(identity_path)
        self._public_key = RSAPublicKey(key.public_key()).to_bytes()
        trust = Trust.of(run_id, public_key)
        self.admission = Admission(trust)
        self._authority = Authorizer(url, trust, run_id, key, "")  # who asks for the bans only shows no login
        self._keeper: AdmissionKeeper | None = None
        self.on_news: Callable[[], None] = lambda: None
        self._stop = threading.Event()
        self.admission.set_own(self._issue())

    @property
    def peer_id(self) -> PeerID:
        return PeerID(peer_id_of_key(self._public_key))

    def keep(self, peer: Peer, on_bans: Callable[[BanList], None] | None = None) -> None:
        """Once the peer is up, until close()."""

        def take(bans: BanList) -> None:
            self.on_news()
            if on_bans is not None:
                on_bans(bans)

        self._keeper = AdmissionKeeper(peer, self._authority.bans, leads=True, on_bans=take)
        threading.Thread(target=self._renew, name="own-token", daemon=True).start()

    def report_conviction(self, evidence: str, votes: int) -> str:
        """See Authorizer. Raises AuthorityRefused, a LoginError."""
        return self._authority.report_conviction(evidence, votes, self.admission.own_token)

    def close(self) -> None:
        self._stop.set()
        if self._keeper is not None:
            self._keeper.close()

    def _renew(self) -> None:
        while not self._stop.wait(MAX_LIFETIME / 3):
            try:
                self._keeper.publish(self._issue())
                self.on_news()
            except Exception:  # a full disk, a key being put back: the next attempt comes before the token has ended
                logger.exception("This peer's own access token could not be renewed")

    def _issue(self) -> bytes:
        signer, expires_at = self._keys.signer("authority"), time.time() + MAX_LIFETIME
        peer_id, hashed = peer_id_of_key(self._public_key), key_hash(self._public_key)
        return issue_token(
            signer, AccessToken(NAMES[self._role], peer_id, hashed, self._run_id, self._role, expires_at)
        )
