"""What becomes of a run file: a fingerprint, and the parts that a peer builds from it."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch
import yaml

from tests.run_text import DEMO, MINE, write
from volunteer_kit.model.image_tokenizer import WEIGHTS
from volunteer_kit.run_sizes import parameters_of, state_bytes, step_bytes
from volunteer_kit.run_tokenizers import build_tokenizers
from volunteer_kit.runs import (
    RunConfig,
    RunError,
    build_model,
    build_optimizer,
    build_param_groups,
    build_stream,
    load_run,
    require_data,
    with_data,
)

PUBLIC_KEY = "ed25519:zCxnPDqEWnO5E2QIRyTsT3RpR-IUYM1P65zsY1VYt44"


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
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=240)
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
