"""What peers write about themselves: who signed it, whether it fits the schema, and the same through a real DHT."""

from __future__ import annotations

import time
from functools import partial

import pytest
from hivemind.dht import DHT
from hivemind.dht.crypto import RSASignatureValidator
from hivemind.optim.progress_tracker import LocalTrainingProgress
from hivemind.p2p import P2P, PeerID

from tests.somebody import Somebody, entry, record_of, store_as
from volunteer_kit import __version__
from volunteer_kit.swarm.net.identity import load_private_key, peer_id_of_owner
from volunteer_kit.swarm.records.peer_record import PeerBoard, RoundsRecord, parse_record, peers_key


@pytest.fixture(scope="module")
def people():
    return [Somebody() for _ in range(5)]


# --- keys ---


def test_the_owner_of_a_record_is_the_peer_id_of_its_key(tmp_path):
    path = tmp_path / "identity.key"
    P2P.generate_identity(str(path))
    identity = path.read_bytes()
    key = load_private_key(identity)
    subkey = RSASignatureValidator(key).local_public_key
    assert peer_id_of_owner(subkey) == PeerID.from_identity(identity)
    signature = key.sign(b"words")
    assert key.get_public_key().verify(b"words", signature)
    other = tmp_path / "other.key"
    P2P.generate_identity(str(other))
    assert peer_id_of_owner(subkey) != PeerID.from_identity(other.read_bytes())


@pytest.mark.parametrize(
    "subkey",
    [
        b"",
        b"no owner",
        b"[owner:]",
        b"[owner:ssh-rsa AAAA]",
        b"[owner:ssh-rsa " + b"A" * 3000 + b"]",
        b"[owner:ssh-nonsense AAAAC3Nz]",
        b"[owner:\xff\xfe\x00]",
    ],
)
def test_a_subkey_without_a_key_has_no_owner(subkey):
    assert peer_id_of_owner(subkey) is None


def test_one_key_has_one_subkey(people):
    """hivemind's validators take all of these; each would count as another peer."""
    subkey, key = people[0].subkey, people[0].subkey.removeprefix(b"[owner:").removesuffix(b"]")
    assert peer_id_of_owner(subkey) == people[0].peer_id
    comment, space = b"[owner:" + key + b" x1]", b"[owner: " + key + b"]"
    for another in (b"0" + subkey, subkey + b"1", comment, subkey + subkey, space):
        assert peer_id_of_owner(another) is None


# --- one record ---


def test_a_record_counts_only_for_the_peer_that_signed_it(people):
    me, other = people[:2]
    record = parse_record(LocalTrainingProgress, me.subkey, entry(me.claims()))
    assert record.peer_id == me.peer_id.to_bytes() and record.epoch == 3
    assert parse_record(LocalTrainingProgress, me.subkey, entry(me.claims(other.peer_id))) is None
    assert parse_record(LocalTrainingProgress, other.subkey, entry(me.claims())) is None


@pytest.mark.parametrize(
    "broken",
    [
        lambda me: (me.subkey, me.claims()),  # without an expiration
        lambda me: (me.subkey, entry(None)),  # it has left
        lambda me: (me.subkey, entry("words")),
        lambda me: (me.subkey, entry([1, 2])),
        lambda me: (me.subkey, entry({})),
        lambda me: (me.subkey, entry(me.claims(epoch=-1))),
        lambda me: (me.subkey, entry(me.claims(epoch="3"))),
        lambda me: (me.subkey, entry(me.claims(samples_per_second=-1.0))),
        lambda me: (me.subkey, entry(me.claims(client_mode=1))),
        lambda me: (me.subkey, entry({**me.claims(), "peer_id": None})),
        lambda me: (me.subkey.decode(), entry(me.claims())),
        lambda me: (7, entry(me.claims())),
        lambda me: (b"nobody", entry(me.claims())),
    ],
)
def test_what_is_no_record_is_dropped(people, broken):
    subkey, value = broken(people[0])
    assert parse_record(LocalTrainingProgress, subkey, value) is None


# --- through a real DHT ---


def fetch_until(board: PeerBoard, found, timeout: float = 60.0):
    deadline = time.monotonic() + timeout
    while not found(records := board.fetch()):
        assert time.monotonic() < deadline, records
    return records


def test_the_board_through_a_real_dht(peer, people):
    board = PeerBoard(peer.dht, "board")
    assert board.fetch() == {}
    board.publish(record_of(peer.peer_id))
    records = fetch_until(board, lambda records: records)
    assert set(records) == {peer.peer_id}
    told = RoundsRecord(kit=__version__)
    assert records[peer.peer_id] == record_of(peer.peer_id, rounds=told) and records[peer.peer_id].kit == __version__

    # a stranger, honest; one with another's peer id; what does not fit the schema; what nobody signed
    dht = DHT(initial_peers=peer.visible_maddrs(), client_mode=True, start=True, startup_timeout=120)
    try:
        write = partial(store_as, stranger=dht, to=peer.peer_id, key=peers_key("board"))
        honest, thief, vandal = people[:3]
        assert write(honest, value=record_of(honest.peer_id, epoch=9).dict())
        assert write(thief, value=record_of(honest.peer_id, epoch=99).dict()), "dropped by its readers"
        assert not write(vandal, value={**record_of(vandal.peer_id).dict(), "name": "x" * 65})
        assert not write(vandal, value={**record_of(vandal.peer_id).dict(), "loss": float("nan")})
        assert not write(vandal, value={**record_of(vandal.peer_id).dict(), "epoch": "9"})
        assert not write(vandal, value=record_of(vandal.peer_id).dict(), sign=False)
    finally:
        dht.shutdown()
    records = fetch_until(board, lambda records: len(records) > 1)
    assert set(records) == {peer.peer_id, honest.peer_id} and records[honest.peer_id].epoch == 9

    board.publish(record_of(peer.peer_id, epoch=4, loss=None))
    assert fetch_until(board, lambda r: r[peer.peer_id].epoch == 4)[peer.peer_id].loss is None
    board.publish(None)
    assert set(fetch_until(board, lambda records: peer.peer_id not in records)) == {honest.peer_id}


@pytest.mark.parametrize(
    "changes",
    [
        {"fingerprint": "short"},
        {"fingerprint": "a" * 65},
        {"fingerprint": "\x1b[2J0123456789"},  # what would clear the terminal that it is told in
        {"fingerprint": "0123456789abcdef\n"},
        {"fingerprint": "0123456789ABCDEF"},
        {"name": "x" * 65},
        {"epoch": -1},
        {"epoch": 2**31},
        {"epoch": 1.0},
        {"epoch": True},
        {"total_samples": -1},
        {"total_samples": 2**53},
        {"samples_per_second": float("nan")},
        {"samples_per_second": float("inf")},
        {"samples_per_second": -1.0},
        {"loss": float("nan")},
        {"loss": float("inf")},
        {"client_mode": 1},
    ],
    ids=str,
)
def test_a_record_is_typed_and_bounded(people, changes):
    with pytest.raises(ValueError):
        record_of(people[0].peer_id, **changes)
    assert record_of(people[0].peer_id, loss=None, total_samples=2**53 - 1)
