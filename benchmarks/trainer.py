"""The Trainer over a swarm beside the plain one: equal steps, few changed lines, and rounds over home lines.

    python benchmarks/trainer.py              all of it, some four minutes; the lines take root and iproute2
    python benchmarks/trainer.py --no-lines   without the lines
    python benchmarks/trainer.py --codec best with the sparse codec over them, in place of 8 bits

Three claims of equality, on which the exit status depends: one peer is a plain Trainer to the last bit; three peers
with sentences of unequal lengths are a plain Trainer on their batches put together; a script changes in a few lines.
Then three peers behind lines of 20/10 Mbit/s in network namespaces, with 8 M parameters in adapters, 8-bit gradients
and rounds in the background. Everything is given as a user gives it, through hivemind_config.
"""

from __future__ import annotations

import argparse
import difflib
import json
import os
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping
from pathlib import Path
from statistics import median

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parents[1]))

from transformers import Trainer, TrainingArguments

from benchmarks.netlab import NoNetlab
from benchmarks.trainer_parts import home
from benchmarks.trainer_parts.material import Sentences, pad, tiny_llama
from benchmarks.trainer_parts.swarm import trained
from volunteer_kit.training.hf_trainer import SwarmTrainer, SwarmTrainingArguments

ROOT = Path(__file__).parents[1]
PARTS = ROOT / "benchmarks/trainer_parts"
QUIET = {"report_to": [], "use_cpu": True, "disable_tqdm": True, "save_strategy": "no", "logging_strategy": "no"}
STEPS, BATCH, ROWS = 20, 4, 4096
CLOSE = 1e-4  # relative, of three peers to the big batch
PATIENCE = 240.0  # s


# --- one peer ---


def is_plain(folder: Path, optim: str) -> bool:
    """Are one peer's parameters those of a plain Trainer after STEPS steps, to the last bit?"""
    arguments = {
        "per_device_train_batch_size": BATCH, "gradient_accumulation_steps": 2, "max_steps": STEPS, "optim": optim,
        "learning_rate": 1e-2, "warmup_steps": 3, "weight_decay": 0.1, "max_grad_norm": 0.5, "seed": 3,
    }  # fmt: skip
    config = {"dht": {}, "opt": {"run_id": f"one-{optim}", "target_batch_size": 2 * BATCH}}
    plain, swarm = tiny_llama(), tiny_llama()
    data = Sentences(range(400))
    Trainer(plain, TrainingArguments(str(folder), **QUIET, **arguments), pad, data).train()
    arguments["hivemind_config"] = config
    SwarmTrainer(swarm, SwarmTrainingArguments(str(folder), **QUIET, **arguments), pad, data).train()
    return all(torch.equal(a, b) for a, b in zip(plain.parameters(), swarm.parameters(), strict=True))


# --- three ---


class InOrder(torch.utils.data.IterableDataset):
    """Batches of the rows that the swarm's steps were of."""

    def __init__(self, steps: list[list[int]]):
        self.steps = steps

    def __iter__(self) -> Iterator[dict[str, Tensor]]:
        every = Sentences(range(ROWS))
        return iter([pad([every[row] for row in rows]) for rows in self.steps])

    def __len__(self) -> int:
        return len(self.steps)


class OfTheWhole(Trainer):
    def get_train_dataloader(self) -> torch.utils.data.DataLoader:
        return torch.utils.data.DataLoader(self.train_dataset, batch_size=None)


def three_beside_one(folder: Path, optim: str) -> dict[str, float]:
    """Distances of three peers' parameters to those of a plain Trainer on the same rows: relative to the parameters,
    and to the way that they have gone; and the largest difference among the three."""
    arguments = {
        "max_steps": STEPS, "optim": optim, "learning_rate": 3e-3, "warmup_steps": 2, "seed": 3,
        "per_device_train_batch_size": BATCH,
    }  # fmt: skip
    opt = {"run_id": "three", "target_batch_size": 3 * BATCH, "matchmaking_time": 2.0, "averaging_timeout": 20.0}
    each = [{"rows": [1000 * number, 400]} for number in range(3)]
    steps: dict[int, list[int]] = defaultdict(list)
    with trained(
        folder, each, lambda number: {"host_maddrs": ["/ip4/127.0.0.1/tcp/0"]}, PATIENCE,
        arguments={**QUIET, **arguments}, opt={**opt, "wait_for_peers": 3},
    ) as peers:  # fmt: skip
        for peer in peers:
            for event in peer.said("step"):
                steps[event["epoch"]] += event["rows"]
        first, *others = [peer.parameters() for peer in peers]
    together = tiny_llama()
    whole = InOrder([steps[epoch] for epoch in sorted(steps)])
    OfTheWhole(together, TrainingArguments(str(folder), **QUIET, **arguments), pad, whole).train()
    reference = {name: parameter.detach() for name, parameter in together.named_parameters()}
    begun = {name: parameter.detach() for name, parameter in tiny_llama().named_parameters()}
    distance = norm({name: first[name] - reference[name] for name in reference})
    return {
        "relative": distance / norm(reference),
        "of_the_way": distance / norm({name: begun[name] - reference[name] for name in reference}),
        "among_peers": max((first[name] - one[name]).abs().max().item() for one in others for name in first),
        "samples_per_step": median(len(rows) for rows in steps.values()),
    }


def norm(tensors: Mapping[str, Tensor]) -> float:
    return torch.stack([tensor.norm() for tensor in tensors.values()]).norm().item()


# --- the script ---


def changed_lines() -> int:
    """Lines of together.py that are not in alone.py, or stand there otherwise."""
    alone, together = ((PARTS / name).read_text().splitlines() for name in ("alone.py", "together.py"))
    return sum(line.startswith("+ ") for line in difflib.ndiff(alone, together))


def run_scripts(folder: Path) -> None:
    """Both, to the end. Raises CalledProcessError."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    for name in ("alone.py", "together.py"):
        subprocess.run(
            [sys.executable, str(PARTS / name)], cwd=folder, env=environment, check=True, capture_output=True,
            timeout=PATIENCE,
        )  # fmt: skip


# --- all of it ---


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--no-lines", action="store_true", help="leave out the home lines")
    parser.add_argument("--codec", choices=home.CODECS, default="8-bit", help="of the gradients over home lines")
    options = parser.parse_args()
    began = time.monotonic()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory(prefix="volunteer-kit-trainer-") as scratch:
        folder = Path(scratch)
        equal = {optim: is_plain(folder, optim) for optim in ("adamw_torch", "sgd")}
        for optim, is_equal in equal.items():
            print(f"one peer, {optim}: {'equal to the last bit' if is_equal else 'NOT EQUAL'} after {STEPS} steps")
        apart = {optim: three_beside_one(folder, optim) for optim in ("adamw_torch", "sgd")}
        for optim, found in apart.items():
            print(
                f"three peers, {optim}, {found['samples_per_step']:g} samples a step: {found['relative']:.1e} of the "
                f"parameters from the whole batch ({found['of_the_way']:.1e} of the way gone), and "
                f"{found['among_peers']:g} from each other"
            )
        run_scripts(folder)
        lines = None
        if not options.no_lines:
            try:
                lines = home.measure(folder, options.codec)
            except NoNetlab as reason:
                print(reason)
    changed = changed_lines()
    print(f"changed lines: {changed}")
    if lines is not None:
        print(table(lines))
    result = {
        "single_peer_equal": all(equal.values()),
        "three_peers_vs_big_batch": max(found["relative"] for found in apart.values()),
        "three_peers_vs_big_batch_of_the_way": max(found["of_the_way"] for found in apart.values()),
        "peers_apart": max(found["among_peers"] for found in apart.values()),
        "changed_lines": changed,
        **(lines or dict.fromkeys(("bytes_per_round_per_peer", "round_s", "stall_s"))),
        "seconds": time.monotonic() - began,
    }
    print(json.dumps({name: float(f"{v:.4g}") if isinstance(v, float) else v for name, v in result.items()}))
    return 0 if result["single_peer_equal"] and result["three_peers_vs_big_batch"] <= CLOSE and changed <= 3 else 1


def table(lines: Mapping[str, float]) -> str:
    rows = [
        ("trained parameters, in adapters", f"{lines['lora_parameters']:,.0f}"),
        ("sent by a peer in a round; on the wire", f"{lines['bytes_per_round_per_peer'] / 1e6:.2f} MB; "
         f"{lines['wire_bytes_per_round_per_peer'] / 1e6:.2f} MB"),
        ("a round; the worst", f"{lines['round_s']:.2f} s; {lines['round_worst_s']:.2f} s"),
        (f"what {home.UP:g} Mbit/s take for the bytes alone", f"{lines['floor_s']:.2f} s"),
        ("not trained, of an epoch", f"{lines['stall_s']:.2f} s"),
        ("rounds in which all were", f"{lines['rounds_of_all']:.0%}"),
    ]  # fmt: skip
    head = f"{home.PEERS} peers, {home.DOWN:g}/{home.UP:g} Mbit/s each, {home.EPOCHS - home.WARM_UP} rounds"
    return "\n".join([head, *(f"  {name:<42}{value}" for name, value in rows)])


if __name__ == "__main__":
    from benchmarks.netlab_parts.descendants import end_descendants_with_us

    end_descendants_with_us()
    sys.exit(main())
