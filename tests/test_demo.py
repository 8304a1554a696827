"""The demo door itself: a real, short demo, and what ends one early."""

from __future__ import annotations

import json
import os
import secrets
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest
from PIL import Image

from volunteer_kit.checkpoint import load_checkpoint
from volunteer_kit.demo.eval import MAX_GAP

QUICK_RUN = """
run_id: quick
description: A smaller demo for the tests.
model:
  preset: tiny
  dim: 64
  depth: 2
  heads: 2
  num_text_tokens: {text}
  num_image_tokens: {codes}
image_tokenizer: scenes32
text_tokenizer: words
data: {data}
optimizer: {{lr: 5.0e-3, warmup_epochs: 2, total_epochs: 200}}
target_batch_size: 64
swarm: {{matchmaking_time: 1.0, allreduce_timeout: 6.0, averaging_timeout: 8.0, progress_expiration: 10.0,
         load_state_timeout: 30.0}}
"""


@pytest.fixture
def temporary():
    """For TMPDIR. Not `tmp_path`: what torch adds to it is a socket's path, which may have 107 characters."""
    with tempfile.TemporaryDirectory(prefix="vk-", dir="/tmp") as folder:
        yield Path(folder)


class RealDemo:
    """`volunteer-kit demo` in a process of its own; what it starts is found by a mark in the environment."""

    def __init__(self, folder: Path, temporary: Path, *options: str, data: str = "{kind: scenes, level: 1}") -> None:
        from volunteer_kit.data.tokenizer import load_tokenizer
        from volunteer_kit.model.image_tokenizer import load_image_tokenizer

        text, codes = load_tokenizer("words").vocab_size, load_image_tokenizer("scenes32").config.num_codes
        self.out, run = folder / "out", folder / "quick.yaml"
        run.write_text(QUICK_RUN.format(text=text, codes=codes, data=data))
        self._mark = ("DEMO_TEST", secrets.token_hex(8))
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "TMPDIR": str(temporary)}
        self.process = subprocess.Popen(
            [sys.executable, "-m", "volunteer_kit.cli", "demo", "--run", str(run), "--out", str(self.out), *options],
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True,
            env=environment | dict([self._mark]),
        )  # fmt: skip

    def read_until(self, words: str) -> str:
        lines = []
        for line in self.process.stdout:
            lines.append(line)
            if words in line:
                return "".join(lines)
        pytest.fail(f"{words!r} was not said:\n{''.join(lines)}")

    def finish(self) -> tuple[int, str]:
        """-> exit code and the rest of the output."""
        said = self.process.communicate(timeout=560)[0]
        return self.process.returncode, said

    def left_behind(self) -> list[str]:
        """Processes of this demo that still live."""
        found, mark = [], "=".join(self._mark).encode()
        for entry in Path("/proc").glob("[0-9]*"):
            try:
                if mark in (entry / "environ").read_bytes() and "Z" not in (entry / "stat").read_text().split()[2]:
                    found.append((entry / "cmdline").read_text().replace("\0", " "))
            except OSError:
                continue
        return found


@pytest.mark.slow
def test_a_real_demo_trains_recovers_and_leaves_nothing_behind(tmp_path, temporary):
    demo = RealDemo(tmp_path, temporary, "--peers", "2", "--minutes", "1")
    code, said = demo.finish()
    assert demo.left_behind() == []
    assert code == 0, said
    last = json.loads(said.splitlines()[-1])
    assert last["peers"] == 3 and last["epochs"] >= 3 and last["samples"] >= 64 * 3
    assert last["killed_peer_recovered"] is True and last["joined_late_in_sync"] is True
    assert 0 <= last["max_param_gap"] <= MAX_GAP
    assert last["loss_last"] < last["loss_first"]
    assert last["checker_accuracy"] >= 0.98 and last["caption_match_shuffled"] <= 0.1
    for path in (last["loss_curve"], last["images"]):
        with Image.open(path) as image:
            image.verify()
    saved = [load_checkpoint(path) for path in (demo.out / "model").iterdir()]
    assert [checkpoint.epoch for checkpoint in saved] == [last["epochs"]]
    assert list(temporary.glob("volunteer-kit*")) == []


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_demo_leaves_in_good_order_and_keeps_the_model(tmp_path, temporary, number):
    demo = RealDemo(tmp_path, temporary, "--peers", "2", "--minutes", "5")
    demo.read_until("first epoch is applied")
    demo.process.send_signal(number)
    started = time.monotonic()
    code, said = demo.finish()
    assert time.monotonic() - started < 200
    assert code == 130 and demo.left_behind() == []
    assert "say goodbye" in said and "Traceback" not in said
    assert "is kept in" in said and list((demo.out / "model").iterdir())


@pytest.mark.slow
def test_a_volunteer_that_cannot_read_its_data_ends_the_demo_with_its_message(tmp_path, temporary):
    (tmp_path / "empty.tar").write_bytes(b"")
    data = f"{{kind: shards, shards: {tmp_path / 'empty.tar'}, patience: 5}}"
    demo = RealDemo(tmp_path, temporary, "--peers", "2", data=data)
    code, said = demo.finish()
    assert code == 2 and demo.left_behind() == []
    assert "cannot go on" in said and "empty.tar" in said and "Traceback" not in said
