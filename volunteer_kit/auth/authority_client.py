"""Asking an authority over HTTP: encrypted, within bounds of time and size, and nowhere else than at its address."""

from __future__ import annotations

import json
import time
import unicodedata
from typing import Any
from urllib.parse import urlsplit

import requests

from volunteer_kit.auth.identity import LoginError
from volunteer_kit.http_client import ProxyTrouble, http_session, is_loopback
from volunteer_kit.http_client import retry_after as retry_after_of

MAX_ANSWER = 16 * 2**20  # bytes; the longest ban list has 65,536 digests of 32 hex digits
TIMEOUT = (6.1, 90.0)  # s to connect, and between two bytes; a login waits for the Hub, which is asked three times
LONGEST = 150.0  # s for one answer, whatever drips in


class AuthorityRefused(LoginError):
    """The run's authority lets nobody in with this; str() says why and what to do.

    `kind`: as the authority says (banned, organization, not_listed, can_write, ...), or "away" where it does not
    answer, "insecure" where its address is not encrypted. `retry_after`: s, if the authority named them.
    """

    def __init__(self, kind: str, message: str, retry_after: float | None = None, status: int = 0) -> None:
        super().__init__(kind, message, retry_after)  # type: ignore[arg-type]  # more kinds than the Hub's
        self._status = status

    @property
    def is_final(self) -> bool:
        """Was it a judgement about this person, login or key? All else may be trouble that passes: an authority that
        was started with the wrong folder sends nobody away for good."""
        return self._status in (401, 403)


class AuthorityClient:
    """Raises AuthorityRefused (insecure) for an address where logins could be read on the way."""

    def __init__(self, url: str) -> None:
        self.url = _checked(url)
        self.host = urlsplit(self.url).hostname or ""

    def get(self, path: str, session: str | None = None, **query: Any) -> dict[str, Any]:
        """Raises AuthorityRefused."""
        return self._ask("GET", path, session, params={key: one for key, one in query.items() if one is not None})

    def post(self, path: str, body: dict[str, Any], session: str | None = None) -> dict[str, Any]:
        """Raises AuthorityRefused."""
        return self._ask("POST", path, session, json=body)

    def delete(self, path: str, session: str) -> dict[str, Any]:
        """Raises AuthorityRefused."""
        return self._ask("DELETE", path, session)

    def _ask(self, method: str, path: str, session: str | None, **content: Any) -> dict[str, Any]:
        headers = {"Authorization": f"Bearer {session}"} if session else {}
        try:  # a session for each question: it keeps no cookies, and threads share nothing
            with http_session() as http:
                with http.request(
                    method, self.url + path, headers=headers, timeout=TIMEOUT, allow_redirects=False, stream=True,
                    **content,
                ) as answer:  # fmt: skip
                    status, retry_after = answer.status_code, retry_after_of(answer.headers.get("Retry-After"))
                    text = _read(answer)
        except ProxyTrouble as trouble:
            raise AuthorityRefused("away", f"{trouble}\n2. Then run it again.") from None
        except (OSError, ValueError) as error:  # all of requests' are OSErrors; the name alone, for texts quote
            raise self._away(type(error).__name__) from None
        try:
            found = json.loads(text)
        except (ValueError, RecursionError):
            found = None
        if status == 200 and isinstance(found, dict):
            return found
        raise self._refusal(status, found, retry_after)

    def _refusal(self, status: int, found: Any, retry_after: float | None) -> AuthorityRefused:
        said = found.get("error") if isinstance(found, dict) else None
        if isinstance(said, dict) and isinstance(said.get("kind"), str) and isinstance(said.get("message"), str):
            kind = "down" if status >= 500 else said["kind"][:40]
            return AuthorityRefused(kind, _plain(said["message"]), retry_after, status)
        if status == 429:
            return AuthorityRefused("limit", "The run's authority is asked too often.\n1. Wait a minute.", retry_after)
        return self._away(f"HTTP {status}", retry_after, status)

    def _away(self, cause: str, retry_after: float | None = None, status: int = 0) -> AuthorityRefused:
        return AuthorityRefused(
            "away",
            f"The run's authority ({self.host}) does not answer ({cause}), and without it nobody joins.\n"
            "1. Look whether this machine is online.\n2. Run it again in some minutes.\n"
            "3. If it stays away, tell the run's host.",
            retry_after,
            status if status >= 500 else 0,
        )


def _checked(url: str) -> str:
    parts = urlsplit(url)
    if parts.scheme == "https" or (parts.scheme == "http" and is_loopback(parts.hostname or "")):
        return url.rstrip("/")
    raise AuthorityRefused(
        "insecure",
        f"The address of the run's authority, {url[:200]}, is not encrypted, so your login is not sent there.\n"
        "1. Ask the run's host for a run file whose authority begins with https://",
    )


def _read(answer: requests.Response) -> bytes:
    parts, size, until = [], 0, time.monotonic() + LONGEST
    for part in answer.iter_content(65_536):
        size += len(part)
        if size > MAX_ANSWER or time.monotonic() > until:
            raise ValueError("an answer without end")
        parts.append(part)
    return b"".join(parts)


def _plain(text: str) -> str:
    """What a server wrote, for a terminal: no control characters but line ends."""
    return "".join(c for c in text[:1500] if c == "\n" or not unicodedata.category(c).startswith("C"))
