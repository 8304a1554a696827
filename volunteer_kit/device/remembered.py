"""The best setting of a device and a model, kept in a small file for the next start."""

from __future__ import annotations

import contextlib
import hashlib
import json
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

from volunteer_kit.device.detect import Device
from volunteer_kit.device.plan import DevicePlan
from volunteer_kit.device.tuner import Setting
from volunteer_kit.device.workload import Workload
from volunteer_kit.storage import read_json, write_whole

LARGEST_FILE = 10_000  # bytes
MOST_MEMORY = 2**50  # bytes; no device has more
FRESH = 14 * 86400  # s; what was measured on a busy day, or shrunk on a full one, is not for ever


def key_of(device: Device, plan: DevicePlan, workload: Workload, largest: int) -> dict[str, Any]:
    """All on which the best setting depends."""
    import torch

    return {
        "device": device.name,
        "memory_gb": round(device.memory_gb),
        "count": plan.count,
        "threads": plan.threads,
        "torch": torch.__version__,
        "model": asdict(workload),
        "precision": plan.precision,
        "largest": largest,
    }


class Remembered:
    """One JSON file a key, in `folder`. A file that is damaged, old, or of another key counts as none."""

    def __init__(self, folder: str | Path, key: dict[str, Any]):
        digest = hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()[:16]
        self._path, self._key = Path(folder) / f"tuned-{digest}.json", json.loads(json.dumps(key))

    def load(self) -> tuple[Setting, float] | None:
        """(the setting, bytes at its peak)"""
        try:
            if time.time() - self._path.stat().st_mtime > FRESH:
                return None
            found = read_json(self._path, limit=LARGEST_FILE)
            batch, checkpointing, peak = found["batch_size"], found["checkpointing"], found["peak_bytes"]
            sound = type(batch) is int and 1 <= batch <= self._key["largest"] and type(checkpointing) is bool
            sound = sound and 0 <= peak < MOST_MEMORY
        except (OSError, ValueError, KeyError, TypeError):
            return None
        return (Setting(batch, checkpointing), float(peak)) if sound and found.get("key") == self._key else None

    def save(self, setting: Setting, peak_bytes: float, samples_per_second: float) -> None:
        """Write the whole file or nothing; a folder that cannot be written to is no reason to stop."""
        kept = {"key": self._key, **setting._asdict(), "peak_bytes": peak_bytes}
        kept["samples_per_second"] = round(samples_per_second, 3)
        with contextlib.suppress(OSError):
            self._path.parent.mkdir(parents=True, exist_ok=True)
            write_whole(self._path, json.dumps(kept, indent=1))
