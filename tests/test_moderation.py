"""Who may take part: the rules by themselves."""

from __future__ import annotations

import pytest

from volunteer_kit.auth.moderation import (
    Allowlist,
    Ban,
    Refused,
    Standing,
    check_ban,
    check_name,
    check_reason,
    check_removal,
    judge,
)

CATS = Allowlist.of("Cats", users=["Lena"], moderators=["Mona"])
LISTED = Allowlist.of(users=["Lena"], moderators=["Mona"])
OPEN = Allowlist.of(is_open=True, moderators=["Mona"])
BAN = Ban("anna", "spam", "Mona", 0.0)


@pytest.mark.parametrize(
    "allowlist, name, standing, outcome",
    [
        (CATS, "anna", Standing(is_member=True), "organization"),
        (CATS, "anna", Standing(), Refused),
        (CATS, "anna", Standing(is_added=True), "added"),
        (CATS, "LENA", Standing(), "listed"),
        (CATS, "mona", Standing(), "moderator"),
        (LISTED, "anna", Standing(is_member=True), Refused),
        (LISTED, "anna", Standing(is_added=True), "added"),
        (OPEN, "anna", Standing(), "open"),
        (OPEN, "anna", Standing(ban=BAN), Refused),
        (CATS, "anna", Standing(is_member=True, is_added=True, ban=BAN), Refused),
        (CATS, "lena", Standing(ban=BAN), Refused),
        (Allowlist(), "anna", Standing(is_member=True), Refused),
    ],
)
def test_who_is_let_in(allowlist, name, standing, outcome):
    if outcome is Refused:
        with pytest.raises(Refused) as caught:
            judge(allowlist, name, standing)
        organization_or_list = "organization" if allowlist.organization else "not_listed"
        assert caught.value.kind == ("banned" if standing.ban else organization_or_list)
        assert name in str(caught.value) and "\n1. " in str(caught.value)
    else:
        assert judge(allowlist, name, standing) == outcome


def test_a_banned_person_reads_the_reason_and_whom_to_ask():
    with pytest.raises(Refused, match="(?s)reason: spam.*https://help.example"):
        judge(OPEN, "anna", Standing(ban=BAN), "https://help.example")


def test_the_organization_is_compared_as_the_hub_does():
    assert CATS.has_member(["dogs", "cats"]) and not CATS.has_member(["catsy"]) and not OPEN.has_member(["cats"])


def test_moderators_do_not_ban_each_other():
    check_ban(CATS, "anna")
    with pytest.raises(Refused, match="authority.moderators in the run file") as caught:
        check_ban(CATS, "MONA")
    assert caught.value.kind == "moderator"


@pytest.mark.parametrize(
    "allowlist, name, standing, kind",
    [
        (CATS, "anna", Standing(is_added=True), None),
        (CATS, "anna", Standing(), "not_added"),
        (CATS, "anna", Standing(is_added=True, is_member=True), "still_in"),
        (CATS, "lena", Standing(is_added=True), "still_in"),
        (CATS, "mona", Standing(is_added=True), "still_in"),
        (OPEN, "anna", Standing(is_added=True), "still_in"),
    ],
)
def test_removing_says_when_it_would_change_nothing(allowlist, name, standing, kind):
    if kind is None:
        check_removal(allowlist, name, standing)
    else:
        with pytest.raises(Refused) as caught:
            check_removal(allowlist, name, standing)
        assert caught.value.kind == kind and (
            kind != "still_in" or "run file" in str(caught.value) or "ban" in str(caught.value)
        )


@pytest.mark.parametrize("name", ["anna", " @anna ", "a-b_c.d", "A1"])
def test_names(name):
    assert check_name(name) == name.strip().removeprefix("@")


@pytest.mark.parametrize("name", ["", "a b", "a/b", "äöü", "a\x00", "x" * 97, "-a", "a\n", "<script>"])
def test_what_is_no_name(name):
    if name == "a\n":
        assert check_name(name) == "a"
    else:
        with pytest.raises(Refused):
            check_name(name)


def test_reasons_are_one_line_that_can_be_shown():
    assert check_reason("  sends\n  large   numbers ") == "sends large numbers"
    for reason in ("", "ab", "x" * 301, "a\x00bc", "escape \x1b[31m", "right \u202e left"):
        with pytest.raises(Refused):
            check_reason(reason)
