"""What a monitor writes down: metrics, a journal, who came and went; also on a sick disk."""

from __future__ import annotations

import json
import threading
import time
import types

import pytest
from hivemind.p2p import PeerID

from volunteer_kit.auth.access_token import BanList, account_digest
from volunteer_kit.dashboard.happenings import Names, sentence
from volunteer_kit.monitor import notes, recording
from volunteer_kit.monitor.hiding import follow_wishes
from volunteer_kit.monitor.notes import Notes
from volunteer_kit.monitor.people import Bans, People
from volunteer_kit.monitor.recording import Recorder, find_tracker
from volunteer_kit.packages import MissingDependency
from volunteer_kit.swarm.net.access.control import Admission
from volunteer_kit.swarm.records.peer_record import PeerRecord

A, B, C = (PeerID(b"\x12\x20" + bytes([i]) * 32) for i in (1, 2, 3))

# --- metrics ---


def test_metrics_are_lines_of_json_and_reach_the_tracker(tmp_path):
    logged, finished = [], threading.Event()
    tracker = types.SimpleNamespace(
        init=lambda **settings: logged.append(settings),
        log=lambda metrics, step: logged.append((metrics, step)),
        finish=finished.set,
    )
    recorder = Recorder(tmp_path / "metrics.jsonl", tracker, {"project": "p"}, pytest.fail)
    recorder.record({"time": 5.0, "epoch": 3, "loss": 4.5, "public_loss": None})
    recorder.close(patience=60)
    assert logged == [{"project": "p"}, ({"epoch": 3, "loss": 4.5}, 3)] and finished.is_set()
    assert json.loads((tmp_path / "metrics.jsonl").read_text()) == {
        "time": 5.0, "epoch": 3, "loss": 4.5, "public_loss": None
    }  # fmt: skip


def test_a_tracker_that_hangs_or_fails_holds_up_nobody(tmp_path, monkeypatch):
    monkeypatch.setattr(recording, "WAITING", 4)
    go, told = threading.Event(), []
    hanging = types.SimpleNamespace(init=lambda **_: None, log=lambda *_, **__: go.wait(30), finish=lambda: None)
    recorder = Recorder(tmp_path / "a.jsonl", hanging, {}, told.append)
    started = time.monotonic()
    for epoch in range(20):
        recorder.record({"epoch": epoch})
    assert time.monotonic() - started < 20 and recorder.dropped >= 14
    go.set()
    recorder.close(patience=60)

    def fail(*_, **__):
        raise RuntimeError("no such project")

    for broken in (
        types.SimpleNamespace(init=fail, log=fail, finish=fail),
        types.SimpleNamespace(init=lambda **_: None, log=fail, finish=fail),
    ):
        recorder = Recorder(tmp_path / "b.jsonl", broken, {}, told.append)
        recorder.record({"epoch": 1})
        recorder.close(patience=60)
    assert sum("no such project" in text for text in told) == 3
    assert len((tmp_path / "b.jsonl").read_text().splitlines()) == 2


def test_the_file_of_metrics_is_bounded(tmp_path, monkeypatch):
    monkeypatch.setattr(recording, "FILE_LIMIT", 1000)
    recorder = Recorder(tmp_path / "metrics.jsonl", None, {}, pytest.fail)
    for epoch in range(100):
        recorder.record({"epoch": epoch, "words": "x" * 30})
    recorder.close(patience=60)
    files = sorted(path.name for path in tmp_path.iterdir())
    assert files == ["metrics.1.jsonl", "metrics.jsonl"]
    assert all((tmp_path / name).stat().st_size < 1200 for name in files)


def test_a_sick_disk_does_not_end_the_recorder(tmp_path):
    told = []
    recorder = Recorder(tmp_path / "no" / "metrics.jsonl", None, {}, told.append)
    recorder.record({"epoch": 1})
    recorder.record({"epoch": 2})
    recorder.close(patience=60)
    assert len(told) == 2 and "cannot be written" in told[0]


def test_a_tracker_that_is_missing_is_named_with_its_install_line(monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "wandb", None)
    with pytest.raises(MissingDependency, match="python -m pip install wandb"):
        find_tracker("wandb")


# --- the journal ---


def test_a_journal_that_cannot_be_opened_is_told_once_and_tried_again(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(notes, "REOPEN_EVERY", 0.0)
    place = tmp_path / "folder"
    place.write_text("a file where the folder should be")
    sick = Notes(place / "journal.sqlite")
    for _ in range(3):
        sick.event("joined", username="ada")
    assert sick.failed == 3 and sick.do("members", default=[]) == []
    assert capsys.readouterr().err.count("cannot be opened") == 1
    place.unlink()
    sick.event("joined", username="ada")
    assert [event["kind"] for event in sick.do("events", 5)] == ["joined"]
    sick.close()


def test_a_warning_is_not_repeated(tmp_path, capsys):
    journal = Notes(tmp_path / "journal.sqlite")
    for _ in range(5):
        journal.warn("The disk\nis full.")
    [event] = journal.do("events", 10)
    assert event["detail"] == {"reason": "The disk is full."} and capsys.readouterr().err.count("is full") == 1
    journal.close()


# --- people ---


def record(peer: PeerID, name: str, **fields) -> PeerRecord:
    usual = {
        "fingerprint": "0" * 32, "device": "Tesla T4", "epoch": 100, "total_samples": 5, "samples_per_second": 3.0,
        "loss": 4.5, "client_mode": False,
    }  # fmt: skip
    return PeerRecord(peer_id=peer.to_bytes(), name=name, **{**usual, **fields})


def told(journal: Notes) -> list[tuple[str, str]]:
    return [(event["kind"], event["detail"].get("username")) for event in reversed(journal.do("events", 100))]


def test_who_joins_and_leaves_is_told_once(tmp_path):
    journal = Notes(tmp_path / "journal.sqlite")
    people = People(journal, Admission())
    ada, bob = record(A, "ada"), record(B, "bob")

    def at(**records) -> None:
        named = {{"ada": A, "bob": B}[name]: one for name, one in records.items()}
        people.look(named, people.claims(named))

    at(ada=ada)
    at(ada=ada, bob=bob)
    at(ada=ada, bob=bob)
    at(bob=bob)
    assert told(journal) == [("joined", "ada"), ("joined", "bob"), ("left", "ada")]
    here = {row["username"]: row["here"] for row in journal.do("members")}
    assert here == {"ada": False, "bob": True}
    again = People(journal, Admission())
    again.look({B: bob}, again.claims({B: bob}))
    assert len(told(journal)) == 3, "a monitor that was restarted tells nothing anew"
    again.look({A: ada, B: bob}, again.claims({A: ada, B: bob}))
    assert told(journal)[-1] == ("joined", "ada")
    journal.close()


def test_a_name_is_hidden_by_its_owners_peers_alone(tmp_path):
    journal, names = Notes(tmp_path / "journal.sqlite"), {A: "Ada", B: "ada", C: "bob"}
    admission = types.SimpleNamespace(is_open=False, account_of=lambda peer: names.get(peer), username_of=names.get)
    stranger = PeerID(b"\x12\x20" + bytes([9]) * 32)

    def look(**wishes: bool) -> frozenset[str]:
        peers = {"a": A, "b": B, "c": C, "stranger": stranger}
        records = {peers[key]: record(peers[key], "ada", hidden=wish) for key, wish in wishes.items()}
        follow_wishes(records, admission, journal)
        return journal.do("hidden")

    assert look(a=False, b=False, c=False) == frozenset()
    assert look(a=False, b=True, c=False) == {"ada"}, "one of the account's machines is enough"
    assert look(c=False) == {"ada"}, "who has left stays hidden"
    assert look(a=False, b=True, c=True, stranger=True) == {"ada", "bob"}
    assert look(a=False, b=False, stranger=True) == {"bob"}, "all of them show it again"
    follow_wishes({A: record(A, "ada", hidden=True)}, Admission(), journal)
    assert journal.do("hidden") == {"bob"}, "in an open run anybody may call himself ada"
    journal.close()


def test_an_outlier_is_told_once_an_hour(tmp_path, monkeypatch):
    journal = Notes(tmp_path / "journal.sqlite")
    people = People(journal, Admission())
    peers = [PeerID(b"\x12\x20" + bytes([i]) * 32) for i in range(1, 8)]
    records = {peer: record(peer, f"v{i}") for i, peer in enumerate(peers)} | {C: record(C, "mallory", epoch=2**30)}
    for _ in range(4):
        people.look(records, people.claims(records))
    outliers = [event for event in journal.do("events", 100) if event["kind"] == "outlier"]
    assert [event["detail"]["username"] for event in outliers] == ["mallory"]
    assert "at step 1,073,741,824" in outliers[0]["detail"]["reason"]
    monkeypatch.setattr("volunteer_kit.monitor.people.TELL_AGAIN", -1.0)
    people.look(records, people.claims(records))
    assert journal.do("counts")["outlier"] == 2
    journal.close()


def test_bans_are_told_by_the_names_that_are_known(tmp_path):
    journal = Notes(tmp_path / "journal.sqlite")
    journal.do("set_leaderboard", [{"username": "Mallory", "samples": 3}])
    mallory, stranger = account_digest("run", "Mallory"), bytes(16)
    bans = Bans(tmp_path / "bans.json", "run", journal)
    bans.take(BanList(1, frozenset({mallory})))
    bans.take(BanList(2, frozenset({mallory, stranger})))
    again = Bans(tmp_path / "bans.json", "run", journal)
    again.take(BanList(2, frozenset({mallory, stranger})))
    again.take(BanList(3, frozenset({stranger})))
    assert told(journal) == [("banned", "Mallory"), ("banned", ""), ("unbanned", "Mallory")]
    # who was removed is on the same list as who was banned
    assert [sentence(event, Names(())) for event in reversed(journal.do("events", 100))] == [
        "Mallory may not take part any more",
        "A volunteer may not take part any more",
        "Mallory may take part again",
    ]
    journal.close()
