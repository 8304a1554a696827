"""One training of a small DALL-E by several peers in one process, as a run file says: what it ends at.

    python -m benchmarks.budget_parts.training '{"data": "scenes", "seed": 0, ...}'

prints {"loss": ..., "tail": ..., "bytes": ...} as its last line. Peers' rounds are group.py's, everything else is the
kit's: model, optimizer, local steps, codec. Trainings of one seed read the same samples in the same order, whatever
their batch, so that they can be compared in pairs.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

from benchmarks.budget_parts.group import Group
from volunteer_kit.run_optimizers import build_local_steps
from volunteer_kit.runs import RunConfig, build_model, build_optimizer, build_param_groups, build_stream, load_run
from volunteer_kit.swarm.codecs.registry import make_codec
from volunteer_kit.swarm.node.local_training import LocalTraining
from volunteer_kit.swarm.rounds.normalised import unit_of

EMOJI = Path(os.environ.get("VOLUNTEER_KIT_EMOJI", Path(__file__).parents[3] / "shared/data/emoji"))
KEPT = {"scenes": 16_384, "emoji": 880}  # samples; of scenes the first EVALUATED are not trained on
EVALUATED = 512
TAIL = 0.05  # of the samples: their mean loss while training is `tail`


class Samples(NamedTuple):
    text: torch.Tensor  # (N, T)
    codes: torch.Tensor  # (N, S)

    def take(self, places: torch.Tensor) -> Samples:
        return Samples(self.text[places], self.codes[places])


def open_run(data: str, **changes: Any) -> RunConfig:
    """The demo's or the emoji run, with fields of its own."""
    run = load_run({"scenes": "demo", "emoji": "emoji"}[data])
    values = run.model_dump(mode="json")
    for section, fields in changes.items():
        values[section] = {**values[section], **fields} if isinstance(fields, dict) else fields
    if data == "emoji":
        values["data"]["shards"] = str(EMOJI / "{00000..00003}.tar")
    return load_run(values)


def read_samples(data: str, folder: Path) -> Samples:
    """All that a training reads, in memory; read once and kept in `folder`."""
    kept = folder / f"{data}.pt"
    if not kept.exists():
        run = open_run(data)
        stream, parts, found = build_stream(run, peer_seed=1), [], 0
        while found < KEPT[data]:
            parts.append(stream.next_batch(min(128, KEPT[data] - found)))
            found += len(parts[-1].text)
        scratch = kept.with_suffix(f".{os.getpid()}")
        torch.save({"text": torch.cat([p.text for p in parts]), "codes": torch.cat([p.codes for p in parts])}, scratch)
        scratch.replace(kept)
    return Samples(**torch.load(kept, weights_only=True))


def order(samples: Samples, first: int, seed: int) -> Iterator[int]:
    generator = torch.Generator().manual_seed(seed)
    while True:
        yield from (first + torch.randperm(len(samples.text) - first, generator=generator)).tolist()


def flat(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """One after another, (elements,)."""
    return torch.cat([tensor.detach().reshape(-1) for tensor in tensors])


class Peers:
    """A swarm in step. With local steps each peer has a model of its own."""

    def __init__(self, run: RunConfig, peers: int):
        swarm = run.swarm
        local = build_local_steps(run)
        self.models = [build_model(run) for _ in range(peers if local else 1)]
        groups = build_param_groups(run, build_model(run))
        self.shared = [parameter for group in groups for parameter in group["params"]]
        make, schedule = build_optimizer(run)
        self.optimizer = make(groups)
        self.scheduler = schedule(self.optimizer)
        self.epoch = 0
        own_groups = [build_param_groups(run, model) for model in self.models]
        self.own = [[p for group in groups for p in group["params"]] for groups in own_groups]
        unit = unit_of(run.target_batch_size)
        self.steps = [LocalTraining(local, groups, lambda: self.epoch, unit) for groups in own_groups] if local else []
        codec = make_codec(swarm.small_compression, swarm.grad_compression, swarm.compress_above, swarm.grad_density)
        self.group = Group(peers, [p.shape for p in self.shared], codec)
        self.peers = peers

    def round(self, batch: Samples, microbatch: int) -> float:
        """One epoch: `batch` shared out, a round, a step. :returns: mean loss"""
        losses, sums = [], []
        for peer, rows in enumerate(torch.arange(len(batch.text)).chunk(self.peers)):
            model, own = (self.models[peer], self.own[peer]) if self.steps else (self.models[0], self.own[0])
            total = torch.zeros(self.group.layout.elements)  # gradients, or with local steps how far they went
            for part in rows.split(microbatch):
                for parameter in own:
                    parameter.grad = None
                loss = model(*batch.take(part)).loss
                loss.backward()
                losses.append(loss.item() * len(part))
                gradients = [parameter.grad for parameter in own]
                if self.steps:
                    self.steps[peer].gather(gradients, len(part), 1.0, b"", ())
                    if self.steps[peer].is_due:
                        self._go(peer, total)
                else:
                    total.add_(flat(gradients), alpha=len(part))
            if self.steps and self.steps[peer].gathered:
                self._go(peer, total)
            sums.append(total)
        counts = [len(rows) for rows in torch.arange(len(batch.text)).chunk(self.peers)]
        average = self.group.average(sums, counts) if self.peers > 1 else sums[0] / counts[0]
        if self.steps:  # as far as a member went
            average *= sum(count**2 for count in counts) / sum(counts) / self.steps[0].unit
        cut = average.split([parameter.numel() for parameter in self.shared])
        for parameter, values in zip(self.shared, cut, strict=True):
            parameter.grad = values.view(parameter.shape)
        self.optimizer.step()
        self.scheduler.step()
        self.epoch += 1
        with torch.no_grad():
            for steps, total in zip(self.steps, sums, strict=False):
                steps.settle(steps.life, [(slice(0, len(total)), total)])
                steps.put(self.shared)
            if not self.steps:
                torch._foreach_copy_(self.own[0], self.shared)
        return sum(losses) / len(batch.text)

    def _go(self, peer: int, total: torch.Tensor) -> None:
        """A step of this peer's own."""
        steps = self.steps[peer]
        total.add_(flat(steps.step().tensors), alpha=steps.unit)

    @torch.no_grad()
    def loss(self, samples: Samples) -> float:
        """Of what all peers hold."""
        torch._foreach_copy_(self.own[0], self.shared)
        parts = torch.arange(len(samples.text)).split(128)
        return sum(self.models[0](*samples.take(part)).loss.item() * len(part) for part in parts) / len(samples.text)


def train(settings: dict[str, Any], folder: Path) -> dict[str, float]:
    """:param settings: data, seed, peers, samples (in all), batch (of an epoch), microbatch; run: fields of its file"""
    torch.set_num_threads(1)
    epochs = settings["samples"] // settings["batch"]
    fields = dict(settings.get("run", {}))
    warm_up = max(1, round(epochs * settings.get("warm_up", 0.04)))
    optimizer = {"warmup_epochs": warm_up, "total_epochs": epochs + 1, **fields.pop("optimizer", {})}
    run = open_run(settings["data"], seed=settings["seed"], optimizer=optimizer, **fields)
    samples = read_samples(settings["data"], folder)
    held_out = settings["data"] == "scenes"
    rows, peers = order(samples, EVALUATED if held_out else 0, settings["seed"]), Peers(run, settings["peers"])
    began, losses = time.monotonic(), []
    for _ in range(epochs):
        batch = samples.take(torch.tensor([next(rows) for _ in range(settings["batch"])]))
        losses.append(peers.round(batch, settings["microbatch"]))
    last = losses[-max(1, round(TAIL * epochs)) :]
    return {
        "loss": peers.loss(samples.take(torch.arange(EVALUATED))),
        "tail": sum(last) / len(last),
        "bytes": max(peers.group.bytes_sent) / epochs,
        "parameters": peers.group.layout.elements,
        "epochs": epochs,
        "seconds": time.monotonic() - began,
    }


if __name__ == "__main__":
    asked = json.loads(sys.argv[1])
    print(json.dumps(train(asked, Path(asked["folder"]))))
