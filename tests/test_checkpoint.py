"""Checkpoints on real disks: full ones, torn writes, damaged files, a writer killed in the middle."""

from __future__ import annotations

import json
import math
import os
import resource
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from volunteer_kit import checkpoint
from volunteer_kit.checkpoint import (
    CheckpointError,
    is_finite,
    keep_last,
    latest_checkpoint,
    load_checkpoint,
    save_checkpoint,
)


def some_tensors(seed: int = 0, size: int = 64) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {
        "layer.weight": torch.randn(size, 3, generator=generator),
        "codes": torch.randint(0, 256, (7,), generator=generator, dtype=torch.uint8),
        "half": torch.randn(5, generator=generator).to(torch.bfloat16),
        "empty": torch.zeros(0, 4),
        "scalar": torch.tensor(3.5),
        "optimizer/0.exp_avg": torch.randn(size, 3, generator=generator),
    }


def same(left, right) -> bool:
    return left.keys() == right.keys() and all(
        left[name].dtype == right[name].dtype and torch.equal(left[name], right[name]) for name in left
    )


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_round_trip(tmp_path):
    tensors = some_tensors()
    meta = {"epoch": 123, "run_id": "demo", "fingerprint": "f" * 8, "loss": 4.25, "note": "ünï", "more": {"a": [1]}}
    path = save_checkpoint(tmp_path / "new" / "folder", tensors, meta)
    assert path == tmp_path / "new" / "folder" / "epoch-000123" and names(path) == ["meta.json", "model.safetensors"]
    found = load_checkpoint(path, fingerprint="f" * 8, shapes={"layer.weight": (64, 3)}, finite=True)
    assert same(found.tensors, tensors) and found.epoch == 123
    assert {key: found.meta[key] for key in meta} == meta
    assert found.meta["kit_version"] and len(found.meta["sha256"]) == 64
    assert found.optimizer.keys() == {"0.exp_avg"} and found.model.keys() == tensors.keys() - {"optimizer/0.exp_avg"}
    assert names(path.parent) == ["epoch-000123"]


def test_tied_and_odd_tensors(tmp_path):
    weight = torch.nn.Parameter(torch.randn(200, 50))
    tensors = {"emb": weight, "out": weight, "part": weight[:10], "turned": weight.t(), "strided": torch.arange(9)[::2]}
    path = save_checkpoint(tmp_path, tensors, {"epoch": 1})
    found = load_checkpoint(path).tensors
    assert same(found, {name: tensor.detach() for name, tensor in tensors.items()})
    assert found["out"] is found["emb"]
    assert (path / "model.safetensors").stat().st_size < 2.5 * weight.numel() * 4  # emb once, turned once


def test_the_same_epoch_again_replaces(tmp_path):
    save_checkpoint(tmp_path, some_tensors(0), {"epoch": 5})
    save_checkpoint(tmp_path, some_tensors(1), {"epoch": 5})
    assert names(tmp_path) == ["epoch-000005"]
    assert same(latest_checkpoint(tmp_path).tensors, some_tensors(1))


READER = """
import os, sys, torch
from volunteer_kit.checkpoint import load_checkpoint, save_checkpoint
for spoil in (
    lambda path: save_checkpoint(sys.argv[1], {"w": torch.zeros(3_000_000)}, {"epoch": 5}),
    lambda path: os.truncate(path / "model.safetensors", 0),
):
    path = save_checkpoint(sys.argv[1], {"w": torch.ones(3_000_000)}, {"epoch": 5})
    found = load_checkpoint(path)
    spoil(path)
    assert bool((found.tensors["w"] == 1).all())
"""


def test_what_was_loaded_outlives_its_file(tmp_path):
    """Replaced by the same epoch, or overwritten in place; a memory map would end the reader with a bus error."""
    done = subprocess.run([sys.executable, "-c", READER, tmp_path], env=environment(), capture_output=True, timeout=180)
    assert done.returncode == 0, (done.returncode, done.stderr)


@pytest.mark.parametrize("meta", [{}, {"epoch": -1}, {"epoch": "3"}, {"epoch": True}, {"epoch": 1.0}])
def test_an_epoch_is_needed(tmp_path, meta):
    with pytest.raises(ValueError, match="epoch"):
        save_checkpoint(tmp_path, some_tensors(), meta)


def test_meta_that_is_no_json_leaves_nothing(tmp_path):
    with pytest.raises(ValueError):
        save_checkpoint(tmp_path, some_tensors(), {"epoch": 1, "loss": math.nan})
    with pytest.raises(TypeError):
        save_checkpoint(tmp_path, some_tensors(), {"epoch": 1, "loss": object()})
    assert names(tmp_path) == []


# damage --------------------------------------------------------------------------------------------------------


def flip_a_bit(path: Path) -> None:
    data = bytearray((path / "model.safetensors").read_bytes())
    data[-9] ^= 1
    (path / "model.safetensors").write_bytes(data)


def cut_off(path: Path) -> None:
    os.truncate(path / "model.safetensors", 100)


def edit_meta(**fields):
    def damage(path: Path) -> None:
        meta = json.loads((path / "meta.json").read_text())
        (path / "meta.json").write_text(json.dumps({**meta, **fields}))

    return damage


def replace_by_pickle(path: Path) -> None:
    """As an attacker would: a pickle whose loading leaves a trace, its hash in meta.json right."""

    class Trap:
        def __reduce__(self):
            return Path.touch, (path.parent / "unpickled",)

    torch.save({"weight": Trap()}, path / "model.safetensors")
    data = (path / "model.safetensors").read_bytes()
    edit_meta(bytes=len(data), sha256=checkpoint._sha256(path / "model.safetensors"))(path)


DAMAGES = {
    "bit": (flip_a_bit, "SHA-256"),
    "cut": (cut_off, "cut off"),
    "no tensors": (lambda path: (path / "model.safetensors").unlink(), "cannot be read"),
    "no meta": (lambda path: (path / "meta.json").unlink(), "meta.json is missing"),
    "meta cut": (lambda path: os.truncate(path / "meta.json", 20), "meta.json is damaged"),
    "meta binary": (lambda path: (path / "meta.json").write_bytes(b"\xff\xfe\x00"), "meta.json is damaged"),
    "meta a list": (lambda path: (path / "meta.json").write_text("[1]"), "meta.json is damaged"),
    "meta huge": (lambda path: (path / "meta.json").write_text(" " * 5 * 2**20), "too long"),
    "newer format": (edit_meta(format=99), "format"),
    "no hash": (edit_meta(sha256=""), "sha256"),
    "ties to nothing": (edit_meta(aliases={"a": "b"}), "ties a to b"),
    "pickle": (replace_by_pickle, "cannot be read"),
    "gone": (lambda path: path.rename(path.with_name("elsewhere")), "no such folder"),
}


@pytest.mark.parametrize("name", DAMAGES)
def test_damage_is_found_and_the_one_before_is_used(tmp_path, name, caplog):
    damage, words = DAMAGES[name]
    save_checkpoint(tmp_path, some_tensors(7), {"epoch": 7})
    newest = save_checkpoint(tmp_path, some_tensors(8), {"epoch": 8})
    damage(newest)
    with pytest.raises(CheckpointError, match=words) as error:
        load_checkpoint(newest)
    assert "  1. " in str(error.value) and str(newest) in str(error.value)
    found = latest_checkpoint(tmp_path)
    assert found.epoch == 7 and same(found.tensors, some_tensors(7))
    if name != "gone":
        assert len(found.skipped) == 1 and words in found.skipped[0] and words in caplog.text
    assert not (tmp_path / "unpickled").exists()


def test_other_runs_models_and_nan_are_refused(tmp_path):
    old = save_checkpoint(tmp_path, some_tensors(), {"epoch": 1, "fingerprint": "ours"})
    new = save_checkpoint(tmp_path, {"layer.weight": torch.tensor([1, math.nan])}, {"epoch": 2, "fingerprint": "b"})
    with pytest.raises(CheckpointError, match="another run"):
        load_checkpoint(new, fingerprint="ours")
    with pytest.raises(CheckpointError, match=r"layer.weight is \(2,\), expected \(64, 3\)"):
        load_checkpoint(new, shapes={"layer.weight": (64, 3)})
    with pytest.raises(CheckpointError, match="bias is missing"):
        load_checkpoint(new, shapes={"bias": (1,)})
    with pytest.raises(CheckpointError, match="NaN"):
        load_checkpoint(new, finite=True)
    for condition in ({"fingerprint": "ours"}, {"shapes": {"layer.weight": (64, 3)}}, {"finite": True}):
        assert latest_checkpoint(tmp_path, **condition).path == old
    assert latest_checkpoint(tmp_path).path == new


def test_no_checkpoint_and_no_good_one(tmp_path):
    assert latest_checkpoint(tmp_path / "missing") is None
    (tmp_path / "epoch-abc").mkdir()
    (tmp_path / "epoch-000009").write_text("a file")
    assert latest_checkpoint(tmp_path) is None
    flip_a_bit(save_checkpoint(tmp_path, some_tensors(), {"epoch": 3}))
    with pytest.raises(CheckpointError, match="No good checkpoint") as error:
        latest_checkpoint(tmp_path)
    assert "SHA-256" in str(error.value) and f"mv {tmp_path}" in str(error.value)


def test_skipping_verification_skips_only_the_hash(tmp_path):
    path = save_checkpoint(tmp_path, some_tensors(), {"epoch": 3})
    flip_a_bit(path)
    assert load_checkpoint(path, verify=False).epoch == 3


# disks and crashes ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("noticed_in_advance", [True, False])
def test_full_disk(tiny_disk, monkeypatch, noticed_in_advance):
    if not noticed_in_advance:  # as when another program fills the disk meanwhile
        monkeypatch.setattr(checkpoint.shutil, "disk_usage", lambda path: type("Usage", (), {"free": 10**12}))
    save_checkpoint(tiny_disk, some_tensors(0), {"epoch": 1})
    with pytest.raises(CheckpointError, match="could not be saved.*(full|No space left).*kept") as error:
        save_checkpoint(tiny_disk, {"big": torch.randn(1000, 1000)}, {"epoch": 2})
    assert "  1. " in str(error.value) and "df -h" in str(error.value)
    with pytest.raises(CheckpointError):  # nor does a failed replacement lose what it was to replace
        save_checkpoint(tiny_disk, {"big": torch.randn(1000, 1000)}, {"epoch": 1})
    assert names(tiny_disk) == ["epoch-000001"]
    assert same(latest_checkpoint(tiny_disk).tensors, some_tensors(0))
    save_checkpoint(tiny_disk, some_tensors(3), {"epoch": 3})
    assert latest_checkpoint(tiny_disk).epoch == 3


def test_a_write_that_fails_midway(tmp_path):
    save_checkpoint(tmp_path, some_tensors(0), {"epoch": 1})
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, limits[1]))
    try:
        with pytest.raises(CheckpointError, match="could not be saved"):
            save_checkpoint(tmp_path, {"big": torch.randn(1000, 1000)}, {"epoch": 2})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, handler)
    assert names(tmp_path) == ["epoch-000001"] and latest_checkpoint(tmp_path).epoch == 1


def test_a_folder_that_cannot_be_one(tmp_path):
    (tmp_path / "file").write_text("x")
    with pytest.raises(CheckpointError, match="could not be saved"):
        save_checkpoint(tmp_path / "file", some_tensors(), {"epoch": 1})
    assert latest_checkpoint(tmp_path / "file") is None


WRITER = """
import itertools, sys, torch
from volunteer_kit.checkpoint import save_checkpoint
for epoch in itertools.count():
    value = epoch // 3  # epochs 0, 0, 0, 1, 1, 1, ...: every other save replaces one
    save_checkpoint(sys.argv[1], {"w": torch.full((400_000,), float(epoch))}, {"epoch": value, "serial": epoch})
    print(epoch, flush=True)
"""


def test_a_writer_killed_anywhere_leaves_good_checkpoints(tmp_path):
    serial = -1
    for attempt in range(3):
        folder = tmp_path / str(attempt)
        with subprocess.Popen(
            [sys.executable, "-c", WRITER, folder], stdout=subprocess.PIPE, text=True, env=environment()
        ) as writer:
            for line in writer.stdout:
                serial = int(line)
                if serial == 2 + attempt:
                    break
            writer.kill()
            serial = max([serial, *(int(line) for line in writer.stdout.read().split())])
        found = latest_checkpoint(folder)
        assert found.skipped == () and found.meta["serial"] >= serial
        assert bool((found.tensors["w"] == found.meta["serial"]).all())
        save_checkpoint(folder, some_tensors(), {"epoch": 99})
        assert all(name.startswith("epoch-") for name in names(folder))  # the killed writer's leftovers are gone


def environment() -> dict[str, str]:
    root = str(Path(checkpoint.__file__).parents[1])
    return {**os.environ, "PYTHONPATH": root, "OMP_NUM_THREADS": "1"}


def test_a_replacement_that_stopped_halfway(tmp_path):
    path = save_checkpoint(tmp_path, some_tensors(4), {"epoch": 4})
    save_checkpoint(tmp_path, some_tensors(3), {"epoch": 3})
    path.rename(tmp_path / ".epoch-000004.old")  # killed between the two renames
    assert latest_checkpoint(tmp_path).epoch == 4  # a reader sees it and moves nothing
    assert names(tmp_path) == [".epoch-000004.old", "epoch-000003"]
    save_checkpoint(tmp_path, some_tensors(5), {"epoch": 5})
    assert names(tmp_path) == ["epoch-000003", "epoch-000004", "epoch-000005"]


def test_the_temporary_of_a_living_writer_is_left_alone(tmp_path):
    (tmp_path / f".epoch-000001.{os.getppid()}.tmp").mkdir()
    save_checkpoint(tmp_path, some_tensors(), {"epoch": 2})
    assert names(tmp_path) == [f".epoch-000001.{os.getppid()}.tmp", "epoch-000002"]


# upkeep --------------------------------------------------------------------------------------------------------


def test_keep_last(tmp_path):
    for epoch in (1, 2, 3, 4, 5, 1_000_000):
        save_checkpoint(tmp_path, some_tensors(epoch), {"epoch": epoch})
    cut_off(tmp_path / "epoch-000005")
    (tmp_path / "notes.txt").write_text("not ours to delete")
    deleted = keep_last(tmp_path, 2)
    assert [path.name for path in deleted] == ["epoch-000003", "epoch-000002", "epoch-000001"]
    assert names(tmp_path) == ["epoch-000004", "epoch-000005", "epoch-1000000", "notes.txt"]
    assert keep_last(tmp_path, 2) == [] and keep_last(tmp_path / "missing", 1) == []
    with pytest.raises(ValueError):
        keep_last(tmp_path, 0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("poison", [math.nan, math.inf, -math.inf])
def test_is_finite(dtype, poison):
    good = {"a": torch.randn(3, 5).to(dtype), "empty": torch.zeros(0), "codes": torch.arange(4)}
    assert is_finite(good) and is_finite(good.values()) and is_finite([])
    for position in (0, 7, 14):
        bad = good["a"].clone()
        bad.view(-1)[position] = poison
        assert not is_finite({**good, "b": bad})
