"""What the authority withstands: haste, bodies that are no requests, sick databases; and its silence about logins."""

from __future__ import annotations

import base64
import json
import logging
import time
from typing import Any

import pytest

from tests.asked_authority import Page, fixtures, kind_of
from tests.local_authority import ALLOWLIST, RUN, add_person, join_body, make_authority
from volunteer_kit import __version__
from volunteer_kit.auth.access_token import TokenError, read_token
from volunteer_kit.auth.authority.settings import AuthorityError, Pace, Settings
from volunteer_kit.auth.authority.storage import Storage

page, lite = fixtures()


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
    from volunteer_kit.bounded_http import household

    assert household("192.0.2.7") == "192.0.2.7" == household("::ffff:192.0.2.7")
    assert household("2001:db8:1:2:3::4") == household("2001:db8:1:2:ffff::1") != household("2001:db8:1:3::1")


@pytest.mark.parametrize(
    "body", [b"", b"{", b"[]", b"null", b"\xff\xfe", b"[" * 10_000, b'{"time": NaN}', b'{"a":"\\ud800"}']
)
def test_bodies_that_cannot_be_read(lite, body):
    answer = lite().http.post("/v1/join", content=body, headers={"Content-Type": "application/json"})
    assert answer.status_code in (400, 422) and answer.json()["error"]["kind"] == "malformed"


@pytest.mark.parametrize("field", ["run_id", "public_key", "proof", "hf_token", "scope"])
@pytest.mark.parametrize("verb", ["join", "refresh"])
def test_half_a_character_is_malformed(lite, anna, verb, field):
    """JSON may have a lone surrogate in it, which is no text: it cannot be hashed, nor written."""
    body = json.dumps({**join_body(anna), field: "ssh-rsa \ud800"})
    answer = lite().http.post(f"/v1/{verb}", content=body, headers={"Content-Type": "application/json"})
    if verb == "refresh" and field in ("hf_token", "scope"):
        assert answer.status_code == 401, "it knows no such field"
    else:
        assert kind_of(answer, 422) == "malformed" and field in answer.text


def test_half_a_character_in_a_moderators_words_is_malformed(lite, mona):
    page = lite()
    headers = {"Content-Type": "application/json", **page.moderator(mona).headers}
    for verb, wrong in (
        ("session", {"hf_token": "\ud800"}),
        ("ban", {"username": "\ud800", "reason": "spam"}),
        ("ban", {"username": "anna", "reason": "\ud800"}),
    ):
        answer = page.http.post(f"/v1/moderate/{verb}", content=json.dumps(wrong), headers=headers)
        assert kind_of(answer, 422) == "malformed"


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
    assert not page.bans().accounts


def test_the_run_is_described(lite):
    about = lite(oauth_client_id="app", run_link="https://example.org/run.yaml").http.get("/v1/run").json()
    assert (about["run_id"], about["allowlist"], about["organization"]) == (RUN, "organization", "cats")
    assert about["kit"] == __version__
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
    before = Page(first).bans()
    first.storage.close()
    second = make_authority(tmp_path, database)
    assert Page(second).refresh().status_code == 200 and Page(second).bans() == before
    second.storage.close()


def test_a_database_made_anew_is_ahead_of_the_lost_one(hub, tmp_path, mona, monkeypatch):
    lost = make_authority(tmp_path / "lost")
    moderator = Page(lost).moderator(mona)
    for name in ("anna", "berta", "carl"):
        moderator.do("ban", name, reason="spam")
    known = Page(lost).bans().version
    lost.storage.close()
    later = time.time() + 60
    monkeypatch.setattr(time, "time", lambda: later)
    new = make_authority(tmp_path / "new")
    Page(new).moderator(mona).do("ban", "anna", reason="spam")
    assert known < Page(new).bans().version < 2**53, "or peers would not take it"
    new.storage.close()


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
    assert "S3cret" not in str(caught.value) and ("--database" in str(caught.value) or says == "no database")


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
