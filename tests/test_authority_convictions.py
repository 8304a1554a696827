"""What a monitor reports of the swarm's convictions: whom it bans, what is kept of it, and how moderators undo it."""

from __future__ import annotations

import base64
import json
import time
from types import SimpleNamespace

import pytest
from fastapi.testclient import TestClient
from sqlalchemy import text

from tests.asked_authority import Page, fixtures, kind_of
from tests.convicting import DETAILS, evidence_by, peer_of, report_body, strike_of, token_of
from tests.local_authority import RUN, URL, add_person, key, make_authority
from volunteer_kit.auth.access_token import account_digest, read_pardons
from volunteer_kit.auth.evidence import CAUSES, MAX_DETAILS, MAX_SIGNERS, MAX_TEXT, Evidence
from volunteer_kit.moderate import tell_bans
from volunteer_kit.swarm.verification.convictions import evidence_of

page, lite = fixtures()
PEOPLE = ("mallory", "bob", "carl", "dora")  # with the keys 0, 1, 2, 3


def join_all(page: Page, hub) -> Page:
    for number, name in enumerate(PEOPLE):
        assert page.join(add_person(hub, name, "cats"), number).status_code == 200
    return page


def report(page: Page, evidence: str, **changes):
    return page.post("/v1/convict", report_body(page.authority, evidence, **changes))


def pardons(page: Page) -> dict[bytes, float]:
    answer = page.http.get("/v1/bans").json()
    return read_pardons(base64.b64decode(answer["pardons"]), page.authority.trust, answer["version"], time.time())


def test_whom_most_have_convicted_is_banned_with_reason_and_evidence(page, hub, mona):
    join_all(page, hub)
    before = page.bans()
    answer = report(page, evidence_by([1, 2]))
    assert answer.status_code == 200 and "mallory is banned by what the swarm has found" in answer.json()["done"]
    assert page.bans().accounts == {account_digest(RUN, "mallory")} and page.bans().version == before.version + 1
    refused = page.refresh(0)
    said = refused.json()["error"]["message"]
    assert kind_of(refused, 403) == "banned" and f"2 of the 3 other accounts found that {CAUSES['gradient']}" in said
    assert "step 41" in said and "test its memory" in said and "moderator's reason" not in said
    moderator = page.moderator(mona)
    (ban,) = moderator.see("bans")
    assert (ban["name"], ban["by"]) == ("mallory", "the swarm")
    (finding,) = ban["conviction"]["findings"]
    assert (finding["by"], finding["details"], finding["epoch"]) == (["bob", "carl"], DETAILS, 41)
    assert (ban["conviction"]["votes"], ban["conviction"]["others"]) == (2, 3)
    (entry,) = moderator.see("log")
    assert (entry["by"], entry["action"], entry["name"], entry["via"]) == ("the swarm", "banned", "mallory", "swarm")


def test_lifting_the_ban_sets_the_convictions_aside(page, hub, mona):
    join_all(page, hub)
    evidence = evidence_by([1, 2])
    body = report_body(page.authority, evidence)
    assert page.post("/v1/convict", body).status_code == 200
    assert kind_of(page.post("/v1/convict", body), 409) == "already", "the same again"
    moderator = page.moderator(mona)
    done = moderator.do("unban", "mallory").json()["done"]
    assert "what the swarm has found until now is set aside" in done and page.refresh(0).status_code == 200
    assert pardons(page).keys() == {account_digest(RUN, "mallory")} and not page.bans().accounts
    assert kind_of(page.post("/v1/convict", body), 409) == "set_aside", "sent again within its minute"
    assert kind_of(report(page, evidence), 409) == "set_aside", "and with a new proof"
    kept = page.authority.storage
    with kept.reading() as db:
        row = db.execute(text("SELECT set_aside_by, evidence FROM convictions")).one()
    assert row[0] == "Mona" and DETAILS in row[1], "it can still be looked at"
    assert report(page, evidence_by([1, 2], at=time.time() + 2)).status_code == 200, "what is found later counts"
    assert moderator.see("bans")[0]["conviction"]["votes"] == 2


def test_a_moderators_own_ban_is_pardoned_too_but_has_no_evidence(lite, hub, mona):
    page = join_all(lite(), hub)
    moderator = page.moderator(mona)
    moderator.do("ban", "mallory", reason="spam")
    assert moderator.see("bans")[0]["conviction"] is None
    assert kind_of(report(page, evidence_by([1, 2])), 409) == "already"
    assert moderator.do("unban", "mallory").json()["done"] == "The ban of mallory is lifted."
    assert kind_of(report(page, evidence_by([1, 2], at=time.time() - 60)), 409) == "set_aside"


def test_a_pardon_means_the_account_not_its_name(lite, hub, mona):
    page = lite()
    storage = page.authority.storage
    join_all(page, hub)
    with storage.writing() as db:
        db.execute(text("UPDATE accounts SET hub_id = 'id-1' WHERE account IN ('mallory', 'bob')"))
    moderator = page.moderator(mona)
    moderator.do("ban", "mallory", reason="spam")
    moderator.do("unban", "mallory")
    assert pardons(page).keys() == {account_digest(RUN, name) for name in ("mallory", "bob")}


@pytest.mark.parametrize(
    ("signers", "others", "kind"),
    [
        ([1], 1, "minority"),  # one alone never
        ([1], 3, "minority"),
        ([1, 2], 4, "minority"),  # half is not more than half
        ([1, 2], 3, None),
        ([1, 2, 3], 5, None),
        ([0, 1], 2, "minority"),  # nobody votes for himself
        ([1, 4], 2, "minority"),  # nobody knows the fourth
    ],
)
def test_majorities(lite, hub, signers, others, kind):
    page = join_all(lite(), hub)
    answer = report(page, evidence_by(signers, others=others))
    assert answer.status_code == 200 if kind is None else kind_of(answer, 409) == kind
    assert bool(page.bans().accounts) == (kind is None)


def test_an_account_has_one_vote_and_a_banned_one_none(lite, hub, mona):
    page = lite()
    for number, name in enumerate(("mallory", "bob", "bob", "bob", "carl")):
        page.join(add_person(hub, name, "cats"), number)
    assert kind_of(report(page, evidence_by([1, 2, 3], others=3)), 409) == "minority"
    page.moderator(mona).do("ban", "carl", reason="spam")
    assert kind_of(report(page, evidence_by([1, 4], others=2)), 409) == "minority"


def test_a_moderator_can_be_convicted_and_another_can_lift_it(lite, hub, mona):
    """Two moderators do not ban each other, but a broken machine is a moderator's as well."""
    page = join_all(lite(), hub)
    page.join(add_person(hub, "Max"), 5)
    assert report(page, evidence_by([1, 2], accused=5)).status_code == 200 and kind_of(page.refresh(5), 403) == "banned"
    assert page.moderator(mona).do("unban", "Max").status_code == 200 and page.refresh(5).status_code == 200


def test_only_the_runs_monitors_report(lite, hub, tmp_path):
    page = join_all(lite(), hub)
    evidence, authority = evidence_by([1, 2]), page.authority
    stranger = make_authority(tmp_path / "stranger")
    for role in ("volunteer", "host"):
        assert kind_of(report(page, evidence, token=token_of(authority, key(9), role)), 403) == "not_monitor"
    for token in (
        token_of(authority, key(8)),  # another monitor's
        token_of(authority, key(9), seconds=-60.0),
        token_of(stranger, key(9)),
        "",
        "no base64",
        "x" * 1500,
    ):
        assert kind_of(report(page, evidence, token=token), 403) == "not_monitor"
    stranger.storage.close()
    body = report_body(authority, evidence)
    for wrong in (
        {"evidence": evidence_by([1, 2], accused=3)},  # the proof is of other evidence
        {"time": body["time"] - 5},
        {"proof": body["proof"][:-8] + "AAAAAAA="},
        {"proof": ""},
    ):
        assert kind_of(page.post("/v1/convict", body | wrong), 401) == "proof"
    assert kind_of(page.post("/v1/convict", body | {"run_id": "other"}), 409) == "run"
    assert kind_of(page.post("/v1/convict", report_body(authority, evidence, at=time.time() - 120)), 400) == "clock"
    assert not page.bans().accounts
    assert page.post("/v1/convict", body | {"from_the_future": 1}).status_code == 200


@pytest.mark.parametrize(
    "change",
    [
        {"accused": "1220"},
        {"others": 0},
        {"others": "3"},
        {"others": 10**9},
        {"findings": []},
        {"findings": [{}]},
        {"signatures": []},
        {"details": "x" * (MAX_DETAILS + 1)},
        {"details": "two\nlines"},
        {"details": "\u202e"},
        {"details": "nul\x00"},
        {"details": "\ud800"},
        {"cause": "ugly"},
        {"epoch": -1},
        {"jurors_for": 1.5},
        {"at": "now"},
        {"at": float("nan")},
        {"signed": [7]},
        None,
    ],
    ids=str,
)
def test_evidence_is_typed_and_bounded(lite, hub, change):
    page = join_all(lite(), hub)
    found = json.loads(evidence_by([1, 2]))
    for name, value in (change or {}).items():
        if name in found["findings"][0] and isinstance(found["findings"][0], dict):
            found["findings"][0][name] = value
        elif name == "signed":
            found["signatures"][0]["findings"] = value
        elif name == "at":
            found["signatures"][0]["at"] = value
        else:
            found[name] = value
    evidence = json.dumps(found) if change else "[" * 12_000
    assert kind_of(report(page, evidence), 400) == "malformed" and not page.bans().accounts


def test_what_is_too_large_is_not_read(lite, hub):
    page = join_all(lite(), hub)
    assert kind_of(report(page, evidence_by([1, 2]), token="x" * 1501), 422) == "malformed"
    assert kind_of(report(page, "x" * 12_501), 422) == "malformed"
    assert kind_of(report(page, evidence_by([1, 2]), votes=-1), 422) == "malformed"
    assert kind_of(report(page, "x" * 20_000), 413) == "malformed"


def test_the_largest_evidence_fits_into_a_report(lite):
    page = lite()
    accused, many = peer_of(0), [peer_of(1).to_bytes()[:-2] + i.to_bytes(2, "big") for i in range(300)]
    strikes = [
        strike_of(accused, epoch=epoch, cause="false_accusation", details="ß" * MAX_DETAILS) for epoch in range(12)
    ]
    said = {type(accused)(one): strikes[i % 4 * 3 : i % 4 * 3 + 3] for i, one in enumerate(many)}
    evidence = evidence_of(accused, said, 310).to_text()
    assert len(json.dumps(evidence)) <= MAX_TEXT and len(Evidence.model_validate_json(evidence).signatures) > 10
    assert kind_of(report(page, evidence), 409) == "nobody", "it was read"
    plain = evidence_of(accused, {one: strikes[:3] for one in said}, 310)
    assert len(plain.signatures) == MAX_SIGNERS


def test_who_is_not_known_is_not_banned(lite, hub):
    page = join_all(lite(), hub)
    assert kind_of(report(page, evidence_by([1, 2], accused=6)), 409) == "nobody"


@pytest.mark.parametrize("later", [-2 * 86_400, 600], ids=["past", "to come"])
def test_strikes_of_another_time_do_not_count(lite, hub, later):
    page = join_all(lite(), hub)
    assert kind_of(report(page, evidence_by([1, 2], at=time.time() + later)), 409) == "set_aside"


def test_databases_from_before_convictions_go_on(hub, tmp_path, database, mona):
    first = make_authority(tmp_path, database)
    page = join_all(Page(first), hub)
    page.moderator(mona).do("ban", "dora", reason="spam")
    with first.storage.writing() as db:
        db.execute(text("DROP TABLE convictions"))
        db.execute(text("DROP TABLE pardons"))
    first.storage.close()
    second = make_authority(tmp_path, database)
    page = Page(second)
    assert page.bans().accounts == {account_digest(RUN, "dora")} and pardons(page) == {}
    assert report(page, evidence_by([1, 2])).status_code == 200
    assert page.moderator(mona).do("unban", "dora").status_code == 200
    second.storage.close()


def test_the_page_shows_what_was_found_and_escapes_it(lite, hub, mona):
    page = join_all(lite(), hub)
    report(page, evidence_by([1, 2], details="<img src=x onerror=alert(1)>"))
    browser = TestClient(page.authority.app, base_url=URL, follow_redirects=True)
    browser.post("/moderate/sign-in", data={"token": mona}, headers={"Origin": URL})
    shown = browser.get("/moderate").text
    assert "by the swarm" in shown and "What was found" in shown and "Signed by bob, carl." in shown
    assert "4 confirmed it and 1 did not" in shown and "<img" not in shown and "&lt;img src=x" in shown


def test_the_command_line_tells_what_was_found(lite, hub, mona):
    page, said = join_all(lite(), hub), []
    report(page, evidence_by([1, 2]))
    tell_bans(SimpleNamespace(bans=lambda: page.moderator(mona).see("bans")), said.append)
    assert "by the swarm" in said[0] and said[1] == f"mallory, step 41: {DETAILS} (signed by bob, carl)"
