"""From the stream into steps and back after a restart: what entered a step is done with, what did not is read again."""

from __future__ import annotations

import contextlib
import json
import os
import signal
from pathlib import Path

import pytest
import torch

from tests.damage import JSON, aside
from volunteer_kit.data.leases import Lease
from volunteer_kit.data.ledger import Applied, Ledger
from volunteer_kit.data.source import SampleName
from volunteer_kit.data.stream import Batch
from volunteer_kit.data.walk import Position
from volunteer_kit.home import Home
from volunteer_kit.reading import Reading
from volunteer_kit.runs import build_stream, load_run
from volunteer_kit.supervisor import Supervisor
from volunteer_kit.swarm.options import StepReport
from volunteer_kit.training.protocol import WorkerSpec

LEASE, OTHER = Lease(0, 0, 0, 8), Lease(0, 1, 0, 8)


def batch(number: int, lease: Lease = LEASE) -> Batch:
    names = [SampleName(0, lease.shard, 2 * number + i) for i in range(2)]
    none = torch.zeros(2, 1)
    return Batch(none, none, [], names, {lease: 2}, Position(0, 0, lease, 0, 2 * number + 2))


def names(*batches: Batch) -> list[SampleName]:
    return [name for one in batches for name in one.names]


def test_what_a_step_took_is_done_with_in_order():
    ledger, given = Ledger(), [batch(n, LEASE if n < 3 else OTHER) for n in range(6)]
    for one in given:
        assert ledger.given(one) is one
    assert ledger.applied(names(*given[:2])) == Applied(given[1].after, {LEASE: 4})
    assert ledger.applied(names(*given[2:4])) == Applied(given[3].after, {LEASE: 2, OTHER: 2})
    assert ledger.applied([]) == Applied(None, {}) and ledger.lost == 0
    assert ledger.applied(names(given[0])) == Applied(None, {})  # told twice
    assert ledger.applied(names(*given[4:])) == Applied(given[5].after, {OTHER: 4})


def test_what_never_entered_a_step_is_lost_and_does_not_hold_up_the_rest():
    ledger, given = Ledger(), [batch(n) for n in range(5)]
    for one in given:
        ledger.given(one)
    assert ledger.applied(names(given[0], given[2])) == Applied(given[2].after, {LEASE: 4})
    assert ledger.lost == 2
    assert ledger.applied(names(given[3])).after == given[3].after  # the last one may still enter the next step
    assert ledger.lost == 2


def test_what_waits_for_a_later_step_is_neither_lost_nor_done_with():
    """Where peers vote, a gradient may be committed after others that were computed later."""
    ledger, given = Ledger(), [batch(n) for n in range(5)]
    for one in given:
        ledger.given(one)
    waiting = {given[1].names[0], given[3].names[0]}
    assert ledger.applied(names(given[2]), waiting) == Applied(given[0].after, {LEASE: 2}) and ledger.lost == 2
    assert ledger.applied(names(given[4]), waiting) == Applied(None, {LEASE: 2}) and ledger.lost == 2
    assert ledger.applied(names(given[1]), waiting - {given[1].names[0]}) == Applied(given[1].after, {LEASE: 2})
    assert ledger.applied(names(given[3])) == Applied(given[3].after, {LEASE: 2}) and ledger.lost == 2


def report(*batches: Batch) -> StepReport:
    found = tuple(names(*batches))
    return StepReport(1, len(found), 2, 1.0, 0.1, 0, 0, names=found)


@pytest.fixture
def reading(tmp_path):
    """reading(fingerprint) -> a Reading of the demo's scenes with its state in tmp_path, and what it told."""

    def make(fingerprint: str = "f", folder: Path = tmp_path):
        told: list[dict] = []
        stream = build_stream(load_run("demo"), peer_seed=1)
        path = str(folder / "stream.json")
        return Reading(stream, path, fingerprint, lambda event, **fields: told.append(fields)), told

    return make


def test_a_restart_goes_on_after_the_last_step_that_was_taken(reading):
    before, _ = reading()
    batches = [before.next_batch(8) for _ in range(4)]
    assert before.applied(report(*batches[:2])) == 16
    after, told = reading()
    assert after.next_batch(8).names == batches[2].names and not told
    other, _ = reading("of another run")
    assert other.next_batch(8).names == batches[0].names


DAMAGE = ["{", "[]", '{"fingerprint": "f"}', '{"fingerprint": "f", "stream": {"version": 9}}']


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_state_is_told_and_reading_begins_anew(reading, damage, tmp_path):
    first, _ = reading()
    expected = first.next_batch(8).names
    (tmp_path / "stream.json").write_text(damage)
    after, told = reading()
    assert "cannot be told" in told[0]["message"] and after.next_batch(8).names == expected


@pytest.mark.parametrize("damage", JSON.values(), ids=list(JSON))
def test_however_a_state_is_damaged_it_is_kept_aside_and_reading_goes_on(reading, damage, tmp_path):
    before, _ = reading()
    before.applied(report(before.next_batch(4)))
    damage(tmp_path / "stream.json")
    after, told = reading()
    [kept] = aside(tmp_path / "stream.json")
    assert [one["kind"] for one in told] == ["stream"] and str(kept) in told[0]["message"]
    assert after.next_batch(4).names


def test_a_full_disk_is_told_once(reading, tiny_disk):
    before, told = reading(folder=tiny_disk)
    with (tiny_disk / "filler").open("wb", buffering=0) as file, contextlib.suppress(OSError):
        while True:
            file.write(bytes(4096))
    for _ in range(3):
        assert before.applied(report(before.next_batch(4))) == 4
    assert [one["kind"] for one in told] == ["stream"] and "No space left" in told[0]["message"]


@pytest.mark.slow
def test_a_killed_worker_reads_on_where_its_last_step_was(tmp_path):
    """A real worker, alone in its swarm: after SIGKILL the next one goes on in the same lease, further on."""
    home = Home(tmp_path / "home")
    spec = WorkerSpec(
        run=load_run("demo").model_dump(mode="json"),
        host_maddrs=["/ip4/127.0.0.1/tcp/0"],
        home=str(home.path),
        threads=1,
        batch_size=16,
        peer_seed=3,
    )

    def epochs(count: int) -> None:
        while count:
            event = supervisor.next_event(timeout=90)
            assert event is not None, (tmp_path / "log").read_text()[-2000:]
            count -= event["event"] == "epoch"

    def place() -> tuple[int, int, int]:
        state = json.loads(home.stream.read_text())["stream"]
        assert state["peer_seed"] == 3
        return state["place"], state["range"], state["used"]

    with Supervisor(spec, log_path=tmp_path / "log", backoff=0.1) as supervisor:
        epochs(3)
        os.kill(supervisor.pid, signal.SIGKILL)
        killed_at = place()
        epochs(3)
        assert supervisor.restarts == 1
        reached = place()
    place_, range_, used = killed_at
    read = 4168 * (reached[0] - place_) + 512 * (reached[1] - range_) + reached[2] - used
    assert 2 * 256 <= read < 10 * 256, (killed_at, reached)


def test_samples_that_come_cell_by_cell_earn_when_the_last_cell_is_in(reading):
    """A name comes with the last of its sample's cells, and a count with each."""

    class Leases:
        counts = {"duplicate": 0}

        def earns(self, lease):
            return lease != OTHER

        def state_dict(self):
            return {}

        def close(self): ...

    one, _ = reading()
    given = [one.next_batch(8) for _ in range(3)]
    one._leases = Leases()
    total = sum(sum(each.leases.values()) for each in given[:2])

    def step(samples, *batches, waiting):
        taken = tuple(name for each in batches for name in each.names)
        first = frozenset(each.names[0] for each in waiting)
        return one.applied(StepReport(1, samples, 2, 1.0, 0.1, 0, 0, names=taken, waiting=first))

    earned = [step(13, given[0], waiting=given[1:2]), step(2, waiting=given[1:2]), step(1, given[1], waiting=())]
    assert sum(earned) == total == 16 and earned == [8, 0, 8]
    one.close()
