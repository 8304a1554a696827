"""Where this machine computes, and how: device, plan, tuner, several cards or cores."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

import torch

from volunteer_kit.device import (
    Device,
    DevicePlan,
    Remembered,
    Setting,
    Workload,
    detect_device,
    key_of,
    largest_batch,
    memory_limit,
    memory_meter,
    memory_needed,
    plan_device,
    smaller_plan,
    tuner_for,
    usable_memory,
    with_batch_size,
)
from volunteer_kit.runs import RunConfig
from volunteer_kit.session.options import compute_loss, workload
from volunteer_kit.swarm.errors import SwarmError
from volunteer_kit.training.callbacks import Emit
from volunteer_kit.training.protocol import WorkerSpec
from volunteer_kit.training.replicas import Replicas
from volunteer_kit.training.tpu import TpuCores
from volunteer_kit.training.trainer import ComputeGradients
from volunteer_kit.training.tuning import Tuning
from volunteer_kit.worker_end import memory_words, too_little_memory


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
    memory_ran_out: bool = False  # with a larger plan: nothing is tried any more

    def gradients(self, folder: Path | None) -> ComputeGradients | None:
        """What computes in the trainer's place, where one device is not all; compiled programs are kept in `folder`.
        Raises MissingTorchXla."""
        if self.found.kind == "tpu":
            return TpuCores(compute_loss, precision=self.plan.precision, programs=folder, fits=self.plan.fits)
        if self.plan.count > 1:
            return Replicas(self.plan.devices, compute_loss, self.plan.precision)
        return None

    def tuning(self, run: RunConfig, parameters: int, folder: Path | None, emit: Emit) -> Tuning | None:
        """Finds the fastest batch while it trains; None on a TPU, where each size is compiled anew, and where
        memory ran out: the next stay begins with what is left."""
        if self.memory_ran_out:
            if folder is not None:
                self._remember(run, parameters, folder)
            return None
        meter = memory_meter(self.plan.devices, self.peers_on_machine)
        if meter is None:
            return None
        work = workload(run, parameters)
        plan = replace(self.plan, threads=self.threads)
        tuner = tuner_for(self.found, plan, work, meter, target_batch_size=run.target_batch_size, folder=folder)

        def tell(setting, why: str) -> None:
            size, recomputes = setting.batch_size, setting.checkpointing
            needed = memory_needed(work, self.found.kind, plan.precision, size, recomputes)
            emit("plan", batch_size=size, checkpointing=recomputes, why=why, memory_bytes=round(needed))

        return Tuning(tuner, meter, tell)

    def _remember(self, run: RunConfig, parameters: int, folder: Path) -> None:
        plan, work = replace(self.plan, threads=self.threads), workload(run, parameters)
        record = Remembered(folder, key_of(self.found, plan, work, largest_batch(run.target_batch_size)))
        record.save(Setting(self.batch_size, plan.checkpointing), 0.0, 0.0)


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
    work, asked = workload(run, parameters), spec.batch_size if found.kind != "tpu" else None
    plan, short = _within_memory(found, replace(plan, batch_size=asked or plan.batch_size), work, spec)
    if short:
        emit("warning", kind="memory", message=short)
    for problem in filter(None, (*found.problems, plan.warning)):
        emit("warning", kind="device", message=problem)
    batch_size = plan.batch_size
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
        memory_bytes=round(memory_needed(work, found.kind, plan.precision, batch_size, plan.checkpointing)),
    )
    place = plan.devices[0] if found.kind in ("cuda", "mps") else "cpu"
    ran_out = spec.most_samples is not None or spec.recompute
    likely = batch_size if spec.batch_size or ran_out else min(64, largest_batch(run.target_batch_size))
    return Compute(found, plan, torch.device(place), batch_size, likely, threads, spec.peers_on_machine, ran_out)


def _within_memory(found: Device, plan: DevicePlan, work: Workload, spec: WorkerSpec) -> tuple[DevicePlan, str]:
    """(the plan, made smaller where memory does not suffice, what to tell about it).

    Raises SwarmError (memory) where there is far too little for any.
    """
    if found.kind != "tpu" and (spec.most_samples is not None or spec.recompute):
        plan = smaller_plan(plan, spec.most_samples or plan.batch_size, spec.recompute)

    def needed(batch: int, checkpointing: bool) -> float:
        return memory_needed(work, found.kind, plan.precision, batch, checkpointing)

    total, least = usable_memory()[0] / max(1, spec.peers_on_machine), needed(1, True)
    if hopeless := too_little_memory(least, spec.peers_on_machine):
        raise SwarmError(hopeless, kind="memory")
    if total < least:
        told = memory_words(total, memory_limit() is not None, least)
        how = " The smallest batches are taken." if found.kind == "cpu" else ""  # a GPU's batches take none of it
        return smaller_plan(plan, 1, True) if how else plan, f"Memory is short: {told}.{how}"
    batch = plan.batch_size
    while batch > 1 and found.kind == "cpu" and needed(batch, plan.checkpointing) > total:
        batch //= 2
    return (plan if batch == plan.batch_size else smaller_plan(plan, batch, False)), ""
