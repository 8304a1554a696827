"""Three peers behind home lines: 8 M parameters in adapters, 8-bit gradients, rounds while they compute on."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from statistics import median

from benchmarks.netlab import Line, Netlab
from benchmarks.trainer_parts.material import tiny_llama, with_adapters
from benchmarks.trainer_parts.swarm import TrainerPeer, trained

PEERS, DOWN, UP = 3, 20.0, 10.0  # Mbit/s
MODEL, RANK = {"hidden": 528, "layers": 7}, 128
BATCH, PAUSE = 2, 1.25  # samples, s of a microbatch
MICROBATCHES = 10  # of one peer in an epoch: more seconds than a round takes
EPOCHS, WARM_UP = 8, 2  # the first rounds begin when the peers do, and are not counted
PATIENCE = 240.0  # s
OPT = {
    "run_id": "home",
    "target_batch_size": PEERS * BATCH * MICROBATCHES,
    "wait_for_peers": PEERS,
    "grad_compression": "uniform8",
    "delay_grad_averaging": True,
    "delay_optimizer_step": True,
}


CODECS = {"8-bit": "uniform8", "best": "sparse"}


def measure(folder: Path, codec: str = "8-bit") -> dict[str, float]:
    """As `figures` says. Raises NoNetlab.

    :param codec: one of CODECS
    """
    parameters = sum(p.numel() for p in with_adapters(tiny_llama(**MODEL), RANK).parameters() if p.requires_grad)
    arguments = {
        "per_device_train_batch_size": BATCH, "max_steps": EPOCHS, "learning_rate": 1e-3, "optim": "adamw_torch",
        "logging_steps": 1,
    }  # fmt: skip
    with Netlab([Line(DOWN, UP)] * PEERS) as lab:
        each = [
            {
                "rows": [1000 * number, 400],
                "inside": lab.inside(number),
                "look": lambda number=number: {"wire": lab.traffic(number).sent},
            }
            for number in range(1, PEERS + 1)
        ]
        with trained(
            folder, each, lambda number: {"host_maddrs": [f"/ip4/{lab.address(number + 1)}/tcp/0"]}, PATIENCE,
            model=MODEL, rank=RANK, pause=PAUSE, arguments=arguments,
            opt={**OPT, "grad_compression": CODECS[codec]},
        ) as peers:  # fmt: skip
            return figures(parameters, peers)


def figures(parameters: int, peers: list[TrainerPeer]) -> dict[str, float]:
    """Medians over rounds of all peers.

    `round_s`: from the round's beginning to the certificate of its step
    `stall_s`: of an epoch, all that lay between a microbatch's end and the next one's beginning
    """
    steps = [e for peer in peers for e in peer.said("step") if e["epoch"] > WARM_UP]
    epochs = [e for peer in peers for e in peer.said("epoch") if e["epoch"] > WARM_UP]
    wire = [
        after["wire"] - before["wire"]
        for peer in peers
        for before, after in pairwise(e for e in peer.said("epoch") if e["epoch"] >= WARM_UP)
    ]
    rounds = [e["seconds"] for e in steps]
    return {
        "lora_parameters": parameters,
        "bytes_per_round_per_peer": median(e["sent"] for e in steps),
        "wire_bytes_per_round_per_peer": median(wire),
        "floor_s": median(wire) * 8e-6 / UP,
        "round_s": median(rounds),
        "round_worst_s": max(rounds),
        "stall_s": median(sum(e["gaps"]) for e in epochs),
        "rounds_of_all": sum(e["group_size"] == PEERS for e in steps) / len(steps),
    }
