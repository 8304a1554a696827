"""A peer that only asks: it counts nothing, averages nothing, and shares no state."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path

from volunteer_kit.checkpoint import save_checkpoint
from volunteer_kit.optim.recipe import parameter_names
from volunteer_kit.runs import RunConfig, build_model, build_optimizer, build_param_groups
from volunteer_kit.session.options import swarm_options
from volunteer_kit.swarm.beside import BUFFERS, HeldBuffers
from volunteer_kit.swarm.errors import SwarmError
from volunteer_kit.swarm.options import SwarmOptions
from volunteer_kit.swarm.peer import Peer, PeerConfig, start_peer
from volunteer_kit.swarm.state import SwarmStateAverager

LOOK_AGAIN = 1.0  # s; who just came declares its state only after a moment
SAY_EVERY = 2.0  # s


def download_checkpoint(
    config: RunConfig, initial_peers: Sequence[str], out: str, timeout: float, say: Callable[[str], None]
) -> Path:
    """Save the swarm's parameters in the folder `out`. Must run in the main thread of a process of its own.

    Raises SwarmError, CheckpointError.
    """
    say(f"Looking for the run {config.run_id} ...")
    peer = start_peer(PeerConfig(initial_peers=[*initial_peers], client_mode=True))
    try:
        options, model = swarm_options(config), build_model(config)
        averager = _asking_averager(peer, options, config, model)
        try:
            _ask(averager, config, timeout, say)
            tensors = [parameter.detach().clone() for parameter in averager.state_tensors()[: averager.num_parameters]]
            names = [*parameter_names(model), *([BUFFERS] if averager.extra_tensors else [])]
            epoch = averager.local_epoch
        finally:
            averager.abandon_statistics()
            averager.shutdown()
    finally:
        peer.shutdown()
    meta = {"run_id": config.run_id, "fingerprint": config.fingerprint, "run": config.model_dump(mode="json")}
    named = dict(zip(names, tensors, strict=True))
    return save_checkpoint(out, named, {**meta, "epoch": epoch})


def _asking_averager(peer: Peer, options: SwarmOptions, config: RunConfig, model) -> SwarmStateAverager:
    optimizer, scheduler = build_optimizer(config)
    return SwarmStateAverager(
        dht=peer.dht,
        prefix=f"{options.run_key}_state_averager",
        optimizer=optimizer,
        params=build_param_groups(config, model),
        scheduler=scheduler,
        offload_optimizer=True,
        custom_gradients=True,
        client_mode=True,
        allow_state_sharing=False,
        min_matchmaking_time=options.matchmaking_time,
        allreduce_timeout=options.allreduce_timeout,
        next_chunk_timeout=options.next_chunk_timeout,
        max_weight=1.0,
        buffers=HeldBuffers.of_run(model) if options.marks_unused else None,
        start=True,
    )


def _ask(averager: SwarmStateAverager, config: RunConfig, timeout: float, say: Callable[[str], None]) -> None:
    deadline, said_at = time.monotonic() + timeout, float("-inf")

    def on_download(done: int, total: int) -> None:
        nonlocal said_at
        if time.monotonic() - said_at >= SAY_EVERY:
            said_at = time.monotonic()
            say(f"{done / 1e6:,.0f} of {total / 1e6:,.0f} MB")

    while not averager.load_state_from_peers(
        timeout=max(1.0, deadline - time.monotonic()), whole=False, on_download=on_download
    ):
        if time.monotonic() > deadline:
            raise SwarmError(
                f"Peers of the swarm answer, but none gave the model of the run {config.run_id!r} within "
                f"{timeout:.0f} s.\n"
                "1. Is anybody training it? Its first peer alone has no model.\n"
                "2. Is it the same run file? Only peers with the fingerprint "
                f"{config.fingerprint[:12]} are asked.\n"
                "3. On a slow line, give it longer: fetch_checkpoint(..., timeout=3600).",
                kind="no_state",
            )
        time.sleep(LOOK_AGAIN)
    say(f"The model of epoch {averager.local_epoch} is here.")
