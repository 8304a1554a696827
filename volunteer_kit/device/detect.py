"""The best device that PyTorch can really use here."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from volunteer_kit.device.cuda import find_cards
from volunteer_kit.device.machine import usable_cores, usable_memory
from volunteer_kit.device.table import Kind
from volunteer_kit.device.tpu import find_tpu

METAL_SHARE = 0.6  # of the memory that it has in common with the CPU


@dataclass(frozen=True)
class Device:
    """What there is to train on: one device, or several equal ones."""

    kind: Kind
    name: str
    memory_gb: float  # 1e9 bytes in all, of each; a CPU's is the RAM this process may use
    free_gb: float  # of it, free now, where most is
    capability: tuple[int, int] | None  # CUDA's compute capability: (7, 5) for a T4
    count: int  # equal devices that can be used: cards, or a TPU's cores
    cores: int  # CPU cores this process may really use: affinity and container quota
    ram_free_gb: float
    problems: tuple[str, ...] = ()  # accelerators that are here but cannot be used, and what to do
    indices: tuple[int, ...] = (0,)  # CUDA's numbers of the equal cards
    free_each_gb: tuple[float, ...] = ()  # free on each of them; (): as much as on the first


def detect_device(prefer: Literal["auto", "cpu"] = "auto", *, root: Path = Path("/")) -> Device:
    """The best device that PyTorch can really use here; what was found and cannot be used is in `.problems`.

    :param root: where /dev, /proc and /sys are; another one in tests.
    """
    cores, ram, ram_free = usable_cores(root), *(size / 1e9 for size in usable_memory(root))
    problems: list[str] = []
    if prefer == "auto":
        tpu, problems = find_tpu(root)
        if tpu is not None:
            return Device("tpu", tpu.name, tpu.memory_gb, tpu.memory_gb, None, tpu.cores, cores, ram_free)
        cards, more = find_cards(root)
        problems += more
        if cards is not None:
            free, count = max(cards.free_gb), len(cards.indices)
            return Device(
                "cuda", cards.name, cards.memory_gb, free, cards.capability, count, cores, ram_free,
                tuple(problems), cards.indices, cards.free_gb,
            )  # fmt: skip
        if _has_metal():
            shares = METAL_SHARE * ram, METAL_SHARE * ram_free
            return Device("mps", "Apple GPU (Metal)", *shares, None, 1, cores, ram_free)
    name = f"CPU ({cores} core{'s' if cores > 1 else ''})"
    return Device("cpu", name, ram, ram_free, None, 1, cores, ram_free, tuple(problems))


def _has_metal() -> bool:
    import torch

    return torch.backends.mps.is_available()
