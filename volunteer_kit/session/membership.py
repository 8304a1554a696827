"""A peer's right to be in a run that has an authority: asked for, shown, kept fresh, and lost."""

from __future__ import annotations

import tempfile
import threading
from collections.abc import Callable
from pathlib import Path

from volunteer_kit.auth.access_token import BanList, Trust
from volunteer_kit.auth.authority_client import AuthorityRefused
from volunteer_kit.auth.authorizer import Authorizer
from volunteer_kit.auth.identity import LoginError
from volunteer_kit.auth.patience import ask_patiently
from volunteer_kit.runs import RunConfig
from volunteer_kit.swarm.net.access.control import Admission
from volunteer_kit.swarm.net.identity import ensure_identity
from volunteer_kit.swarm.net.peer import Peer
from volunteer_kit.swarm.records.credentials import AdmissionKeeper

LOGIN_STEPS = "1. Join again, and log in.\n2. In a terminal: hf auth login, then the same command once more."


class Membership:
    """Of one worker. In a run without an authority there is nothing to ask, and everybody is admitted.

    :param identity_path: the peer's key, made if it is missing; None: one for this stay only
    :param on_trouble: gets words for the screen when the authority gives no new token for a while
    :ivar on_news: called when there is a new token, or a newer list of bans; from other threads
    :ivar refused: set when the authority will have us no longer; `why` says so in words
    """

    def __init__(
        self,
        run: RunConfig,
        identity_path: str | None,
        hf_token: str | None,
        on_trouble: Callable[[str], None] = lambda text: None,
    ):
        self._on_trouble = on_trouble
        self.on_news: Callable[[], None] = lambda: None
        self.refused, self.why = threading.Event(), ""
        self._scratch = tempfile.TemporaryDirectory(prefix="volunteer-kit-") if identity_path is None else None
        self.identity_path = identity_path or str(Path(self._scratch.name) / "identity.key")
        self._keeper: AdmissionKeeper | None = None
        self._authorizer: Authorizer | None = None
        self.trust: Trust | None = None
        self.admission = Admission()
        if run.authority is not None:
            self.trust = Trust.of(run.run_id, run.authority.public_key)
            self.admission = Admission(self.trust)
            self._authorizer = self._make_authorizer(run, self.trust, hf_token)

    def _make_authorizer(self, run: RunConfig, trust: Trust, hf_token: str | None) -> Authorizer:
        if not hf_token:
            what = f"The run {run.run_id!r} asks who you are, and nobody is logged in."
            raise LoginError("wrong", f"{what}\n{LOGIN_STEPS}")
        key = ensure_identity(self.identity_path)
        return Authorizer(
            run.authority.url, trust, run.run_id, key, hf_token,
            on_token=self._take, on_refused=self._lose, on_trouble=self._on_trouble,
        )  # fmt: skip

    def ask(
        self,
        leave: threading.Event | None = None,
        on_wait: Callable[[str, float], None] = lambda reason, seconds: None,
    ) -> None:
        """Before the peer is started. Waits for an authority that is away. Raises AuthorityRefused, a LoginError, with
        the reason.

        :param leave: ends the waiting without a token
        :param on_wait: told what it waits for, and how long until it asks again, s
        """
        if self._authorizer is not None:
            leave = leave or threading.Event()
            ask_patiently(self._authorizer.join, lambda trouble, pause: on_wait(trouble.first_line, pause), leave.wait)

    def why_no_token(self) -> str | None:
        """As Authorizer's; None in a run without an authority."""
        return self._authorizer.why_no_token() if self._authorizer is not None else None

    def keep(self, peer: Peer) -> None:
        """Once the peer is up, until close()."""
        if self._authorizer is not None:
            self._keeper = AdmissionKeeper(peer, self._authorizer.bans, on_bans=self._look_for_ourselves)
            self._authorizer.start()

    def close(self) -> None:
        if self._authorizer is not None:
            self._authorizer.stop()
        if self._keeper is not None:
            self._keeper.close()
        if self._scratch is not None:
            self._scratch.cleanup()

    def _take(self, envelope: bytes) -> None:
        if self._keeper is None:
            self.admission.set_own(envelope)
        else:
            self._keeper.publish(envelope)
        self.on_news()

    def _look_for_ourselves(self, bans: BanList) -> None:
        """Who is banned hears the reason at once, not when his token has to be renewed."""
        self.on_news()
        if self._authorizer.token.account not in bans.accounts:
            return
        try:
            self._authorizer.refresh()
        except AuthorityRefused as refused:
            if refused.is_final:
                self._lose(refused.kind, str(refused))

    def _lose(self, kind: str, message: str) -> None:
        self.why = message
        self.refused.set()
