"""NVIDIA cards, and whether the PyTorch that is installed has kernels for them."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple


class Cards(NamedTuple):
    """Equal cards that can be used, the first one's kind."""

    name: str
    capability: tuple[int, int]
    memory_gb: float  # of one
    indices: tuple[int, ...]  # PyTorch's
    free_gb: tuple[float, ...]  # of each


def find_cards(root: Path) -> tuple[Cards | None, list[str]]:
    """The first usable card and those like it, and what is wrong with cards that cannot be used."""
    import torch

    if not torch.cuda.is_available():
        problem = (root / "dev/nvidia0").exists()
        return None, [_NO_CUDA.format(version=torch.__version__)] if problem else []
    problems: list[str] = []
    usable: list[tuple[int, str, tuple[int, int]]] = []
    arch_list = torch.cuda.get_arch_list()
    for index in range(torch.cuda.device_count()):
        name, capability = torch.cuda.get_device_name(index), torch.cuda.get_device_capability(index)
        if torch.version.hip is None and not has_kernels(capability, arch_list):
            problems.append(_no_kernels(name, capability, arch_list, torch.__version__))
        else:
            usable.append((index, name, capability))
    if not usable:
        return None, problems
    _, name, capability = usable[0]
    indices = tuple(index for index, *kind in usable if kind == [name, capability])
    memory = [memory_of(index) for index in indices]
    free = tuple(free / 1e9 for free, _ in memory)
    return Cards(name, capability, min(total for _, total in memory) / 1e9, indices, free), problems


def memory_of(index: int) -> tuple[float, float]:
    """(bytes free for this process, what it has already reserved counted in; bytes it may have) on a card."""
    import torch

    free, total = torch.cuda.mem_get_info(index)
    if not torch.cuda.is_initialized():
        return free, total
    share = getattr(torch.cuda, "get_per_process_memory_fraction", lambda _: 1.0)(index)  # somebody may have set one
    return min(free + torch.cuda.memory_reserved(index), share * total), share * total


def has_kernels(capability: tuple[int, int], arch_list: Iterable[str]) -> bool:
    """Whether a PyTorch built for `arch_list` (torch.cuda.get_arch_list()) runs on a card of this capability.

    Machine code (sm_86) runs on later minor versions of the same major one; PTX (compute_90) on everything later;
    sm_90a and its like only on their own card.
    """
    major, minor = capability
    for arch in arch_list:
        match = re.fullmatch(r"(sm|compute)_(\d+)(\d)([a-z]?)", arch)
        if not match:
            continue
        kind, built = match[1], (int(match[2]), int(match[3]))
        if kind == "compute" and not match[4] and built <= capability:
            return True
        if kind == "sm" and built[0] == major and (built[1] == minor if match[4] else built[1] <= minor):
            return True
    return False


def _no_kernels(name: str, capability: tuple[int, int], arch_list: Iterable[str], version: str) -> str:
    needed = f"sm_{capability[0]}{capability[1]}"
    return (
        f"{name} is here, but this PyTorch ({version}) has no kernels for it: the card needs {needed}, "
        f"the build has {', '.join(arch_list)}. Another device is used instead.\n"
        "  1. On Kaggle or Colab, choose another accelerator (T4) in the notebook's settings and run it again.\n"
        "  2. On a machine of your own, take a PyTorch built for older cards, then check with the second line:\n"
        "     pip install torch --index-url https://download.pytorch.org/whl/cu126\n"
        '     python -c "import torch; print(torch.cuda.get_arch_list())"'
    )


_NO_CUDA = (
    "An NVIDIA GPU is in this machine, but PyTorch {version} cannot use it; the CPU trains instead.\n"
    "  1. Look whether the driver works: nvidia-smi\n"
    "  2. If it does, install a PyTorch with CUDA (not in a hosted notebook): https://pytorch.org/get-started/locally"
)
