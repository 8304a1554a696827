"""A real monitor and real workers whose peers vote on each step: what the monitor credits is what was committed."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hivemind.p2p import PeerID

from tests.monitored import MonitoredRun, MonitorProcess, Volunteer, monitored
from volunteer_kit.journal import JournalReader
from volunteer_kit.runs import build_model, build_param_groups, load_run
from volunteer_kit.swarm.credit.ledger import CreditLedger
from volunteer_kit.swarm.net.identity import peer_digest
from volunteer_kit.swarm.node.store import NodeStore
from volunteer_kit.swarm.sync.config import SyncConfig

CELLS = SyncConfig(1).cells
def committed(run: MonitoredRun, name: str) -> float:
    """Samples of a worker that has left, by its own node's books."""
    elements = sum(p.numel() for group in build_param_groups(*model_of(run)) for p in group["params"])
    store = NodeStore(run.folder / name / "node", elements)
    try:
        ledger = store.durable().ledger
    finally:
        store.close()
    assert ledger is not None
    return ledger.committed / CELLS


def model_of(run: MonitoredRun):
    config = load_run(run.run)
    return config, build_model(config)


def credit(monitor: MonitorProcess) -> tuple[int | None, dict[bytes, int]]:
    """The last step that was entered, and samples of each machine."""
    ledger = CreditLedger(monitor.folder / "credit.sqlite", read_only=True)
    try:
        return ledger.last_epoch(), {digest: samples for digest, (samples, _) in ledger.of_machines().items()}
    finally:
        ledger.close()


def machine_of(volunteer: Volunteer) -> bytes:
    return peer_digest(PeerID.from_base58(volunteer.wait_event("connected")["peer_id"]))


def finish(volunteers: list[Volunteer], epoch: int) -> int:
    """Let them end together. :returns: the epoch of the last step."""
    for volunteer in volunteers:
        volunteer.order(json.dumps({"command": "finish_at", "epoch": epoch}))
    return max(volunteer.wait_event("finished")["epoch"] for volunteer in volunteers)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_monitor_credits_what_was_committed(tmp_path: Path):
    with monitored(tmp_path, open_run=True, target_batch_size=512) as run:
        monitor = run.monitor()
        volunteers = {name: run.volunteer(name) for name in ("ada", "bob")}
        checkpoint = monitor.wait_checkpoint()["detail"]["epoch"]
        monitor.wait(lambda journal: {"ada", "bob"} <= {row["username"] for row in journal.leaderboard()})
        last = finish([*volunteers.values()], checkpoint + 3)
        monitor.wait(lambda journal: (credit(monitor)[0] or 0) >= last)
        for volunteer in volunteers.values():
            volunteer.leave()
            volunteer.wait_event("left")
            volunteer.process.wait(120)
        monitor.wait(lambda journal: journal.latest()["samples_total"] == sum(credit(monitor)[1].values()))
        own = {machine_of(volunteer): committed(run, name) for name, volunteer in volunteers.items()}
        found = credit(monitor)[1]
        assert all(samples > 0 for samples in own.values())
        assert found == {machine: int(samples) for machine, samples in own.items()}
        with JournalReader(monitor.folder / "journal.sqlite") as journal:
            assert journal.latest()["epoch"] >= last
            board = {row["username"]: row["samples"] for row in journal.leaderboard()}
        assert board == {name: found[machine_of(volunteer)] for name, volunteer in volunteers.items()}
        assert monitor.stop() < 60
