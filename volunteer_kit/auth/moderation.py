"""Who may take part and who may not: the rules, as functions of what is known; no network, no database.

A run lets in the members of a Hub organization, the people that its file lists, those whom a moderator added, or
everybody. A ban goes before all of these. Names are compared as the Hub does, without regard to case.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Literal

NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,95}")  # what the Hub allows, and a little more
MAX_REASON = 300  # characters that a moderator gives; the volunteer reads them
BY_SWARM = "the swarm"  # who has banned whom the others convicted; no account of the Hub has a blank in its name
Way = Literal["moderator", "listed", "organization", "added", "open"]


class Refused(PermissionError):
    """No, and why: str() is for the person who asked. `kind` is one word for programs; `retry_after` in s."""

    def __init__(self, kind: str, message: str, retry_after: float | None = None) -> None:
        super().__init__(message)
        self.kind, self.retry_after = kind, retry_after


@dataclass(frozen=True)
class Person:
    """Somebody whom the Hub knows. `hub_id` stays the same when an account is renamed; "" if the Hub did not tell."""

    name: str
    orgs: tuple[str, ...] = ()
    hub_id: str = ""

    @property
    def account(self) -> str:
        return account_of(self.name)


@dataclass(frozen=True)
class Ban:
    name: str
    reason: str
    by: str
    at: float  # s since 1970


@dataclass(frozen=True)
class Allowlist:
    """Whom the run file lets in.

    :param organization: of the Hub; its members take part
    :param users: names that the run file lists
    :param moderators: may add, remove and ban, and take part
    :param is_open: everybody with an account at the Hub
    """

    organization: str | None = None
    users: frozenset[str] = frozenset()
    moderators: frozenset[str] = frozenset()
    is_open: bool = False

    @classmethod
    def of(
        cls,
        organization: str | None = None,
        users: Iterable[str] = (),
        moderators: Iterable[str] = (),
        is_open: bool = False,
    ) -> Allowlist:
        """With names as they are compared."""
        return cls(organization, frozenset(map(account_of, users)), frozenset(map(account_of, moderators)), is_open)

    @property
    def kind(self) -> Literal["open", "organization", "listed"]:
        return "open" if self.is_open else "organization" if self.organization else "listed"

    def is_moderator(self, name: str) -> bool:
        return account_of(name) in self.moderators

    def has_member(self, orgs: Iterable[str]) -> bool:
        """Is one of these organizations the run's?"""
        return bool(self.organization) and account_of(self.organization or "") in map(account_of, orgs)

    def way_in(self, name: str, *, is_member: bool = False, is_added: bool = False) -> Way | None:
        """By what this person may take part; None: not at all. Bans are another matter."""
        if self.is_moderator(name):
            return "moderator"
        if account_of(name) in self.users:
            return "listed"
        if is_member and self.organization:
            return "organization"
        if is_added:
            return "added"
        return "open" if self.is_open else None


@dataclass(frozen=True)
class Standing:
    """What is known of an account. `is_member`: of the run's organization, when the Hub was last asked."""

    is_member: bool = False
    is_added: bool = False
    ban: Ban | None = field(default=None)


def account_of(name: str) -> str:
    """How names are compared and kept."""
    return name.lower()


def judge(allowlist: Allowlist, name: str, standing: Standing, help_url: str = "") -> Way:
    """By what this person may take part. Raises Refused (banned, organization, not_listed)."""
    if standing.ban is not None:
        raise Refused("banned", _banned(name, standing.ban, help_url))
    way = allowlist.way_in(name, is_member=standing.is_member, is_added=standing.is_added)
    if way is not None:
        return way
    if allowlist.organization:
        organization = allowlist.organization
        raise Refused(
            "organization",
            f"{name} is not in the organization {organization}, whose members train this run.\n"
            f"1. Ask to join: https://huggingface.co/{organization} (“Request to join this org”), or ask the host.\n"
            "2. When you are in, run it again. If you are in already: a fine-grained token may hide it, a read "
            "token does not.",
        )
    asked = f" ({help_url})" if help_url else ""
    raise Refused(
        "not_listed",
        f"{name} is not among those who train this run.\n1. Ask its host{asked} to add this name.\n"
        "2. When it is added, run it again.",
    )


def check_name(name: str) -> str:
    """Without blanks and the @ before it. Raises Refused (name) for what is no name at the Hub."""
    name = name.strip().removeprefix("@")
    if not NAME.fullmatch(name):
        raise Refused("name", "This is no name at the Hub: one has letters, digits, “-”, “_” and “.” only.")
    return name


def check_reason(reason: str) -> str:
    """In one line. Raises Refused (reason)."""
    reason = " ".join(reason.split())
    if not 3 <= len(reason) <= MAX_REASON or not reason.isprintable():
        raise Refused("reason", f"Give a reason, which the person will read, in 3 to {MAX_REASON} characters.")
    return reason


def check_ban(allowlist: Allowlist, name: str) -> None:
    """Raises Refused (moderator) where a ban would put out one of those who could lift it."""
    if allowlist.is_moderator(name):
        raise Refused(
            "moderator",
            f"{name} is a moderator of this run, and moderators do not ban each other.\n"
            f"1. Take {name} out of authority.moderators in the run file.\n"
            "2. Restart the authority, and ban then.",
        )


def check_removal(allowlist: Allowlist, name: str, standing: Standing) -> None:
    """Raises Refused (not_added, still_in) where taking back an addition would change nothing."""
    way = allowlist.way_in(name, is_member=standing.is_member)
    if way == "moderator":
        raise Refused("still_in", f"{name} is a moderator. Take the name out of authority.moderators in the run file.")
    if way is not None:
        by = {
            "listed": "the run file lists this name",
            "organization": f"{name} is in the organization {allowlist.organization}",
            "open": "this run is open to everybody",
        }[way]
        raise Refused("still_in", f"{name} would stay in: {by}.\n1. To keep {name} out, ban this name.")
    if not standing.is_added:
        raise Refused("not_added", f"Nobody has added {name}, so there is nothing to take back.")


def _banned(name: str, ban: Ban, help_url: str) -> str:
    whom = f"the run's host: {help_url}" if help_url else "the run's host"
    if ban.by == BY_SWARM:
        return (
            f"{name} has been banned from this run by those who train in it: {ban.reason}.\n"
            f"1. A machine can do that by itself: test its memory and its GPU, and update volunteer_kit.\n"
            f"2. Then, or if it is an error, ask {whom}"
        )
    what = f"{name} has been banned from this run. The moderator's reason: {ban.reason}"
    return f"{what}\n1. If it is an error, ask {whom}"
