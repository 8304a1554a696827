"""How much memory training takes and how much it could take, on the device that computes."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Protocol

from volunteer_kit.device.cuda import memory_of
from volunteer_kit.device.machine import usable_memory

HOST_SHARE = 0.8  # of the free RAM: peers' averagers grow, and where there is none left the kernel kills somebody


class MemoryMeter(Protocol):
    """Bytes; the peak is since `begin`."""

    def begin(self) -> None: ...

    def peak_bytes(self) -> float: ...

    def limit_bytes(self) -> float: ...


def memory_meter(devices: Sequence[str]) -> MemoryMeter | None:
    """For DevicePlan.devices; None for a TPU, whose memory is the compiler's."""
    kind = devices[0].split(":")[0]
    if kind == "cuda":
        return CudaMemory([int(name.partition(":")[2] or 0) for name in devices])
    return {"mps": MetalMemory, "cpu": HostMemory}[kind]() if kind != "xla" else None


class CudaMemory:
    """Of the fullest of several cards: what PyTorch has reserved, gaps included, for that is what runs out."""

    def __init__(self, indices: Sequence[int]):
        self._indices = list(indices)

    def begin(self) -> None:
        import torch

        torch.cuda.empty_cache()
        for index in self._indices:
            torch.cuda.reset_peak_memory_stats(index)

    def peak_bytes(self) -> float:
        import torch

        return max(torch.cuda.max_memory_reserved(index) for index in self._indices)

    def limit_bytes(self) -> float:
        return min(memory_of(index)[0] for index in self._indices)


class MetalMemory:
    """Metal has no peak; between microbatches it keeps what the last one took."""

    def begin(self) -> None:
        import torch

        torch.mps.empty_cache()

    def peak_bytes(self) -> float:
        import torch

        return torch.mps.driver_allocated_memory()

    def limit_bytes(self) -> float:
        import torch

        return min(torch.mps.recommended_max_memory(), self.peak_bytes() + HOST_SHARE * usable_memory()[1])


class HostMemory:
    """Resident memory of this process."""

    def __init__(self, proc: Path = Path("/proc/self"), usable: Callable[[], tuple[int, int]] = usable_memory):
        self._proc, self._usable = proc, usable

    def begin(self) -> None:
        try:
            (self._proc / "clear_refs").write_text("5")  # the peak starts anew; Linux only
        except OSError:
            pass

    def peak_bytes(self) -> float:
        return self._status("VmHWM") or _highest_ever()

    def limit_bytes(self) -> float:
        return (self._status("VmRSS") or _highest_ever()) + HOST_SHARE * self._usable()[1]

    def _status(self, key: str) -> int:
        try:
            found = re.search(rf"{key}:\s+(\d+) kB", (self._proc / "status").read_text())
        except OSError:
            return 0
        return 1024 * int(found[1]) if found else 0


def _highest_ever() -> float:
    """Where there is no /proc (macOS, in bytes there)."""
    import resource

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
