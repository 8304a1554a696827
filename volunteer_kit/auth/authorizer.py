"""The volunteer's side: joins by the authority, and keeps an access token that is good, in a thread of its own.

    authorizer = Authorizer(url, trust, "demo", key, hf_token, on_token=table.hold, on_refused=leave)
    authorizer.join()    # blocks; AuthorityRefused says why not
    authorizer.start()   # refreshes until stop(); nobody waits for it

A token lives 15 min and is renewed from a third of that on, so an authority may be away for ten minutes and nobody
notices. If it stays away longer the token ends, and the peer asks on until the authority is back.
"""

from __future__ import annotations

import base64
import binascii
import logging
import random
import threading
import time
from collections.abc import Callable
from typing import Any

from cryptography.hazmat.primitives.asymmetric import rsa

from volunteer_kit.auth.access_token import (
    MAX_LIFETIME,
    AccessToken,
    BanList,
    TokenError,
    Trust,
    peer_id_of_key,
    read_bans_statement,
    read_pardons,
    read_token,
)
from volunteer_kit.auth.authority_client import AuthorityClient, AuthorityRefused
from volunteer_kit.auth.patience import pause_after
from volunteer_kit.auth.proof import convict_claim, join_claim, prove, public_text, refresh_claim

FIRST_PAUSE = 2.0  # s after a question that nobody answered; then twice as long each time
LONGEST_PAUSE = 60.0  # s
LOOK_EVERY = 30.0  # s between looks whether the machine was suspended
_log = logging.getLogger(__name__)


class Authorizer:
    """
    :param url: of the authority; https, but on this machine
    :param trust: the run's root keys: a token that they do not stand behind is not taken from anybody
    :param identity: the peer's libp2p key
    :param hf_token: a login at the Hub that can only read; shown to the authority at `url` and nobody else
    :param scope: of that login, if it came from the browser; the authority does not rely on it
    :param on_token: called with each new token's envelope, first in join(), later in the authorizer's thread
    :param on_refused: called once with kind and message when the authority will not have us any more
    :param on_trouble: called once in a row of vain questions, with words for the screen
    :param clock: s since 1970
    :ivar trouble: why the newest question got no token; None: it got one
    Raises AuthorityRefused (insecure).
    """

    def __init__(
        self,
        url: str,
        trust: Trust,
        run_id: str,
        identity: rsa.RSAPrivateKey,
        hf_token: str,
        scope: str | None = None,
        *,
        on_token: Callable[[bytes], None] = lambda envelope: None,
        on_refused: Callable[[str, str], None] = lambda kind, message: None,
        on_trouble: Callable[[str], None] = lambda text: None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._client = AuthorityClient(url)
        self._trust, self._run_id, self._key, self._clock = trust, run_id, identity, clock
        self._hf_token, self._scope = hf_token, scope
        self._on_token, self._on_refused, self._on_trouble = on_token, on_refused, on_trouble
        self.trouble: AuthorityRefused | None = None
        self._public_key = public_text(identity)
        self._peer_id = peer_id_of_key(self._public_key)
        self._stopped = threading.Event()
        self._thread: threading.Thread | None = None
        self._due = 0.0  # by time.monotonic(): when to refresh
        self._failures = 0
        self._rejoin = False
        self.token: AccessToken | None = None  # the newest; it may have expired while the authority was away

    def __repr__(self) -> str:
        return f"Authorizer({self._client.host}, {self.token.username if self.token else 'not joined'})"

    def __getstate__(self) -> dict[str, Any]:
        raise TypeError("An Authorizer holds a login and is not pickled; send the tokens that it gets.")

    # --- joining ---

    def join(self) -> AccessToken:
        """Waits for the answer. Raises AuthorityRefused, a LoginError with the reason and the way out."""
        moment = int(self._clock())
        body = self._body(join_claim(self._run_id, moment, self._hf_token), moment)
        answer = self._client.post("/v1/join", {**body, "hf_token": self._hf_token, "scope": self._scope})
        return self._take(answer)

    def refresh(self) -> AccessToken:
        """A new token for the peer that has joined. Raises AuthorityRefused."""
        moment = int(self._clock())
        return self._take(self._client.post("/v1/refresh", self._body(refresh_claim(self._run_id, moment), moment)))

    def _body(self, claim: bytes, moment: int) -> dict[str, Any]:
        return {
            "run_id": self._run_id,
            "public_key": self._public_key.decode(),
            "time": moment,
            "proof": prove(self._key, claim),
        }

    def _take(self, answer: dict[str, Any]) -> AccessToken:
        """Nobody's word is taken for it: the token must be the one that other peers will believe."""
        try:
            envelope = base64.b64decode(answer["token"], validate=True)
            token = read_token(envelope, self._trust, self._clock())
            if token.peer_id != self._peer_id:
                raise TokenError("other_peer", "it is for another peer")
        except (KeyError, TypeError, binascii.Error, ValueError) as error:
            raise _unbelievable(str(error) if isinstance(error, TokenError) else "it cannot be read") from None
        self.token, self._failures, self.trouble = token, 0, None
        self._rejoin = bool(answer.get("join_again"))
        self._due = time.monotonic() + (token.expires_at - self._clock()) / 3
        self._on_token(envelope)
        return token

    # --- staying ---

    def start(self) -> None:
        """Refresh from a third of the token's life on, in a thread. join() comes before."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="authorizer", daemon=True)
            self._thread.start()

    def stop(self, within: float = 2.0) -> None:
        """Ask no more; waits up to `within` s for a question under way."""
        self._stopped.set()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(within)

    def _run(self) -> None:
        while not self._stopped.wait(min(LOOK_EVERY, max(0.0, self._due - time.monotonic()))):
            if time.monotonic() < self._due and not self._has_slept():
                continue
            try:
                self._renew()
            except AuthorityRefused as refused:
                if refused.is_final:
                    self._stopped.set()
                    self._on_refused(refused.kind, str(refused))
                    return
                self._wait_longer(refused)
            except Exception:  # a callback's; without this thread the token would end silently
                _log.exception("Refreshing the access token broke; it is tried again")
                self._wait_longer(None)

    def _has_slept(self) -> bool:
        """The machine was suspended: its monotonic clock stood still, and the token's time went on. Or its clock was
        set back, and the token would last too long to be believed."""
        if self._failures > 0 or self.token is None:
            return False
        return not LOOK_EVERY <= self.token.expires_at - self._clock() <= MAX_LIFETIME + LOOK_EVERY

    def _renew(self) -> None:
        if self._rejoin:
            try:
                self.join()
                return
            except AuthorityRefused as refused:
                if refused.kind in ("banned", "organization", "not_listed"):
                    raise
                _log.warning("Signing in again did not work yet: %s", refused.first_line)
        try:
            self.refresh()
        except AuthorityRefused as refused:
            if refused.kind != "unknown":
                raise
            self.join()

    def _wait_longer(self, refused: AuthorityRefused | None) -> None:
        asked_for = refused.retry_after if refused else None
        pause = pause_after(self._failures, asked_for, FIRST_PAUSE, LONGEST_PAUSE)
        self._failures += 1
        self.trouble = refused or self.trouble
        if refused and self._failures == 1:
            left = max(0.0, self.token.expires_at - self._clock()) if self.token else 0.0
            is_known = refused.kind != "clock" and left <= MAX_LIFETIME
            good = f"is good for {left / 60:.0f} min more" if is_known else "holds until it ends"
            text = f"{refused.first_line} The access token in hand {good}; asking on."
            _log.warning(text)
            try:
                self._on_trouble(text)
            except Exception:  # without this thread the token would end silently
                _log.exception("The trouble with the authority could not be told")
        # jitter: when an authority comes back, its volunteers must not all knock in the same second
        self._due = time.monotonic() + pause * random.uniform(0.7, 1.3)

    def why_no_token(self) -> str | None:
        """Why the others admit us no longer: our token has ended, and in words why there is no other one. None while
        it holds."""
        token, trouble = self.token, self.trouble
        if token is None or token.expires_at > self._clock():
            return None
        why = trouble.first_line if trouble else f"The run's authority ({self._client.host}) is being asked."
        return f"This machine's access token has ended, so the others admit it no longer. {why} It goes on asking."

    def report_conviction(self, evidence: str, votes: int, token: bytes) -> str:
        """A monitor's: that so many accounts convict somebody, by this JSON of auth.evidence.Evidence.

        :param token: the monitor's access token
        :returns: what was done, in words. Raises AuthorityRefused.
        """
        moment = int(self._clock())
        body = self._body(convict_claim(self._run_id, moment, evidence), moment)
        said = {"token": base64.b64encode(token).decode(), "evidence": evidence, "votes": votes}
        return str(self._client.post("/v1/convict", {**body, **said}).get("done", ""))

    # --- who is shut out ---

    def bans(self, known_version: int | None = None) -> tuple[BanList, bytes] | None:
        """The list and the authority's signed statement of it, checked; None if it is still the known version.

        Raises AuthorityRefused (away, down; forged for a list that the authority did not sign).
        """
        answer = self._client.get("/v1/bans", known=known_version)
        if known_version is not None and answer.get("version") == known_version:
            return None
        try:
            envelope = base64.b64decode(answer["statement"], validate=True)
            statement = read_bans_statement(envelope, self._trust, self._clock())
            pardons = self._pardons(answer, statement.version)
            bans = BanList.of(statement.version, (bytes.fromhex(account) for account in answer["accounts"]), pardons)
        except (KeyError, TypeError, binascii.Error, ValueError) as error:
            raise _unbelievable(str(error) if isinstance(error, TokenError) else "it cannot be read") from None
        if not bans.matches(statement):
            raise _unbelievable("the list is another than the signed one")
        return bans, envelope

    def _pardons(self, answer: dict[str, Any], version: int) -> dict[bytes, float]:
        """Raises what bans() looks for. An older authority names none."""
        if answer.get("pardons") is None:
            return {}
        return read_pardons(base64.b64decode(answer["pardons"], validate=True), self._trust, version, self._clock())


def _unbelievable(reason: str) -> AuthorityRefused:
    return AuthorityRefused(
        "forged",
        f"What the run's authority sent is not to be believed: {reason}.\n"
        "1. Take the newest run file from the run's host: it names the key that signs.\n"
        "2. Look whether this machine's clock is right: timedatectl",
    )
