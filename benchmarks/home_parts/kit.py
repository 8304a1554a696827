"""A worker of the kit: its own Peer, SwarmOptimizer and Trainer, put together as volunteer_kit/session does."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path

from benchmarks.home_parts.device import Device, Words, on_the_wire
from tests.orders import say
from volunteer_kit.checkpoint import latest_checkpoint
from volunteer_kit.optim.recipe import parameter_names
from volunteer_kit.robust.rules import rule
from volunteer_kit.run_optimizers import build_local_steps
from volunteer_kit.runs import RunConfig, build_model, build_optimizer, build_param_groups, load_run
from volunteer_kit.session.options import compute_loss, swarm_options
from volunteer_kit.swarm.optimizer import SwarmOptimizer
from volunteer_kit.swarm.peer import Peer, PeerConfig, start_peer
from volunteer_kit.training.callbacks import SaveCheckpoints
from volunteer_kit.training.trainer import Callback, Trainer

SAVE_EVERY = 20.0  # s; a session's 600, dilated


class TellSteps(Callback):
    """Each global step as an event, with what the clock and the line say of it; and each that was put off."""

    def __init__(self, device: Device):
        self.device = device

    def on_epoch(self, trainer: Trainer, report, loss: float | None) -> None:
        say(
            "step",
            at=time.monotonic(),
            epoch=report.epoch,
            samples=report.counted,
            of=report.samples,
            pending=trainer.optimizer.samples_after(report.epoch),
            uncertain=report.uncertain,
            kept_until=report.kept_until,
            group_size=report.group_size,
            received=report.received,
            seconds=report.seconds,
            failure=report.failure,
            apart=report.apart,
            made_up_for=report.made_up_for,
            bytes_sent=report.bytes_sent,
            bytes_received=report.bytes_received,
            swarm=trainer.optimizer.tracker.global_progress.num_peers,
            **self.device.clock.read(),
            **on_the_wire(),
        )

    def on_postponed(self, trainer: Trainer, report) -> None:
        say("postponed", at=time.monotonic(), epoch=report.epoch, seconds=report.seconds, failure=report.failure)


def start(settings: dict) -> Peer:
    peer = start_peer(
        PeerConfig(
            initial_peers=settings.get("initial_peers", []),
            host_maddrs=[f"/ip4/{settings['address']}/tcp/{settings.get('port', 0)}"],
            client_mode=settings.get("client_mode", False),
            identity_path=settings.get("identity_path"),
            check_identity=False,
        )
    )
    say("connected", at=time.monotonic(), peer_id=str(peer.peer_id), maddrs=peer.visible_maddrs())
    return peer


def train(settings: dict, device: Device, words: Words) -> None:
    run = load_run(settings["run"])
    model = build_model(run)
    names = parameter_names(model)
    peer = start(settings)
    make_optimizer, make_scheduler = build_optimizer(run)
    folder = settings.get("folder")
    optimizer = SwarmOptimizer(
        peer=peer,
        options=replace(
            swarm_options(run, left_over=Path(folder, "left_over.bin") if folder else None),
            refresh_period=settings["refresh_period"],
        ),
        params=build_param_groups(run, model),
        optimizer=make_optimizer,
        scheduler=make_scheduler,
        local_steps=build_local_steps(run),
        reduce=rule(run.swarm.aggregation),
    )
    resumed = resume(optimizer, names, run, folder) if folder else None
    taken = optimizer.join(patience=run.swarm.load_state_timeout)
    say("ready", at=time.monotonic(), epoch=optimizer.local_epoch, resumed=resumed, taken=taken, **on_the_wire())
    words.go.wait()
    callbacks: list[Callback] = [TellSteps(device)]
    if folder:
        meta = {"run_id": run.run_id, "fingerprint": run.fingerprint}
        callbacks.append(SaveCheckpoints(folder, names, meta, lambda *_, **__: None, every_seconds=SAVE_EVERY))
    trainer = Trainer(
        model, optimizer, device.next_batch, compute_loss,
        batch_size=device.batch, callbacks=callbacks, compute_gradients=device,
    )  # fmt: skip
    device.clock.start()
    trainer.train(words.leave.is_set)
    optimizer.settle()
    trainer.tell_steps()
    optimizer.uncertain_steps.leaving()
    say("finished", at=time.monotonic(), kept_until=optimizer.uncertain_steps.kept_until(), traffic=optimizer.traffic())
    optimizer.shutdown()
    peer.shutdown()


def resume(optimizer: SwarmOptimizer, names: list[str], run: RunConfig, folder: str) -> int | None:
    """:returns: the epoch of the newest state that was stored here"""
    found = latest_checkpoint(folder, fingerprint=run.fingerprint) if Path(folder).exists() else None
    if found is None:
        return None
    optimizer.load_named_state(names, found.tensors, found.meta)
    return optimizer.local_epoch
