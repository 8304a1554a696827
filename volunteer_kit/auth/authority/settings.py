"""What an authority is told: whom it lets in, for how long, how often, and where it may be reached."""

from __future__ import annotations

import ipaddress
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import urlsplit

from volunteer_kit.addressing import in_url
from volunteer_kit.auth.access_token import MAX_LIFETIME
from volunteer_kit.auth.moderation import Allowlist


class AuthorityError(OSError):
    """An authority cannot be started, or used by its host; str() says what happened and what to do."""


@dataclass(frozen=True)
class Pace:
    """How often, as the `limits` package writes it. Per address: of IPv6 its /64, for one household has all of that.

    Raise `join` for a class that joins in one minute from behind one address.
    """

    join: str = "120/minute"  # per address; each asks the Hub
    account: str = "30/minute"  # joins of one account
    refresh: str = "1200/minute"  # per address; a peer refreshes every 5 min
    peer: str = "30/minute"  # refreshes of one key
    login: str = "20/minute"  # moderators, per address
    wrong: str = "20/minute"  # logins that the Hub refused, per address: nobody tries tokens through us
    read: str = "1200/minute"  # the ban list and the run's description, per address


@dataclass(frozen=True)
class Settings:
    """
    :param url: where volunteers reach it; https, but on this machine
    :param token_lifetime: s; a shorter one asks the authority more often, a longer one than 900 is not allowed
    :param max_peers: that one account may have in the run at once; more machines of one person are more load, not more
        people, and a sign of an account that is shared
    :param recheck_after: s after which an account has to sign in at the Hub again (it may have left the organization);
        up to the same time later it may still refresh, for the Hub may be away
    :param behind_proxy: a proxy on this machine does TLS and says who asks (X-Forwarded-For, X-Forwarded-Proto)
    """

    run_id: str
    url: str
    allowlist: Allowlist = field(default_factory=Allowlist)
    oauth_client_id: str | None = None
    help_url: str = ""
    run_link: str = ""
    run_file: Path | None = None  # what volunteers get at /run.yaml
    token_lifetime: float = MAX_LIFETIME
    max_peers: int = 16
    recheck_after: float = 86_400.0
    proof_window: float = 60.0  # s that a volunteer's clock may differ
    bans_lifetime: float = 120.0  # s that a signed statement of the ban list is good
    bans_cached: float = 3.0  # s
    session_lifetime: float = 8 * 3600.0  # s that a moderator stays signed in
    behind_proxy: bool = False
    pace: Pace = field(default_factory=Pace)

    def __post_init__(self) -> None:
        require_https(self.url)
        if not 1 <= self.token_lifetime <= MAX_LIFETIME:
            raise AuthorityError(f"Tokens live 1 to {MAX_LIFETIME:.0f} s, not {self.token_lifetime:g}.")


def is_loopback(host: str) -> bool:
    """Is this name or address the machine itself?"""
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return host == "localhost"


def require_https(url: str) -> str:
    """The address, without a slash at its end. Raises AuthorityError for http to another machine: logins pass there."""
    try:
        parts = urlsplit(url)
        host = parts.hostname or ""
    except ValueError:
        parts, host = urlsplit(""), ""
    if parts.scheme not in ("http", "https") or not host or parts.username or parts.query or parts.fragment:
        raise AuthorityError(f"{url!r} is no address of an authority: write it as https://NAME")
    if parts.scheme == "http" and not is_loopback(host):
        raise AuthorityError(
            f"The authority's address {url} is not encrypted, and logins would pass there.\n"
            "1. Give the authority a certificate (--tls-cert, --tls-key), or put a proxy with one before it.\n"
            f"2. Write its address in the run file as https://{in_url(host)}"
        )
    return url.rstrip("/")
