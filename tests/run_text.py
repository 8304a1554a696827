"""A run file, for tests that change it."""

from __future__ import annotations

from pathlib import Path

import yaml

from volunteer_kit.data.tokenizer import load_tokenizer
from volunteer_kit.model.image_tokenizer import load_image_tokenizer
from volunteer_kit.runs import load_run

CODES = load_image_tokenizer("scenes32").config
WORDS = load_tokenizer("words").vocab_size
DEMO = f"""\
run_id: mine
seed: 0
model:
  preset: tiny
  dim: 64
  depth: 2
  num_text_tokens: {WORDS}
  num_image_tokens: {CODES.num_codes}
  image_fmap_size: {CODES.fmap}
image_tokenizer: scenes32
text_tokenizer: words
data:
  kind: scenes
  level: 1
optimizer:
  lr: 5.0e-3
  warmup_epochs: 10
  total_epochs: 400
target_batch_size: 256
swarm:
  matchmaking_time: 2.0
  allreduce_timeout: 15.0
  averaging_timeout: 30.0
"""
MINE = load_run(yaml.safe_load(DEMO))


def write(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "my.yaml"
    path.write_text(text)
    return path
