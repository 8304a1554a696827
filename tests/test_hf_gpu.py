"""Several GPUs in one machine, and a Trainer in a swarm: its peer takes one of them by itself, and says so."""

from __future__ import annotations

import os
from unittest import mock

import pytest
import torch
from transformers import Trainer, TrainingArguments

from benchmarks.trainer_parts.material import tiny_llama
from volunteer_kit.training import hf_gpu
from volunteer_kit.training.hf_gpu import see_one_gpu
from volunteer_kit.training.hf_trainer import SwarmCallback, SwarmTrainingArguments

SWARM = {"dht": {}, "opt": {"run_id": "ours", "target_batch_size": 64}}


@pytest.fixture
def machine(monkeypatch, tmp_path):
    """Make this a machine with GPUs that have so much memory free; without a driver that could use them.

    `begun`: the driver has read CUDA_VISIBLE_DEVICES already, as after torch.cuda.is_available(). CUDA counts the GPUs
    from the last to the first, nvidia-smi from the first to the last.
    """

    def make(*free: int, smi: str | None = None, begun: bool = False) -> None:
        for name in ("CUDA_VISIBLE_DEVICES", "LOCAL_RANK", "WORLD_SIZE", "RANK"):
            monkeypatch.delenv(name, raising=False)
        rows = "".join(f"GPU-{n}{n}{n}, {megabytes}\\n" for n, megabytes in enumerate(free))
        program = tmp_path / "nvidia-smi"
        program.write_text(f"#!/bin/sh\n{smi or f'printf {rows!r}'}\n".replace("\\\\n", "\\n"))
        program.chmod(0o755)
        monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
        seen = lambda: 1 if "CUDA_VISIBLE_DEVICES" in os.environ else len(free)  # noqa: E731
        monkeypatch.setattr(torch.cuda, "device_count", seen)
        monkeypatch.setattr(hf_gpu, "counted_by_cuda", (lambda: len(free)) if begun else seen)
        uuids = [f"GPU-{n}{n}{n}" for n in reversed(range(len(free)))]
        monkeypatch.setattr(hf_gpu, "uuids_of_cuda", lambda: uuids)

    with mock.patch.dict(os.environ):
        yield make


@pytest.mark.parametrize(
    ("free", "taken", "other"), [((15000, 15000), 0, 1), ((400, 15000), 1, 0), ((400, 9000, 15000), 2, 0)]
)
def test_the_emptiest_is_taken_and_the_next_peer_told_of_another(machine, capsys, free, taken, other):
    machine(*free)
    see_one_gpu()
    assert os.environ["CUDA_VISIBLE_DEVICES"] == f"GPU-{taken}{taken}{taken}"
    said = capsys.readouterr().out
    assert f"{len(free)} GPUs are here" in said and f"this one takes GPU-{taken}{taken}{taken}." in said
    assert f"CUDA_VISIBLE_DEVICES=GPU-{other}{other}{other} python" in said and "initial_peers" in said


@pytest.mark.parametrize("why", ["one", "CUDA has begun", "launcher", "decided", "no nvidia-smi", "odd nvidia-smi"])
def test_what_is_decided_already_stays(machine, monkeypatch, capsys, why):
    odd = {"no nvidia-smi": "exit 9", "odd nvidia-smi": "echo No devices were found"}.get(why)
    machine(*([15000] if why == "one" else [15000, 15000]), smi=odd)
    if why == "CUDA has begun":
        monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    if why == "launcher":
        monkeypatch.setenv("LOCAL_RANK", "1")
    if why == "decided":
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    before = os.environ.get("CUDA_VISIBLE_DEVICES")
    see_one_gpu()
    assert os.environ.get("CUDA_VISIBLE_DEVICES") == before and capsys.readouterr().out == ""


def test_arguments_with_a_swarm_count_one_gpu(machine, tmp_path):
    machine(15000, 15000)
    assert TrainingArguments(tmp_path / "out", report_to=[]).n_gpu == 2, "a plain Trainer's are as they were"
    args = SwarmTrainingArguments(tmp_path / "out", per_device_train_batch_size=4, report_to=[], hivemind_config=SWARM)
    assert (args.n_gpu, args.train_batch_size) == (1, 4)
    assert os.environ["CUDA_VISIBLE_DEVICES"] == "GPU-000"


@pytest.mark.parametrize(
    ("free", "index", "other"), [((15000, 400), 1, 1), ((400, 15000), 0, 0), ((9, 15000, 9), 1, 2)]
)
def test_the_emptiest_is_taken_where_cuda_has_read_its_variable_before(
    machine, monkeypatch, tmp_path, capsys, free, index, other
):
    """torch.cuda.is_available() is enough for that. Then the variable says nothing about this process."""
    machine(*free, begun=True)
    made_current = []
    monkeypatch.setattr(torch.cuda, "set_device", made_current.append)
    args = SwarmTrainingArguments(tmp_path / "out", per_device_train_batch_size=4, report_to=[], hivemind_config=SWARM)
    assert "CUDA_VISIBLE_DEVICES" not in os.environ, "its children may see all of them"
    device = torch.device("cuda", index)
    assert (args.n_gpu, args.train_batch_size, args.device) == (1, 4, device)
    assert made_current == [device], "accelerate's cuda is the current one"
    assert args.distributed_state.device == device
    taken = free.index(max(free))
    said = capsys.readouterr().out
    assert f"this one takes {device} (GPU-{taken}{taken}{taken})" in said
    assert said.count("GPUs are here") == 1 and f"CUDA_VISIBLE_DEVICES=GPU-{other}{other}{other} python" in said


def test_a_model_that_may_lie_on_a_gpu_stays_there(machine, monkeypatch, tmp_path):
    machine(400, 15000, begun=True)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    made_current = mock.Mock()
    monkeypatch.setattr(torch.cuda, "set_device", made_current)
    args = SwarmTrainingArguments(tmp_path / "out", report_to=[], hivemind_config=SWARM)
    assert args.n_gpu == 1 and not made_current.called


def test_any_trainer_that_becomes_a_peer_counts_one_gpu(machine, monkeypatch, tmp_path, capsys):
    """Of another class, and made when CUDA had begun."""
    machine(15000, 15000, begun=True)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    args = TrainingArguments(tmp_path / "out", per_device_train_batch_size=4, report_to=[])
    trainer = Trainer(model=tiny_llama(), args=args, train_dataset=[])
    assert trainer._train_batch_size == 8
    SwarmCallback(trainer, SWARM)
    assert (trainer.args.n_gpu, trainer._train_batch_size) == (1, 4)
    said = capsys.readouterr().out
    assert f"this one takes {args.device} (GPU-111)" in said and "CUDA_VISIBLE_DEVICES=GPU-000 python" in said
