"""Slots: numbers in a file that two processes map."""

from __future__ import annotations

import errno
import mmap
import multiprocessing
import os

import pytest
import torch

from volunteer_kit.swarm.node.slots import Slots, StoreError

ELEMENTS = 1500  # two pages of 4096 bytes, the second one not full


def test_a_view_has_the_numbers_of_its_slot(tmp_path):
    slots = Slots(tmp_path / "gradients.bin", ELEMENTS)
    slots.ensure(3)
    for slot in range(3):
        view = slots.view(slot)
        assert view.shape == (ELEMENTS,) and view.dtype == torch.float32 and not view.any()
        view.fill_(slot + 1)
    assert [slots.view(slot).unique().tolist() for slot in range(3)] == [[1], [2], [3]]
    slots.zero(1)
    assert [slots.view(slot).unique().tolist() for slot in range(3)] == [[1], [0], [3]]


def test_slots_begin_at_pages(tmp_path):
    slots = Slots(tmp_path / "gradients.bin", ELEMENTS)
    slots.ensure(2)
    assert slots.slot_bytes % mmap.ALLOCATIONGRANULARITY == 0
    assert all(slots.view(slot).data_ptr() % mmap.PAGESIZE == 0 for slot in range(2))
    assert (tmp_path / "gradients.bin").stat().st_size == 2 * slots.slot_bytes


def test_views_stay_valid_when_the_file_grows(tmp_path):
    slots = Slots(tmp_path / "gradients.bin", ELEMENTS)
    slots.ensure(1)
    view = slots.view(0)
    slots.ensure(50)
    view += 2.0
    assert Slots(tmp_path / "gradients.bin", ELEMENTS).view(0).sum() == 2 * ELEMENTS
    slots.close()
    slots.close()
    view += 1.0
    assert Slots(tmp_path / "gradients.bin", ELEMENTS).view(0).sum() == 3 * ELEMENTS


def test_the_file_never_shrinks(tmp_path):
    slots = Slots(tmp_path / "gradients.bin", ELEMENTS)
    slots.ensure(3)
    slots.ensure(1)
    assert len(slots) == 3


def test_growing_changes_nothing_that_is_there(tmp_path):
    slots = Slots(tmp_path / "gradients.bin", ELEMENTS)
    slots.ensure(2)
    slots.view(1).copy_(torch.arange(ELEMENTS))
    slots.ensure(4)
    assert torch.equal(slots.view(1), torch.arange(ELEMENTS, dtype=torch.float32))
    assert not slots.view(3).any()


def test_two_processes_share_them_and_the_file_outlives_a_killed_one(tmp_path):
    mine = Slots(tmp_path / "gradients.bin", ELEMENTS)
    mine.ensure(2)
    mine.view(0).fill_(1.0)

    def other():
        theirs = Slots(tmp_path / "gradients.bin", ELEMENTS)
        assert theirs.view(0)[7] == 1.0
        theirs.view(1).fill_(5.0)
        os.kill(os.getpid(), 9)

    child = multiprocessing.get_context("fork").Process(target=other)
    child.start()
    child.join()
    assert child.exitcode == -9
    assert mine.view(1).unique().tolist() == [5.0]


def test_the_other_process_sees_slots_that_were_added(tmp_path):
    node, training = (Slots(tmp_path / "gradients.bin", ELEMENTS) for _ in range(2))
    with pytest.raises(IndexError, match="0 slots"):
        training.view(0)
    node.ensure(1)
    training.view(0).fill_(3.0)
    assert node.view(0)[0] == 3.0
    with pytest.raises(IndexError):
        training.view(-1)


def test_a_full_disk_is_told_and_changes_nothing(tmp_path, monkeypatch):
    slots = Slots(tmp_path / "gradients.bin", ELEMENTS)
    slots.ensure(1)
    before = (tmp_path / "gradients.bin").stat().st_size

    def full(descriptor, start, size):
        os.ftruncate(descriptor, start + size // 2)
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(StoreError, match=r"No space left.*\n1\. Make room: df -h"):
        slots.ensure(9)
    assert (tmp_path / "gradients.bin").stat().st_size == before and len(slots) == 1


def test_a_disk_that_is_really_full(tiny_disk):
    slots = Slots(tiny_disk / "gradients.bin", 100_000)
    slots.ensure(2)
    slots.view(1).fill_(1.0)
    with pytest.raises(StoreError, match="Make room"):
        slots.ensure(50)
    assert len(slots) == 2 and slots.view(1).sum() == 100_000
    slots.ensure(3)
    assert not slots.view(2).any()


def test_without_fallocate_the_space_is_written(tmp_path, monkeypatch):
    slots = Slots(tmp_path / "gradients.bin", ELEMENTS)
    monkeypatch.delattr(os, "posix_fallocate")
    slots.ensure(3)
    about = (tmp_path / "gradients.bin").stat()
    assert len(slots) == 3 and about.st_blocks * 512 >= about.st_size
    assert not slots.view(2).any()


def test_a_folder_that_is_not_there_is_told(tmp_path):
    with pytest.raises(StoreError, match="cannot be opened"):
        Slots(tmp_path / "missing" / "gradients.bin", ELEMENTS)
