"""Which TPU is here, without importing torch_xla (seconds, and it takes hold of the TPU)."""

from __future__ import annotations

import importlib.util
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from volunteer_kit.device.table import TPUS

GOOGLE = "0x1ae0"  # its PCI vendor number
# PCI device numbers, as in torch_xla/_internal/tpu.py; v2 and v3 have the same, and v3 is what is still offered
PCI = {"0x0027": "v3", "0x005e": "v4", "0x0062": "v5p", "0x0063": "v5e", "0x006f": "v6e"}


class FoundTpu(NamedTuple):
    name: str  # TPU v3-8, as Google writes it: generation and cores
    cores: int
    memory_gb: float  # a core


def find_tpu(root: Path = Path("/"), environment: Mapping[str, str] = os.environ) -> tuple[FoundTpu | None, list[str]]:
    """The TPU that PyTorch would use, by environment and devices; and what is missing for that."""
    chips, generation = _chips(root)
    asked = environment.get("PJRT_DEVICE", "").upper()
    told = environment.get("TPU_ACCELERATOR_TYPE", "")
    is_here = chips or told or asked == "TPU" or "COLAB_TPU_ADDR" in environment
    if not is_here or asked not in ("", "TPU"):
        return None, []
    found = _named(told) or _counted(generation, chips)
    if found is None:
        return None, [_UNKNOWN.format(told=told or "nothing")]
    if importlib.util.find_spec("torch_xla") is None:
        return None, [_NO_XLA.format(name=found.name)]
    return found, []


def _named(told: str) -> FoundTpu | None:
    """v3-8, v5litepod-4, v6e-1 -> the TPU. The number counts cores, two of which are one device in a v4 and a v5p. Of
    a pod's slice this machine has eight at most."""
    match = re.fullmatch(r"(v\d+[a-z]*)-(\d{1,5})", told.lower().replace("v5litepod", "v5e"))
    if match is None or match[1] not in TPUS:
        return None
    number = int(match[2]) // (2 if match[1] in ("v4", "v5p") else 1)
    return FoundTpu(f"TPU {match[1]}-{match[2]}", max(1, min(number, 8)), TPUS[match[1]].memory_gb)


def _counted(generation: str | None, chips: int) -> FoundTpu | None:
    if generation is None or not chips:
        return None
    cores = chips * TPUS[generation].cores
    return FoundTpu(f"TPU {generation}-{cores}", cores, TPUS[generation].memory_gb)


def _chips(root: Path) -> tuple[int, str | None]:
    """(how many TPU chips the PCI bus and /dev show, their generation if the bus tells it)."""
    found = []
    for device in (root / "sys/bus/pci/devices").glob("*"):
        if _text(device / "vendor") == GOOGLE and _text(device / "device") in PCI:
            found.append(PCI[_text(device / "device")])
    if found:
        return len(found), found[0]
    # a container may not see the bus; /dev/vfio alone would be any device that is passed through to it
    return len(list((root / "dev").glob("accel[0-9]*"))), None


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8").strip().lower()
    except OSError:
        return ""


_NO_XLA = (
    "A {name} is here, but PyTorch cannot use it without torch_xla; the CPU trains instead.\n"
    "  1. Install the torch_xla of your PyTorch's version, then start the notebook's kernel anew:\n"
    "     volunteer-kit setup tpu\n"
    "  2. Or choose a GPU in the notebook's settings."
)
_UNKNOWN = (
    "A TPU seems to be here, of a kind that the kit does not know (TPU_ACCELERATOR_TYPE: {told}); it is not used.\n"
    "  1. Name it, if you know it: export TPU_ACCELERATOR_TYPE=v5e-1 (or v2-8, v3-8, v6e-1)\n"
    "  2. Or choose a GPU in the notebook's settings."
)
