"""Run files: what they mean, what is refused and how it is told, and who may average with whom."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import yaml

from volunteer_kit.data.tokenizer import load_tokenizer
from volunteer_kit.model.image_tokenizer import WEIGHTS, load_image_tokenizer
from volunteer_kit.run_reader import RUN_FILES
from volunteer_kit.run_tokenizers import build_tokenizers
from volunteer_kit.runs import (
    RunConfig,
    RunError,
    build_model,
    build_optimizer,
    build_param_groups,
    build_stream,
    load_run,
    parameters_of,
    require_data,
    state_bytes,
    step_bytes,
    with_data,
)

PUBLIC_KEY = "ed25519:zCxnPDqEWnO5E2QIRyTsT3RpR-IUYM1P65zsY1VYt44"
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


def line_of(text: str, start: str) -> int:
    return next(n for n, line in enumerate(text.splitlines(), 1) if line.strip().startswith(start))


def refused(tmp_path: Path, text: str) -> str:
    path = write(tmp_path, text)
    with pytest.raises(RunError) as caught:
        load_run(path)
    assert str(path) in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize("name", sorted(file.stem for file in RUN_FILES.glob("*.yaml")))
def test_shipped_runs_load_and_survive_a_dump(name):
    config = load_run(name)
    assert config.run_id == name
    again = load_run(json.loads(json.dumps(config.model_dump(mode="json"))))
    assert again == config and again.fingerprint == config.fingerprint


def test_a_run_by_path_equals_the_run_by_name(tmp_path):
    by_path = load_run(write(tmp_path, (RUN_FILES / "demo.yaml").read_text()))
    assert by_path == load_run("demo")
    folder = tmp_path / "repository"
    folder.mkdir()
    (folder / "run.yaml").write_text(DEMO)
    assert load_run(folder) == load_run(str(folder / "run.yaml")) == MINE


def test_the_original_run_has_its_numbers(tmp_path, monkeypatch):
    monkeypatch.setenv("VOLUNTEER_KIT_HOME", str(tmp_path))
    config = load_run("dalle-laion")
    assert (config.model.dim, config.model.depth, config.target_batch_size) == (1024, 64, 4096)
    assert (config.optimizer.warmup_epochs, config.optimizer.total_epochs) == (3125, 31250)
    assert config.optimizer.lr == 2.5e-3 and config.optimizer.betas == (0.9, 0.96)
    with pytest.raises(RunError, match=r"(?s)vqgan-f8-8192' is not on this machine.*convert last.ckpt vqgan-f8-8192"):
        build_tokenizers(config)


# what is changed in demo.yaml, where the message must point, and words it must hold
MISTAKES = [
    ("target_batch_size: 256", "target_batchsize: 256", "target_batchsize", ["target_batch_size", "Fix"]),
    ("  matchmaking_time: 2.0", "  matchmaking_tme: 2.0", "matchmaking_tme", ["'swarm'", "matchmaking_time"]),
    ("  level: 1", "  levle: 1", "levle", ["'data'", "level"]),
    ("  warmup_epochs: 10", "  warmup: 10", "warmup", ["'optimizer'", "warmup_epochs"]),
    ("  preset: tiny", "  preset: tny", "model", ["'tny'", "tiny", "original"]),
    ("target_batch_size: 256", "target_batch_size: many", "target_batch_size", ["'many'", "integer"]),
    ("target_batch_size: 256", "target_batch_size: 0", "target_batch_size", ["greater than or equal to 1"]),
    ("seed: 0", "seed: -1", "seed", ["greater than or equal to 0"]),
    ("  lr: 5.0e-3", "  lr: .nan", "lr", ["finite"]),
    ("  lr: 5.0e-3", "  lr: .inf", "lr", ["finite"]),
    ("  matchmaking_time: 2.0", "  matchmaking_time: .inf", "matchmaking_time", ["finite"]),
    ("  warmup_epochs: 10", "  warmup_epochs: 500", "warmup_epochs", ["500", "400"]),
    ("  averaging_timeout: 30.0", "  averaging_timeout: 3.0", "averaging_timeout", ["17 s", "or more"]),
    ("image_tokenizer: scenes32", "image_tokenizer: scenes99", "image_tokenizer", ["scenes99", "scenes32"]),
    ("image_tokenizer: scenes32", "image_tokenizer: vqgan-f8-8192", "num_image_tokens", ["makes 8192 codes"]),
    ("text_tokenizer: words", "text_tokenizer: wrds", "text_tokenizer", ["wrds"]),
    ("run_id: mine", "run_id: a b", "run_id", ["'a b'"]),
]


@pytest.mark.parametrize(("old", "new", "key", "words"), MISTAKES, ids=[m[1].strip() for m in MISTAKES])
def test_a_mistake_is_told_with_its_line_and_its_fix(tmp_path, old, new, key, words):
    assert old in DEMO
    text = DEMO.replace(old, new)
    message = refused(tmp_path, text)
    assert f"line {line_of(text, key + ':')}:" in message
    for word in [*words, "Fix:"]:
        assert word in message


def test_a_misspelt_key_is_not_told_as_missing_too(tmp_path):
    message = refused(tmp_path, DEMO.replace("target_batch_size: 256", "target_batchsize: 256"))
    assert message.count("Fix:") == 1 and "missing" not in message
    message = refused(tmp_path, DEMO.replace("target_batch_size: 256", "colour: red"))
    assert "'target_batch_size' is missing" in message and "'colour' is no setting" in message


def test_delayed_gradients_need_a_delayed_step(tmp_path):
    text = DEMO + "  delay_optimizer_step: false\n  delay_grad_averaging: true\n"
    message = refused(tmp_path, text)
    assert f"line {line_of(text, 'delay_grad_averaging')}:" in message
    assert "set delay_optimizer_step: true" in message
    assert load_run(write(tmp_path, text.replace("step: false", "step: true"))).swarm.delay_grad_averaging


@pytest.mark.parametrize(
    ("key", "number", "words"),
    [
        ("num_text_tokens", WORDS - 1, [f"has {WORDS} tokens", f"set num_text_tokens: {WORDS}"]),
        ("num_image_tokens", 9, [f"makes {CODES.num_codes} codes", f"set num_image_tokens: {CODES.num_codes}"]),
        ("image_fmap_size", 5, [f"makes {CODES.fmap} codes a side", f"set image_fmap_size: {CODES.fmap}"]),
    ],
)
def test_vocabularies_and_code_counts_must_fit_the_model(tmp_path, key, number, words):
    text = re.sub(rf"{key}: \d+", f"{key}: {number}", DEMO)
    message = refused(tmp_path, text)
    assert f"line {line_of(text, key)}:" in message
    for word in words:
        assert word in message


def test_several_mistakes_are_told_in_the_order_of_their_lines(tmp_path):
    text = DEMO.replace("seed: 0", "sead: 0").replace("  level: 1", "  level: 9")
    message = refused(tmp_path, text)
    assert message.index("'sead'") < message.index("level")
    assert message.count("Fix:") == 2


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", ["key: value"]),
        ("- a\n- b\n", ["key: value"]),
        ("run_id: demo\nmodel: [unclosed\n", ["line", "not valid YAML"]),
        ("run_id: demo\n\trun: x\n", ["line 2", "not valid YAML"]),
        ("run_id: demo\nrun_id: other\n", ["line 2", "line 1", "'run_id'"]),
        ("run_id: demo\n", ["'model' is missing", "'data' is missing"]),
        ("a: &x [1]\nb: *x\n", ["aliases"]),
        ("a: " + "[" * 40 + "]" * 40, ["levels"]),
        ("a: " + "[" * 5000 + "]" * 5000, ["nested"]),
        ("run_id: !!python/object/apply:os.system ['true']\n", ["not valid YAML"]),
    ],
)
def test_a_file_that_is_no_run_is_refused(tmp_path, text, words):
    message = refused(tmp_path, text)
    for word in words:
        assert word in message


def test_unreadable_and_oversized_files_are_refused(tmp_path):
    binary = tmp_path / "binary.yaml"
    binary.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(RunError, match="UTF-8"):
        load_run(binary)
    huge = tmp_path / "huge.yaml"
    huge.write_text("# " + "x" * 300_000)
    with pytest.raises(RunError, match="300002 bytes"):
        load_run(huge)


def test_an_unknown_run_names_the_known_ones():
    with pytest.raises(RunError, match=r"Did you mean 'demo'(.|\n)*dalle-laion, demo, emoji"):
        load_run("dmo")
    with pytest.raises(RunError, match="no run"):
        load_run("/nowhere/run.yaml")


def test_a_hub_run_without_a_network_is_one_plain_message(tmp_path):
    code = "from volunteer_kit.runs import load_run\ntry: load_run('org/name')\nexcept ValueError as e: print(e)"
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path)}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=60)
    assert "'org/name' could not be read" in done.stdout and "could not be reached" in done.stdout, done.stderr


def test_a_hub_run_is_read_from_the_cache_of_the_real_client(tmp_path):
    """The layout that huggingface_hub keeps on disk, so that its own lookup finds the file."""
    commit = "0" * 40
    home = tmp_path / "hub" / "models--org--name"
    (home / "snapshots" / commit).mkdir(parents=True)
    (home / "refs").mkdir()
    (home / "refs" / "main").write_text(commit)
    (home / "snapshots" / commit / "run.yaml").write_text(DEMO.replace("run_id: mine", "run_id: of-the-hub"))
    code = "from volunteer_kit.runs import load_run\nprint(load_run('hub:org/name').run_id)"
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path)}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=60)
    assert done.stdout.strip() == "of-the-hub", done.stderr


def changed(**changes) -> RunConfig:
    values = yaml.safe_load(DEMO)
    for path, value in changes.items():
        section = values
        *parents, key = path.split("__")
        for parent in parents:
            section = section.setdefault(parent, {})
        section[key] = value
    return load_run(values)


@pytest.mark.parametrize(
    "changes",
    [
        {"seed": 1},
        {"model__depth": 3},
        {"optimizer__lr": 1e-3},
        {"optimizer__betas": [0.9, 0.95]},
        {"target_batch_size": 257},
        {"data__level": 2},
        {"data__min_caption": 4},
        {"swarm__grad_compression": "float16"},
        {"swarm__compress_above": 1},
        {"swarm__average_state_every": 2},
    ],
    ids=str,
)
def test_what_must_be_equal_changes_the_fingerprint(changes):
    assert changed(**changes).fingerprint != MINE.fingerprint


@pytest.mark.parametrize(
    "changes",
    [
        {"description": "other words"},
        {"initial_peers": ["/ip4/127.0.0.1/tcp/1/p2p/QmX"]},
        {"authority": {"url": "https://example.org", "public_key": PUBLIC_KEY}},
        {"swarm__matchmaking_time": 3.0},
        {"swarm__load_state_timeout": 5.0},
        {"data__prefetch": 7},
    ],
    ids=str,
)
def test_addresses_and_patience_do_not_change_the_fingerprint(changes):
    assert changed(**changes).fingerprint == MINE.fingerprint


def test_fingerprints_do_not_depend_on_the_process_or_on_how_the_model_is_written(tmp_path):
    code = "import sys\nfrom volunteer_kit.runs import load_run\nprint(load_run(sys.argv[1]).fingerprint)"
    environment = {**os.environ, "PYTHONHASHSEED": "7"}
    command = [sys.executable, "-c", code, write(tmp_path, DEMO)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60)
    assert done.stdout.strip() == MINE.fingerprint
    values = yaml.safe_load(DEMO)
    values["model"] = MINE.model.model_dump()
    assert load_run(values).fingerprint == MINE.fingerprint


def test_an_image_tokenizer_counts_by_its_weights_not_by_its_path(tmp_path):
    shipped = (WEIGHTS / "scenes32.safetensors").read_bytes()
    (tmp_path / "same.safetensors").write_bytes(shipped)
    same = changed(image_tokenizer=str(tmp_path / "same.safetensors"))
    assert same.fingerprint == MINE.fingerprint
    tokenizer = build_tokenizers(same).image
    tokenizer.codebook.mul_(-1)
    tokenizer.save(tmp_path / "other.safetensors")
    assert changed(image_tokenizer=str(tmp_path / "other.safetensors")).fingerprint != same.fingerprint


def test_data_belong_to_the_machine_not_to_the_run():
    config = load_run("emoji")
    with pytest.raises(RunError, match="--data"):
        require_data(config)
    with pytest.raises(RunError, match="--data"):
        build_stream(config, peer_seed=0)
    here = with_data(config, "/data/{0..3}.tar")
    assert here.data.shards == "/data/{0..3}.tar" and here.fingerprint == config.fingerprint
    with pytest.raises(RunError, match="makes its own data"):
        with_data(MINE, "/data/0.tar")


def test_every_peer_starts_from_the_same_weights_and_the_global_seed_is_left_alone():
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    first = build_model(MINE)
    assert torch.equal(torch.rand(3), expected)
    second = build_model(MINE)
    other = build_model(changed(seed=1))
    weights = [torch.cat([p.detach().flatten() for p in m.parameters()]) for m in (first, second, other)]
    assert torch.equal(weights[0], weights[1]) and not torch.equal(weights[0], weights[2])


def test_the_parts_fit_together_one_step():
    config = MINE
    model = build_model(config)
    batch = build_stream(config, peer_seed=3).next_batch(4)
    assert batch.text.shape == (4, config.model.text_seq_len)
    assert batch.codes.shape == (4, config.model.image_seq_len)
    make_optimizer, make_schedule = build_optimizer(config)
    optimizer = make_optimizer(build_param_groups(config, model))
    schedule = make_schedule(optimizer)
    before = model(batch.text, batch.codes).loss
    for _ in range(3):
        optimizer.zero_grad()
        model(batch.text, batch.codes).loss.backward()
        optimizer.step()
        schedule.step()
    assert model(batch.text, batch.codes).loss < before


def test_peers_with_other_seeds_read_other_samples():
    config = MINE
    keys = [build_stream(config, peer_seed=n).next_batch(8).text for n in (1, 1, 2)]
    assert torch.equal(keys[0], keys[1]) and not torch.equal(keys[0], keys[2])


def test_what_a_newcomer_has_to_expect_of_his_line():
    original = load_run("dalle-laion")
    assert parameters_of(original) == 125_894_244
    assert state_bytes(original) == pytest.approx(758.5e6, rel=0.01)  # as measured by benchmarks/join_parts/link.py
    assert step_bytes(original) == 2 * 125_894_244
