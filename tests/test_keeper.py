"""The keeper: tokens are found, told and renewed, whatever strangers make up; bans are heard, whoever is silent."""

from __future__ import annotations

import threading
import time
from concurrent.futures import Future
from types import SimpleNamespace

import pytest
from hivemind.dht.crypto import RSASignatureValidator
from hivemind.p2p import PeerID
from hivemind.utils import ValueWithExpiration
from hivemind.utils.crypto import RSAPrivateKey

from tests.test_admission import A, wait_until
from tests.trust import RunKeys
from volunteer_kit.auth.access_token import peer_id_of_key, sign_bans
from volunteer_kit.swarm.net.access.control import RENEW_BEFORE, Admission
from volunteer_kit.swarm.records import credentials as keeping
from volunteer_kit.swarm.records.credentials import AdmissionKeeper, token_key


class Shelf:
    """In the DHT's place: what was stored, by key."""

    def __init__(self):
        self.held, self.stored = {}, []

    def add_validators(self, validators) -> None:
        pass

    def store(self, key, value, expiration_time, subkey=None, return_future=False) -> Future:
        self.stored.append(key)
        entry = ValueWithExpiration(value, expiration_time)
        self.held[key] = entry if subkey is None else ValueWithExpiration({subkey: entry}, expiration_time)
        return done(True)

    def get(self, key, latest=False, return_future=False) -> Future:
        return done(self.held.get(key))


def done(value) -> Future:
    future = Future()
    future.set_result(value)
    return future


@pytest.fixture
def run(tmp_path):
    return RunKeys(tmp_path)


@pytest.fixture
def keep(run):
    """Starts keepers; with a shelf and the admission of each."""
    started = []

    def start(fetch=None, shelf: Shelf | None = None, **options) -> SimpleNamespace:
        peer = SimpleNamespace(dht=shelf or Shelf(), admission=run.admission(own=A), peer_id=A)
        started.append(AdmissionKeeper(peer, fetch, bans_every=0.05, **options))
        return SimpleNamespace(shelf=peer.dht, admission=peer.admission)

    yield start
    for one in started:
        one.close()


def tell(run, shelf: Shelf) -> PeerID:
    """A peer whose token is in the DHT."""
    key = RSAPrivateKey()
    public = key.get_public_key().to_bytes()
    peer = PeerID(peer_id_of_key(public))
    subkey = RSASignatureValidator(key).local_public_key
    shelf.store(token_key("test", peer), run.token(peer, "bob"), time.time() + 600, subkey=subkey)
    return peer


def made_up(count: int) -> list[PeerID]:
    return [PeerID(b"\x12\x20" + number.to_bytes(32, "big")) for number in range(count)]


def test_peers_that_somebody_has_made_up_do_not_hide_the_true_ones(run, keep, monkeypatch):
    monkeypatch.setattr(keeping, "LOOK_EVERY", 0.02)
    kept = keep()
    bob = tell(run, kept.shelf)

    def look() -> bool:
        return [kept.admission.believes(peer) for peer in (*made_up(300), bob)][-1]  # always in this order

    assert wait_until(look, 60.0)


def test_who_is_not_found_is_looked_for_less_and_less_often(keep, monkeypatch):
    monkeypatch.setattr(keeping, "LOOK_EVERY", 0.02)
    kept, asked = keep(), []
    get = kept.shelf.get
    monkeypatch.setattr(kept.shelf, "get", lambda key, **more: (asked.append(key), get(key, **more))[1])
    stranger = made_up(1)[0]
    assert wait_until(lambda: kept.admission.believes(stranger) or token_key("test", stranger) in asked, 60.0)
    deadline = time.monotonic() + 1.5
    while time.monotonic() < deadline:
        kept.admission.believes(stranger)
        time.sleep(0.01)
    assert 1 <= asked.count(token_key("test", stranger)) <= 2


def test_an_authority_that_does_not_answer_delays_no_tokens(run, keep):
    asked, answer = threading.Event(), threading.Event()

    def fetch(known: int | None):
        asked.set()
        answer.wait(240)

    try:
        kept = keep(fetch)
        assert asked.wait(60)
        bob = tell(run, kept.shelf)
        assert wait_until(lambda: kept.admission.believes(bob), 60.0)
    finally:
        answer.set()


def test_our_token_is_told_again_and_again(keep, monkeypatch):
    """The nodes that have it leave, and storing it can fail."""
    monkeypatch.setattr(keeping, "TELL_EVERY", 0.05)
    monkeypatch.setattr(keeping, "LOOK_EVERY", 0.02)
    kept = keep()
    assert wait_until(lambda: kept.shelf.stored.count(token_key("test", A)) >= 3, 60.0)


@pytest.mark.parametrize(("age", "asks"), [(1.0, False), (50.0, True)])
def test_an_old_statement_is_no_news_of_today(run, keep, age, asks):
    """It is good for two minutes: whoever hides the newer one from us would win as much for the banned."""
    shelf, asked = Shelf(), []
    old = sign_bans(run.signer, run.bans, time.time() - age, time.time() + 120 - age)
    shelf.store("test_bans", old, time.time() + 120 - age)
    run.ban("bob")
    kept = keep(lambda known: (asked.append(known), (run.bans, run.statement()))[1], shelf=shelf)
    if asks:
        assert wait_until(lambda: kept.admission.bans.version == 1, 60.0) and asked[0] is None
        assert shelf.held["test_bans"].value != old, "and the others are told"
    else:
        assert not wait_until(lambda: asked, 1.0)


def test_a_newcomer_knows_the_bans_at_once(run, keep):
    """However long it takes until somebody tells it."""
    run.ban("bob")
    kept = keep(lambda known: (run.bans, run.statement()))
    assert wait_until(lambda: kept.admission.bans.version == 1, 60.0)


def test_a_token_is_looked_for_before_it_ends(run):
    now = time.time()
    admission = Admission(run.trust, clock=lambda: now)
    peer = made_up(1)[0]
    assert admission.show(run.token(peer, "bob", seconds=600.0), peer) is None
    assert admission.believes(peer) and admission.take_unknown() == []
    now += 600 - RENEW_BEFORE + 1
    assert admission.believes(peer), "it still holds"
    assert admission.take_unknown() == [peer]
