"""A training step of the original's model: dalle-pytorch's own DALLE, the kit's, and the kit's recomputing."""

from __future__ import annotations

from benchmarks import model
from benchmarks.gpu_parts.part import Setting, Tell

BATCH, ROUNDS = 4, 5
NAMES = ("dalle_pytorch", "kit", "kit_checkpointing")


def measure(setting: Setting, tell: Tell, precision: str) -> None:
    """Seconds a step and peak memory of each, speedup over dalle-pytorch as the median of neighbouring steps."""
    size = "tiny" if setting.tiny else "cuda"
    rounds, batch = (2, 2) if setting.tiny else (ROUNDS, BATCH)
    rows = model.compare(rounds, setting.device, precision, True, batch, size)
    for name, row in zip(NAMES, rows, strict=True):
        keys = ("seconds", "peak_mb", "speedup", "loss_gap", "grad_gap")
        tell(**{f"{name}_{key}": row[key] for key in keys})
    ours = rows[1]
    tell(batch=batch, precision=precision, speedup=ours["speedup"], memory_ratio=ours["memory_ratio"])
    tell.summary(
        f"{rows[0]['seconds']:.3f} s and {rows[0]['peak_mb']:,.0f} MB; the kit {ours['seconds']:.3f} s "
        f"({ours['speedup']:.2f} times) and {ours['peak_mb']:,.0f} MB, recomputing {rows[2]['peak_mb']:,.0f} MB"
    )
