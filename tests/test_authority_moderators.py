"""Moderators of the authority: who they add, remove and ban, what they see, and what is written down of it."""

from __future__ import annotations

import functools

import pytest

from tests.asked_authority import fixtures, kind_of
from tests.local_authority import RUN, add_person
from volunteer_kit.auth.access_token import BanList, account_digest

page, lite = fixtures()


def test_moderators_add_and_remove(page, hub, mona):
    berta = add_person(hub, "Berta")
    moderator = page.moderator(mona)
    assert kind_of(page.join(berta), 403) == "organization"
    assert "may take part" in moderator.do("add", "berta").json()["done"]
    assert kind_of(moderator.do("add", "BERTA"), 409) == "already"
    assert page.join(berta).status_code == 200
    before = page.bans()
    assert moderator.do("remove", "berta").status_code == 200
    assert kind_of(page.refresh(), 403) == "organization" and kind_of(page.join(berta), 403) == "organization"
    after = page.bans()
    assert after.version == before.version + 1, "tokens that are good still end for everybody"
    assert after.accounts == {account_digest(RUN, "Berta")} and before.accounts == frozenset()
    assert kind_of(moderator.do("remove", "berta"), 409) == "not_added"
    moderator.do("add", "berta")
    assert page.bans() == BanList(before.version + 2) and page.refresh().status_code == 200


def test_a_ban_reaches_list_refresh_and_join_at_once_with_its_reason(page, anna, mona):
    page.join(anna)
    moderator = page.moderator(mona)
    before = page.bans()
    assert not before.accounts
    assert moderator.do("ban", "Anna", reason=" sends  large numbers ").status_code == 200
    assert page.bans() == BanList(before.version + 1, frozenset([account_digest(RUN, "anna")]))
    for answer in (page.refresh(), page.join(anna), page.join(anna, 1)):
        assert kind_of(answer, 403) == "banned" and "sends large numbers" in answer.json()["error"]["message"]
    (ban,) = moderator.see("bans")
    assert (ban["name"], ban["reason"], ban["by"]) == ("anna", "sends large numbers", "Mona")
    assert kind_of(moderator.do("ban", "anna", reason="again"), 409) == "already"
    assert kind_of(moderator.do("add", "anna"), 403) == "banned"
    assert moderator.do("unban", "anna").status_code == 200 and page.bans() == BanList(before.version + 2)
    assert page.refresh().status_code == 200
    assert kind_of(moderator.do("unban", "anna"), 409) == "not_banned"


def test_a_known_ban_list_is_not_sent_again_but_its_statement_is(lite, anna, mona):
    page = lite()
    page.moderator(mona).do("ban", "anna", reason="spam")
    answer = page.http.get("/v1/bans", params={"known": page.bans().version}).json()
    assert answer["accounts"] is None and answer["statement"]
    assert page.http.get("/v1/bans", params={"known": 0}).json()["accounts"]


def test_a_ban_means_the_account_not_its_name(page, anna, mona, monkeypatch):
    """An account can be renamed at the Hub; the organization still has it."""
    from volunteer_kit.auth.authority import desk
    from volunteer_kit.auth.moderation import Person

    person = Person("anna", ("cats",), "id-1")
    monkeypatch.setattr(desk, "who_is", lambda *_: person)
    page.join(anna)
    monkeypatch.setattr(desk, "who_is", lambda *_: Person("annette", ("cats",), "id-1"))
    page.join(anna, 1)
    monkeypatch.setattr(desk, "who_is", lambda *_: Person("Mona"))
    moderator = page.moderator(mona)
    moderator.do("ban", "anna", reason="spam")
    moderator.do("ban", "carl", reason="spam")  # nobody has seen him here
    assert page.bans().accounts == {account_digest(RUN, name) for name in ("anna", "annette", "carl")}
    for name, hub_id in (("anita", "id-1"), ("carl", "id-2"), ("carla", "id-2")):
        person = Person(name, ("cats",), hub_id)
        monkeypatch.setattr(desk, "who_is", functools.partial(lambda person, *_: person, person))
        assert kind_of(page.join(anna, 2), 403) == "banned", name


def test_a_banned_accounts_machine_is_not_lent_to_another_account(lite, hub, anna, mona):
    page = lite()
    page.join(anna)
    page.moderator(mona).do("ban", "anna", reason="spam")
    carl = add_person(hub, "carl", "cats")
    assert kind_of(page.join(carl), 403) == "banned" and page.join(carl, 1).status_code == 200


def test_moderators_cannot_ban_each_other_and_are_told_the_way(lite, mona):
    answer = lite().moderator(mona).do("ban", "max", reason="I do not like him")
    assert kind_of(answer, 403) == "moderator" and "run file" in answer.json()["error"]["message"]


def test_only_moderators_moderate(lite, hub, anna, mona):
    page = lite()
    assert kind_of(page.post("/v1/moderate/session", {"hf_token": anna}), 403) == "not_moderator"
    writes = add_person(hub, "Max", role="write")
    assert kind_of(page.post("/v1/moderate/session", {"hf_token": writes}), 403) == "can_write"
    for headers in ({}, {"Authorization": "Bearer "}, {"Authorization": "Bearer x"}, {"Cookie": "vk_moderator=x"}):
        assert kind_of(page.http.get("/v1/moderate/members", headers=headers), 401) == "session"
        assert kind_of(page.post("/v1/moderate/ban", {"username": "a", "reason": "abc"}, headers=headers), 401)
    moderator = page.moderator(mona)
    assert moderator.see("members") == []
    page.http.delete("/v1/moderate/session", headers=moderator.headers)
    assert kind_of(moderator.do("add", "anna"), 401) == "session"


def test_sessions_end(lite, mona):
    page = lite(session_lifetime=0.0)
    assert kind_of(page.moderator(mona).do("add", "anna"), 401) == "session"


def test_the_log_has_every_action_and_nobody_can_change_it(page, anna, mona):
    from sqlalchemy import text
    from sqlalchemy.exc import DBAPIError

    page.join(anna)
    moderator = page.moderator(mona)
    moderator.do("add", "berta")
    moderator.do("ban", "anna", reason="spam")
    moderator.do("ban", "anna", reason="failed, so it is not there")
    moderator.do("unban", "anna")
    log = moderator.see("log")
    said = [(entry["by"], entry["action"], entry["name"], entry["reason"], entry["via"]) for entry in log]
    assert said == [
        ("Mona", "unbanned", "anna", "", "api"),
        ("Mona", "banned", "anna", "spam", "api"),
        ("Mona", "added", "berta", "", "api"),
    ]
    assert [entry["action"] for entry in moderator.see("log", before=log[1]["id"], limit=1)] == ["added"]
    for statement in ("DELETE FROM log", "UPDATE log SET name = 'x'"):
        with pytest.raises(DBAPIError, match="only added to"), page.authority.storage.writing() as db:
            db.execute(text(statement))
    assert len(moderator.see("log")) == 3


def test_members_tell_who_is_here_and_by_what(page, hub, anna, mona):
    moderator = page.moderator(mona)
    page.join(anna)
    page.join(anna, 1)
    page.join(mona, 2)
    moderator.do("add", "berta")
    moderator.do("ban", "carl", reason="spam")
    members = {row["name"]: (row["way"], row["peers"], row["added_by"]) for row in moderator.see("members")}
    assert members == {"anna": ("organization", 2, None), "Mona": ("moderator", 1, None), "berta": ("added", 0, "Mona")}
    assert [row["name"] for row in moderator.see("members", part="ERT")] == ["berta"]
    assert moderator.see("members", part="_") == []
