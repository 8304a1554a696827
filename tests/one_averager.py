"""A state averager with statistics of many types, for tests of the state that it tells, gives and takes."""

from __future__ import annotations

import threading

import torch
from hivemind.compression import NoCompression
from hivemind.p2p import PeerID

from volunteer_kit.swarm.state import SwarmStateAverager


class Counting(torch.optim.Optimizer):
    """Statistics of many types, as an 8-bit optimizer has."""

    def __init__(self, params, lr: float = 0.1):
        super().__init__(params, {"lr": lr})
        self.gate = threading.Event()
        self.gate.set()
        for group in self.param_groups:
            for parameter in group["params"]:
                self.state[parameter] = {
                    "codes": torch.zeros(parameter.shape, dtype=torch.uint8),
                    "mean": torch.zeros_like(parameter),
                    "scale": torch.zeros(()),
                    "steps": 0,
                }

    @torch.no_grad()
    def step(self):
        self.gate.wait(10)
        for group in self.param_groups:
            for parameter in group["params"]:
                state = self.state[parameter]
                parameter.sub_(group["lr"])
                state["codes"].add_(1)
                state["mean"].sub_(0.5)
                state["scale"].add_(0.25)
                state["steps"] += 1


def make_averager(
    peer, *, start: bool = False, lr: float = 0.1, seed: int = 0, period: float = 5.0, prefix: str = "state",
    scheduler=lambda optimizer: torch.optim.lr_scheduler.LambdaLR(optimizer, lambda epoch: 1.0 / (1 + epoch)),
) -> SwarmStateAverager:  # fmt: skip
    generator = torch.Generator().manual_seed(seed)
    params = [torch.nn.Parameter(torch.randn(shape, generator=generator)) for shape in [(3, 4), (5,)]]
    return SwarmStateAverager(
        dht=peer.dht,
        prefix=prefix,
        params=params,
        optimizer=lambda groups: Counting(groups, lr=lr),
        scheduler=scheduler,
        offload_optimizer=True,
        custom_gradients=True,
        client_mode=False,
        state_compression=NoCompression(),
        declare_state_period=period,
        min_matchmaking_time=1.0,
        next_chunk_timeout=10.0,
        start=start,
    )


def seen_donors(peer, prefix: str = "state") -> dict[PeerID, int]:
    """Donor -> the epoch that it declares."""
    found = peer.dht.get(f"{prefix}.all_averagers", latest=True)
    return {PeerID(key): entry.value[0] for key, entry in found.value.items()} if found else {}
