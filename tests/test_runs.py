"""Run files: what they mean, what is refused and how it is told."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.run_text import CODES, DEMO, MINE, WORDS, write
from volunteer_kit.model.dalle import PRESETS, Dalle
from volunteer_kit.run_reader import RUN_FILES
from volunteer_kit.run_sizes import state_bytes
from volunteer_kit.run_tokenizers import build_tokenizers
from volunteer_kit.runs import RunError, load_run


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
    ("  allreduce_timeout: 15.0", "  allreduce_timout: 15.0", "allreduce_timout", ["'swarm'", "allreduce_timeout"]),
    ("  level: 1", "  levle: 1", "levle", ["'data'", "level"]),
    ("  warmup_epochs: 10", "  warmup: 10", "warmup", ["'optimizer'", "warmup_epochs"]),
    ("  preset: tiny", "  preset: tny", "model", ["'tny'", "tiny", "original"]),
    ("  preset: tiny", "  preset: [tiny]", "model", ["['tiny']", "tiny", "original"]),
    ("target_batch_size: 256", "target_batch_size: many", "target_batch_size", ["'many'", "integer"]),
    ("target_batch_size: 256", "target_batch_size: 0", "target_batch_size", ["greater than or equal to 1"]),
    ("seed: 0", "seed: -1", "seed", ["greater than or equal to 0"]),
    ("  lr: 5.0e-3", "  lr: .nan", "lr", ["finite"]),
    ("  lr: 5.0e-3", "  lr: .inf", "lr", ["finite"]),
    ("  allreduce_timeout: 15.0", "  allreduce_timeout: .inf", "allreduce_timeout", ["finite"]),
    ("  warmup_epochs: 10", "  warmup_epochs: 500", "warmup_epochs", ["500", "400"]),
    ("image_tokenizer: scenes32", "image_tokenizer: scenes99", "image_tokenizer", ["scenes99", "scenes32"]),
    ("image_tokenizer: scenes32", "image_tokenizer: vqgan-f8-8192", "num_image_tokens", ["makes 8192 codes"]),
    ("text_tokenizer: words", "text_tokenizer: wrds", "text_tokenizer", ["wrds"]),
    ("run_id: mine", "run_id: a b", "run_id", ["'a b'"]),
    (
        "  allreduce_timeout: 15.0", "  allreduce_timeout: 15.0\n  grad_compression: zip", "grad_compression",
        ["swarm.grad_compression is 'zip', but", "'uniform8'", "'sparse'", "'powersgd'"],
    ),
]  # fmt: skip


@pytest.mark.parametrize(("old", "new", "key", "words"), MISTAKES, ids=[m[1].strip() for m in MISTAKES])
def test_a_mistake_is_told_with_its_line_and_its_fix(tmp_path, old, new, key, words):
    assert old in DEMO
    text = DEMO.replace(old, new)
    message = refused(tmp_path, text)
    assert f"line {line_of(text, key + ':')}:" in message
    for word in [*words, "Fix:"]:
        assert word in message


@pytest.mark.parametrize("value", ["5", "1.0e+308", "[a]", "true"])
def test_a_model_that_is_no_section_is_told(tmp_path, value):
    text = (RUN_FILES / "demo.yaml").read_text().replace("model: tiny", f"model: {value}")
    assert re.search(r"line \d+: model is .*dictionary.*\n  Fix: ", refused(tmp_path, text))


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


def demo_with(swarm: dict | None = None, **changes) -> dict:
    values = load_run("demo").model_dump(mode="json")
    values["swarm"] |= swarm or {}
    return values | changes


def test_that_peers_vote_may_be_said_and_not_denied():
    """Files of earlier kits say it."""
    plain, said = load_run(demo_with()), load_run(demo_with({"commits": True}))
    assert said == plain and said.fingerprint == plain.fingerprint
    with pytest.raises(RunError) as caught:
        load_run(demo_with({"commits": False}))
    assert "commits" in str(caught.value) and "Fix:" in str(caught.value)


def test_how_late_a_gradient_may_be_is_of_the_fingerprint():
    assert len({load_run(demo_with({"max_staleness": epochs})).fingerprint for epochs in (4, 8)}) == 2


@pytest.mark.parametrize(
    ("changes", "name"),
    [
        ({"swarm": {"average_state_every": 2}}, "average_state_every"),
        ({"swarm": {"max_staleness": 0}}, "swarm.max_staleness"),
        ({"swarm": {"max_staleness": 17}}, "swarm.max_staleness"),
    ],
)
def test_what_peers_that_vote_cannot_do_is_told(changes, name):
    with pytest.raises(RunError) as caught:
        load_run(demo_with(**changes))
    assert name in str(caught.value) and "Fix:" in str(caught.value)


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
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=240)
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
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=240)
    assert done.stdout.strip() == "of-the-hub", done.stderr


@pytest.mark.parametrize(
    "more",
    [
        {},
        {"share_input_output_emb": False},
        {"rotary_emb": False, "shift_tokens": False},
        {"reversible": True, "attn_types": ("full", "axial_row"), "shared_attn_ids": (0, 1), "shared_ff_ids": (0, 0)},
        {"depth": 6, "last_layer_conv_like": True, "attn_types": ("axial_row", "axial_col"), "heads": 3, "ff_mult": 3},
        {"depth": 7, "last_layer_conv_like": True, "shared_attn_ids": (0,), "shared_ff_ids": (0, 1, 2)},
    ],
)
def test_the_number_of_parameters_is_known_without_the_model(more):
    sizes = PRESETS["tiny"].model_copy(update=more)
    with torch.device("meta"):
        model = Dalle(sizes)
    assert sizes.parameters == sum(parameter.numel() for parameter in model.parameters())


@pytest.mark.parametrize("module", ["runs", "authority_door", "dashboard.door"])
def test_a_run_is_read_without_torch(module):
    """It costs 3 s and 250 MB in each process that does not train: the host's services and the volunteer's notebook."""
    code = f"import sys, volunteer_kit.{module}; from volunteer_kit.runs import load_run, require_ready\n"
    code += "from volunteer_kit.run_sizes import state_bytes\n"
    code += "run = load_run('demo'); require_ready(run, max_mbps=100)\n"
    code += "print(run.fingerprint, state_bytes(run), sorted({'torch', 'hivemind', 'scipy'} & set(sys.modules)))"
    said = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=240)
    fingerprint, size, heavy = said.stdout.split(maxsplit=2)
    assert (fingerprint, int(size)) == (load_run("demo").fingerprint, state_bytes(load_run("demo"))), said.stderr
    assert heavy.strip() == "[]"
