"""A worker of plain hivemind: hivemind.Optimizer as its documentation says, with delayed averaging, and nothing of the
kit but its codecs: with numpy >= 2.4 hivemind's own 8-bit ones exchange nothing, and say that they have.

Settings "stock": codec (float16, uniform8, blockwise8, powersgd), rank (of PowerSGD), and further arguments of
hivemind.Optimizer, as matchmaking_time, averaging_timeout, allreduce_timeout, average_state_every.
"""

from __future__ import annotations

import time
from functools import partial

import hivemind
from hivemind.compression import serialization
from hivemind.optim.power_sgd_averager import PowerSGDGradientAverager
from hivemind.proto import runtime_pb2

from benchmarks.home_parts.device import Device, Words, on_the_wire
from tests.orders import say
from volunteer_kit.runs import build_model, build_optimizer, build_param_groups, load_run
from volunteer_kit.swarm.codecs.registry import CODECS, make_codec

OF_HIVEMIND = frozenset(runtime_pb2.CompressionType.values())


def install_codecs() -> None:
    """Replace hivemind's codecs in its registry, in this process and those that it forks."""
    registry = serialization._BASE_COMPRESSION_TYPES
    for codec in CODECS.values():
        name = runtime_pb2.CompressionType.Name(codec.compression_type) if codec.compression_type in OF_HIVEMIND else ""
        if name:
            registry[name] = codec


class TellingOptimizer(hivemind.Optimizer):
    """Says of each step whose samples were in it. A step of its own counts as lost: the next averaging of states takes
    a part of it in, and the next download nothing."""

    device: Device
    _in_round, _proceeded_alone = 0, False

    def _begin_averaging_gradients(self, grad_scaler) -> bool:
        self._in_round = self.grad_averager.local_samples_accumulated
        began = super()._begin_averaging_gradients(grad_scaler)
        if not began:
            self._tell(1, None if self.tracker.global_progress.num_peers <= 1 else "no round was begun")
        return began

    def _load_local_gradients_into_optimizer(self) -> None:
        self._proceeded_alone = True
        super()._load_local_gradients_into_optimizer()

    def _average_gradients_and_load_into_optimizer(self, maybe_step_control) -> None:
        self._proceeded_alone, began = False, time.monotonic()
        super()._average_gradients_and_load_into_optimizer(maybe_step_control)
        group_size, failure = 1, "averaging failed"
        if maybe_step_control is not None and not self._proceeded_alone:
            group_size, failure = len(maybe_step_control.result()), None
        self._tell(group_size, failure, time.monotonic() - began)

    def load_state_from_peers(self, **kwargs) -> None:
        say("download", at=time.monotonic(), lost=self.grad_averager.local_samples_accumulated)
        super().load_state_from_peers(**kwargs)

    def _tell(self, group_size: int, failure: str | None, seconds: float = 0.0) -> None:
        say(
            "step",
            at=time.monotonic(),
            epoch=self.local_epoch,
            samples=0 if failure else self._in_round,
            of=self._in_round,
            pending=self.grad_averager.local_samples_accumulated,
            group_size=group_size,
            seconds=seconds,
            failure=failure,
            swarm=self.tracker.global_progress.num_peers,
            **self.device.clock.read(),
            **on_the_wire(),
        )


def train(settings: dict, device: Device, words: Words) -> None:
    install_codecs()
    run, stock = load_run(settings["run"]), dict(settings["stock"])
    swarm, codec, rank = run.swarm, stock.pop("codec"), stock.pop("rank", 1)
    model = build_model(run)
    dht = hivemind.DHT(
        initial_peers=settings["initial_peers"], host_maddrs=[f"/ip4/{settings['address']}/tcp/0"], start=True,
        client_mode=settings.get("client_mode", False), startup_timeout=90.0,
    )  # fmt: skip
    make_optimizer, make_scheduler = build_optimizer(run)
    wire = CODECS["float16"] if codec == "powersgd" else make_codec("float16", codec, swarm.compress_above)
    if codec == "powersgd":
        stock["grad_averager_factory"] = partial(PowerSGDGradientAverager, averager_rank=rank)
    optimizer = TellingOptimizer(
        dht=dht,
        run_id=run.run_id,
        params=build_param_groups(run, model),
        optimizer=make_optimizer,
        scheduler=make_scheduler,
        **{
            "target_batch_size": run.target_batch_size,
            "batch_size_per_step": device.batch,
            "matchmaking_time": swarm.matchmaking_time,
            "averaging_timeout": swarm.averaging_timeout,
            "allreduce_timeout": swarm.allreduce_timeout,
            "next_chunk_timeout": swarm.allreduce_timeout / 3,
            "client_mode": dht.client_mode,
            "offload_optimizer": True,
            "delay_optimizer_step": True,
            "delay_grad_averaging": True,
            "delay_state_averaging": True,
            "average_state_every": 1,
            "grad_compression": wire,
            "state_averaging_compression": wire,
            "tracker_opts": {
                "min_refresh_period": settings["refresh_period"],
                "default_refresh_period": 2 * settings["refresh_period"],
                "max_refresh_period": 2 * settings["refresh_period"],
                "metadata_expiration": swarm.progress_expiration,
            },
            **stock,
        },
    )
    optimizer.device = device
    say("ready", at=time.monotonic(), epoch=optimizer.local_epoch, resumed=None, taken=False, **on_the_wire())
    words.go.wait()
    device.clock.start()
    while not words.leave.is_set():
        device(model, device.next_batch())
        optimizer.step()
        optimizer.zero_grad()
    say("finished", at=time.monotonic())
    optimizer.shutdown()
    dht.shutdown()
