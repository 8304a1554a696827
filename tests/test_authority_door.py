"""The doors of host and moderator: `volunteer-kit authority` and `volunteer-kit moderate`, as they are typed."""

from __future__ import annotations

import json
import os
import ssl
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import requests
import typer
from typer.testing import CliRunner

from tests.bounded_server import make_certificate
from tests.local_authority import RUN, add_person, join_body, make_authority, served
from tests.waiting import wait_until
from volunteer_kit import authority_door, cli_host
from volunteer_kit.auth.access_token import KeyFolder, KeysError, Trust
from volunteer_kit.auth.authority.server import serve
from volunteer_kit.auth.authority.settings import AuthorityError
from volunteer_kit.auth.authority_client import AuthorityRefused
from volunteer_kit.run_reader import RUN_FILES, RunError


def write_run(folder: Path, public_key: str, **more: Any) -> Path:
    path = folder / "run.yaml"
    authority = {"url": "http://127.0.0.1:8400", "public_key": public_key, "moderators": ["Mona"], **more}
    path.write_text(f"{(RUN_FILES / 'demo.yaml').read_text()}\nauthority: {json.dumps(authority)}\n")
    return path


# --- keys ---


def test_keys_are_made_shown_and_rotated(tmp_path):
    said: list[str] = []
    public_key = authority_door.make_keys(RUN, folder=tmp_path, say=said.append)
    assert public_key in "\n".join(said) and "root.pem" in said[0]
    assert authority_door.make_keys(RUN, folder=tmp_path, say=said.append) == public_key, "the same ones again"
    run = write_run(tmp_path, public_key)
    assert authority_door.make_keys(str(run), folder=tmp_path, say=said.append) == public_key
    keys, trust = KeyFolder(tmp_path / "keys"), Trust.of(RUN, public_key)
    before = keys.signer("authority").sign("token", b"x")
    authority_door.rotate_key(run, folder=tmp_path, say=said.append)
    after = keys.signer("authority").sign("token", b"x")
    assert before != after and "new key" in said[-1]
    assert {trust.open(signed, "token", "authority", time.time()) for signed in (before, after)} == {b"x"}


def test_keys_that_nobody_would_believe_are_found_before_anybody_joins(tmp_path):
    ours = authority_door.make_keys(RUN, folder=tmp_path / "a", say=lambda line: None)
    run = write_run(tmp_path, ours)
    authority_door.make_keys(RUN, folder=tmp_path / "b", say=lambda line: None)
    authority_door.make_keys("other", folder=tmp_path / "c", say=lambda line: None)
    for folder in ("b", "c"):
        with pytest.raises(RunError, match="would not believe"):
            authority_door.serve_authority(run, folder=tmp_path / folder)
    with pytest.raises(KeysError, match="missing"):
        authority_door.serve_authority(run, folder=tmp_path / "nowhere")
    with pytest.raises(RunError, match="has no authority"):
        authority_door.serve_authority(RUN, folder=tmp_path / "a")


def test_the_databases_password_may_come_by_the_environment(tmp_path, monkeypatch):
    app, asked = typer.Typer(), []
    cli_host.add_verbs(app, lambda verb: verb)
    monkeypatch.setattr(authority_door, "serve_authority", lambda run, **how: asked.append(how["database"]))
    monkeypatch.setenv("VOLUNTEER_KIT_DATABASE", "postgresql://ada:S3cret@db/run")
    for arguments in ([], ["--database", "other.sqlite"]):
        result = CliRunner().invoke(app, ["authority", "run.yaml", *arguments])
        assert result.exit_code == 0, result.output
    assert asked == ["postgresql://ada:S3cret@db/run", "other.sqlite"]
    assert "S3cret" not in CliRunner().invoke(app, ["authority", "--help"]).output


# --- where it listens ---


@pytest.mark.parametrize(
    "how, says",
    [
        ({"host": "0.0.0.0"}, "--tls-cert"),
        ({"host": "192.0.2.1"}, "not encrypted"),
        ({"tls_cert": "cert.pem"}, "go together"),
        ({"host": "192.0.2.1", "behind_proxy": True}, "cannot listen"),
        ({"tls_cert": "nowhere.pem", "tls_key": "nowhere.pem"}, "cannot be used"),
    ],
)
def test_it_does_not_listen_where_logins_could_be_read(hub, tmp_path, how, says):
    authority = make_authority(tmp_path)
    with pytest.raises(AuthorityError, match=says):
        serve(authority.app, **how)
    authority.storage.close()


def test_a_port_that_is_taken_is_told(hub, tmp_path):
    authority = make_authority(tmp_path)
    with served(authority) as url, pytest.raises(AuthorityError, match="--port"):
        serve(authority.app, port=int(url.rpartition(":")[2]))
    authority.storage.close()


def test_with_a_certificate_it_speaks_tls_only(hub, tmp_path):
    cert, private = make_certificate(tmp_path)
    authority, token = make_authority(tmp_path), add_person(hub, "anna", "cats")
    ready, stop, at = threading.Event(), threading.Event(), []
    how = {"tls_cert": cert, "tls_key": private, "stop": stop, "on_ready": lambda url: (at.append(url), ready.set())}
    thread = threading.Thread(target=serve, args=(authority.app,), kwargs=how)
    thread.start()
    try:
        assert ready.wait(120) and at[0].startswith("https://")
        answer = requests.post(f"{at[0]}/v1/join", json=join_body(token), verify=str(cert), timeout=60)
        assert answer.status_code == 200
        with pytest.raises(requests.RequestException):
            requests.get(at[0].replace("https", "http") + "/v1/run", timeout=60)
    finally:
        stop.set()
        thread.join(60)
    authority.storage.close()


def test_a_renewed_certificate_is_taken_up_and_a_broken_one_is_not(hub, tmp_path, caplog):
    cert, private = make_certificate(tmp_path)
    (tmp_path / "other").mkdir()
    other, other_key = make_certificate(tmp_path / "other", number=1)
    authority, ready, stop, at = make_authority(tmp_path), threading.Event(), threading.Event(), []
    how = {"tls_cert": cert, "tls_key": private, "stop": stop, "on_ready": lambda url: (at.append(url), ready.set())}
    thread = threading.Thread(target=serve, args=(authority.app,), kwargs=how)
    thread.start()

    def shown() -> str:
        return ssl.get_server_certificate(("127.0.0.1", int(at[0].rpartition(":")[2])), timeout=60)

    try:
        assert ready.wait(120)
        old = cert.read_text()
        assert shown().strip() == old.strip()
        os.replace(other, cert)  # not its key yet
        wait_until(lambda: "cannot be used" in caplog.text, 60.0)
        assert shown().strip() == old.strip()
        time.sleep(1.5)
        assert caplog.text.count("cannot be used") == 1, "told once"
        os.replace(other_key, private)
        wait_until(lambda: shown().strip() == cert.read_text().strip() != old.strip(), 60.0)
    finally:
        stop.set()
        thread.join(60)
    authority.storage.close()


# --- moderators type ---


@pytest.fixture
def run_verb(hub, tmp_path, monkeypatch) -> Iterator[Callable[..., Any]]:
    monkeypatch.setenv("HF_TOKEN", add_person(hub, "Mona"))
    authority, app = make_authority(tmp_path), typer.Typer()
    cli_host.add_verbs(app, lambda verb: verb)
    with served(authority) as url:
        yield lambda *words: CliRunner().invoke(app, ["moderate", *words, "--url", url])
    sessions = authority.app.state.moderators.sessions
    assert sessions._signed == {}, "each one signed out again"
    authority.storage.close()


def test_a_moderator_works_from_the_command_line(run_verb, hub):
    assert "berta may take part" in run_verb("add", "berta").stdout
    assert "eve is banned" in run_verb("ban", "eve", "--reason", "spam").stdout
    assert "berta" in run_verb("members").stdout and "berta" not in run_verb("members", "zzz").stdout
    assert "eve" in run_verb("bans").stdout and "spam" in run_verb("bans").stdout
    assert "lifted" in run_verb("unban", "eve").stdout and "Nobody is banned" in run_verb("bans").stdout
    assert "is out" in run_verb("remove", "berta").stdout
    lines = run_verb("log").stdout.splitlines()
    assert [line.split()[4] for line in lines] == ["removed", "unbanned", "banned", "added"]


def test_what_a_moderator_may_not_do_is_told(run_verb, hub, monkeypatch):
    refused = run_verb("ban", "max", "--reason", "spam").exception
    assert isinstance(refused, AuthorityRefused) and "run file" in str(refused)
    monkeypatch.setenv("HF_TOKEN", add_person(hub, "anna"))
    assert "not a moderator" in str(run_verb("members").exception)


def test_without_a_login_or_a_run_it_is_told_what_to_do(monkeypatch, tmp_path):
    app = typer.Typer()
    cli_host.add_verbs(app, lambda verb: verb)
    assert "--url" in str(CliRunner().invoke(app, ["moderate", "bans"]).exception)
    assert "no authority" in str(CliRunner().invoke(app, ["moderate", "bans", "--run", RUN]).exception)
