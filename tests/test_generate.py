"""Captions -> pictures from a checkpoint on disk, and an image tokenizer from the command that trains one."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import numpy as np
import pytest
from PIL import Image

from volunteer_kit.checkpoint import CheckpointError, save_checkpoint
from volunteer_kit.generate import generate_images
from volunteer_kit.model.image_tokenizer import load_image_tokenizer
from volunteer_kit.run_reader import RunError
from volunteer_kit.runs import build_model, load_run
from volunteer_kit.train_tokenizer import train_tokenizer

CAPTION = "a large red circle on the left of a grey background"


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory):
    """A folder with one checkpoint of the untrained demo model."""
    folder = tmp_path_factory.mktemp("checkpoints")
    config = load_run("demo")
    meta = {"epoch": 7, "run_id": config.run_id, "fingerprint": config.fingerprint}
    save_checkpoint(folder, build_model(config).tensors(), meta)
    return folder


def test_pictures_and_a_grid_are_written(checkpoints, tmp_path):
    drawn = generate_images([CAPTION, "a dog"], checkpoint=checkpoints, out=tmp_path, copies=2)
    assert drawn.captions == [CAPTION, CAPTION, "a dog", "a dog"] and drawn.epoch == 7
    assert [image.shape for image in drawn.images] == [(32, 32, 3)] * 4
    for path, image in zip(drawn.paths, drawn.images, strict=True):
        on_disk = np.asarray(Image.open(path).resize((32, 32), Image.Resampling.NEAREST))
        assert np.array_equal(on_disk, image)
    assert Image.open(drawn.grid).width > 4 * 150
    assert not np.array_equal(drawn.images[0], drawn.images[1])  # copies differ


def test_a_seed_repeats_the_pictures(checkpoints, tmp_path):
    first, again, other = (
        generate_images([CAPTION], checkpoint=checkpoints, out=tmp_path, seed=seed).images[0] for seed in (1, 1, 2)
    )
    assert np.array_equal(first, again) and not np.array_equal(first, other)


def test_what_cannot_be_drawn_is_told(checkpoints, tmp_path):
    with pytest.raises(RunError, match="no caption"):
        generate_images([" "], checkpoint=checkpoints, out=tmp_path)
    with pytest.raises(CheckpointError, match="no checkpoint in"):
        generate_images([CAPTION], checkpoint=tmp_path / "empty", out=tmp_path)
    other = tmp_path / "other.yaml"
    text = (load_run("demo").model_dump(mode="json")) | {"run_id": "other"}
    text["model"]["depth"] = 2
    other.write_text(json.dumps(text))  # JSON is YAML
    with pytest.raises(CheckpointError, match=r"does not fit the run 'other'(.|\n)*demo"):
        generate_images([CAPTION], checkpoint=checkpoints, run=other, out=tmp_path)


def test_the_command_prints_the_paths(checkpoints, tmp_path):
    command = [sys.executable, "-m", "volunteer_kit.cli", "generate", CAPTION, "--checkpoint", str(checkpoints)]
    done = subprocess.run(
        [*command, "--out", str(tmp_path / "p")], capture_output=True, text=True, timeout=240, env=os.environ
    )
    assert done.returncode == 0, done.stderr
    for line in done.stdout.splitlines()[1:]:
        assert os.path.isfile(line.strip())
    broken = next(checkpoints.iterdir()) / "model.safetensors"
    damaged = tmp_path / "damaged" / broken.parent.name
    damaged.mkdir(parents=True)
    (damaged / "meta.json").write_bytes((broken.parent / "meta.json").read_bytes())
    (damaged / "model.safetensors").write_bytes(broken.read_bytes()[:-5])
    command[-1] = str(damaged)
    command += ["--out", str(tmp_path / "q")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240)
    assert done.returncode == 2 and "cut off" in done.stderr and "Traceback" not in done.stderr


def test_a_tokenizer_is_trained_and_fits_a_run(tmp_path):
    path = tmp_path / "mine.safetensors"
    lines: list[str] = []
    short = train_tokenizer(tmp_path / "short.safetensors", hidden=16, num_codes=32, steps=2, say=lines.append)
    quality = train_tokenizer(path, hidden=16, num_codes=32, steps=150, say=lines.append)
    assert quality.mae < 0.6 * short.mae
    assert load_image_tokenizer(path).config.num_codes == 32
    assert str(path) in lines[-1]
    values = load_run("demo").model_dump(mode="json")
    values["image_tokenizer"] = str(path)
    with pytest.raises(RunError, match="makes 32 codes"):
        load_run(values)
    values["model"]["num_image_tokens"] = 32
    assert load_run(values).image_tokenizer == str(path)
