"""How much memory training takes and how much it could take, on the device that computes."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Protocol

from volunteer_kit.device.cuda import memory_of
from volunteer_kit.device.machine import usable_memory

HOST_SHARE = 0.8  # of the free RAM: peers' processes grow, and where there is none left the kernel kills somebody


class MemoryMeter(Protocol):
    """Bytes; the peak is since `begin`."""

    def begin(self) -> None: ...

    def peak_bytes(self) -> float: ...

    def limit_bytes(self) -> float: ...


def memory_meter(devices: Sequence[str], peers_on_machine: int = 1) -> MemoryMeter | None:
    """For DevicePlan.devices; None for a TPU, whose memory is the compiler's. What is free is shared evenly by
    `peers_on_machine` workers, all of whom may be looking for their batch size at once."""
    kind = devices[0].split(":")[0]
    if kind == "cuda":
        return CudaMemory([int(name.partition(":")[2] or 0) for name in devices], peers_on_machine)
    share = HOST_SHARE / peers_on_machine
    return {"mps": MetalMemory, "cpu": HostMemory}[kind](share) if kind != "xla" else None


class CudaMemory:
    """Of the fullest of several cards: what PyTorch has reserved, gaps included, for that is what runs out."""

    def __init__(self, indices: Sequence[int], peers_on_machine: int = 1):
        self._indices, self._peers = list(indices), peers_on_machine

    def begin(self) -> None:
        import torch

        torch.cuda.empty_cache()
        for index in self._indices:
            torch.cuda.reset_peak_memory_stats(index)

    def peak_bytes(self) -> float:
        import torch

        return max(torch.cuda.max_memory_reserved(index) for index in self._indices)

    def limit_bytes(self) -> float:
        import torch

        limits = []
        for index in self._indices:
            ours = torch.cuda.memory_reserved(index)
            limits.append(ours + (memory_of(index)[0] - ours) / self._peers)
        return min(limits)


class MetalMemory:
    """Metal has no peak; between microbatches it keeps what the last one took."""

    def __init__(self, share: float = HOST_SHARE):
        self._share = share

    def begin(self) -> None:
        import torch

        torch.mps.empty_cache()

    def peak_bytes(self) -> float:
        import torch

        return torch.mps.driver_allocated_memory()

    def limit_bytes(self) -> float:
        import torch

        return min(torch.mps.recommended_max_memory(), self.peak_bytes() + self._share * usable_memory()[1])


class HostMemory:
    """Resident memory of this process.

    :param share: of the free RAM that it may take
    """

    def __init__(
        self,
        share: float = HOST_SHARE,
        proc: Path = Path("/proc/self"),
        usable: Callable[[], tuple[int, int]] = usable_memory,
    ):
        self._share, self._proc, self._usable = share, proc, usable

    def begin(self) -> None:
        try:
            (self._proc / "clear_refs").write_text("5")  # the peak starts anew; Linux only
        except OSError:
            pass

    def peak_bytes(self) -> float:
        return self._status("VmHWM") or _highest_ever()

    def limit_bytes(self) -> float:
        return (self._status("VmRSS") or _highest_ever()) + self._share * self._usable()[1]

    def _status(self, key: str) -> int:
        try:
            found = re.search(rf"{key}:\s+(\d+) kB", (self._proc / "status").read_text())
        except OSError:
            return 0
        return 1024 * int(found[1]) if found else 0


def _highest_ever() -> float:
    """Where /proc does not tell: macOS, whose unit is the byte, and some sandboxes, where it is the kB as on Linux."""
    import resource

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
