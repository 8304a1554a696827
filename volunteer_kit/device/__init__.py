"""What this machine can do (detect_device), how it starts to train (plan_device), each choice with its reason, and
what it finds out while it trains (tuner_for).

`python -m volunteer_kit.device` prints detection and plan.
"""

from __future__ import annotations

from pathlib import Path

from volunteer_kit.device.cuda import has_kernels
from volunteer_kit.device.detect import Device, detect_device
from volunteer_kit.device.machine import memory_kills, memory_limit, usable_cores, usable_memory
from volunteer_kit.device.memory import MemoryMeter, memory_meter
from volunteer_kit.device.plan import (
    MICROBATCH_SECONDS,
    DevicePlan,
    largest_batch,
    least_memory,
    memory_needed,
    plan_device,
    smaller_plan,
    with_batch_size,
)
from volunteer_kit.device.remembered import Remembered, key_of
from volunteer_kit.device.table import TABLE, Precision
from volunteer_kit.device.tuner import Setting, Tuner
from volunteer_kit.device.workload import DEMO, ORIGINAL, Workload

__all__ = [
    "DEMO",
    "MICROBATCH_SECONDS",
    "ORIGINAL",
    "TABLE",
    "Device",
    "DevicePlan",
    "MemoryMeter",
    "Precision",
    "Remembered",
    "Setting",
    "Tuner",
    "Workload",
    "detect_device",
    "has_kernels",
    "largest_batch",
    "least_memory",
    "memory_kills",
    "memory_limit",
    "memory_meter",
    "memory_needed",
    "plan_device",
    "smaller_plan",
    "tuner_for",
    "usable_cores",
    "usable_memory",
    "with_batch_size",
]


def tuner_for(
    device: Device,
    plan: DevicePlan,
    workload: Workload,
    memory: MemoryMeter,
    *,
    target_batch_size: int | None = None,
    folder: str | Path | None = None,
) -> Tuner:
    """A tuner that starts at the plan, or where it ended the last time.

    Make it when the model is on its device, so that what is taken without any microbatch is known. Not for a TPU,
    where each batch size is compiled anew.

    :param target_batch_size: samples of an epoch, swarm-wide
    :param folder: where results are kept from start to start; None: nowhere
    """
    largest = largest_batch(target_batch_size)

    def estimate(setting: Setting) -> float:
        samples = setting.batch_size / plan.count  # on one of the devices
        fixed = workload.layer_bytes(plan.precision, setting.checkpointing) + 4 * workload.parameters  # gradients
        return samples * workload.sample_bytes(plan.precision, setting.checkpointing) + fixed

    memory.begin()
    return Tuner(
        Setting(plan.batch_size, plan.checkpointing),
        largest=largest,
        estimate=estimate,
        limit_bytes=memory.limit_bytes(),
        idle_bytes=memory.peak_bytes(),
        careful=device.kind == "cpu",
        multiple=plan.count,
        record=Remembered(folder, key_of(device, plan, workload, largest)) if folder is not None else None,
    )
