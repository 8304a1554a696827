"""A residual comes later: once, for the cells that entered, and also after a restart."""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
from pathlib import Path

import pytest
import torch

from volunteer_kit.swarm.codecs.registry import CODECS
from volunteer_kit.swarm.rounds.error_feedback import MAX_AGE, MOST_ROUNDS, ROUNDS, ErrorFeedback
from volunteer_kit.swarm.rounds.layout import Layout

CELLS = 4
LAYOUT = Layout([torch.Size([40])], CELLS, CODECS["sparse"])
ALL = (1 << CELLS) - 1


def left(number: float) -> torch.Tensor:
    return torch.full((10,), float(number))


def found(feedback: ErrorFeedback) -> list[float]:
    """Each cell's residual times its weight."""
    values = [feedback.residual(cell).unique().tolist() for cell in range(CELLS)]
    assert all(len(each) == 1 for each in values)
    return [value * feedback.weight(cell) for cell, (value,) in enumerate(values)]


@pytest.fixture(params=["file", "memory"])
def feedback(request, tmp_path):
    return ErrorFeedback(tmp_path / "node" / "residuals.bin" if request.param == "file" else None, LAYOUT)


def test_nothing_counts_before_it_settles(feedback):
    for cell in range(CELLS):
        feedback.keep(b"one", cell, left(cell + 1))
    assert found(feedback) == [0, 0, 0, 0]
    feedback.settle(b"one", 0b0101)
    assert found(feedback) == [1, 0, 3, 0]


def test_a_round_that_is_dropped_changes_nothing(feedback):
    feedback.keep(b"one", 0, left(1))
    feedback.settle(b"one", ALL)
    feedback.keep(b"two", 0, left(2))
    feedback.drop_rounds()
    feedback.settle(b"two", ALL)
    assert found(feedback) == [1, 0, 0, 0]


def test_a_round_settles_once(feedback):
    feedback.keep(b"one", 0, left(1))
    feedback.keep(b"two", 0, left(2))
    feedback.settle(b"one", ALL)
    feedback.settle(b"two", ALL)
    feedback.settle(b"one", ALL)
    feedback.settle(b"unknown", ALL)
    assert found(feedback) == [2, 0, 0, 0]


def test_nothing_left_over_is_a_residual_too(feedback):
    for cell in range(2):
        feedback.keep(b"one", cell, left(1))
    feedback.settle(b"one", ALL)
    feedback.keep(b"two", 0, None)
    feedback.keep(b"two", 1, torch.full((10,), torch.nan))
    feedback.settle(b"two", ALL)
    assert found(feedback) == [0, 0, 0, 0] and feedback.weight(0) == 0


def test_a_mean_keeps_its_weight(feedback):
    feedback.keep(b"answer", 1, left(2), weight=50.0)
    feedback.settle(b"answer", ALL)
    assert found(feedback) == [0, 100, 0, 0]


def test_of_many_rounds_the_oldest_lose_their_values_but_are_not_sent_twice(feedback):
    feedback.keep(b"before", 0, left(5))
    feedback.settle(b"before", 1)
    for number in range(ROUNDS + 1):
        feedback.keep(bytes([number]), 0, left(number + 1))
    feedback.settle(bytes([0]), 1)  # the 5 was sent within it
    assert found(feedback)[0] == 0
    feedback.settle(bytes([ROUNDS]), 1)
    assert found(feedback)[0] == ROUNDS + 1
    for number in range(2 * MOST_ROUNDS):
        feedback.keep(bytes([number, 0]), 0, left(number + 1))
    feedback.settle(bytes([2 * MOST_ROUNDS - 1, 0]), 1)
    assert found(feedback)[0] == 2 * MOST_ROUNDS


def test_another_process_finds_all_of_it(tmp_path):
    path = tmp_path / "residuals.bin"
    first = ErrorFeedback(path, LAYOUT)
    first.keep(b"one", 0, left(1), weight=3.0)
    first.settle(b"one", ALL)
    first.keep(b"two", 0, left(2))
    first.keep(b"two", 1, None)
    second = ErrorFeedback(path, LAYOUT)
    assert found(second) == [3, 0, 0, 0]
    second.settle(b"two", ALL)
    assert found(second) == [2, 0, 0, 0]
    second.forget()
    assert found(ErrorFeedback(path, LAYOUT)) == [0, 0, 0, 0]


def keep_and_die(path: Path) -> None:
    feedback = ErrorFeedback(path, LAYOUT)
    feedback.keep(b"one", 0, left(1))
    feedback.settle(b"one", ALL)
    feedback.keep(b"two", 0, left(2))
    os.kill(os.getpid(), signal.SIGKILL)


def test_it_outlives_a_process_that_is_killed(tmp_path):
    path = tmp_path / "residuals.bin"
    process = multiprocessing.get_context("spawn").Process(target=keep_and_die, args=(path,))
    process.start()
    process.join()
    feedback = ErrorFeedback(path, LAYOUT)
    assert process.exitcode == -signal.SIGKILL
    assert found(feedback) == [1, 0, 0, 0]
    feedback.settle(b"two", ALL)
    assert found(feedback) == [2, 0, 0, 0]


def test_a_copy_that_a_death_interrupted_is_done_again(tmp_path):
    path = tmp_path / "residuals.bin"
    first = ErrorFeedback(path, LAYOUT)
    first.keep(b"one", 0, left(1))
    first.keep(b"one", 2, left(3))
    note = json.loads(path.with_suffix(".json").read_text())
    note["settling"] = [b"one".hex(), 0b0001]  # as it is while values are copied
    path.with_suffix(".json").write_text(json.dumps(note))
    assert found(ErrorFeedback(path, LAYOUT)) == [1, 0, 0, 0]
    assert found(ErrorFeedback(path, LAYOUT)) == [1, 0, 0, 0]


DAMAGES = ["other layout", "old", "cut note", "no note", "cut values", "no number", "no round"]


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_file_that_cannot_be_used_begins_anew(tmp_path, damage):
    path, layout = tmp_path / "residuals.bin", LAYOUT
    first = ErrorFeedback(path, LAYOUT)
    first.keep(b"one", 0, left(1))
    first.settle(b"one", ALL)
    note_path = path.with_suffix(".json")
    note = json.loads(note_path.read_text())
    if damage == "other layout":
        layout = Layout([torch.Size([40])], CELLS, CODECS["uniform4"])
    elif damage == "old":
        note_path.write_text(json.dumps({**note, "at": note["at"] - MAX_AGE - 60}))
    elif damage == "cut note":
        note_path.write_text(note_path.read_text()[:-9])
    elif damage == "no note":
        note_path.unlink()
    elif damage == "cut values":
        path.write_bytes(path.read_bytes()[:-4])
    elif damage == "no number":
        first.keep(b"two", 0, torch.zeros(10))
        values = bytearray(path.read_bytes())
        values[:4] = torch.tensor(torch.nan).numpy().tobytes()
        path.write_bytes(values)
    elif damage == "no round":
        note_path.write_text(json.dumps({**note, "settling": ["00", 1]}))
    again = ErrorFeedback(path, layout)
    assert found(again) == [0, 0, 0, 0]
    again.keep(b"new", 3, left(4))
    again.settle(b"new", ALL)
    assert found(ErrorFeedback(path, layout)) == [0, 0, 0, 4]


def test_where_no_file_can_be_it_is_kept_in_memory(tmp_path):
    (tmp_path / "file").write_text("")
    feedback = ErrorFeedback(tmp_path / "file" / "residuals.bin", LAYOUT)
    feedback.keep(b"one", 0, left(1))
    feedback.settle(b"one", ALL)
    assert found(feedback) == [1, 0, 0, 0]


def test_a_full_disk_costs_the_file_and_no_round(tmp_path, monkeypatch):
    path = tmp_path / "residuals.bin"
    feedback = ErrorFeedback(path, LAYOUT)
    feedback.keep(b"one", 0, left(1))
    feedback.settle(b"one", ALL)

    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full, raising=False)
    feedback.keep(b"two", 1, left(2))
    feedback.settle(b"two", ALL)
    assert found(feedback) == [1, 2, 0, 0]
    assert not path.exists()
