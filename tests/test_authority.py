"""The authority: who joins, who is refused and why, and for how long. On SQLite and PostgreSQL."""

from __future__ import annotations

import base64
import time

import pytest

from tests.asked_authority import Page, fixtures, kind_of
from tests.local_authority import RUN, add_person, join_body, key, make_authority, refresh_body
from volunteer_kit.auth.access_token import key_hash, peer_id_of_key, read_token
from volunteer_kit.auth.moderation import Allowlist
from volunteer_kit.auth.proof import public_text

page, lite = fixtures()


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


def test_who_was_away_finds_his_place_taken(hub, tmp_path, database, anna):
    now = [time.time()]
    authority = make_authority(tmp_path, database, max_peers=1, clock=lambda: now[0])
    page = Page(authority)
    assert page.join(anna, at=now[0]).status_code == 200
    now[0] += 901
    assert page.refresh(at=now[0]).status_code == 200, "the place is free still"
    now[0] += 901
    assert page.join(anna, 1, at=now[0]).status_code == 200
    assert kind_of(page.refresh(at=now[0]), 409) == "peers"
    assert page.refresh(1, at=now[0]).status_code == 200, "whose token is good keeps his place"
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
