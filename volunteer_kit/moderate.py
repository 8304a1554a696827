"""Moderating a run from the command line: sign in at its authority, do one thing, sign out."""

from __future__ import annotations

import contextlib
import getpass
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

from volunteer_kit.auth.authority_client import AuthorityClient, AuthorityRefused
from volunteer_kit.auth.login import Login, LoginError
from volunteer_kit.runs import RunError, load_run
from volunteer_kit.widgets.words import plain

Say = Callable[[str], None]


class Moderation:
    """A moderator who is signed in; see signed_in(). Each method raises AuthorityRefused with the reason."""

    def __init__(self, client: AuthorityClient, session: str) -> None:
        self._client, self._session = client, session

    def add(self, name: str) -> str:
        return self._do("add", username=name)

    def remove(self, name: str) -> str:
        return self._do("remove", username=name)

    def ban(self, name: str, reason: str) -> str:
        return self._do("ban", username=name, reason=reason)

    def unban(self, name: str) -> str:
        return self._do("unban", username=name)

    def members(self, part: str = "") -> list[dict[str, Any]]:
        return self._client.get("/v1/moderate/members", self._session, part=part)["members"]

    def bans(self) -> list[dict[str, Any]]:
        return self._client.get("/v1/moderate/bans", self._session)["bans"]

    def log(self, limit: int = 50) -> list[dict[str, Any]]:
        return self._client.get("/v1/moderate/log", self._session, limit=limit)["log"]

    def _do(self, action: str, **what: str) -> str:
        return str(self._client.post(f"/v1/moderate/{action}", what, self._session)["done"])


@contextlib.contextmanager
def signed_in(url: str | None = None, run: str | None = None, token: str | None = None) -> Iterator[Moderation]:
    """Sign in at the authority at `url`, or of `run`, with a login that is here already, or that is asked for.

    Raises RunError, LoginError, AuthorityRefused.
    """
    client = AuthorityClient(url or _url_of(run))
    session = str(client.post("/v1/moderate/session", {"hf_token": _token(token)})["session"])
    try:
        yield Moderation(client, session)
    finally:
        with contextlib.suppress(AuthorityRefused):  # it ends by itself too
            client.delete("/v1/moderate/session", session)


def tell_members(moderation: Moderation, part: str, say: Say) -> None:
    rows = [
        (row["name"], row["way"] or "not let in any more", f"{row['peers']} machines", _ago(row["seen_at"]))
        for row in moderation.members(part)
    ]
    _table(rows, "Nobody has joined yet." if not part else "Nobody has such a name.", say)


def tell_bans(moderation: Moderation, say: Say) -> None:
    bans = moderation.bans()
    rows = [(row["name"], _moment(row["at"]), f"by {row['by']}", row["reason"]) for row in bans]
    _table(rows, "Nobody is banned.", say)
    for row in bans:
        for found in (row.get("conviction") or {}).get("findings", ()):  # an older authority has none
            what = f"{row['name']}, step {found['epoch']}: {found['details']} (signed by {', '.join(found['by'])})"
            say(plain(what))


def tell_log(moderation: Moderation, limit: int, say: Say) -> None:
    rows = [(_moment(row["at"]), row["by"], row["action"], row["name"], row["reason"]) for row in moderation.log(limit)]
    _table(rows, "Nothing yet.", say)


def _url_of(run: str | None) -> str:
    if run is None:
        raise RunError("Whose authority? Name the run, or its authority's address: --run RUN, or --url https://NAME")
    authority = load_run(run).authority
    if authority is None:
        raise RunError(f"The run {run} has no authority, so nobody moderates it.")
    return authority.url


def _token(given: str | None) -> str:
    login = Login(for_authority=True)
    identity = login.find(given)
    if identity is None:
        notes = "\n".join(login.notes)
        if not sys.stdin.isatty():
            ways = "1. Log in: hf auth login\n2. Run it again."
            raise LoginError("malformed", f"No login was found here.\n{notes}\n{ways}")
        enough = "A token that tells only who you are is enough (fine-grained, no box ticked)"
        print(f"{notes}\n{enough}: {login.token_url}", file=sys.stderr)
        login.check(getpass.getpass("Hugging Face token (not shown): "))
        identity = login.identity
    assert identity is not None
    return identity.token


def _table(rows: list[tuple[str, ...]], nothing: str, say: Say) -> None:
    """Strangers wrote some of it: no control characters."""
    cells = [[plain(str(cell)) for cell in row] for row in rows]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    for row in cells:
        say("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())
    if not rows:
        say(nothing)


def _moment(at: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime(at))


def _ago(at: float | None) -> str:
    return "never here" if at is None else f"last seen {_moment(at)}"
