"""Who may call whom: tokens shown and believed, for all processes of a peer, and between real peers of a DHT."""

from __future__ import annotations

import multiprocessing as mp
import time
from types import SimpleNamespace

import pytest
from hivemind.dht.routing import DHTID
from hivemind.p2p import PeerID
from hivemind.utils import MSGPackSerializer, get_dht_time
from hivemind.utils.crypto import RSAPrivateKey

from tests.trust import RunKeys, make_identity
from volunteer_kit.auth.access_token import BanList, account_digest
from volunteer_kit.swarm.errors import SwarmError
from volunteer_kit.swarm.net.access.control import Admission, NotAdmitted
from volunteer_kit.swarm.net.access.token_table import CAPACITY, PROBES, Known, Roster
from volunteer_kit.swarm.net.identity import load_private_key
from volunteer_kit.swarm.net.peer import PeerConfig, start_peer
from volunteer_kit.swarm.records.credentials import AdmissionKeeper
from volunteer_kit.swarm.records.peer_record import PeerBoard, PeerRecord

A, B, C = (PeerID(b"\x12\x20" + bytes([i]) * 32) for i in range(1, 4))
LOOPBACK = ["/ip4/127.0.0.1/tcp/0"]


@pytest.fixture
def run(tmp_path):
    return RunKeys(tmp_path)


# --- what a token is worth ---


def test_a_run_without_an_authority_admits_everybody():
    admission = Admission()
    admission.check(A, "find")
    assert admission.is_open and admission.is_admitted(A) and admission.show(b"", A) is None
    assert admission.account_of(A) != admission.account_of(B), "each peer counts as an account of its own"


def test_a_peer_is_admitted_by_what_it_has_shown(run):
    admission = run.admission(bob=B)
    admission.check(B, "find")
    assert admission.username_of(B) == "bob" and admission.role_of(B) == "volunteer"
    assert admission.account_of(B) == account_digest("test", "Bob"), "as the Hub, which knows no capitals"
    with pytest.raises(NotAdmitted, match="no access token.*find"):
        admission.check(C, "find")
    assert admission.refused == {("find", "no_token"): 1}


@pytest.mark.parametrize(
    ("attack", "reason"),
    [
        ("nothing", "no_token"),
        ("noise", "malformed"),
        ("a long one", "malformed"),
        ("of another key", "forged"),
        ("a changed one", "forged"),
        ("an old one", "expired"),
        ("another run's", "other_run"),
        ("another peer's", "other_peer"),
        ("of one who is banned", "banned"),
    ],
)
def test_a_token_that_admits_nobody(run, tmp_path, attack, reason):
    admission, good = run.admission(), run.token(B, "bob")
    stranger = RunKeys(tmp_path / "stranger")  # with a root key of his own
    shown = {
        "nothing": b"",
        "noise": b"\x93" * 300,
        "a long one": good + b"x" * 2000,
        "of another key": stranger.token(B, "bob"),
        "a changed one": good.replace(b"bob", b"eve"),
        "an old one": run.token(B, "bob", seconds=-6.0),
        "another run's": RunKeys(tmp_path, "other").token(B, "bob"),
        "another peer's": run.token(C, "bob"),
        "of one who is banned": good,
    }
    if reason == "banned":
        admission.ban(run.ban("bob")[0])
    assert admission.show(shown[attack], B) == reason
    assert not admission.is_admitted(B) and not admission.is_admitted(C)


def test_a_token_is_good_until_it_expires_but_for_the_clocks_difference(run, monkeypatch):
    now = time.time()
    monkeypatch.setattr(time, "time", lambda: now)  # a token's as well
    admission = Admission(run.trust, clock=lambda: now)
    assert admission.show(run.token(B, seconds=60.0), B) is None
    now += 63
    assert admission.is_admitted(B), "3 s are within what hivemind lets clocks differ by"
    now += 3
    assert admission.reason_to_refuse(B) == "expired"
    assert admission.show(run.token(B, seconds=900.0), B) is None and admission.is_admitted(B), "a fresh one"


def test_a_new_key_of_the_authority_sends_nobody_away(run):
    admission = run.admission(bob=B)
    run.keys.rotate("authority")
    assert admission.is_admitted(B) and admission.show(run.token(C, "eve"), C) is None


def test_a_ban_is_known_in_all_processes_at_once(run):
    admission = run.admission(bob=B, cleo=C)
    told, ask = mp.Pipe(), mp.Event()

    def other_process():
        admission.show(run.token(A, "dora"), A)
        told[1].send(admission.reason_to_refuse(B))
        ask.wait(120)
        told[1].send((admission.reason_to_refuse(B), admission.reason_to_refuse(C), admission.bans.version))

    process = mp.get_context("fork").Process(target=other_process)
    process.start()
    assert told[0].poll(120) and told[0].recv() is None
    admission.ban(run.ban("bob")[0])
    ask.set()
    assert told[0].poll(120) and told[0].recv() == ("banned", None, 1)
    process.join()
    assert admission.username_of(A) == "dora", "what another process was shown"


def test_an_older_list_of_bans_changes_nothing(run):
    admission = run.admission(bob=B)
    old, _ = run.ban("bob")
    run.bans = BanList(2, frozenset())  # taken back
    admission.ban(run.bans)
    admission.ban(old)
    assert admission.is_admitted(B) and admission.bans.version == 2


def test_a_full_table_forgets_who_expired_the_longest_ago():
    roster = Roster()
    for number in range(3 * CAPACITY):
        roster.add(number.to_bytes(34, "big"), Known(b"a" * 16, 1000.0 + number, "volunteer", f"user-{number}"))
    newest = [roster.get(number.to_bytes(34, "big")) for number in range(3 * CAPACITY - 100, 3 * CAPACITY)]
    assert all(known is not None for known in newest)
    assert newest[-1] == Known(b"a" * 16, 1000.0 + 3 * CAPACITY - 1, "volunteer", f"user-{3 * CAPACITY - 1}")
    assert PROBES < CAPACITY


# --- real peers ---


@pytest.fixture(scope="module")
def three(tmp_path_factory):
    """Peers "ada" and "bob" of a run with an authority, and a keeper of each."""
    folder = tmp_path_factory.mktemp("run")
    run = RunKeys(folder)
    identities = {name: folder / f"{name}.key" for name in ("ada", "bob")}
    ids = {name: make_identity(path) for name, path in identities.items()}
    peers, keepers, maddrs = {}, {}, []

    def fetch(known: int | None):
        return (run.bans, run.statement()) if known is None or run.bans.version > known else None

    for name, path in identities.items():
        admission = run.admission(own=ids[name], username=name)
        config = PeerConfig(initial_peers=maddrs, host_maddrs=LOOPBACK, identity_path=str(path), client_mode=False)
        peers[name] = start_peer(config, admission)
        maddrs = maddrs or peers[name].visible_maddrs()
        keepers[name] = AdmissionKeeper(peers[name], fetch, leads=name == "ada", bans_every=1.0)
    yield SimpleNamespace(run=run, ids=ids, peers=peers, maddrs=maddrs)
    for name in peers:
        keepers[name].close()
        peers[name].shutdown()


def wait_until(true, seconds=120.0):
    deadline = time.monotonic() + seconds
    while not true() and time.monotonic() < deadline:
        time.sleep(0.05)
    return true()


def record_of(peer) -> PeerRecord:
    return PeerRecord(
        peer_id=peer.peer_id.to_bytes(), fingerprint="ab" * 16, name="x", device="CPU", epoch=1, total_samples=5,
        samples_per_second=1.0, loss=None, client_mode=False,
    )  # fmt: skip


def test_admitted_peers_share_a_dht(three):
    ada, bob = three.peers["ada"], three.peers["bob"]
    assert bob.dht.store("some", 5, get_dht_time() + 60)
    assert ada.dht.get("some", latest=True).value == 5
    assert ada.admission.username_of(three.ids["bob"]) == "bob", "shown with its calls"


@pytest.mark.parametrize("shows", ["nothing", "another peer's token"])
def test_a_stranger_gets_nothing_from_the_dht(three, tmp_path, shows):
    own = make_identity(tmp_path / "key")
    admission = Admission(three.run.trust)
    if shows != "nothing":
        admission._roster.token = three.run.token(three.ids["bob"], "bob")
    before = sum(three.peers["ada"].admission.refused.values())
    config = PeerConfig(
        initial_peers=three.maddrs, host_maddrs=LOOPBACK, identity_path=str(tmp_path / "key"), startup_timeout=60
    )
    with pytest.raises(SwarmError):
        start_peer(config, admission)
    assert sum(three.peers["ada"].admission.refused.values()) > before
    assert not three.peers["ada"].admission.is_admitted(own)


async def store_large(dht, node):
    await node.store("large", b"x" * 20_000, get_dht_time() + 60)


async def kept(dht, node):
    return [name for name in ("large", "long", "small") if node.protocol.storage.get(DHTID.generate(name))]


def test_what_is_too_large_or_lives_too_long_is_not_kept(three):
    ada, bob = three.peers["ada"], three.peers["bob"]
    bob.dht.run_coroutine(store_large)  # in its own process: a pipe of hivemind's takes no more than 16 KB
    bob.dht.store("long", 1, get_dht_time() + 10 * 86400)
    bob.dht.store("small", 1, get_dht_time() + 60)
    assert ada.dht.run_coroutine(kept) == ["small"], "what bob's own node keeps is his own affair"


def test_records_count_once_their_authors_token_is_found_and_no_longer_when_it_is_banned(three, monkeypatch):
    ada, bob = three.peers["ada"], three.peers["bob"]
    board = PeerBoard(ada.dht, "test")
    key = load_private_key((three.run.folder / "bob.key").read_bytes())
    monkeypatch.setattr(RSAPrivateKey, "_process_wide_key", key)  # peers are processes of their own elsewhere
    PeerBoard(bob.dht, "test").publish(record_of(bob))
    assert wait_until(lambda: three.ids["bob"] in board.fetch())
    three.run.ban("bob")
    assert wait_until(lambda: three.ids["bob"] not in board.fetch())
    assert ada.admission.reason_to_refuse(three.ids["bob"]) == "banned"
    assert not bob.dht.store("more", 1, get_dht_time() + 60) or ada.dht.get("more", latest=True) is None


def test_words_of_the_wire_are_small(run):
    assert len(run.token(A, "a-name-as-long-as-the-hub-permits-it-to-be-42")) < 600
    assert len(MSGPackSerializer.dumps(run.statement())) < 600
