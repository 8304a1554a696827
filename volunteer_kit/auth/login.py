"""Logging a volunteer in: what lies here already first, then the browser, then a token that he types.

login = Login(for_authority=True, organization="training-together")
login.find()                      # argument, this machine, Colab's or Kaggle's secrets, HF_TOKEN
surface.welcome(terms, login)     # asks if nothing was found
login.identity                    # Identity(name, orgs, token)
"""

from __future__ import annotations

from volunteer_kit.auth.browser import BrowserLogin, why_no_browser
from volunteer_kit.auth.identity import LATER, TOKEN_URL, Identity, LoginError, check
from volunteer_kit.auth.sources import look

__all__ = ["Identity", "Login", "LoginError", "check"]


class Login:
    """One volunteer's login; what a screen needs to ask for it. Tokens stay in memory; nothing is written."""

    token_url = TOKEN_URL

    def __init__(
        self, *, for_authority: bool = False, organization: str | None = None, client_id: str | None = None
    ) -> None:
        """`for_authority`, `organization`: see check(). `client_id`: the host's OAuth app at the Hub.

        The browser login of huggingface_hub's own app asks for every right, so for an authority it is offered only
        with a `client_id` whose app asks for "openid profile".
        """
        self.for_authority, self.organization, self.client_id = for_authority, organization, client_id
        self.identity: Identity | None = None
        self.notes: list[str] = []  # what was tried and did not do, in words
        self._browser: BrowserLogin | None = None

    def __repr__(self) -> str:
        return f"Login({self.identity!r})"

    @property
    def name(self) -> str | None:
        """Whom the Hub knows us as; None while nobody is logged in."""
        return self.identity.name if self.identity else None

    def find(self, token: str | None = None) -> Identity | None:
        """A login that is here already. What fails is noted, and the next is tried.

        Raises LoginError when no other token would do better now: no network, the Hub down, asked too often.
        """
        self.notes.clear()
        for found in look(token):
            if found.token is None:
                self.notes.append(f"{found.note}.")
                continue
            try:
                self.check(found.token)
            except LoginError as error:
                if error.kind in LATER:
                    raise
                self.notes.append(f"Not used: {found.where}. {error.first_line}")
            else:
                return self.identity
        return None

    def check(self, token: str) -> str:
        """Log in with this token; the name that it belongs to. Raises LoginError."""
        self.identity = check(token, for_authority=self.for_authority, organization=self.organization)
        return self.identity.name

    def browser(self) -> BrowserLogin | None:
        """The login in the browser, begun by the first call; None where it would give a token that can write, and
        where the Hub's client is too old for it, which is noted."""
        if self.for_authority and self.client_id is None:
            return None
        if (why := why_no_browser()) is not None:
            if why not in self.notes:
                self.notes.append(why)
            return None
        if self._browser is None:
            self._browser = BrowserLogin(self.client_id)
        return self._browser

    def from_browser(self) -> str | None:
        """The name, once somebody logged in with the browser; None before. Raises LoginError."""
        if self._browser is None or (granted := self._browser.take()) is None:
            return None
        self.identity = check(
            granted.token, for_authority=self.for_authority, organization=self.organization, scope=granted.scope
        )
        return self.identity.name

    def close(self) -> None:
        """Call off a browser login that nobody waits for any more."""
        if self._browser is not None:
            self._browser.cancel()
