"""A Trainer in a swarm and those around it: what it refuses before it begins, what it finds of others, the Hub."""

from __future__ import annotations

import os
import subprocess
import sys
from types import SimpleNamespace

import pytest
import safetensors.torch

from benchmarks.trainer_parts.material import tiny_llama
from tests.hub import Hub
from tests.local_swarm import ROOT
from tests.trainers import make
from volunteer_kit.swarm.errors import SwarmError
from volunteer_kit.swarm.records.peer_record import PeerBoard, PeerRecord
from volunteer_kit.training.hf_member import ALL_TRAINERS
from volunteer_kit.training.hf_trainer import refuse_other_ways

NOBODY = "/ip4/127.0.0.1/tcp/1/p2p/QmVw55HRsuptQWXCVBQEpzFhMHftKSh5aEtfyv6MgV74PX"


def frozen():
    return tiny_llama().requires_grad_(False)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        (dict(per_device_train_batch_size=4, gradient_accumulation_steps=3), ["12 samples (4 x 3", "together is 8"]),
        (dict(model=frozen), ["no parameters to train", "get_peft_model"]),
        (dict(optim="sgd", lr_scheduler_type="reduce_lr_on_plateau", eval_strategy="steps"), ["ReduceLROnPlateau"]),
        (dict(dht={"initial_peers": [NOBODY], "startup_timeout": 15.0}), [NOBODY[:30]]),
    ],
)
def test_what_cannot_be_is_told_before_it_begins(tmp_path, settings, words):
    if "eval_strategy" in settings:
        settings = {**settings, "more": {"eval_dataset": [{"input_ids": [1], "labels": [1]}]}}
    trainer = make(tmp_path, 8, max_steps=2, **settings)
    with pytest.raises(SwarmError) as caught:
        trainer.train()
    assert all(word in str(caught.value) for word in words), caught.value
    assert "\n1. " in str(caught.value) and trainer.state.global_step == 0


@pytest.mark.parametrize(
    ("asked", "words"),
    [
        ({"is_deepspeed_enabled": True}, ["DeepSpeed and hivemind_config", "1. Leave DeepSpeed out"]),
        ({"is_fsdp_enabled": True}, ["FSDP and hivemind_config"]),
        ({"args": SimpleNamespace(n_gpu=1, world_size=4)}, ["on one GPU", "CUDA_VISIBLE_DEVICES=0", "initial_peers"]),
    ],
)
def test_other_ways_of_sharing_the_work_are_refused(asked, words):
    alone = SimpleNamespace(n_gpu=1, world_size=1)
    trainer = {"is_deepspeed_enabled": False, "is_fsdp_enabled": False, "args": alone}
    refuse_other_ways(SimpleNamespace(**trainer))
    with pytest.raises(SwarmError) as caught:
        refuse_other_ways(SimpleNamespace(**{**trainer, **asked}))
    assert caught.value.kind == "bad_config" and all(word in str(caught.value) for word in words)


def test_who_finds_only_another_run_is_told_its_name(tmp_path, peer, capsys):
    record = PeerRecord(
        peer_id=peer.peer_id.to_bytes(), fingerprint="a" * 32, name="theirs", device="cpu", epoch=3, total_samples=9,
        samples_per_second=1.0, loss=None, client_mode=False,
    )  # fmt: skip
    PeerBoard(peer.dht, ALL_TRAINERS, lifetime=240.0).publish(record)
    trainer = make(tmp_path, 4, max_steps=2, dht={"initial_peers": peer.visible_maddrs()})
    assert trainer.train().global_step == 2
    assert "Nobody here trains 'ours' yet; others train 'theirs'." in capsys.readouterr().out


PUSHES = """
import sys
from pathlib import Path
from tests.trainers import make

trainer = make(
    Path(sys.argv[1]), 4, max_steps=4, save_strategy="steps", save_steps=2, push_to_hub=True, hub_strategy="every_save",
    hub_model_id="mona/ours", hub_token=sys.argv[2],
)
trainer.train()
trainer.push_to_hub()
"""


def test_it_is_brought_to_the_hub(tmp_path):
    """By the real client, to a stand-in; in a process of its own, for the client takes the address once."""
    with Hub() as hub:
        hub.tokens["hf_writes"] = "mona"
        hub.writers.add("hf_writes")
        environment = {**os.environ, **hub.environment(tmp_path / "hf"), "OMP_NUM_THREADS": "1"}
        environment["PYTHONPATH"] = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
        done = subprocess.run(
            [sys.executable, "-c", PUSHES, str(tmp_path / "out"), "hf_writes"],
            cwd=ROOT, env=environment, capture_output=True, text=True, timeout=280,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr[-3000:]
    repository, _, files = hub.commits[-1]
    assert repository == "mona/ours" and {"model.safetensors", "config.json", "README.md"} <= set(files)
    assert safetensors.torch.load(files["model.safetensors"]).keys() >= {"model.norm.weight"}
