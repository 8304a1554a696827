"""What this machine can do (detect_device) and how it should train (plan_device), each choice with its reason.

`python -m volunteer_kit.device` prints both.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, NamedTuple

import torch

Precision = Literal["fp32", "fp16", "bf16"]

MICROBATCH_SECONDS = 2.0  # longer ones delay leaving and overshoot the epoch; shorter ones gain nothing
SAFE_SHARE = 0.8  # of the free memory; the rest is for fragments and for what other programs take
FLOATS_PER_UNIT = 18  # kept for backward per layer, token and channel; measured on the kit's model, ff_mult 4
FOLDED = 5  # dim**2 numbers that a layer keeps in fp32: its output matrices, LayerScale folded into them
BUSY_TOKENS = 2048  # in a microbatch keep a device busy; to recompute activations for more of them gains nothing


@dataclass(frozen=True)
class Device:
    """One place to train on."""

    kind: Literal["cuda", "mps", "cpu"]
    name: str
    memory_gb: float  # 1e9 bytes in all; a CPU's is the RAM this process may use
    free_gb: float  # of it, free now
    capability: tuple[int, int] | None  # CUDA's compute capability: (7, 5) for a T4
    count: int  # equal devices in this machine
    cores: int  # CPU cores this process may really use: affinity and container quota
    ram_free_gb: float
    problems: tuple[str, ...] = ()  # accelerators that are here but cannot be used, and what to do


@dataclass(frozen=True)
class Workload:
    """What one sample costs; enough to choose a first batch size. The tuner measures the rest."""

    parameters: int  # trainable
    tokens: int  # per sample, text and image
    dim: int
    depth: int
    logits: int  # text tokens x text vocabulary + image tokens x codes
    reversible: bool = False  # then recomputing needs no activations at all

    @property
    def flops(self) -> float:
        """Of forward and backward of one sample; sharing weights saves memory, not work."""
        return 6.0 * (self.tokens * self.depth * 16 * self.dim**2 + self.dim * self.logits)

    def sample_bytes(self, precision: Precision, checkpointing: bool) -> float:
        """Memory of one sample's activations."""
        width = self.tokens * self.dim
        one_layer = FLOATS_PER_UNIT * width
        layers = self.depth * one_layer
        if checkpointing:
            layers = one_layer + (4 if self.reversible else self.depth) * width
        size = 4 if precision == "fp32" else 2.4  # norms and softmax stay in fp32
        return layers * size + 3 * 4 * self.logits

    def layer_bytes(self, precision: Precision, checkpointing: bool) -> float:
        """Memory that a microbatch takes whatever its size."""
        return 0 if checkpointing or precision != "fp32" else self.depth * FOLDED * self.dim**2 * 4


# Of volunteer_kit/model/dalle.py's presets, for the printout; a run passes its own.
DEMO = Workload(parameters=713_360, tokens=80, dim=128, depth=4, logits=16 * 272 + 64 * 128)
ORIGINAL = Workload(125_900_000, 1280, 1024, 64, 256 * 32_356 + 1024 * 8192, reversible=True)


@dataclass(frozen=True)
class DevicePlan:
    """How this machine trains; nobody else needs to know or agree."""

    batch_size: int  # samples in a microbatch
    precision: Precision
    checkpointing: bool  # the model's: recompute activations in backward, a third slower, far less memory
    threads: int  # for torch on the CPU
    why: str
    warning: str = ""


class _Row(NamedTuple):
    kind: str
    pattern: str  # of the device's name
    capability: tuple[int, int]  # at least this
    precision: Precision
    tflops: float  # that training reaches, about; for the CPU a thread's
    max_batch: int
    why: str


NO_BF16 = "fp16 with loss scaling, no bf16 below SM 8.0"
TABLE: tuple[_Row, ...] = (
    _Row("cuda", r"\bP100\b", (6, 0), "fp32", 6, 64, "no tensor cores, so fp32"),
    _Row("cuda", r"\bGTX 16\d\d\b", (7, 5), "fp32", 3, 64, "no tensor cores, and its fp16 is known to give NaN"),
    _Row("cuda", r"\bT4\b", (7, 5), "fp16", 20, 64, NO_BF16),
    _Row("cuda", r"\bV100\b", (7, 0), "fp16", 40, 64, NO_BF16),
    _Row("cuda", r"\bRTX 20\d\d|TITAN RTX|Quadro RTX", (7, 5), "fp16", 25, 64, NO_BF16),
    _Row("cuda", r"\b(G?B[1-3]00|H[12]00|GH200)\b", (9, 0), "bf16", 250, 64, "bf16 needs no loss scaling"),
    _Row("cuda", r"\bA100\b", (8, 0), "bf16", 110, 64, "bf16 needs no loss scaling"),
    _Row("cuda", r"\bL4\b", (8, 9), "bf16", 35, 64, "bf16 needs no loss scaling"),
    _Row("cuda", r"\bA10G?\b", (8, 6), "bf16", 45, 64, "bf16 needs no loss scaling"),
    _Row("cuda", r"\bRTX 30\d\d", (8, 6), "bf16", 35, 64, "bf16 needs no loss scaling"),
    _Row("cuda", r"\b(RTX 40\d\d|L40S?)", (8, 9), "bf16", 70, 64, "bf16 needs no loss scaling"),
    _Row("cuda", r"\bRTX 50\d\d", (12, 0), "bf16", 90, 64, "bf16 needs no loss scaling"),
    _Row("cuda", "", (8, 0), "bf16", 30, 64, "bf16, which every card from SM 8.0 has"),
    _Row("cuda", "", (7, 0), "fp16", 15, 64, NO_BF16),
    _Row("cuda", "", (0, 0), "fp32", 3, 64, "no tensor cores below SM 7.0, so fp32"),
    _Row("mps", "", (0, 0), "fp32", 3, 32, "fp32 is what all of Metal's kernels have"),
    _Row("cpu", "", (0, 0), "fp32", 0.04, 16, "fp32, the fastest here"),
)


def detect_device(prefer: Literal["auto", "cpu"] = "auto", *, root: Path = Path("/")) -> Device:
    """The best device that PyTorch can really use here; what was found and cannot be used is in `.problems`.

    :param root: where /proc and /sys are; another one in tests.
    """
    cores, ram, ram_free = usable_cores(root), *usable_memory(root)
    problems: list[str] = []
    if prefer == "auto" and torch.cuda.is_available():
        for index in range(torch.cuda.device_count()):
            name, capability = torch.cuda.get_device_name(index), torch.cuda.get_device_capability(index)
            arch_list = torch.cuda.get_arch_list()
            if torch.version.hip is None and not has_kernels(capability, arch_list):
                problems.append(_no_kernels(name, capability, arch_list))
                continue
            free, total = torch.cuda.mem_get_info(index)
            count = sum(torch.cuda.get_device_name(i) == name for i in range(torch.cuda.device_count()))
            return Device(
                "cuda", name, total / 1e9, free / 1e9, capability, count, cores, ram_free / 1e9, tuple(problems)
            )
    elif prefer == "auto" and (root / "dev/nvidia0").exists():
        problems.append(_NO_CUDA.format(version=torch.__version__))
    if prefer == "auto" and torch.backends.mps.is_available():
        share = 0.6  # of the memory it has in common with the CPU
        name = "Apple GPU (Metal)"
        return Device("mps", name, share * ram / 1e9, share * ram_free / 1e9, None, 1, cores, ram_free / 1e9)
    name = f"CPU ({cores} core{'s' if cores > 1 else ''})"
    return Device("cpu", name, ram / 1e9, ram_free / 1e9, None, 1, cores, ram_free / 1e9, tuple(problems))


def plan_device(device: Device, workload: Workload | None = None, *, peers_on_machine: int = 1) -> DevicePlan:
    """A plan to start with, from the table's first row that fits.

    :param workload: of the run's model; None: small enough that memory does not matter.
    :param peers_on_machine: volunteers that share this machine's cores and memory.
    """
    row = next(row for row in TABLE if _fits(row, device))
    peers = max(1, peers_on_machine)
    threads = max(1, device.cores // peers)
    tflops = row.tflops * (threads if device.kind == "cpu" else 1 / peers)
    work = workload or DEMO
    batch = _power_of_two(min(row.max_batch, MICROBATCH_SECONDS * tflops * 1e12 / work.flops))
    reasons = [f"{device.name}: {row.why}"]
    if batch < row.max_batch:
        reasons.append(f"a microbatch takes about {max(1, round(batch * work.flops / tflops / 1e12))} s")

    # On a GPU: weights, gradients, accumulators. On the CPU also the optimizer and the averager's buffers.
    fixed = work.parameters * (28 if device.kind == "cpu" else 12)
    room = device.free_gb * 1e9 / peers * SAFE_SHARE - fixed
    enough, warning = min(batch, math.ceil(BUSY_TOKENS / work.tokens)), ""
    room_without = room - work.layer_bytes(row.precision, False)
    checkpointing = enough * work.sample_bytes(row.precision, False) > room_without
    if checkpointing:
        reasons.append("recomputes activations to save memory")
    else:
        room = room_without
    by_memory = _power_of_two(room / work.sample_bytes(row.precision, checkpointing))
    if by_memory < batch:
        batch = by_memory
        reasons.append(f"batch of {batch} by {device.free_gb:.1f} GB of free memory")
    if work.sample_bytes(row.precision, checkpointing) > room:
        needed = (fixed + work.sample_bytes(row.precision, checkpointing)) / SAFE_SHARE / 1e9
        warning = (
            f"This model needs about {needed:.1f} GB on {device.name}; {device.free_gb / peers:.1f} GB are free.\n"
            "  1. Close other programs or notebooks that use its memory.\n  2. Or join a run with a smaller model."
        )
    if device.kind == "cpu":
        reasons.append(f"{threads} thread{'s' if threads > 1 else ''}")
    return DevicePlan(batch, row.precision, checkpointing, threads, "; ".join(reasons), warning)


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


def usable_cores(root: Path = Path("/")) -> int:
    """CPU cores this process may use: its affinity, and a container's quota, which os.cpu_count() does not know."""
    try:
        cores = float(len(os.sched_getaffinity(0)))
    except AttributeError:  # macOS
        cores = float(os.cpu_count() or 1)
    for folder in _cgroups(root, "cpu"):
        old = _numbers(folder / "cpu.cfs_quota_us", 1) + _numbers(folder / "cpu.cfs_period_us", 1)
        limit = _numbers(folder / "cpu.max", 2) or old
        if len(limit) == 2 and limit[0] > 0 and limit[1] > 0:  # -1: no quota
            cores = min(cores, limit[0] / limit[1])
    return max(1, int(cores + 0.01))


def usable_memory(root: Path = Path("/")) -> tuple[int, int]:
    """(bytes of RAM this process may have, bytes of it free now), a container's limit considered."""
    info = dict(re.findall(r"(\w+):\s+(\d+) kB", _text(root / "proc/meminfo")))
    if "MemTotal" in info:
        total = int(info["MemTotal"]) * 1024
        free = int(info.get("MemAvailable", info["MemTotal"])) * 1024
    else:  # macOS tells only the total
        total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        free = total // 2
    for folder in _cgroups(root, "memory"):
        limit = _numbers(folder / "memory.max", 1) or _numbers(folder / "memory.limit_in_bytes", 1)
        used = _numbers(folder / "memory.current", 1) or _numbers(folder / "memory.usage_in_bytes", 1)
        if limit and used and limit[0] < total:
            cache = re.search(r"^(?:total_)?inactive_file (\d+)", _text(folder / "memory.stat"), re.MULTILINE)
            taken = used[0] - (int(cache[1]) if cache else 0)  # the kernel gives unused file cache back
            total = int(limit[0])
            free = min(free, max(0, int(limit[0] - taken)))
    return total, free


def _cgroups(root: Path, controller: str) -> list[Path]:
    """Folders of this process's control groups, its own and all above it; version 2 and 1."""
    folders = []
    for line in _text(root / "proc/self/cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers == "" or controller in controllers.split(","):
            base = root / "sys/fs/cgroup" / (controller if controllers else "")
            inner = base / path.lstrip("/")
            folders += [inner, *(parent for parent in inner.parents if base in (parent, *parent.parents))]
    return [folder for folder in folders if folder.is_dir()]


def _text(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""


def _numbers(path: Path, count: int) -> tuple[float, ...]:
    """The first numbers of a file, "max" being infinite; () if there are fewer."""
    words = _text(path).split()[:count]
    numbers = tuple(math.inf if word == "max" else float(word) for word in words if re.fullmatch(r"max|-?\d+", word))
    return numbers if len(numbers) == count else ()


def _fits(row: _Row, device: Device) -> bool:
    enough = device.capability is None or device.capability >= row.capability
    return row.kind == device.kind and enough and re.search(row.pattern, device.name) is not None


def _power_of_two(limit: float) -> int:
    return 2 ** int(math.log2(limit)) if limit >= 1 else 1


def _no_kernels(name: str, capability: tuple[int, int], arch_list: Iterable[str]) -> str:
    needed = f"sm_{capability[0]}{capability[1]}"
    return (
        f"{name} is here, but this PyTorch ({torch.__version__}) has no kernels for it: the card needs {needed}, "
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


def _main() -> None:
    device = detect_device()
    print(f"Device   {device.name}, {device.memory_gb:.1f} GB, {device.free_gb:.1f} GB free", end="")
    print(f", compute capability {'.'.join(map(str, device.capability))}" if device.capability else "")
    print(f"Machine  {device.cores} usable CPU cores, {device.ram_free_gb:.1f} GB of RAM free")
    print(f"PyTorch  {torch.__version__}")
    for problem in device.problems:
        print(f"Problem  {problem}")
    for title, workload in (("the demo's model", DEMO), ("the original, 125.9 M parameters", ORIGINAL)):
        plan = plan_device(device, workload)
        recompute = ", recomputing activations" if plan.checkpointing else ""
        print(f"Plan for {title}: batch {plan.batch_size}, {plan.precision}, {plan.threads} CPU threads{recompute}")
        print(f"         because: {plan.why}")
        if plan.warning:
            print(f"Warning  {plan.warning}")


if __name__ == "__main__":
    _main()
