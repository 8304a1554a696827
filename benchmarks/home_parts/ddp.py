"""A worker of DistributedDataParallel's kind: all gradients all-reduced in fp32 by gloo, every target batch.

Shares are proportional to speed, so that nobody waits for a slower device: DDP itself gives everybody as much as the
slowest. Settings "ddp": number, workers, total_speed, door (address of number 0).
"""

from __future__ import annotations

import os
import time
from datetime import timedelta

import torch

from benchmarks.home_parts.device import Device, Words, on_the_wire
from tests.orders import say
from volunteer_kit.runs import build_model, build_optimizer, build_param_groups, load_run

PORT, PATIENCE = 29_500, timedelta(minutes=10)


def train(settings: dict, device: Device, words: Words) -> None:
    os.environ["GLOO_SOCKET_IFNAME"] = "line"
    import torch.distributed as dist

    run, ddp = load_run(settings["run"]), settings["ddp"]
    model = build_model(run)
    make_optimizer, make_scheduler = build_optimizer(run)
    optimizer = make_optimizer(build_param_groups(run, model))
    scheduler = make_scheduler(optimizer)
    dist.init_process_group(
        "gloo", init_method=f"tcp://{ddp['door']}:{PORT}", rank=ddp["number"], world_size=ddp["workers"],
        timeout=PATIENCE,
    )  # fmt: skip
    say("ready", at=time.monotonic(), epoch=0, resumed=None, taken=False, **on_the_wire())
    words.go.wait()
    device.clock.start()
    parameters = list(model.parameters())
    microbatches = max(1, round(run.target_batch_size * device.speed / ddp["total_speed"] / device.batch))
    samples, epoch, wants_end = microbatches * device.batch, 0, False
    while not wants_end:
        total = [torch.zeros_like(parameter) for parameter in parameters]
        for _ in range(microbatches):
            model.zero_grad()
            device(model, device.next_batch())
            torch._foreach_add_(total, [parameter.grad for parameter in parameters], alpha=device.batch)
        began = time.monotonic()
        told = torch.tensor([float(samples), float(words.leave.is_set())])
        flat = torch.cat([told, *(gradient.view(-1) for gradient in total)])
        dist.all_reduce(flat)
        everybodys, wants_end = flat[0].item(), flat[1].item() > 0
        parts = (flat[2:] / everybodys).split([parameter.numel() for parameter in parameters])
        for parameter, part in zip(parameters, parts, strict=True):
            parameter.grad = part.view_as(parameter)
        optimizer.step()
        scheduler.step()
        epoch += 1
        say(
            "step", at=time.monotonic(), epoch=epoch, samples=samples, of=samples, pending=0,
            group_size=ddp["workers"], swarm=ddp["workers"], seconds=time.monotonic() - began,
            failure=None, **device.clock.read(), **on_the_wire(),
        )  # fmt: skip
    say("finished", at=time.monotonic())
