"""The run that a bench trains, in sizes that two cores carry eight times, and its samples, made once for all workers.

Time dilation: one second here stands for `dilation` seconds of the original run of 125.9 M parameters. Its fixed waits
(matchmaking, timeouts, expirations) and the time that all devices need for an epoch are divided by it, for every system
compared. So are the rounds, for the model has 1 / dilation of the original's parameters; and where it has fewer still,
so that two cores carry what encodes, reduces and decodes them, the lines are narrower in the same proportion
(`line_scale`): parameters / line is then what 125.9 M / dilation on the line asked for would be. With `--model 12.5m
--dilation 10` the lines are what they are called.

Each look of plain hivemind at the others' progress costs about 45 kB with eight peers (all of them, signed, from all of
them), however small the model is: dilated, looks every 0.5 s sent 2.5 Mbit/s from each worker. So it looks every
`refresh_period` seconds, about as often on these lines as the original on its own.

These do not shrink: the bytes of matchmaking, messages and DHT, the delays of lines, and floors of plain hivemind's
waits: below LEAST_MATCHMAKING and LEAST_EXPIRATION, processes that share two cores would be late and taken for gone,
below LEAST_ALLREDUCE the next part of 512 kB, on a line that seven of them share, for lost. All of these make waits
longer than they stand for.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
import yaml
from safetensors.torch import load_file, save_file
from torch import Tensor

from volunteer_kit.run_sizes import parameters_of
from volunteer_kit.runs import build_stream, load_run

ORIGINAL = 125.9e6  # parameters
EPOCH, MATCHMAKING, ALLREDUCE, EXPIRATION = 141.0, 15.0, 240.0, 60.0  # s, of the original's size
LEAST_MATCHMAKING, LEAST_EXPIRATION = 3.0, 10.0  # s
LEAST_ALLREDUCE = 60.0  # s; a third of it is waited for the next part, whose 512 kB do not shrink with the model
MODELS: dict[str, dict[str, Any]] = {
    "1.5m": {"dim": 128, "depth": 5, "heads": 2},
    "4m": {"dim": 256, "depth": 4, "heads": 4},
    "12.5m": {"dim": 384, "depth": 5, "heads": 6},
}
SPARSE = {"grad_compression": "sparse", "small_compression": "sparse", "aggregation": "mean"}
COMPRESS_ABOVE = 2048  # elements; 65,536 of the original leave its norms and biases out, and here half of the model
POOL = 512  # samples
DEMO = Path(__file__).parents[2] / "volunteer_kit" / "run_files" / "demo.yaml"


def stepping(batch_size: int) -> dict[str, Any]:
    """Local steps, of which sparse ways travel. Few rounds have to bring more each: a fourth of the values. What comes
    late is a momentum of its own: with the usual outer optimizer (0.7, 0.9) budget.py's loss ended a third higher."""
    local_steps = {"batch_size": batch_size, "outer_lr": 1.0, "outer_momentum": 0.0}
    return {**SPARSE, "grad_density": 0.25, "local_steps": local_steps}


def make_run(model: str, target_batch_size: int, dilation: float, **swarm: Any) -> dict[str, Any]:
    """A run as load_run takes it: the demo's scenes, a larger model, the dilated waits, and `swarm` over these."""
    run = yaml.safe_load(DEMO.read_text())
    run["run_id"] = "home-links"
    run["captions"] = []
    run["model"] = {"preset": "tiny", "dim_head": 64, "ff_mult": 4, **MODELS[model]}
    run["target_batch_size"] = target_batch_size
    run["optimizer"] = {"lr": 1.0e-2, "warmup_epochs": 5, "total_epochs": 1000}
    run["swarm"] = {"delay_optimizer_step": True, "delay_grad_averaging": True, "grad_compression": "blockwise8"}
    matchmaking, allreduce = max(LEAST_MATCHMAKING, MATCHMAKING / dilation), max(LEAST_ALLREDUCE, ALLREDUCE / dilation)
    run["swarm"] |= {
        "matchmaking_time": matchmaking,
        "allreduce_timeout": allreduce,
        "averaging_timeout": 1.25 * allreduce + matchmaking,
        "progress_expiration": max(LEAST_EXPIRATION, EXPIRATION / dilation),
        "load_state_timeout": 120.0,
    }
    run["swarm"]["compress_above"] = COMPRESS_ABOVE
    run["swarm"] |= swarm
    load_run(run)  # raises RunError
    return run


def line_scale(run: dict[str, Any], dilation: float) -> float:
    """What lines are multiplied by."""
    return parameters_of(load_run({**run, "swarm": {}})) * dilation / ORIGINAL


class Pool(NamedTuple):
    text: Tensor  # int64 (N, T)
    codes: Tensor  # int64 (N, I)


def make_pool(run: dict[str, Any], path: Path) -> None:
    batch = build_stream(load_run(run), peer_seed=1).next_batch(POOL)
    save_file({"text": batch.text.contiguous(), "codes": batch.codes.contiguous()}, path)


def load_pool(path: str | Path) -> Pool:
    return Pool(**load_file(path))


def speeds_apart(peers: int, ratio: float, total: float) -> Sequence[float]:
    """Samples/s of `peers` devices in geometric steps, the fastest `ratio` times the slowest, `total` together."""
    shares = torch.logspace(0, 1, peers, base=ratio) if peers > 1 else torch.ones(1)
    return (total * shares / shares.sum()).tolist()
