"""The authority: who joins, who is refused and why, and what is kept of a login: nothing. On SQLite and PostgreSQL."""

from __future__ import annotations

import base64
import functools
import logging
import time
from collections.abc import Iterator
from typing import Any

import pytest
from fastapi.testclient import TestClient
from hub import Hub
from local_authority import (
    ALLOWLIST,
    RUN,
    Authority,
    add_person,
    join_body,
    key,
    make_authority,
    refresh_body,
    this_hub,
)
from postgres import fixtures

from volunteer_kit.auth.access_token import (
    BanList,
    TokenError,
    account_digest,
    key_hash,
    peer_id_of_key,
    read_bans_statement,
    read_token,
)
from volunteer_kit.auth.authority.settings import AuthorityError, Pace, Settings
from volunteer_kit.auth.authority.storage import Storage
from volunteer_kit.auth.moderation import Allowlist
from volunteer_kit.auth.proof import public_text

new_postgres, database = fixtures()


@pytest.fixture(scope="module")
def the_hub() -> Iterator[Hub]:
    with Hub() as hub, this_hub(hub):
        yield hub


@pytest.fixture
def hub(the_hub) -> Hub:
    the_hub.forget()
    the_hub.expired.clear()
    the_hub.hides_orgs = False
    return the_hub


@pytest.fixture
def anna(hub) -> str:
    return add_person(hub, "anna", "cats")


@pytest.fixture
def mona(hub) -> str:
    return add_person(hub, "Mona")


class Page:
    """What a test asks the authority."""

    def __init__(self, authority: Authority):
        self.authority = authority
        self.http = TestClient(authority.app, base_url="http://127.0.0.1:8400", raise_server_exceptions=False)

    def post(self, path: str, body: Any, **more: Any) -> Any:
        return self.http.post(path, json=body, **more)

    def join(self, token: str, number: int = 0, **more: Any) -> Any:
        return self.post("/v1/join", join_body(token, number, **more))

    def refresh(self, number: int = 0, **more: Any) -> Any:
        return self.post("/v1/refresh", refresh_body(number, **more))

    def moderator(self, token: str) -> Moderator:
        answer = self.post("/v1/moderate/session", {"hf_token": token})
        assert answer.status_code == 200, answer.text
        return Moderator(self, answer.json()["session"])

    def bans(self) -> BanList:
        """As a peer takes them."""
        answer = self.http.get("/v1/bans").json()
        statement = read_bans_statement(base64.b64decode(answer["statement"]), self.authority.trust, time.time())
        bans = BanList.of(answer["version"], map(bytes.fromhex, answer["accounts"]))
        assert bans.matches(statement) and 60 <= statement.expires_at - time.time() <= 120
        return bans


class Moderator:
    def __init__(self, page: Page, session: str):
        self.page, self.headers = page, {"Authorization": f"Bearer {session}"}

    def do(self, action: str, username: str, **more: str) -> Any:
        return self.page.post(f"/v1/moderate/{action}", {"username": username, **more}, headers=self.headers)

    def see(self, what: str, **query: Any) -> list[dict[str, Any]]:
        return self.page.http.get(f"/v1/moderate/{what}", params=query, headers=self.headers).json()[what]


@pytest.fixture
def page(hub, tmp_path, database) -> Iterator[Page]:
    authority = make_authority(tmp_path, database)
    yield Page(authority)
    authority.storage.close()


@pytest.fixture
def lite(hub, tmp_path) -> Iterator[Any]:
    """Makes authorities on SQLite, for what no database has to do with."""
    made: list[Authority] = []

    def make(**settings: Any) -> Page:
        made.append(make_authority(tmp_path, **settings))
        return Page(made[-1])

    yield make
    for authority in made:
        authority.storage.close()


def kind_of(answer: Any, status: int) -> str:
    assert answer.status_code == status, answer.text
    error = answer.json()["error"]
    assert set(error) == {"kind", "message"}
    return error["kind"]


# --- joining ---


def test_a_token_binds_account_key_peer_run_and_end(page, anna):
    answer = page.join(anna)
    assert answer.status_code == 200, answer.text
    token = read_token(base64.b64decode(answer.json()["token"]), page.authority.trust, time.time())
    public = public_text(key(0))
    assert (token.username, token.run_id, token.role) == ("anna", RUN, "volunteer")
    assert token.peer_id == peer_id_of_key(public) and token.key_hash == key_hash(public)
    assert token.expires_at == answer.json()["expires_at"] and 0 < token.expires_at - time.time() <= 900
    assert len(base64.b64decode(answer.json()["token"])) < 600


def test_refreshing_needs_the_key_only_and_asks_no_hub(page, hub, anna):
    assert kind_of(page.refresh(), 401) == "unknown", "who has not joined cannot refresh"
    page.join(anna)
    hub.forget()
    answer = page.refresh()
    assert answer.status_code == 200 and answer.json()["username"] == "anna" and not answer.json()["join_again"]
    assert hub.asked == []
    assert kind_of(page.refresh(1), 401) == "unknown", "nor another key"


@pytest.mark.parametrize(
    "name, orgs, role, status, kind",
    [
        ("berta", (), "read", 403, "organization"),
        ("lena", (), "read", 200, None),
        ("mona", (), "read", 200, None),
        ("carl", ("CATS", "dogs"), "read", 200, None),
        ("dora", ("cats",), "write", 403, "can_write"),
        ("emil", ("cats",), "god", 403, "unknown_rights"),
    ],
)
def test_who_joins(lite, hub, name, orgs, role, status, kind):
    answer = lite().join(add_person(hub, name, *orgs, role=role))
    assert answer.status_code == status
    if kind:
        assert kind_of(answer, status) == kind and "\n1. " in answer.json()["error"]["message"]


@pytest.mark.parametrize(
    "token, fault, status, kind",
    [
        ("hf_unknown", {}, 401, "wrong"),
        ("hf_old", {}, 401, "expired"),
        ("two words", {}, 400, "malformed"),
        ("hf_annareadSecret", {"status": 500}, 503, "down"),
        ("hf_annareadSecret", {"status": 429}, 503, "down"),
        ("hf_annareadSecret", {"cut_after": 4}, 503, "down"),
    ],
)
def test_logins_that_fail(lite, hub, anna, token, fault, status, kind):
    hub.expired.add("hf_old")
    if fault:
        hub.fail("/whoami", times=9, **fault)
    answer = lite().join(token)
    assert kind_of(answer, status) == kind and token not in answer.text
    assert status != 503 or int(answer.headers["Retry-After"]) > 0


@pytest.mark.parametrize(
    "scope, app, says",
    [
        ("openid profile", "the-hosts-app", None),
        ("openid", "the-hosts-app", None),
        ("openid profile write-repos", "the-hosts-app", "can_write"),
        ("openid profile read-repos", "the-hosts-app", "can_write"),
        ("openid profile", "another-app", "unknown_rights"),
    ],
)
def test_an_oauth_login_is_judged_by_what_the_hub_signed_not_by_what_the_client_says(lite, hub, scope, app, says):
    hub.orgs["oda"] = ["cats"]
    body = join_body(hub.oauth_token("oda", app, scope)) | {"scope": "openid profile"}
    answer = lite(oauth_client_id="the-hosts-app").post("/v1/join", body)
    assert answer.status_code == 200 if says is None else kind_of(answer, 403) == says, answer.text


def test_an_oauth_login_changed_to_ask_less_is_refused_by_the_hub(lite, hub):
    head, payload, signature = hub.oauth_token("oda", "the-hosts-app", "openid write-repos").split(".")
    less = hub.oauth_token("oda", "the-hosts-app", "openid").split(".")[1]
    answer = lite(oauth_client_id="the-hosts-app").join(f"{head}.{less}.{signature}")
    assert kind_of(answer, 401) == "wrong"


def test_organizations_of_an_oauth_login_may_stand_in_userinfo_only(lite, hub):
    hub.orgs["oda"], hub.hides_orgs = ["cats"], True
    page = lite(oauth_client_id="the-hosts-app")
    assert page.join(hub.oauth_token("oda", "the-hosts-app")).status_code == 200
    assert kind_of(page.join(hub.oauth_token("berta", "the-hosts-app")), 403) == "organization"


# --- the proof ---


def test_proofs_that_do_not_fit(lite, hub, anna):
    page, good = lite(), join_body(anna)
    wrong = {
        "another key": good | {"public_key": join_body(anna, 1)["public_key"]},
        "another time": good | {"time": good["time"] + 1},
        "another login": good | {"hf_token": add_person(hub, "carl", "cats")},
        "a refresh's": good | {"proof": refresh_body()["proof"]},
        "no base64": good | {"proof": "!"},
        "an Ed25519 key": good | {"public_key": "ssh-rsa AAAAC3NzaC1lZDI1NTE5AAAAIA"},
    }
    for what, body in wrong.items():
        assert kind_of(page.post("/v1/join", body), 401) == "proof", what
    assert not [asked for asked in hub.asked if "whoami" in asked.path], "the Hub is asked about a proven key only"
    assert kind_of(page.post("/v1/refresh", refresh_body() | {"proof": good["proof"]}), 401) == "proof"
    assert page.post("/v1/join", good).status_code == 200


@pytest.mark.parametrize("off, fine", [(-55, True), (55, True), (-65, False), (65, False), (10**9, False)])
def test_a_proof_is_good_for_a_minute(lite, anna, off, fine):
    answer = lite().join(anna, at=time.time() + off)
    assert answer.status_code == 200 if fine else kind_of(answer, 400) == "clock"
    assert fine or "clock is" in answer.json()["error"]["message"]


def test_a_proof_sent_again_gives_a_token_for_the_same_key_and_nobody_else(lite, anna):
    page, body = lite(), join_body(anna)
    first, second = (page.post("/v1/join", body).json()["token"] for _ in range(2))
    tokens = [read_token(base64.b64decode(token), page.authority.trust, time.time()) for token in (first, second)]
    assert tokens[0].peer_id == tokens[1].peer_id and tokens[0].key_hash == tokens[1].key_hash


def test_another_runs_volunteers_are_told(lite, anna):
    assert kind_of(lite().join(anna, run_id="other"), 409) == "run"


# --- several machines, time ---


def test_one_account_has_several_machines_within_bounds(hub, tmp_path, database, anna):
    now = [time.time()]
    authority = make_authority(tmp_path, database, max_peers=2, clock=lambda: now[0])
    page = Page(authority)
    assert [page.join(anna, n, at=now[0]).status_code for n in (0, 1)] == [200, 200]
    assert page.join(anna, 1, at=now[0]).status_code == 200, "the same machine again is no further one"
    assert kind_of(page.join(anna, 2, at=now[0]), 409) == "peers"
    now[0] += 901
    assert page.join(anna, 2, at=now[0]).status_code == 200, "machines that have left make room"
    authority.storage.close()


def test_membership_is_asked_again_after_a_day_and_the_hub_may_be_away_meanwhile(lite, hub, anna):
    now = [time.time()]
    page = lite(clock=lambda: now[0], recheck_after=1000.0)
    page.join(anna, at=now[0])
    for later, expected in ((900, False), (200, True), (800, True)):
        now[0] += later
        answer = page.refresh(at=now[0])
        assert answer.status_code == 200 and answer.json()["join_again"] is expected
    now[0] += 200
    assert kind_of(page.refresh(at=now[0]), 401) == "unknown"
    hub.orgs["anna"] = []
    assert kind_of(page.join(anna, at=now[0]), 403) == "organization", "who left the organization is out by then"


def test_what_the_run_file_says_holds_after_a_restart(hub, tmp_path, database, anna):
    authority = make_authority(tmp_path, database)
    Page(authority).join(anna)
    authority.storage.close()
    again = make_authority(tmp_path, database, allowlist=Allowlist.of(moderators=["mona"]))
    assert kind_of(Page(again).refresh(), 403) == "not_listed"
    again.storage.close()


# --- moderators ---


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
    assert page.bans() == BanList(0)
    assert moderator.do("ban", "Anna", reason=" sends  large numbers ").status_code == 200
    assert page.bans() == BanList(1, frozenset([account_digest(RUN, "anna")]))
    for answer in (page.refresh(), page.join(anna), page.join(anna, 1)):
        assert kind_of(answer, 403) == "banned" and "sends large numbers" in answer.json()["error"]["message"]
    (ban,) = moderator.see("bans")
    assert (ban["name"], ban["reason"], ban["by"]) == ("anna", "sends large numbers", "Mona")
    assert kind_of(moderator.do("ban", "anna", reason="again"), 409) == "already"
    assert kind_of(moderator.do("add", "anna"), 403) == "banned"
    assert moderator.do("unban", "anna").status_code == 200 and page.bans() == BanList(2)
    assert page.refresh().status_code == 200
    assert kind_of(moderator.do("unban", "anna"), 409) == "not_banned"


def test_a_known_ban_list_is_not_sent_again_but_its_statement_is(lite, anna, mona):
    page = lite()
    page.moderator(mona).do("ban", "anna", reason="spam")
    answer = page.http.get("/v1/bans", params={"known": 1}).json()
    assert answer["accounts"] is None and answer["version"] == 1 and answer["statement"]
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


# --- bounds, words, silence ---


def test_too_often_is_told_when_to_come_back(lite, hub, anna):
    page = lite(pace=Pace(join="2/minute", peer="1/minute", login="1/minute"))
    assert [page.join(anna).status_code for _ in range(3)] == [200, 200, 429]
    answer = page.join(anna)
    assert kind_of(answer, 429) == "limit" and 1 <= int(answer.headers["Retry-After"]) <= 61
    assert page.refresh().status_code == 200 and kind_of(page.refresh(), 429) == "limit"
    page.post("/v1/moderate/session", {"hf_token": anna})
    assert kind_of(page.post("/v1/moderate/session", {"hf_token": anna}), 429) == "limit"


def test_one_account_or_guessing_tokens_is_paced_too(lite, hub, anna):
    page = lite(pace=Pace(account="1/minute", wrong="2/minute"))
    assert [page.join(anna, n).status_code for n in (0, 1)] == [200, 429]
    assert [page.join(f"hf_guess{n}").status_code for n in range(3)] == [401, 401, 429]
    assert sum("whoami" in asked.path for asked in hub.asked) == 4, "after that the Hub is not asked for them"


def test_an_address_is_who_is_connected_whatever_headers_say(lite, anna):
    page = lite(pace=Pace(join="1/minute"))
    page.join(anna)
    body = join_body(anna)
    answer = page.post("/v1/join", body, headers={"X-Forwarded-For": "10.1.2.3", "Forwarded": "for=10.1.2.3"})
    assert kind_of(answer, 429) == "limit"


def test_what_counts_as_one_address():
    from volunteer_kit.auth.authority.pace import household

    assert household("192.0.2.7") == "192.0.2.7" == household("::ffff:192.0.2.7")
    assert household("2001:db8:1:2:3::4") == household("2001:db8:1:2:ffff::1") != household("2001:db8:1:3::1")


@pytest.mark.parametrize(
    "body", [b"", b"{", b"[]", b"null", b"\xff\xfe", b"[" * 10_000, b'{"time": NaN}', b'{"a":"\\ud800"}']
)
def test_bodies_that_cannot_be_read(lite, body):
    answer = lite().http.post("/v1/join", content=body, headers={"Content-Type": "application/json"})
    assert answer.status_code in (400, 422) and answer.json()["error"]["kind"] == "malformed"


def test_a_malformed_request_is_not_repeated_in_the_answer(lite, anna):
    for wrong in (
        {"time": anna},
        {"public_key": anna},
        {"hf_token": [anna]},
        {"proof": {anna: anna}},
        {"run_id": anna * 9},
    ):
        answer = lite().post("/v1/join", join_body(anna) | wrong)
        assert kind_of(answer, 422) == "malformed" and anna not in answer.text and next(iter(wrong)) in answer.text


def test_large_bodies_are_not_read(lite):
    assert kind_of(lite().http.post("/v1/join", content=b"x" * 20_000), 413) == "malformed"
    assert kind_of(lite().http.post("/v1/join", content=iter([b"x" * 9000] * 3)), 413) == "malformed"


def test_unknown_fields_are_for_later_versions(lite, anna):
    assert lite().post("/v1/join", join_body(anna) | {"from_the_future": 1}).status_code == 200


def test_nothing_of_a_login_is_stored_or_logged(page, hub, anna, mona, caplog, capfd):
    caplog.set_level(logging.DEBUG)
    writes = add_person(hub, "dora", "cats", role="write")
    answers = [page.join(anna), page.join(writes), page.join("hf_unknownSecret"), page.refresh()]
    answers.append(page.post("/v1/join", join_body(anna) | {"time": "x"}))
    page.moderator(mona)
    hub.fail("/whoami", times=3, cut_after=3)
    answers.append(page.join(anna))
    storage = page.authority.storage
    kept = b"".join(path.read_bytes() for path in page_files(page)) if storage.is_sqlite else dump(storage)
    assert b"anna" in kept
    printed = (
        caplog.text + "".join(capfd.readouterr()) + "".join(answer.text for answer in answers) + kept.decode("latin1")
    )
    for secret in (anna, mona, writes, "hf_unknownSecret"):
        assert secret not in printed


def page_files(page: Page) -> list[Any]:
    return list(page.authority.keys.path.parent.glob("authority.sqlite*"))


def dump(storage: Storage) -> bytes:
    from sqlalchemy import select

    from volunteer_kit.auth.authority.tables import Table

    with storage.reading() as db:
        return repr([db.execute(select(table)).all() for table in Table.metadata.sorted_tables]).encode()


def test_a_key_is_rotated_while_everybody_stays(lite, anna, monkeypatch):
    from volunteer_kit.auth.authority import desk

    page = lite()
    old = base64.b64decode(page.join(anna).json()["token"])
    signing = page.http.get("/v1/run").json()["certificates"]
    page.authority.keys.rotate("authority")
    monkeypatch.setattr(desk, "KEYS_CACHED", 0.0)
    new = base64.b64decode(page.refresh().json()["token"])
    assert page.http.get("/v1/run").json()["certificates"] != signing
    for token in (old, new):
        assert read_token(token, page.authority.trust, time.time()).username == "anna"
    assert page.bans() == BanList(0)


def test_the_run_is_described(lite):
    about = lite(oauth_client_id="app", run_link="https://example.org/run.yaml").http.get("/v1/run").json()
    assert (about["run_id"], about["allowlist"], about["organization"]) == (RUN, "organization", "cats")
    assert about["oauth_client_id"] == "app" and about["run_file"] == "https://example.org/run.yaml"


def test_another_root_is_not_believed(lite, anna, tmp_path):
    from volunteer_kit.auth.access_token import KeyFolder, Trust

    token = base64.b64decode(lite().join(anna).json()["token"])
    other = Trust.of(RUN, KeyFolder(tmp_path / "other").create(RUN))
    with pytest.raises(TokenError):
        read_token(token, other, time.time())


# --- databases ---


def test_members_and_bans_outlive_a_restart(hub, tmp_path, database, anna, mona):
    first = make_authority(tmp_path, database)
    Page(first).join(anna)
    Page(first).moderator(mona).do("ban", "berta", reason="spam")
    first.storage.close()
    second = make_authority(tmp_path, database)
    assert Page(second).refresh().status_code == 200 and Page(second).bans().version == 1
    second.storage.close()


def test_a_database_of_another_run_is_not_used(hub, tmp_path, database):
    Storage(database, "other").close()
    with pytest.raises(AuthorityError, match="of the run 'other'"):
        Storage(database, RUN)


@pytest.mark.parametrize(
    "database, says",
    [
        ("/proc/nowhere/a.sqlite", "cannot be used"),
        ("postgresql://user:S3cret@127.0.0.1:9/x", "cannot be used"),
        ("mongo://x", "no database"),
        ("://", "no database"),
    ],
)
def test_databases_that_cannot_be_used(database, says):
    with pytest.raises(AuthorityError, match=says) as caught:
        Storage(database, RUN)
    assert "S3cret" not in str(caught.value) and "--database" in str(caught.value) or says == "no database"


def test_a_database_that_goes_away_is_told_to_clients_in_words(page, anna, caplog):
    page.join(anna)
    with page.authority.storage.writing() as db:
        db.connection().exec_driver_sql("ALTER TABLE accounts RENAME TO gone")
    answer = page.refresh()
    assert kind_of(answer, 503) == "down" and "Traceback" not in answer.text and "SELECT" not in answer.text
    assert page.join(anna).status_code == 503 and anna not in caplog.text and "accounts" in caplog.text


def test_a_full_disk_is_told_and_passes(hub, tiny_disk, anna):
    authority = make_authority(tiny_disk, pace=Pace(account="1000/minute"))
    page = Page(authority)
    assert page.join(anna).status_code == 200
    filler = tiny_disk / "filler"
    with filler.open("wb", buffering=0) as file, pytest.raises(OSError):
        while file.write(b"x" * 4096):
            pass
    answers = [page.join(anna, number % 4) for number in range(40)]
    assert {answer.status_code for answer in answers} <= {200, 503} and kind_of(answers[-1], 503) == "down"
    filler.unlink()
    answer = page.refresh()
    authority.storage.close()  # or the disk cannot be taken away
    assert answer.status_code == 200


# --- settings ---


@pytest.mark.parametrize("url", ["http://example.org", "ftp://x", "https://", "example.org", "https://a:b@example.org"])
def test_addresses_where_logins_could_be_read(url):
    with pytest.raises(AuthorityError, match="https"):
        Settings(RUN, url)


def test_no_token_lives_longer_than_a_quarter_of_an_hour():
    with pytest.raises(AuthorityError, match="900"):
        Settings(RUN, "https://example.org", ALLOWLIST, token_lifetime=901)
