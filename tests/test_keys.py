"""Root, certificates, tokens, the signed word on bans: what is believed, and what is not, and why."""

from __future__ import annotations

import os
import stat
import time
import tracemalloc

import hypothesis.strategies as st
import msgpack
import pytest
from hypothesis import given, settings

from volunteer_kit.auth.access_token import (
    MAX_BANS,
    MAX_LIFETIME,
    AccessToken,
    BanList,
    account_digest,
    issue_token,
    peer_id_of_key,
    read_bans_statement,
    read_token,
    sign_bans,
)
from volunteer_kit.auth.keys import DAY, Certificate, KeyFolder, KeysError, TokenError, Trust, parse_public_keys

NOW = time.time()
PEER = b"\x12\x20" + b"p" * 32


@pytest.fixture(scope="module")
def keys(tmp_path_factory) -> KeyFolder:
    folder = KeyFolder(tmp_path_factory.mktemp("keys") / "k")
    folder.create("demo")
    return folder


@pytest.fixture(scope="module")
def trust(keys) -> Trust:
    return Trust.of("demo", keys.root_public)


def token(**changes) -> AccessToken:
    given = {"username": "ada", "peer_id": PEER, "key_hash": b"h" * 32, "run_id": "demo", "role": "volunteer"}
    return AccessToken(**{**given, "expires_at": NOW + 600.0, **changes})


# --- on the disk ---


def test_keys_are_their_owners_and_stay(keys):
    assert stat.S_IMODE(os.stat(keys.path / "root.pem").st_mode) == 0o600
    public = keys.root_public
    assert keys.create("demo") == public == KeyFolder(keys.path).root_public
    with pytest.raises(KeysError, match="of the run 'demo', not 'other'"):
        keys.create("other")
    assert "PRIVATE" not in repr(keys.signer("authority")) + str(vars(keys))


def test_without_its_root_a_folder_signs_until_the_certificate_ends(tmp_path):
    folder = KeyFolder(tmp_path / "k")
    public = folder.create("demo")
    signer = folder.signer("monitor")
    (folder.path / "root.pem").rename(tmp_path / "in a drawer")
    assert folder.signer("monitor").certificate == signer.certificate
    with pytest.raises(KeysError, match="root.pem is missing.\n1. If it is kept elsewhere"):
        folder.rotate("monitor")
    assert folder.signer("monitor").certificate == signer.certificate, "nothing was changed"
    (tmp_path / "in a drawer").rename(folder.path / "root.pem")
    assert folder.root_public == public


def test_a_run_keeps_its_root_while_that_lies_in_a_drawer(tmp_path):
    folder = KeyFolder(tmp_path / "k")
    public = folder.create("demo")
    (folder.path / "root.pem").rename(tmp_path / "in a drawer")
    assert KeyFolder(folder.path).create("demo") == public == folder.root_public
    assert not (folder.path / "root.pem").exists(), "no new root is made for a folder that has a run"
    with pytest.raises(KeysError, match="of the run 'demo', not 'other'"):
        folder.create("other")
    with pytest.raises(KeysError, match="root.pem is missing"):
        folder.signer("authority")  # it has never had a certificate
    KeyFolder(tmp_path / "another").create("demo")
    (tmp_path / "another" / "root.pem").rename(folder.path / "root.pem")
    for use in (lambda: folder.create("demo"), lambda: folder.signer("authority")):
        with pytest.raises(KeysError, match="is not the root key of this run"):
            use()


@pytest.mark.parametrize("what", ["run_id", "authority.cert"])
def test_a_folder_of_before_there_was_a_root_pub(tmp_path, what):
    folder = KeyFolder(tmp_path / "k")
    folder.create("demo")
    folder.signer("authority")
    (folder.path / "root.pub").unlink()
    assert folder.create("demo") and (folder.path / "root.pub").exists(), "it is written at the next start"
    for name in {"root.pub", "root.pem", "run_id", "authority.cert"} - {what}:
        (folder.path / name).unlink()
    with pytest.raises(KeysError, match="root.pem is missing.\n1. If it is kept elsewhere"):
        folder.create("demo")
    assert not (folder.path / "root.pem").exists()


def test_a_folder_that_cannot_be_written_to_is_told_with_the_way_out(tmp_path):
    (tmp_path / "in the way").touch()
    with pytest.raises(KeysError, match="cannot be written to .*in the way/keys: .*\n1. .*df -h .*\n2. Make room"):
        KeyFolder(tmp_path / "in the way" / "keys").create("demo")


def test_a_beginning_that_was_cut_off_is_gone_on_with(tmp_path):
    folder = KeyFolder(tmp_path / "k")
    public = folder.create("demo")
    for name in ("run_id", "root.pub"):
        (folder.path / name).unlink()
    assert folder.create("demo") == public and folder.run_id == "demo"


def test_a_certificate_that_runs_out_without_its_root_is_warned_of(tmp_path, monkeypatch, caplog):
    folder = KeyFolder(tmp_path / "k")
    folder.create("demo")
    folder.signer("authority")
    (folder.path / "root.pem").rename(tmp_path / "in a drawer")
    assert folder.running_out() == {} and not caplog.records
    monkeypatch.setattr(time, "time", lambda: NOW + 25 * DAY)
    folder.signer("authority")
    folder.signer("authority")
    (said,) = caplog.messages
    assert "ends in 5 days" in said and f"root.pem back into {folder.path}" in said
    assert folder.running_out()["authority"] == pytest.approx(5.0, abs=0.1)
    monkeypatch.setattr(time, "time", lambda: NOW + 26.1 * DAY)
    folder.signer("authority")
    assert len(caplog.messages) == 2
    (tmp_path / "in a drawer").rename(folder.path / "root.pem")
    assert folder.running_out() == {} and folder.signer("authority").certificate.not_after > NOW + 50 * DAY


def test_a_certificate_is_renewed_when_a_third_of_its_life_is_left(tmp_path, monkeypatch):
    folder = KeyFolder(tmp_path / "k")
    folder.create("demo")
    first = folder.signer("authority").certificate
    monkeypatch.setattr(time, "time", lambda: NOW + 15 * DAY)
    assert folder.signer("authority").certificate == first
    monkeypatch.setattr(time, "time", lambda: NOW + 21 * DAY)
    renewed = folder.signer("authority").certificate
    assert renewed.not_after > first.not_after and renewed.public_key == first.public_key


def test_a_damaged_key_is_told(tmp_path):
    folder = KeyFolder(tmp_path / "k")
    folder.create("demo")
    (folder.path / "root.pem").write_bytes(b"-----BEGIN PRIVATE KEY-----\nx\n-----END PRIVATE KEY-----\n")
    with pytest.raises(KeysError, match="damaged: put back its backup"):
        folder.signer("authority")


@pytest.mark.parametrize("text", ["", "k", "ed25519:", "ed25519:AAAA", "rsa:" + "A" * 43, "ed25519:" + "!" * 43])
def test_what_is_no_public_key(text):
    with pytest.raises(ValueError, match="public key"):
        parse_public_keys(text)


# --- believed ---


def test_what_is_signed_by_a_certified_key_is_believed_also_when_the_key_has_changed(keys, trust):
    envelope = issue_token(keys.signer("authority"), token())
    keys.rotate("authority")
    assert read_token(envelope, trust, NOW) == token()
    assert read_token(issue_token(keys.signer("authority"), token()), trust, NOW) == token()


def test_two_roots_are_trusted_while_one_is_replaced(keys, tmp_path):
    new = KeyFolder(tmp_path / "new")
    both = Trust.of("demo", f"{new.create('demo')} {keys.root_public}")
    for folder in (keys, new):
        assert read_token(issue_token(folder.signer("authority"), token()), both, NOW).username == "ada"


# --- not believed ---


def test_another_kind_role_run_or_root_is_not(keys, trust, tmp_path):
    authority, monitor = keys.signer("authority"), keys.signer("monitor")
    stranger, other = KeyFolder(tmp_path / "s"), KeyFolder(tmp_path / "o")
    stranger.create("demo")
    other.create("other")
    payload = msgpack.packb(["ada", PEER, b"h" * 32, "volunteer", NOW + 600.0])
    cases = {
        "forged": [
            monitor.sign("token", payload),
            authority.sign("bans", payload),
            stranger.signer("authority").sign("token", payload),
        ],
        "other_run": [other.signer("authority").sign("token", payload)],
    }
    for kind, envelopes in cases.items():
        for envelope in envelopes:
            with pytest.raises(TokenError) as refused:
                read_token(envelope, trust, NOW)
            assert refused.value.kind == kind


def test_a_key_that_certifies_itself_is_not(keys, trust):
    signer = keys.signer("authority")
    own = Certificate("demo", "authority", signer.certificate.public_key, NOW + DAY)
    forged = Certificate("demo", "authority", own.public_key, own.not_after, signer._key.sign(own.claims()))
    good = msgpack.unpackb(issue_token(signer, token()))
    good[3] = forged.to_bytes()
    with pytest.raises(TokenError, match="not certified by the run's root"):
        read_token(msgpack.packb(good), trust, NOW)


def test_time_passes(keys, trust):
    envelope = issue_token(keys.signer("authority"), token())
    assert read_token(envelope, trust, NOW + 604.0), "clocks differ"
    for later in (606.0, 31 * DAY):
        with pytest.raises(TokenError) as refused:
            read_token(envelope, trust, NOW + later)
        assert refused.value.kind == "expired"
    endless = issue_token(keys.signer("authority"), token(expires_at=NOW + MAX_LIFETIME + 120))
    with pytest.raises(TokenError, match="longer than any"):
        read_token(endless, trust, NOW)


@pytest.mark.parametrize(
    "changes",
    [
        {"username": ""}, {"username": "a\x1b[2J"}, {"username": "a" * 101}, {"peer_id": b"short"}, {"role": "king"},
        {"expires_at": float("nan")}, {"key_hash": b""}, {"run_id": "other"},
    ],
    ids=str,
)  # fmt: skip
def test_a_token_that_no_peer_would_take_is_not_issued(keys, changes):
    with pytest.raises(ValueError):
        issue_token(keys.signer("authority"), token(**changes))


@settings(max_examples=200, deadline=None, derandomize=True)
@given(data=st.data())
def test_whatever_a_stranger_shows_is_refused_in_words(keys, trust, data):
    good = issue_token(keys.signer("authority"), token())
    changed = bytearray(good)
    changed[data.draw(st.integers(0, len(good) - 1))] ^= data.draw(st.integers(1, 255))
    junk = data.draw(st.one_of(st.binary(max_size=300), st.just(bytes(changed)), st.just(good[: len(good) // 2])))
    with pytest.raises(TokenError):
        read_token(junk, trust, NOW)


# --- who a key is, who is banned ---


@pytest.mark.parametrize("key", [b"", b"ssh-rsa x", b"ssh-ed25519 AAAAC3NzaC1lZDI1NTE5AAAAIJ", b"\xff" * 50])
def test_what_is_no_peers_key(key):
    with pytest.raises(ValueError):
        peer_id_of_key(key)


def test_an_account_is_named_without_regard_to_capitals_and_by_run():
    assert account_digest("demo", "Ada") == account_digest("demo", "ada") != account_digest("other", "ada")
    assert account_digest("de", "moada") != account_digest("dem", "oada")


def test_the_signed_word_fits_one_list_only(keys, trust):
    bans = BanList.of(3, [bytes([i]) * 16 for i in range(5)])
    envelope = sign_bans(keys.signer("authority"), bans, NOW, NOW + 120)
    said = read_bans_statement(envelope, trust, NOW)
    assert bans.matches(said) and len(envelope) < 600
    assert not BanList(3, frozenset(list(bans.accounts)[1:])).matches(said)
    assert not BanList(2, bans.accounts).matches(said)
    with pytest.raises(TokenError, match="expired"):
        read_bans_statement(envelope, trust, NOW + 200)
    with pytest.raises(TokenError):
        read_token(envelope, trust, NOW)


def test_a_strangers_list_is_bounded():
    with pytest.raises(ValueError):
        BanList.of(1, [b"short"])
    with pytest.raises(ValueError):
        BanList.of(1, (i.to_bytes(16, "big") for i in range(MAX_BANS + 1)))


@pytest.mark.parametrize(
    "data",
    [
        b"\x91" * 60_000,
        (b"\xdd" + (60_000).to_bytes(4, "big")) * 1000 + bytes(60_000),
        b"\xdd" + (60_000).to_bytes(4, "big") + b"\x90" * 60_000,
        msgpack.packb({"a": 1}),
        msgpack.packb([msgpack.ExtType(5, bytes(100))]),
        bytes(2**22),
    ],
    ids=["deep", "promises", "lists", "a map", "an extension", "long"],
)
def test_a_heavy_envelope_is_malformed(trust, data):
    began = time.process_time()
    with pytest.raises(TokenError) as refused:
        trust.open(data, "token", "authority", NOW)
    assert refused.value.kind == "malformed" and len(str(refused.value)) < 200
    assert time.process_time() - began < 1.0


def test_forged_envelopes_leave_nothing_behind(keys, trust):
    """Each was remembered with all of its bytes, as one that is shown again and again is: 268 MB of them."""
    certificate = keys.signer("authority").certificate.to_bytes()
    large = Certificate("demo", "authority", bytes(30_000), NOW + DAY, bytes(30_000)).to_bytes()
    tracemalloc.start()
    try:
        for number in range(400):
            payload = number.to_bytes(4, "big") + bytes(50_000)
            for certified in (certificate, large[:-4] + number.to_bytes(4, "big")):
                envelope = msgpack.packb([1, "token", payload[: 60_000 - len(certified)], certified, bytes(64)])
                with pytest.raises(TokenError):
                    trust.open(envelope, "token", "authority", NOW)
        assert tracemalloc.get_traced_memory()[0] < 2e6
    finally:
        tracemalloc.stop()
