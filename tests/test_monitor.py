"""A monitor beside real workers and a real authority: it watches, keeps, signs, and brings a ruined run back."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.local_swarm import ROOT
from tests.monitored import MonitoredRun, MonitorProcess, Volunteer, monitored
from volunteer_kit.journal import JournalReader
from volunteer_kit.monitor.judge import MIN_RISE
from volunteer_kit.swarm.credit.ledger import CreditLedger

WENT_BACK = "ordered everybody back to an earlier model"


def metrics(monitor: MonitorProcess) -> list[dict]:
    lines = (monitor.folder / "metrics.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]


def signed(monitor: MonitorProcess) -> list[dict]:
    """Of its states those that are, oldest first."""
    return [one for one in json.loads((monitor.folder / "states.json").read_text()) if one["manifest"]]


def steps(volunteer: Volunteer) -> list[dict]:
    """Of this volunteer, as far as told."""
    try:
        volunteer.wait_for(lambda event: False, timeout=0.5)
    except AssertionError:
        return [event for event in volunteer.events if event["event"] == "epoch"]


def command(*words: str, folder: Path, timeout: float = 200.0) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "volunteer_kit.cli", "monitor", *words],
        capture_output=True, text=True, cwd=folder, timeout=timeout,
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
    )  # fmt: skip


def test_alone_it_waits_and_ends_when_told(tmp_path):
    with monitored(tmp_path, open_run=True) as run:
        monitor = run.monitor()
        ready = run.maddrs
        monitor.wait(lambda journal: journal.latest())
        assert monitor.stop() < 60
        assert "not signed" in monitor.log.read_text()
        run.maddrs = []
        again = run.monitor(wait=False)
        assert again.ready()["peer_id"] == ready[0].rpartition("/")[2], "the same peer after a restart"
        done = command("watch", str(run.file), "--folder", str(again.folder), folder=tmp_path)
        assert done.returncode == 2 and "Another monitor runs" in done.stderr
        again.stop()


def test_what_it_cannot_do_is_told_in_words(tmp_path):
    with monitored(tmp_path) as run:
        for words, said in (
            (["watch", str(run.file), "--folder", "deep/elsewhere"], "needs the run's keys"),
            (["rollback", str(run.file), "--to", "10"], "no monitor's folder"),
            (["watch", str(run.file), "--trackio", "--wandb"], "one tracker"),
        ):
            done = command(*words, folder=tmp_path)
            assert done.returncode == 2 and said in done.stderr, done


def credited(monitor: MonitorProcess) -> set[str]:
    ledger = CreditLedger(monitor.folder / "credit.sqlite", read_only=True)
    try:
        return {total.username for total in ledger.totals()}
    finally:
        ledger.close()


def ruin(run: MonitoredRun, monitor: MonitorProcess) -> dict:
    """The event of going back. An attacker whom a busy machine throws out of step before it has harmed anybody ruins
    itself only: then another one comes."""
    for name in ("mallory", "mallet", "trudy"):
        when = run.folder / f"attack of {name}"
        attacker = run.volunteer(name, attack="large_numbers", when=str(when))
        attacker.wait_epoch(1, group_size=2)
        when.touch()
        try:
            return monitor.wait_event("rollback")
        except AssertionError as e:
            reason = e
        finally:
            attacker.leave()
    raise reason


@pytest.mark.slow
@pytest.mark.timeout(800)
def test_a_run_that_is_ruined_on_purpose_comes_back_by_itself(tmp_path):
    """By the plain mean: an admitted peer sends its gradients turned round and a thousand times as long; it leaves."""
    with monitored(tmp_path) as run:
        monitor = run.monitor()
        ada, bob = run.volunteer("ada"), run.volunteer("bob")
        monitor.wait_event("joined", username="ada")
        good = monitor.wait_checkpoint()["detail"]["epoch"]
        states = monitor.wait(lambda journal: signed(monitor))
        assert states[0]["epoch"] == good, "judged good, and signed"

        event = ruin(run, monitor)
        resumed = event["detail"]["resume_epoch"]
        assert event["detail"]["to_epoch"] >= good
        for volunteer in (ada, bob):
            back = volunteer.wait_epoch(resumed + 3)  # the mean of one before has the ruined model in it
            late = [one for one in steps(volunteer) if event["time"] < one["time"] and one["epoch"] < resumed]
            assert len(late) <= 2, "it obeys within two epochs"
            kept = max((s for s in states if s["epoch"] <= event["detail"]["to_epoch"]), key=lambda s: s["epoch"])
            before = [one for one in steps(volunteer) if one["epoch"] <= kept["epoch"] + 1 and one["loss"]]
            assert back["loss"] < before[-1]["loss"] + 2 * MIN_RISE
        monitor.wait(lambda journal: journal.latest()["epoch"] >= resumed + 3)
        rows = [row for row in metrics(monitor) if row["epoch"] > resumed]
        assert rows[-1]["public_loss"] < 1.5
        monitor.wait(lambda journal: {"ada", "bob"} <= credited(monitor))
        monitor.wait(lambda journal: {"ada", "bob"} <= {row["username"] for row in journal.leaderboard()})
        with JournalReader(monitor.folder / "journal.sqlite") as journal:
            assert len(journal.events(100, ("rollback",))) == 1
        assert monitor.stop() < 60


@pytest.mark.slow
@pytest.mark.timeout(700)
def test_by_hand_and_after_the_death_of_a_monitor(tmp_path):
    with monitored(tmp_path, target_batch_size=512) as run:
        first = run.monitor(name="first")
        volunteer = run.volunteer("ada")
        second = run.monitor(name="second")
        first.wait_checkpoint()
        second.wait_checkpoint()

        first.kill()  # whichever it was: the other one goes on
        epoch = second.wait(lambda journal: journal.latest()["epoch"])
        second.wait(lambda journal: journal.latest()["epoch"] > epoch + 3)
        states = second.wait(lambda journal: signed(second))

        refused = command("rollback", str(run.file), "--to", "7", "--folder", str(second.folder), folder=tmp_path)
        assert refused.returncode == 2 and "no checkpoint of step 7. Kept are those of step" in refused.stderr
        to = states[-1]["epoch"]  # older ones may go meanwhile
        done = command("rollback", str(run.file), "--to", str(to), "--folder", str(second.folder), folder=tmp_path)
        assert done.returncode == 0 and f"goes back to its checkpoint of step {to}" in done.stdout, done
        event = second.wait_event("rollback")
        assert "host" in event["detail"]["reason"]
        resumed = event["detail"]["resume_epoch"]
        volunteer.wait_for(lambda e: e["event"] == "warning" and WENT_BACK in e["message"])
        volunteer.wait_epoch(resumed + 1)
        kept = [one["epoch"] for one in json.loads((second.folder / "states.json").read_text())]
        assert all(epoch <= to or epoch >= resumed for epoch in kept), "what was undone is given up"

        members = second.wait(lambda journal: journal.members())
        second.kill()
        again = run.monitor("--initial-peers", volunteer.wait_event("connected")["maddrs"][0], name="second")
        time.sleep(1.0)
        assert again.wait(lambda journal: journal.members())[0]["peer_id"] in {row["peer_id"] for row in members}
        again.wait(lambda journal: journal.latest()["epoch"] > event["detail"]["resume_epoch"])
        assert again.stop() < 60
