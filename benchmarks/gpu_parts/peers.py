"""Two real peers of the original's run on one card: what benchmarks/full_size.py does on CPUs.

They go on until they have taken two epochs together: the first to come is alone in its first ones. Each is a
supervisor, its worker, DHT and averagers; they read image shards, encode them on the card, train, average and step
together, and their checkpoints are compared.
"""

from __future__ import annotations

import os

from rich.console import Console

from benchmarks import full_size
from benchmarks.gpu_parts.material import image_shards, original
from benchmarks.gpu_parts.part import Setting, Tell


def measure(setting: Setting, tell: Tell) -> None:
    home = setting.folder / "home"
    home.mkdir()
    os.environ["VOLUNTEER_KIT_HOME"] = str(home)
    if setting.tiny:
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    run = original(setting.tiny, home)
    images = (48, 12) if setting.tiny else (1200, 100)
    shards = image_shards(setting.folder / "images", *images, size=32 if setting.tiny else 256)
    data = run.data.model_copy(
        update={"kind": "shards", "shards": [str(shard) for shard in shards], "range_length": 4 if setting.tiny else 32}
    )
    patience = {"matchmaking_time": 10.0, "allreduce_timeout": 60.0, "averaging_timeout": 120.0}
    run = run.model_copy(
        update={
            "run_id": "gpu-day", "data": data, "target_batch_size": 16 if setting.tiny else 192,
            "swarm": run.swarm.model_copy(update=patience),
        }
    )  # fmt: skip
    full_size.PEER_MEMORY = 40e9  # the card's memory is what is measured
    peers, found = full_size.measure(run, home, Console(), setting.left() - 5, sharing=2)
    found["parameters_equal"] = found["param_gap"] == 0
    found["loss_last"] = peers[0].epochs[-1]["loss"]
    tell(**found)
    for number, peer in enumerate(peers, start=1):
        about = ("device", "batch_size", "precision", "checkpointing")
        tell(**{f"peer{number}_{key}": peer.device[key] for key in about})
    card = f"{found['gpu_gb']:.2f} GB of the card each, " if found["gpu_gb"] else ""
    equal = "equal" if found["param_gap"] == 0 else f"apart by {found['param_gap']:.1e}"
    tell.summary(
        f"{found['epochs']} epochs together, {card}{found['peak_pss_gb']:.1f} GB of RAM each, parameters {equal}, "
        f"{60 * found['minutes']:.0f} s"
    )
    if found["received"] < 1 or found["param_gap"] > 1e-5:
        raise SystemExit(f"They did not train together as they should: {found}")
