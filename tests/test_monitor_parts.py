"""The parts of a monitor, each for itself: what it keeps, records, notes, asks and tells, also on a sick disk."""

from __future__ import annotations

import json
import math
import threading
import time
import types
from dataclasses import replace

import pytest
import torch
from hivemind.p2p import PeerID

from volunteer_kit.auth.access_token import BanList, account_digest
from volunteer_kit.monitor import asked, notes, recording
from volunteer_kit.monitor.errors import MonitorError
from volunteer_kit.monitor.evidence import Looker, State, largest_share
from volunteer_kit.monitor.kept import KEPT, KeptStates, Writer
from volunteer_kit.monitor.lookout import PACE_OVER, Pace
from volunteer_kit.monitor.notes import Notes
from volunteer_kit.monitor.people import Bans, People
from volunteer_kit.monitor.recording import Recorder, find_tracker
from volunteer_kit.monitor.rescue import DISBELIEVED_FOR, Disbelief
from volunteer_kit.swarm.admission import Admission
from volunteer_kit.swarm.chunks import ChunkStore
from volunteer_kit.swarm.manifest import Manifest
from volunteer_kit.swarm.records import PeerRecord

A, B, C = (PeerID(b"\x12\x20" + bytes([i]) * 32) for i in (1, 2, 3))


def wait_until(true, timeout: float = 20.0) -> None:
    deadline = time.monotonic() + timeout
    while not true():
        assert time.monotonic() < deadline
        time.sleep(0.01)


# --- looks ---


def state(epoch: int, value: float, order: int = 0, statistics_finite: bool = True) -> State:
    return State(epoch, order, [torch.full((4,), value), torch.ones(2)], statistics_finite, 4.0)


def look(looker: Looker, *states: State) -> list:
    found = []
    for one in states:
        wait_until(lambda: not looker.is_busy)
        looker.submit(one)
        wait_until(lambda: not looker.is_busy)
        found += [seen.look for seen in looker.results()]
    return found


def test_a_look_measures_loss_and_way():
    def bound(parameters, before, after):
        return [float(after - before) * 0.3] * 2

    looker = Looker(bound, lambda parameters: parameters[0][0].item())
    first, second, far, after_order, nan, lost = look(
        looker, state(5, 1.0), state(6, 2.0), state(7, 9.0), state(20, 1.0, order=1), state(21, math.nan, order=1),
        state(22, 1.0, order=1, statistics_finite=False),
    )  # fmt: skip
    assert (first.public_loss, first.moved, first.swarm_loss) == (1.0, None, 4.0)
    assert 0.5 < second.moved < 1, "one step, and two more of both that may lie between"
    assert far.moved > 1 and after_order.moved is None, "an order may move it as far as it likes"
    assert not nan.finite and nan.public_loss is None and not lost.finite
    looker.close()


def test_a_look_that_fails_is_not_the_last():
    def loss(parameters):
        if parameters[0][0] == 1:
            raise RuntimeError("out of memory")
        return 3.0

    looker = Looker(None, loss)
    assert [one.epoch for one in look(looker, state(5, 1.0), state(6, 2.0))] == [6]
    looker.close()


def test_shares_of_bounds():
    assert largest_share([1.0, 3.0], [2.0, 4.0]) == 0.75
    assert largest_share([0.0], [0.0]) == 0.0 and largest_share([1e-9], [0.0]) == math.inf
    assert largest_share([math.nan], [1.0]) == math.inf and largest_share([], []) == 0.0


def test_the_swarms_pace():
    pace = Pace()
    assert pace.epochs_per_second(0.0) is None
    for second in range(0, 400, 4):
        pace.saw(second // 4, float(second))
    assert pace.epochs_per_second(396.0) == pytest.approx(0.25)
    assert pace.epochs_per_second(396.0 + 2 * PACE_OVER) is None, "it stands still"
    pace.begin_anew()
    assert pace.epochs_per_second(400.0) is None


def test_only_states_that_no_steps_lead_to_speak_against_their_owners(monkeypatch):
    disbelief, now = Disbelief(), time.monotonic()
    for peer, count in ((A, 0), (B, 1), (A, 1), (C, 2), (A, 0), (A, 1)):  # the count begins anew with each own step
        disbelief.note(str(peer), "why", count)
    assert [peer for peer, _ in disbelief.lately(now)] == [B, C, A]
    assert disbelief.lately(now + 2 * DISBELIEVED_FOR) == []
    disbelief.note(str(B), "why", 2)
    disbelief.clear()
    assert disbelief.lately(now) == []


# --- states on the disk ---


def write(folder, *epochs: int, chunks: bool = True) -> KeptStates:
    kept = KeptStates(folder)
    writer = Writer(kept, ["w", "optimizer/w/m"], {"run_id": "r"}, chunks)
    for epoch in epochs:
        metadata = {"epoch": epoch, "lineage": "ab" * 8, "numbers": [1], "past": [object()]}
        writer.submit(metadata, [torch.full((300,), float(epoch)), torch.zeros(300)])
        wait_until(lambda: not writer._busy.is_set())
        assert writer.is_busy, "somebody has to take note of it first"
        [one] = writer.results()
        kept.add(one)
    writer.close()
    return kept


def test_states_outlast_a_restart_and_old_ones_go(tmp_path):
    epochs = [10 * i for i in range(1, KEPT + 4)]
    kept = write(tmp_path, *epochs[:-1])
    for one in kept.waiting:
        kept.update(one, replace(one, confirmed=True))
    kept = write(tmp_path, epochs[-1])
    assert [one.epoch for one in kept.confirmed] == epochs[-1 - KEPT : -1]
    assert [one.epoch for one in kept.waiting] == [80]
    again = KeptStates(tmp_path)
    assert again.all == kept.all
    assert len(list((tmp_path / "states").glob("state-*"))) == KEPT + 1
    assert len(list((tmp_path / "checkpoints").iterdir())) == KEPT + 1
    assert all(ChunkStore.find(tmp_path / "states", root).is_complete for root in again.roots)
    assert again.of_epoch(80) and again.of_epoch(10) is None


def test_a_signed_state_is_remembered_with_its_words(tmp_path):
    kept = write(tmp_path, 10)
    [one] = kept.all
    manifest = Manifest("key", 10, 3, 0, bytes(8), bytes.fromhex(one.root), one.total_bytes, one.chunk_size, 1.0, 2.0)
    kept.update(one, one.with_manifest(manifest))
    assert KeptStates(tmp_path).all[0].signed == manifest


def test_what_is_damaged_is_not_kept(tmp_path):
    kept = write(tmp_path, 10, 20)
    [store] = [ChunkStore.find(tmp_path / "states", kept.roots[0])]
    (store.path / "have").unlink()
    assert [one.epoch for one in KeptStates(tmp_path).all] == [20]
    (tmp_path / "states.json").write_text('[{"epoch": 1')
    assert KeptStates(tmp_path).all == []
    (tmp_path / "states.json").write_text('[{"unknown": 1}]')
    assert KeptStates(tmp_path).all == []


def test_without_an_authority_there_are_checkpoints_only(tmp_path):
    kept = write(tmp_path, 10, chunks=False)
    assert kept.roots == [] and [one.epoch for one in KeptStates(tmp_path).all] == [10]
    kept.give_up_after(5)
    assert KeptStates(tmp_path).all == []


def test_a_full_disk_is_told_and_the_next_state_is_written(tiny_disk):
    kept = KeptStates(tiny_disk)
    writer = Writer(kept, ["w"], {"run_id": "r"}, chunks=True)
    for size, error in ((2_000_000, True), (1000, False)):
        writer.submit({"epoch": 10, "lineage": "ab" * 8, "numbers": []}, [torch.zeros(size)])
        wait_until(lambda: not writer._busy.is_set())
        [found] = writer.results()
        assert isinstance(found, OSError) is error
    writer.close()


# --- asked by hand ---


def test_a_question_is_answered_once(tmp_path):
    done = threading.Event()

    def monitor() -> None:
        while not done.is_set():
            asked.answer_all(tmp_path, lambda epoch: (epoch == 10, f"step {epoch}"))
            time.sleep(0.01)

    thread = threading.Thread(target=monitor)
    thread.start()
    try:
        assert asked.ask(tmp_path, 10, 10.0) == {"done": True, "text": "step 10"}
        assert asked.ask(tmp_path, 7, 10.0) == {"done": False, "text": "step 7"}
    finally:
        done.set()
        thread.join()
    assert list((tmp_path / "asked").iterdir()) == []


def test_who_is_not_there_does_not_answer_later(tmp_path):
    assert asked.ask(tmp_path, 10, 0.2) is None
    (tmp_path / "asked" / "x.json").write_text("{")
    (tmp_path / "asked" / "y.json").write_text(json.dumps({"to_epoch": 5, "time": time.time() - 1e4}))
    orders = []
    asked.answer_all(tmp_path, lambda epoch: orders.append(epoch) or (True, ""))
    assert orders == [] and list((tmp_path / "asked").glob("*.json")) == []


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
    recorder.close()
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
    assert time.monotonic() - started < 1 and recorder.dropped >= 14
    go.set()
    recorder.close()

    def fail(*_, **__):
        raise RuntimeError("no such project")

    for broken in (
        types.SimpleNamespace(init=fail, log=fail, finish=fail),
        types.SimpleNamespace(init=lambda **_: None, log=fail, finish=fail),
    ):
        recorder = Recorder(tmp_path / "b.jsonl", broken, {}, told.append)
        recorder.record({"epoch": 1})
        recorder.close()
    assert sum("no such project" in text for text in told) == 3
    assert len((tmp_path / "b.jsonl").read_text().splitlines()) == 2


def test_the_file_of_metrics_is_bounded(tmp_path, monkeypatch):
    monkeypatch.setattr(recording, "FILE_LIMIT", 1000)
    recorder = Recorder(tmp_path / "metrics.jsonl", None, {}, pytest.fail)
    for epoch in range(100):
        recorder.record({"epoch": epoch, "words": "x" * 30})
    recorder.close()
    files = sorted(path.name for path in tmp_path.iterdir())
    assert files == ["metrics.1.jsonl", "metrics.jsonl"]
    assert all((tmp_path / name).stat().st_size < 1200 for name in files)


def test_a_sick_disk_does_not_end_the_recorder(tmp_path):
    told = []
    recorder = Recorder(tmp_path / "no" / "metrics.jsonl", None, {}, told.append)
    recorder.record({"epoch": 1})
    recorder.record({"epoch": 2})
    recorder.close()
    assert len(told) == 2 and "cannot be written" in told[0]


def test_a_tracker_that_is_missing_is_named_with_its_install_line(monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "wandb", None)
    with pytest.raises(MonitorError, match="python -m pip install wandb"):
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
    journal.close()
