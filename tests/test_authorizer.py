"""The volunteer's side, against a real authority over real HTTP: joining, staying, giving up; an authority away."""

from __future__ import annotations

import base64
import http.server
import json
import logging
import pickle
import queue
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tests.free_ports import free_port
from tests.hub import Hub
from tests.local_authority import RUN, Authority, add_person, key, make_authority, served
from volunteer_kit.auth import authorizer as module
from volunteer_kit.auth.access_token import KeyFolder, Trust, peer_id_of_key, read_token
from volunteer_kit.auth.authority_client import AuthorityRefused
from volunteer_kit.auth.authorizer import Authorizer
from volunteer_kit.auth.identity import LoginError
from volunteer_kit.auth.patience import ask_patiently
from volunteer_kit.auth.proof import public_text

SOON = 120.0  # s; a second or two, but on a busy machine
LIFETIME = 6.0  # s; renewed after a third of it
ANNA = "hf_annareadSecret"


@pytest.fixture
def hub(hub) -> Hub:
    add_person(hub, "anna", "cats")
    add_person(hub, "Mona")
    return hub


@pytest.fixture(autouse=True)
def impatient(monkeypatch):
    monkeypatch.setattr(module, "FIRST_PAUSE", 0.05)
    monkeypatch.setattr(module, "LONGEST_PAUSE", 0.2)


@pytest.fixture
def authority(hub, tmp_path) -> Iterator[Authority]:
    authority = make_authority(tmp_path, token_lifetime=LIFETIME)
    yield authority
    authority.storage.close()


class Volunteer:
    """An authorizer, and what it told."""

    def __init__(self, url: str, trust: Trust, **more: Any):
        self.tokens: queue.Queue[tuple[bytes, float]] = queue.Queue()  # and when it came
        self.refused: queue.Queue[tuple[str, str]] = queue.Queue()
        self.trust = trust
        told = {
            "on_token": lambda envelope: self.tokens.put((envelope, time.time())),
            "on_refused": lambda *why: self.refused.put(why),
        }
        self.authorizer = Authorizer(url, trust, RUN, key(0), ANNA, **told, **more)

    def next_token(self) -> Any:
        envelope, came = self.tokens.get(timeout=SOON)
        return read_token(envelope, self.trust, came)


@pytest.fixture
def volunteer(authority) -> Iterator[Callable[..., Volunteer]]:
    made: list[Volunteer] = []

    def one(url: str, trust: Trust | None = None, **more: Any) -> Volunteer:
        made.append(Volunteer(url, trust or authority.trust, **more))
        return made[-1]

    yield one
    for each in made:
        each.authorizer.stop(SOON)


def moderators(authority: Authority) -> Any:
    return authority.app.state.moderators


def test_it_joins_and_renews_in_the_background(authority, volunteer, hub):
    with served(authority) as url:
        anna = volunteer(url)
        token = anna.authorizer.join()
        assert token.username == "anna" and token.peer_id == peer_id_of_key(public_text(key(0)))
        assert anna.next_token() == token
        hub.forget()
        anna.authorizer.start()
        ends = [anna.next_token().expires_at for _ in range(3)]
        assert token.expires_at < ends[0] < ends[1] < ends[2] and hub.asked == []
        assert anna.authorizer.token.expires_at >= ends[2]


def test_it_lives_through_an_authority_that_is_away(authority, volunteer):
    port = free_port()
    with served(authority, port) as url:
        anna = volunteer(url)
        anna.authorizer.join()
        anna.authorizer.start()
        anna.next_token()
    with pytest.raises(AuthorityRefused) as caught:
        anna.authorizer.refresh()
    assert caught.value.kind == "away" and not caught.value.is_final and "\n1. " in str(caught.value)
    last = anna.authorizer.token.expires_at
    time.sleep(max(0.0, last - time.time()) + 0.1)  # its token ends meanwhile
    assert anna.refused.empty()
    with served(authority, port):
        while anna.next_token().expires_at <= last:
            pass


@pytest.mark.parametrize("trouble", ["ban", "remove"])
def test_it_gives_up_at_once_when_it_is_put_out(authority, volunteer, hub, trouble):
    hub.orgs["anna"] = []
    moderators(authority).add("Mona", "anna", "api")
    with served(authority) as url:
        anna = volunteer(url)
        anna.authorizer.join()
        anna.authorizer.start()
        if trouble == "ban":
            moderators(authority).ban("Mona", "anna", "sends large numbers", "api")
        else:
            moderators(authority).remove("Mona", "anna", "api")
        kind, message = anna.refused.get(timeout=SOON)
        assert kind == ("banned" if trouble == "ban" else "organization") and "\n1. " in message
        assert trouble != "ban" or "sends large numbers" in message
        anna.authorizer._thread.join(SOON)
        assert not anna.authorizer._thread.is_alive() and anna.refused.empty()
    hub.orgs["anna"] = ["cats"]


def test_an_authority_that_lost_its_records_is_joined_again(authority, volunteer, hub, tmp_path):
    port = free_port()
    with served(authority, port) as url:
        anna = volunteer(url)
        anna.authorizer.join()
    (tmp_path / "new").mkdir()
    (tmp_path / "keys").rename(tmp_path / "new" / "keys")
    other = make_authority(tmp_path / "new", token_lifetime=LIFETIME)
    with served(other, port):
        anna.tokens.get()
        anna.authorizer.start()
        assert anna.next_token().username == "anna" and sum("whoami" in asked.path for asked in hub.asked) == 2
    other.storage.close()


def test_a_callback_that_breaks_does_not_end_it(authority, volunteer, caplog):
    with served(authority) as url:
        anna = volunteer(url)
        anna.authorizer.join()
        calls: queue.Queue[int] = queue.Queue()

        def breaks(envelope: bytes) -> None:
            calls.put(1)
            raise RuntimeError("the roster is full")

        anna.authorizer._on_token = breaks
        anna.authorizer.start()
        for _ in range(3):
            calls.get(timeout=SOON)
        assert "the roster is full" in caplog.text


# --- what it does not believe ---


def test_a_token_that_the_runs_key_does_not_stand_behind_is_not_taken(authority, volunteer, tmp_path):
    other = Trust.of(RUN, KeyFolder(tmp_path / "other").create(RUN))
    with served(authority) as url:
        anna = volunteer(url, other)
        with pytest.raises(AuthorityRefused) as caught:
            anna.authorizer.join()
        assert caught.value.kind == "forged" and anna.tokens.empty() and not caught.value.is_final


def test_bans_are_checked_and_known_ones_not_fetched_again(authority, volunteer, tmp_path):
    moderators(authority).ban("Mona", "eve", "spam", "api")
    with served(authority) as url:
        anna = volunteer(url)
        bans, statement = anna.authorizer.bans()
        assert len(bans.accounts) == 1 and len(statement) < 1000
        assert anna.authorizer.bans(bans.version) is None and anna.authorizer.bans(0)[0] == bans
        other = Trust.of(RUN, KeyFolder(tmp_path / "other").create(RUN))
        with pytest.raises(AuthorityRefused, match="not to be believed"):
            volunteer(url, other).authorizer.bans()


class Liar(http.server.BaseHTTPRequestHandler):
    """A server that gives one answer to everything."""

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["Content-Length"]))
        status, headers, body = self.server.answer
        self.server.seen.append(dict(self.headers))
        self.send_response(status)
        for name, value in {"Content-Length": str(len(body)), **headers}.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body)

    do_GET = do_POST

    def log_message(self, *args: object) -> None:
        pass


@pytest.fixture
def liar() -> Iterator[Any]:
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Liar) as server:
        server.seen, server.url = [], f"http://127.0.0.1:{server.server_address[1]}"
        thread = threading.Thread(target=server.serve_forever, args=(0.05,))
        thread.start()
        yield server
        server.shutdown()
        thread.join()


def said(kind: str, message: str = "no") -> bytes:
    return json.dumps({"error": {"kind": kind, "message": message}}).encode()


@pytest.mark.parametrize(
    "answer, kind, is_final",
    [
        ((200, {}, b"<html>a hotel's page"), "away", False),
        ((200, {}, b"[]"), "away", False),
        ((200, {}, b"{}"), "forged", False),
        ((200, {}, b'{"token": 5}'), "forged", False),
        ((200, {}, b'{"token": "eHg="}'), "forged", False),
        ((200, {}, b"[" * 100_000), "away", False),
        ((302, {"Location": "http://127.0.0.1:1/steal"}, b""), "away", False),
        ((403, {}, said("banned", "spam\x1b[31m")), "banned", True),
        ((401, {}, said("some new kind")), "some new kind", True),
        ((429, {"Retry-After": "7"}, said("limit")), "limit", False),
        ((429, {}, b""), "limit", False),
        ((503, {"Retry-After": "soon"}, said("banned")), "down", False),
        ((409, {}, said("run")), "run", False),
        ((500, {}, b"oops"), "away", False),
    ],
)
def test_whatever_a_server_answers_is_told_in_words(authority, volunteer, liar, answer, kind, is_final):
    liar.answer = answer
    with pytest.raises(LoginError) as caught:
        volunteer(liar.url).authorizer.join()
    error = caught.value
    assert (error.kind, error.is_final) == (kind, is_final) and "\x1b" not in str(error) and ANNA not in str(error)
    assert len(liar.seen) == 1, "no redirect is followed with a login in hand"
    assert error.retry_after == (7.0 if "7" in answer[1].values() else None)


def test_a_first_join_waits_for_what_passes_as_long_as_it_is_asked_to(authority, volunteer, liar):
    """503, 429 and silence, each told with how long it waits, and then a real authority answers."""
    port, waits, told = free_port(), [], []
    answers = [(429, {"Retry-After": "45"}, b""), (503, {"Retry-After": "99999"}, b""), (503, {}, b"")]
    liar.answer = (503, {}, said("down"))
    anna = volunteer(liar.url)

    def wait(seconds: float) -> bool:
        waits.append(seconds)
        if answers:
            liar.answer = answers.pop(0)
        return False

    def join() -> Any:
        if len(waits) < 4:
            return anna.authorizer.join()
        with served(authority, port) as url:
            return volunteer(url).authorizer.join()

    token = ask_patiently(join, lambda trouble, pause: told.append((trouble.first_line, pause)), wait)
    assert token.username == "anna" and waits == [2.0, 45.0, 300.0, 16.0]
    assert [pause for _, pause in told] == waits and "asked too often" in told[1][0] and "HTTP 503" in told[2][0]


@pytest.mark.parametrize("kind", ["banned", "organization", "clock"])
def test_what_does_not_pass_is_not_waited_for(authority, volunteer, liar, kind):
    liar.answer = (403, {"Retry-After": "7"}, said(kind))
    with pytest.raises(AuthorityRefused):
        ask_patiently(volunteer(liar.url).authorizer.join, lambda *told: None, pytest.fail)


def test_patience_ends_and_so_does_the_waiting_of_who_leaves(authority, volunteer, liar):
    liar.answer = (503, {}, b"")
    waits: list[float] = []
    join = volunteer(liar.url).authorizer.join
    with pytest.raises(AuthorityRefused) as caught:
        ask_patiently(join, lambda *told: None, waits.append)
    assert caught.value.kind == "away" and 600 < sum(waits) <= 900 and max(waits) == 60.0
    leave = threading.Event()
    leave.set()
    assert ask_patiently(join, lambda *told: None, leave.wait) is None


def test_an_authority_that_is_away_is_the_cause_once_the_token_has_ended(authority, volunteer):
    told: queue.Queue[str] = queue.Queue()
    ahead = [0.0]
    port = free_port()
    with served(authority, port) as url:
        anna = volunteer(url, clock=lambda: time.time() + ahead[0], on_trouble=told.put)
        anna.authorizer.join()
        assert anna.authorizer.why_no_token() is None
    anna.authorizer.start()
    assert "does not answer" in told.get(timeout=SOON)
    ahead[0] = LIFETIME
    why = anna.authorizer.why_no_token()
    assert "access token has ended" in why and "127.0.0.1" in why and "does not answer" in why
    ahead[0] = 0.0
    with served(authority, port):
        anna.next_token(), anna.next_token()
        assert anna.authorizer.why_no_token() is None and told.empty(), "once in a row of vain questions"


def test_a_clock_that_goes_back_is_told_by_the_authority_and_ends_no_stay(hub, volunteer, monkeypatch, tmp_path):
    """The token in hand would last an hour, and no token may: it is asked long before it is due."""
    monkeypatch.setattr(module, "LOOK_EVERY", 0.05)
    behind, authority = [0.0], make_authority(tmp_path / "long")
    with served(authority) as url:
        anna = volunteer(url, authority.trust, clock=lambda: time.time() - behind[0])
        anna.authorizer.join()
        anna.authorizer.start()
        behind[0] = 3600.0
        deadline = time.monotonic() + SOON
        while anna.authorizer.trouble is None and time.monotonic() < deadline:
            time.sleep(0.01)
        trouble = anna.authorizer.trouble
        assert trouble.kind == "clock" and not trouble.is_final and anna.refused.empty()
        anna.authorizer.stop(SOON)
    authority.storage.close()


def test_an_answer_without_end_is_not_read_to_the_end(authority, volunteer, liar, monkeypatch):
    from volunteer_kit.auth import authority_client

    monkeypatch.setattr(authority_client, "MAX_ANSWER", 100_000)
    liar.answer = (200, {}, b" " * 300_000)
    with pytest.raises(AuthorityRefused) as caught:
        volunteer(liar.url).authorizer.join()
    assert caught.value.kind == "away"


@pytest.mark.parametrize(
    "url", ["http://example.org", "ftp://127.0.0.1", "example.org", "http://127.0.0.1.evil.example"]
)
def test_logins_are_not_sent_unencrypted(authority, volunteer, url):
    with pytest.raises(AuthorityRefused) as caught:
        volunteer(url)
    assert caught.value.kind == "insecure" and "https://" in str(caught.value)


def test_the_login_stays_out_of_sight(authority, volunteer, caplog, liar):
    caplog.set_level(logging.DEBUG)
    liar.answer = (500, {}, b"")
    anna = volunteer(liar.url)
    anna.authorizer.start()
    with pytest.raises(AuthorityRefused) as caught:
        anna.authorizer.join()
    assert ANNA not in repr(anna.authorizer) + str(anna.authorizer) + caplog.text + repr(caught.value)
    with pytest.raises(TypeError):
        pickle.dumps(anna.authorizer)
    assert not any("Authorization" in headers or "Cookie" in headers for headers in liar.seen)


def test_a_peers_identity_by_hivemind_proves_itself_the_same_way(authority):
    from hivemind.utils.crypto import RSAPrivateKey

    from volunteer_kit.auth.proof import is_proven, prove

    theirs = RSAPrivateKey()
    public = theirs.get_public_key().to_bytes()
    assert public_text(theirs._private_key) == public
    assert is_proven(public, theirs.sign(b"claim").decode(), b"claim")
    assert theirs.get_public_key().verify(
        b"claim", base64.b64encode(base64.b64decode(prove(theirs._private_key, b"claim")))
    )
