"""Every file that is read at a start and decides what is overwritten or forgotten afterwards, damaged in every way.

Nothing raises what is not in words, nothing valuable is written over, and a person is told once. The lists of states
and their chunks are in test_monitor_parts.py, shards of `encode` in test_encode_shard.py, caches in test_cache.py.
"""

from __future__ import annotations

import json
import logging
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.damage import BYTES, JSON, aside
from tests.waiting import wait_until
from volunteer_kit.auth.keys import KeyFolder, KeysError
from volunteer_kit.device.remembered import Remembered
from volunteer_kit.device.tuner import Setting
from volunteer_kit.home import Home, Totals
from volunteer_kit.host.folder import HostFolder
from volunteer_kit.host.settings import HostError, HostSettings
from volunteer_kit.monitor import asked
from volunteer_kit.monitor.credits import Credits
from volunteer_kit.monitor.notes import Notes
from volunteer_kit.monitor.people import Bans
from volunteer_kit.monitor.recording import Recorder
from volunteer_kit.swarm.credit.ledger import CreditLedger
from volunteer_kit.swarm.errors import SwarmError
from volunteer_kit.swarm.net.identity import ensure_identity
from volunteer_kit.swarm.state.manifest import Sequences

every_damage = pytest.mark.parametrize("damage", [pytest.param(damage, id=name) for name, damage in JSON.items()])
damage_of_bytes = pytest.mark.parametrize("damage", [pytest.param(damage, id=name) for name, damage in BYTES.items()])


def content(path: Path) -> object:
    return path.read_bytes() if path.is_file() else "a folder"


# --- a volunteer's ---


@every_damage
@pytest.mark.parametrize("shown", [False, True], ids=["new", "shown before"])
def test_totals_are_told_and_go_on_from_what_was_shown(tmp_path, damage, shown):
    home, told = Home(tmp_path), []
    home.save_totals(Totals(700, 20, 3.5, {"rounds": 4}))
    if shown:
        home.save_status({"my_samples": 690, "my_epochs": 19})
    damage(tmp_path / "totals.json")
    damaged = content(tmp_path / "totals.json")
    expected = Totals(690, 19) if shown else Totals()
    assert home.totals(told.append) == expected
    [kept] = aside(tmp_path / "totals.json")
    assert content(kept) == damaged and len(told) == 1 and str(kept) in told[0]
    assert Home(tmp_path).totals(told.append) == expected and len(told) == 1, "told once"


@every_damage
@pytest.mark.parametrize("name", ["peers.json", "stay.json", "status.json"])
def test_what_is_not_missed_for_long_is_as_none(tmp_path, damage, name):
    home = Home(tmp_path)
    home.save_known_peers(["/ip4/203.0.113.5/tcp/31337/p2p/12D3KooW"] * 2)
    home.save_stay("a" * 32)
    home.save_status({"my_samples": 7})
    damage(tmp_path / name)
    assert isinstance(home.known_peers(), list) and isinstance(home.status(), dict)
    assert home.was_here("a" * 32) in (True, False)


@every_damage
def test_what_the_monitor_said_is_told_to_be_forgotten(tmp_path, damage, caplog, monkeypatch):
    monkeypatch.setattr(logging.getLogger("volunteer_kit.swarm.state.manifest"), "propagate", True)
    path = tmp_path / "sequences.json"
    Sequences(path).raise_to("manifest", 7)
    damage(path)
    damaged = content(path)
    assert Sequences(path)["manifest"] in (0, 7)
    kept = aside(path)
    if damaged != b"{}":
        assert content(kept[0]) == damaged and str(kept[0]) in caplog.text
    Sequences(path).raise_to("rollback", 2)
    assert Sequences(path)["rollback"] == 2


@every_damage
def test_what_the_tuner_found_is_measured_again(tmp_path, damage):
    remembered = Remembered(tmp_path, {"device": "GPU", "largest": 64})
    remembered.save(Setting(32, True), 1e9, 12.0)
    assert remembered.load() == (Setting(32, True), 1e9)
    [path] = tmp_path.iterdir()
    damage(path)
    found = remembered.load()
    assert found is None or found == (Setting(32, True), 1e9)


# --- a host's ---


@every_damage
def test_a_hosts_settings_are_not_guessed(tmp_path, damage):
    folder, path = HostFolder(tmp_path), tmp_path / "host.json"
    folder.save({"run_id": "tiny", "peer_id": "Qm1", "port": 8000, "public_url": "https://run.example.org"})
    damage(path)
    damaged = content(path)
    try:
        saved = folder.read()
        assert isinstance(HostSettings.remembered(saved), HostSettings)
    except HostError as error:
        assert "1. Put back its backup" in str(error) and "mv " in str(error)
    assert content(path) == damaged, "it stays for a person to look at"


@every_damage
def test_told_bans_are_told_again_and_the_file_is_kept(tmp_path, damage, capsys):
    notes, path = Notes(tmp_path / "journal.sqlite"), tmp_path / "bans.json"
    Bans(path, "run", notes).take(SimpleNamespace(accounts=frozenset({b"a" * 16})))
    damage(path)
    damaged = content(path)
    bans = Bans(path, "run", notes)
    bans.take(SimpleNamespace(accounts=frozenset({b"a" * 16})))
    if damaged not in (b"[]", json.dumps([(b"a" * 16).hex()]).encode()):
        assert [content(kept) for kept in aside(path)] == [damaged]
        assert str(aside(path)[0]) in capsys.readouterr().err
    assert json.loads(path.read_text()) == [(b"a" * 16).hex()]
    notes.close()


@every_damage
def test_a_question_that_cannot_be_read_is_not_acted_on(tmp_path, damage):
    folder = tmp_path / asked.FOLDER
    folder.mkdir()
    (folder / "0.json").write_text(json.dumps({"to_epoch": 10, "time": 1e12}))
    damage(folder / "0.json")
    acted = []
    asked.answer_all(tmp_path, lambda epoch: (acted.append(epoch) or True, ""))
    assert acted in ([], [-1])


@damage_of_bytes
def test_credit_is_never_begun_anew_by_itself(tmp_path, damage, capsys):
    """An empty ledger in its place would make the leaderboard empty too."""
    path = tmp_path / "credit.sqlite"
    CreditLedger(path).close()
    damage(path)
    damaged = content(path)
    notes = Notes(tmp_path / "journal.sqlite")
    notes.do("set_leaderboard", [{"username": "anna", "samples": 7, "provisional": 0, "seconds": 1.0, "machines": 1}])

    def collector(ledger: CreditLedger) -> SimpleNamespace:
        return SimpleNamespace(ledger=ledger, collect=lambda epoch: None)

    said = []
    notes.warn = lambda text, **about: said.append(text)
    credits = Credits(path, notes, collector, lambda: 1)
    try:
        wait_until(lambda: said)
    finally:
        credits.close()
    assert str(path) in said[0] and len(said) == 1
    if path.is_file():
        assert "1. Put back its backup" in said[0] and f"mv {path}" in said[0]
    assert content(path) == damaged
    assert [row["username"] for row in notes.do("leaderboard")] == ["anna"]
    notes.close()


def test_a_ledger_is_there_whole_or_not_at_all(tmp_path, monkeypatch):
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(
            "volunteer_kit.swarm.credit.ledger.write_once", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt)
        )
        CreditLedger(tmp_path / "credit.sqlite")
    assert list(tmp_path.iterdir()) == []
    with CreditLedger(tmp_path / "credit.sqlite")._db as db:
        assert db.execute("PRAGMA integrity_check").fetchone() == ("ok",)


@damage_of_bytes
def test_a_journal_that_cannot_be_read_is_told_and_kept(tmp_path, damage, capsys):
    path = tmp_path / "journal.sqlite"
    notes = Notes(path)
    notes.event("joined", username="anna")
    notes.close()
    damage(path)
    damaged = content(path)
    notes = Notes(path)
    notes.event("joined", username="berta")
    assert str(path) in capsys.readouterr().err
    assert damaged in [content(one) for one in (path, *aside(path))]
    notes.close()


def test_metrics_go_on_after_a_line_that_was_cut_off(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"epoch": 1}\n{"epo')
    recorder = Recorder(path, None, {}, pytest.fail)
    for epoch in (2, 3):
        recorder.record({"epoch": epoch})
    recorder.close(patience=30.0)
    assert path.read_text().splitlines() == ['{"epoch": 1}', '{"epo', '{"epoch": 2}', '{"epoch": 3}']


# --- keys ---


@pytest.mark.parametrize("name", ["root.pem", "root.pub", "run_id", "monitor.pem", "monitor.cert"])
@damage_of_bytes
def test_a_runs_keys_are_never_replaced_in_silence(tmp_path, name, damage, caplog):
    folder = KeyFolder(tmp_path)
    public, signer = folder.create("tiny"), folder.signer("monitor")
    damage(tmp_path / name)
    damaged = content(tmp_path / name)
    try:
        again = KeyFolder(tmp_path)
        assert again.create("tiny") == public, "it is the same run"
        assert again.signer("monitor").certificate.run_id == "tiny"
    except KeysError as error:
        assert str(tmp_path) in str(error)
        assert content(tmp_path / name) == damaged
    else:
        has_same_key = again.signer("monitor").certificate.public_key == signer.certificate.public_key
        assert has_same_key or (content(aside(tmp_path / name)[0]) == damaged and name in caplog.text)


def test_an_empty_root_key_of_a_first_start_on_a_full_disk_heals(tmp_path, caplog):
    (tmp_path / "root.pem").write_bytes(b"")
    public = KeyFolder(tmp_path).create("tiny")
    assert KeyFolder(tmp_path).create("tiny") == public and "root.pem was empty" in caplog.text


@pytest.mark.parametrize("left", [b"", bytes(100), b"\n"])
def test_an_empty_identity_heals_with_a_word(tmp_path, left):
    path, told = tmp_path / "identity.key", []
    path.write_bytes(left)
    key = ensure_identity(path, told.append)
    [kept] = aside(path)
    assert kept.read_bytes() == left and len(told) == 1 and str(kept) in told[0]
    assert ensure_identity(path, told.append).private_numbers() == key.private_numbers() and len(told) == 1
    assert path.stat().st_mode & 0o377 == 0 and len(list(tmp_path.iterdir())) == 2


@damage_of_bytes
def test_an_identity_that_others_know_is_not_replaced(tmp_path, damage):
    path = tmp_path / "identity.key"
    ensure_identity(path)
    path.chmod(0o600)
    damage(path)
    damaged = content(path)
    with pytest.raises(SwarmError, match="1. If you have a backup"):
        ensure_identity(path, may_be_new=False)
    assert content(path) == damaged


def test_a_full_disk_leaves_no_empty_key(tiny_disk):
    with open(tiny_disk / "big", "wb", buffering=0) as file, pytest.raises(OSError):
        while True:
            file.write(bytes(4096))
    with pytest.raises(SwarmError, match="cannot be kept") as told:
        ensure_identity(tiny_disk / "identity.key")
    assert "df -h" in str(told.value) and [path.name for path in tiny_disk.iterdir()] == ["big"]
    with pytest.raises(KeysError, match="df -h"):
        KeyFolder(tiny_disk / "keys").create("tiny")
    with pytest.raises(OSError, match="has no room"):
        Home(tiny_disk / "home").require_room()
    (tiny_disk / "big").unlink()
    assert ensure_identity(tiny_disk / "identity.key").key_size == 2048
    assert KeyFolder(tiny_disk / "keys").create("tiny").startswith("ed25519:")
    Home(tiny_disk / "home").require_room()
