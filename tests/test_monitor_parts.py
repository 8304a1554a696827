"""The parts of a monitor, each for itself: how it looks, which states it keeps, what it is asked."""

from __future__ import annotations

import json
import math
import shutil
import subprocess
import threading
import time
from dataclasses import replace

import pytest
import torch
from hivemind.p2p import PeerID

from tests import damage
from tests.damage import aside
from tests.waiting import wait_until
from volunteer_kit.monitor import asked
from volunteer_kit.monitor.evidence import Looker, State, largest_share
from volunteer_kit.monitor.kept import KEPT, KeptStates, Writer
from volunteer_kit.monitor.lookout import PACE_OVER, Pace
from volunteer_kit.swarm.state.chunk_store import ChunkStore
from volunteer_kit.swarm.state.manifest import Manifest

DAMAGES = damage.JSON
A, B, C = (PeerID(b"\x12\x20" + bytes([i]) * 32) for i in (1, 2, 3))


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
    for step, second in enumerate(range(1000, 5000, 660)):
        pace.saw(step, float(second))
    assert pace.epochs_per_second(5500.0) == pytest.approx(1 / 660), "eleven minutes a step, as the original's"
    assert pace.epochs_per_second(5500.0 + 4 * 660) is None


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


def confirm_all(kept: KeptStates) -> None:
    for one in kept.waiting:
        kept.update(one, replace(one, confirmed=True))


def on_disk(folder) -> set[str]:
    return {path.name for place in ("checkpoints", "states") for path in (folder / place).glob("*")}


@pytest.mark.parametrize("damage", damage.JSON)
@pytest.mark.parametrize("chunks", [True, False], ids=["signed", "not signed"])
def test_a_damaged_list_is_made_anew_and_no_state_is_deleted(tmp_path, damage, chunks):
    kept = write(tmp_path, 10, 20, 30, chunks=chunks)
    confirm_all(kept)
    before, there, path = write(tmp_path, 40, chunks=chunks).all, on_disk(tmp_path), tmp_path / "states.json"
    DAMAGES[damage](path)
    told = []
    kept = KeptStates(tmp_path, told.append)
    assert kept.all == before and [one.confirmed for one in before] == [True, True, True, False]
    assert len(told) == 1 and "nothing is deleted" in told[0] and "10, 20, 30, 40" in told[0]
    [moved] = aside(path)
    assert str(moved) in told[0]
    write(tmp_path, 50, chunks=chunks)
    assert on_disk(tmp_path) > there
    assert KeptStates(tmp_path, told.append).all[:-1] == before and len(told) == 1


@pytest.mark.parametrize("what", ["list", "list and records", "folders of an older version"])
def test_without_a_list_states_are_known_by_their_folders(tmp_path, what):
    kept = write(tmp_path, 10, 20, 30)
    confirm_all(kept)
    before = kept.all
    (tmp_path / "states.json").unlink()
    for record in (tmp_path / "checkpoints").glob("*/kept.json"):
        if what == "list and records":
            record.write_text("{")
        elif what == "folders of an older version":
            record.unlink()
    told = []
    kept = KeptStates(tmp_path, told.append)
    assert [replace(one, confirmed=True) for one in kept.all] == before, "with their chunks"
    assert [one.confirmed for one in kept.all] == [what == "list"] * 3, "else they are on probation"
    assert "is missing" in told[0]


@pytest.mark.parametrize("name", ["have", "hashes", "size"])
@pytest.mark.parametrize("damage", damage.BYTES)
def test_damaged_chunks_are_made_whole_again(tmp_path, name, damage):
    kept = write(tmp_path, 10, 20)
    DAMAGES[damage](ChunkStore.place(tmp_path / "states", kept.roots[0]) / name)
    told = []
    again = KeptStates(tmp_path, told.append)
    assert again.all == kept.all and len(told) <= 1, "some damage makes no difference"
    assert all("whole again" in text for text in told)
    assert all(ChunkStore.find(tmp_path / "states", root).verify() for root in again.roots)


def test_of_a_state_whose_chunks_are_lost_the_checkpoint_stays(tmp_path):
    kept = write(tmp_path, 10, 20)
    with open(ChunkStore.place(tmp_path / "states", kept.roots[0]) / "state", "r+b") as file:
        file.truncate(100)
    (ChunkStore.place(tmp_path / "states", kept.roots[0]) / "have").unlink()
    told = []
    again = KeptStates(tmp_path, told.append)
    assert [(one.epoch, bool(one.root)) for one in again.all] == [(10, False), (20, True)]
    assert "nobody can be ordered back" in told[0]
    write(tmp_path, 30)
    assert {"epoch-000010", "epoch-000020", "epoch-000030"} < on_disk(tmp_path)


def test_what_is_on_no_list_goes_when_it_is_superseded(tmp_path):
    """Such as a state whose monitor was killed before it entered it, or one that a person put there."""
    write(tmp_path / "other", 5, 55)
    for place in ("checkpoints", "states"):
        shutil.copytree(tmp_path / "other" / place, tmp_path / place)
    foreign = on_disk(tmp_path / "other")
    (tmp_path / "states.json").write_text(json.dumps([]))
    (tmp_path / "checkpoints").rename(tmp_path / "put back")
    KeptStates(tmp_path)
    write(tmp_path, 10)
    for path in (tmp_path / "put back").iterdir():
        path.rename(tmp_path / "checkpoints" / path.name)
    for epoch in range(20, 60, 10):
        confirm_all(write(tmp_path, epoch))
        assert foreign < on_disk(tmp_path)
    confirm_all(KeptStates(tmp_path))
    write(tmp_path, 60)
    left = foreign & on_disk(tmp_path)
    assert len(left) == 2 and "epoch-000055" in left, "five confirmed ones are newer than the other"


def test_what_a_killed_writer_left_goes_at_the_next_start(tmp_path):
    write(tmp_path, 10)
    there = on_disk(tmp_path)
    with subprocess.Popen(["true"]) as dead:
        dead.wait()
    (tmp_path / "checkpoints" / f".epoch-000020.{dead.pid}.tmp").mkdir()
    (tmp_path / "checkpoints" / ".epoch-000020.0123abcd.part").mkdir()
    KeptStates(tmp_path)
    assert on_disk(tmp_path) == there


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
        assert asked.ask(tmp_path, 10, 60.0) == {"done": True, "text": "step 10"}
        assert asked.ask(tmp_path, 7, 60.0) == {"done": False, "text": "step 7"}
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
