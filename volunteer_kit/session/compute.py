"""Where this machine computes, and how: device, plan, tuner, several cards or cores."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

import torch

from volunteer_kit.device import (
    Device,
    DevicePlan,
    detect_device,
    largest_batch,
    memory_meter,
    plan_device,
    tuner_for,
    with_batch_size,
)
from volunteer_kit.runs import RunConfig
from volunteer_kit.session.options import compute_loss, workload
from volunteer_kit.training.callbacks import Emit
from volunteer_kit.training.protocol import WorkerSpec
from volunteer_kit.training.replicas import Replicas
from volunteer_kit.training.tpu import TpuCores
from volunteer_kit.training.trainer import ComputeGradients
from volunteer_kit.training.tuning import Tuning


@dataclass
class Compute:
    """This machine's part of the work. `device` is where the main model is; a TPU's is the CPU."""

    found: Device
    plan: DevicePlan
    device: torch.device
    batch_size: int
    likely_batch: int  # where the tuner may end
    threads: int
    peers_on_machine: int = 1

    def gradients(self, folder: Path | None) -> ComputeGradients | None:
        """What computes in the trainer's place, where one device is not all; compiled programs are kept in `folder`.
        Raises MissingTorchXla."""
        if self.found.kind == "tpu":
            return TpuCores(compute_loss, precision=self.plan.precision, programs=folder, fits=self.plan.fits)
        if self.plan.count > 1:
            return Replicas(self.plan.devices, compute_loss, self.plan.precision)
        return None

    def tuning(self, run: RunConfig, parameters: int, folder: Path | None, emit: Emit) -> Tuning | None:
        """Finds the fastest batch while it trains; None on a TPU, where each size is compiled anew."""
        meter = memory_meter(self.plan.devices, self.peers_on_machine)
        if meter is None:
            return None
        work = workload(run, parameters)
        plan = replace(self.plan, threads=self.threads)
        tuner = tuner_for(self.found, plan, work, meter, target_batch_size=run.target_batch_size, folder=folder)

        def tell(setting, why: str) -> None:
            emit("plan", batch_size=setting.batch_size, checkpointing=setting.checkpointing, why=why)

        return Tuning(tuner, meter, tell)


def choose(run: RunConfig, spec: WorkerSpec, parameters: int, emit: Emit) -> Compute:
    """Look for the device, make the plan and tell both."""
    found = detect_device()
    plan = plan_device(
        found,
        workload(run, parameters),
        peers_on_machine=spec.peers_on_machine,
        target_batch_size=run.target_batch_size,
    )
    if found.kind == "tpu" and spec.batch_size:
        plan = with_batch_size(plan, spec.batch_size)
    for problem in filter(None, (*found.problems, plan.warning)):
        emit("warning", kind="device", message=problem)
    batch_size = plan.batch_size if found.kind == "tpu" else spec.batch_size or plan.batch_size
    threads = max(1, spec.threads or plan.threads)
    torch.set_num_threads(threads)
    emit(
        "device",
        device=found.name,
        batch_size=batch_size,
        checkpointing=plan.checkpointing,
        precision=plan.precision,
        threads=threads,
        why=plan.why,
    )
    place = plan.devices[0] if found.kind in ("cuda", "mps") else "cpu"
    likely = batch_size if spec.batch_size else min(64, largest_batch(run.target_batch_size))
    return Compute(found, plan, torch.device(place), batch_size, likely, threads, spec.peers_on_machine)
