"""What the monitor signs, and that nobody else can, nor say it again later."""

from __future__ import annotations

import dataclasses
import pickle
import time

import msgpack
import pytest
from hivemind.dht.protocol import DHTProtocol
from hivemind.dht.routing import DHTID
from hivemind.dht.validation import CompositeValidator, DHTRecord
from hivemind.utils import get_dht_time

from volunteer_kit.auth.keys import KeyFolder, TokenError, Trust
from volunteer_kit.swarm.records.signed import MAX_STATEMENT
from volunteer_kit.swarm.state.manifest import (
    LIFETIME,
    Manifest,
    Sequences,
    Statements,
    key_of,
    seal,
    unseal,
    validators,
)

KEY = "run-0123"
NOW, DAY = time.time(), 86_400.0  # these tests may run long after they were collected


@pytest.fixture(scope="module")
def sign(keys):
    return keys.signer("monitor").sign


@pytest.fixture(scope="module")
def trust(keys):
    return Trust.of("run", keys.root_public)


def manifest(**words) -> Manifest:
    usual = {
        "run_key": KEY, "epoch": 20, "sequence": 3, "order": 0, "lineage": b"12345678", "root": b"r" * 32,
        "total_bytes": 5 * 2**20 + 1, "chunk_size": 2**20, "created_at": NOW, "expires_at": NOW + DAY,
    }  # fmt: skip
    return Manifest(**{**usual, **words})


def test_what_is_signed_is_read(trust, sign):
    said = manifest()
    envelope = seal(sign, said)
    assert unseal(trust, "manifest", KEY, envelope, NOW) == said and len(envelope) < MAX_STATEMENT / 4
    assert said.num_chunks == 6


def test_what_is_not_the_monitors_is_refused(trust, sign, keys, tmp_path):
    good = seal(sign, manifest())
    stranger = KeyFolder(tmp_path)
    stranger.create("run")
    cases = {
        "forged": [
            seal(stranger.signer("monitor").sign, manifest()),
            seal(keys.signer("authority").sign, manifest()),  # another of the run's keys
            good[:-1] + bytes([good[-1] ^ 1]),
        ],
        "other_run": [seal(sign, manifest(run_key="run-9999"))],
        "expired": [seal(sign, manifest(created_at=1.0, expires_at=NOW - 1))],
        "malformed": [b"", b"x" * 5000, None, 7, good[:-5], seal(sign, manifest(expires_at=NOW + 3 * LIFETIME))],
    }
    for kind, envelopes in cases.items():
        for envelope in envelopes:
            with pytest.raises(TokenError) as caught:
                unseal(trust, "manifest", KEY, envelope, NOW)
            assert caught.value.kind == kind, envelope


@pytest.mark.parametrize(
    "words",
    [
        {"epoch": -1}, {"epoch": 2**31}, {"epoch": True}, {"epoch": 1.0}, {"sequence": 0}, {"sequence": 2**60},
        {"order": -1}, {"lineage": b""}, {"lineage": "12345678"}, {"root": b"r" * 31}, {"total_bytes": 0},
        {"total_bytes": 2**50}, {"chunk_size": 1}, {"chunk_size": 2**30}, {"created_at": float("nan")},
        {"expires_at": float("inf")}, {"created_at": NOW + 2 * DAY}, {"run_key": ""}, {"run_key": "x" * 300},
    ],
    ids=lambda words: next(iter(words)),
)  # fmt: skip
def test_a_statement_is_bounded_even_if_it_is_signed(words, trust, sign):
    said = manifest(**words)
    envelope = sign("manifest", msgpack.packb(said.to_list()))
    with pytest.raises(TokenError):
        unseal(trust, "manifest", KEY, envelope, NOW)


# --- on a node ---


def record(kind: str, envelope, expires_at: float, subkey=DHTProtocol.IS_REGULAR_VALUE) -> DHTRecord:
    key = DHTID.generate(source=key_of(kind, KEY)).to_bytes()
    return DHTRecord(key, subkey, DHTProtocol.serializer.dumps(envelope), expires_at)


def test_a_node_takes_a_statement_with_its_own_end_only(trust, sign):
    parts = pickle.loads(pickle.dumps(validators(trust, KEY)))  # as they come to the DHT's process
    validator = CompositeValidator(parts)
    said = manifest()
    envelope = seal(sign, said)
    assert validator.validate(record("manifest", envelope, said.expires_at))
    assert not validator.validate(record("manifest", envelope, said.expires_at + 1)), "it would outlive its successor"
    assert not validator.validate(record("manifest", envelope, said.expires_at - 1))
    assert not validator.validate(record("manifest", envelope, said.expires_at, DHTProtocol.serializer.dumps("x")))
    for junk in (b"", None, 7, [envelope], {"a": envelope}, "words"):
        assert not validator.validate(record("manifest", junk, said.expires_at))
    broken = dataclasses.replace(record("manifest", envelope, said.expires_at), value=b"\xc1")
    assert not validator.validate(broken)
    other = dataclasses.replace(broken, key=DHTID.generate(source="other").to_bytes())
    assert validator.validate(other), "what is not ours is not our business"


def test_a_node_remembers_the_newest(trust, sign):
    validator = CompositeValidator(validators(trust, KEY))
    newer = manifest(sequence=4, expires_at=NOW + DAY + 1)
    assert validator.validate(record("manifest", seal(sign, newer), newer.expires_at))
    older = manifest(expires_at=NOW + 2 * DAY)
    assert not validator.validate(record("manifest", seal(sign, older), older.expires_at))


def test_what_was_acted_on_outlasts_a_restart(tmp_path):
    path = tmp_path / "folder" / "sequences.json"
    sequences = Sequences(path)
    sequences.raise_to("manifest", 7)
    sequences.raise_to("manifest", 5)
    again = Sequences(path)
    assert again["manifest"] == 7 and again["rollback"] == 0
    path.write_text('{"manifest": "x", "rollback": 3, "a": -1')
    assert Sequences(path)["manifest"] == 0
    path.write_text('{"manifest": true, "rollback": 3}')
    assert Sequences(path)["rollback"] == 3 and Sequences(path)["manifest"] == 0


def test_statements_through_a_dht(peer, trust, sign, tmp_path):
    statements = Statements(peer.dht, KEY, trust, Sequences(tmp_path / "sequences.json"))
    assert statements.find("manifest") is None and statements.next_sequence("manifest") == 1
    now = get_dht_time()
    first = manifest(sequence=1, created_at=now, expires_at=statements.expiry("manifest", now))
    assert statements.publish(sign, first) and statements.find("manifest") == first
    assert statements.next_sequence("manifest") == 2
    envelope = seal(sign, first)

    second = manifest(sequence=2, epoch=30, created_at=now, expires_at=statements.expiry("manifest", now))
    assert second.expires_at > first.expires_at
    assert statements.publish(sign, second) and statements.find("manifest") == second

    key = key_of("manifest", KEY)
    for expires_at in (first.expires_at, second.expires_at + 100):  # the old one again, and with a longer life
        peer.dht.store(key, value=envelope, expiration_time=expires_at)
        assert statements.find("manifest") == second
    peer.dht.store(key, subkey="x", value=envelope, expiration_time=second.expires_at + 100)
    assert statements.find("manifest") == second
    statements.sequences.raise_to("manifest", 3)
    assert Statements(peer.dht, KEY, trust, statements.sequences).find("manifest") is None, "we have seen a newer one"
