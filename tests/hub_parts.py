"""What the stand-in Hub is made of: its repositories, what it was asked, what fails, and its two logins."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple


class Refused(Exception):
    """A status and the Hub's word for it."""


class Asked(NamedTuple):
    """A request as it came."""

    method: str
    path: str  # with the query
    range: str | None
    token: str | None


@dataclass
class Repo:
    files: dict[str, bytes | Path]
    commit: str
    revisions: tuple[str, ...]
    gated: bool
    private: bool

    def size(self, name: str) -> int:
        content = self.files[name]
        return content.stat().st_size if isinstance(content, Path) else len(content)


@dataclass
class Fault:
    part: str  # of the path
    times: int
    status: int | None
    retry_after: int | None
    cut_after: int | None  # bytes of a body, then the connection is reset


@dataclass
class App:
    """An OAuth app of a host: what its login page at the Hub gives, and to whom (RFC 6749, RFC 7636)."""

    client_id: str
    person: str = "mona"  # who is logged in at the Hub in this browser
    scope: str = "openid profile"
    codes: dict[str, dict[str, str]] = field(default_factory=dict)  # code -> what the browser brought


@dataclass
class Device:
    """The login in the browser (RFC 8628): what a person does there, and what the Hub then gives."""

    token: str = "hf_from_browser"
    scope: str | None = "openid profile"
    pending: int = 1  # polls until the person has answered
    answer: str = "granted"  # or an OAuth error: access_denied, expired_token
    interval: float = 0.05  # s; the Hub says 5
    expires_in: float = 300.0  # s
    clients: list[str] = field(default_factory=list)  # ids of the apps that asked
    polls: int = 0
