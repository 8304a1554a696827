"""The devices that people have, most specific rows first, and how each trains best."""

from __future__ import annotations

import re
from typing import Literal, NamedTuple

Kind = Literal["cuda", "mps", "tpu", "cpu"]
Precision = Literal["fp32", "fp16", "bf16"]


class Row(NamedTuple):
    kind: Kind
    pattern: str  # of the device's name
    capability: tuple[int, int]  # at least this
    precision: Precision
    tflops: float  # that training reaches, about; for the CPU a thread's, for a TPU a core's
    max_batch: int  # to start with, a device; beyond it a larger one gains little
    why: str


NO_BF16 = "fp16 with loss scaling, no bf16 below SM 8.0"
BF16_UNITS = "bf16 is what its matrix units compute in"
TABLE: tuple[Row, ...] = (
    Row("cuda", r"\bP100\b", (6, 0), "fp32", 6, 64, "no tensor cores, so fp32"),
    Row("cuda", r"\bGTX 16\d\d\b", (7, 5), "fp32", 3, 64, "no tensor cores, and its fp16 is known to give NaN"),
    Row("cuda", r"\bT4\b", (7, 5), "fp16", 20, 64, NO_BF16),
    Row("cuda", r"\bV100\b", (7, 0), "fp16", 40, 64, NO_BF16),
    Row("cuda", r"\bRTX 20\d\d|TITAN RTX|Quadro RTX", (7, 5), "fp16", 25, 64, NO_BF16),
    Row("cuda", r"\b(G?B[1-3]00|H[12]00|GH200)\b", (9, 0), "bf16", 250, 64, "bf16 needs no loss scaling"),
    Row("cuda", r"\bA100\b", (8, 0), "bf16", 110, 64, "bf16 needs no loss scaling"),
    Row("cuda", r"\bL4\b", (8, 9), "bf16", 35, 64, "bf16 needs no loss scaling"),
    Row("cuda", r"\bA10G?\b", (8, 6), "bf16", 45, 64, "bf16 needs no loss scaling"),
    Row("cuda", r"\bRTX 30\d\d", (8, 6), "bf16", 35, 64, "bf16 needs no loss scaling"),
    Row("cuda", r"\b(RTX 40\d\d|L40S?)", (8, 9), "bf16", 70, 64, "bf16 needs no loss scaling"),
    Row("cuda", r"\bRTX 50\d\d", (12, 0), "bf16", 90, 64, "bf16 needs no loss scaling"),
    Row("cuda", "", (8, 0), "bf16", 30, 64, "bf16, which every card from SM 8.0 has"),
    Row("cuda", "", (7, 0), "fp16", 15, 64, NO_BF16),
    Row("cuda", "", (0, 0), "fp32", 3, 64, "no tensor cores below SM 7.0, so fp32"),
    Row("tpu", r"\bv2\b", (0, 0), "bf16", 10, 32, BF16_UNITS),
    Row("tpu", r"\bv3\b", (0, 0), "bf16", 25, 32, BF16_UNITS),
    Row("tpu", r"\bv5e\b", (0, 0), "bf16", 80, 64, BF16_UNITS),
    Row("tpu", r"\bv6e\b", (0, 0), "bf16", 300, 64, BF16_UNITS),
    Row("tpu", "", (0, 0), "bf16", 50, 32, BF16_UNITS),
    Row("mps", "", (0, 0), "fp32", 3, 32, "fp32 is what all of Metal's kernels have"),
    Row("cpu", "", (0, 0), "fp32", 0.04, 16, "fp32, the fastest here"),
)


class Tpu(NamedTuple):
    """A generation of TPUs as PyTorch sees it: a core is a device."""

    cores: int  # a chip
    memory_gb: float  # a core


# https://cloud.google.com/tpu/docs/system-architecture-tpu-vm; the two cores of a v4 or v5p chip are one device
TPUS = {
    "v2": Tpu(2, 8),
    "v3": Tpu(2, 16),
    "v4": Tpu(1, 32),
    "v5e": Tpu(1, 16),
    "v5p": Tpu(1, 95),
    "v6e": Tpu(1, 32),
}


def row_for(kind: str, name: str, capability: tuple[int, int] | None) -> Row:
    """The table's first row that fits; there is one for everything of a known kind."""
    return next(
        row
        for row in TABLE
        if row.kind == kind
        and (capability is None or capability >= row.capability)
        and re.search(row.pattern, name) is not None
    )
