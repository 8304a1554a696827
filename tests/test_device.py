"""Device plans as tables, and detection on this machine and on copied /proc and /sys trees of others."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from volunteer_kit import device as device_module
from volunteer_kit.device import (
    DEMO,
    ORIGINAL,
    TABLE,
    Device,
    Workload,
    detect_device,
    has_kernels,
    plan_device,
    usable_cores,
    usable_memory,
)
from volunteer_kit.model.dalle import Dalle, DalleConfig


def gpu(name: str, capability: tuple[int, int], memory_gb: float = 16.0, cores: int = 4) -> Device:
    return Device("cuda", name, memory_gb, memory_gb - 0.5, capability, 1, cores, 12.0)


def cpu(cores: int, ram_gb: float = 12.0) -> Device:
    return Device("cpu", f"CPU ({cores} cores)", ram_gb, ram_gb, None, 1, cores, ram_gb)


# name as CUDA gives it, capability, precision, a word of the reason
CARDS = [
    ("Tesla P100-PCIE-16GB", (6, 0), "fp32", "tensor cores"),
    ("Tesla K80", (3, 7), "fp32", "below SM 7.0"),
    ("NVIDIA GeForce GTX 1080 Ti", (6, 1), "fp32", "below SM 7.0"),
    ("NVIDIA GeForce GTX 1660 Ti", (7, 5), "fp32", "NaN"),
    ("Tesla T4", (7, 5), "fp16", "loss scaling"),
    ("Tesla V100-SXM2-16GB", (7, 0), "fp16", "no bf16"),
    ("NVIDIA GeForce RTX 2080 Ti", (7, 5), "fp16", "no bf16"),
    ("Quadro RTX 6000", (7, 5), "fp16", "no bf16"),
    ("NVIDIA TITAN V", (7, 0), "fp16", "no bf16"),
    ("NVIDIA A100-SXM4-40GB", (8, 0), "bf16", "bf16"),
    ("NVIDIA A10G", (8, 6), "bf16", "bf16"),
    ("NVIDIA L4", (8, 9), "bf16", "bf16"),
    ("NVIDIA L40S", (8, 9), "bf16", "bf16"),
    ("NVIDIA GeForce RTX 3090", (8, 6), "bf16", "bf16"),
    ("NVIDIA GeForce RTX 4060 Laptop GPU", (8, 9), "bf16", "bf16"),
    ("NVIDIA GeForce RTX 5090", (12, 0), "bf16", "bf16"),
    ("NVIDIA H100 80GB HBM3", (9, 0), "bf16", "bf16"),
    ("NVIDIA H200", (9, 0), "bf16", "bf16"),
    ("NVIDIA B200", (10, 0), "bf16", "bf16"),
    ("A card of 2031", (15, 0), "bf16", "from SM 8.0"),
]


@pytest.mark.parametrize(("name", "capability", "precision", "why"), CARDS)
def test_precision_by_card(name, capability, precision, why):
    for workload in (None, ORIGINAL):
        plan = plan_device(gpu(name, capability, 40.0), workload)
        assert plan.precision == precision and why in plan.why and name in plan.why
        assert plan.batch_size >= 1 and not plan.warning and plan.threads == 4


def test_every_row_of_the_table_is_reached():
    reached = {next(i for i, row in enumerate(TABLE) if device_module._fits(row, gpu(*card[:2]))) for card in CARDS}
    reached |= {len(TABLE) - 2, len(TABLE) - 1}  # mps and cpu, below
    assert reached == set(range(len(TABLE)))


@pytest.mark.parametrize(
    ("device", "batch"),
    [
        (gpu("Tesla P100-PCIE-16GB", (6, 0)), 1),
        (gpu("Tesla T4", (7, 5), 15.8), 2),
        (gpu("NVIDIA A100-SXM4-40GB", (8, 0), 42.0), 8),
        (gpu("NVIDIA H200", (9, 0), 150.0), 16),
        (cpu(2), 1),
        (cpu(64, 256.0), 1),
    ],
)
def test_batch_of_the_original_model(device, batch):
    assert plan_device(device, ORIGINAL).batch_size == batch


def test_a_small_model_gets_a_useful_batch_everywhere():
    assert plan_device(cpu(2)).batch_size == 16 == plan_device(cpu(1), DEMO).batch_size
    assert plan_device(gpu("Tesla T4", (7, 5))).batch_size == 64
    apple = Device("mps", "Apple GPU (Metal)", 10.0, 5.0, None, 1, 8, 8.0)
    assert (plan_device(apple).precision, plan_device(apple).batch_size) == ("fp32", 32)


DEEP = Workload(parameters=300_000_000, tokens=1280, dim=1024, depth=24, logits=16_000_000)


def test_little_memory_first_costs_batch_then_recomputing_then_a_warning():
    plans = [plan_device(gpu("NVIDIA H100 80GB HBM3", (9, 0), memory), DEEP) for memory in (900, 80, 8, 4)]
    assert [plan.checkpointing for plan in plans] == [False, False, True, True]
    sizes = [plan.batch_size for plan in plans]
    assert sizes[0] > sizes[1] > 2 and sizes[2] >= 2 and sizes[3] == 1
    assert "free memory" in plans[1].why and "recomputes" in plans[2].why
    assert not plans[2].warning and "needs about" in plans[3].warning and "  1. " in plans[3].warning
    for plan, memory in zip(plans[:3], (900, 80, 8), strict=True):
        taken = plan.batch_size * DEEP.sample_bytes(plan.precision, plan.checkpointing) + 12 * DEEP.parameters
        assert taken <= 0.8 * memory * 1e9


def test_peers_on_one_machine_share_it():
    alone, shared = plan_device(cpu(8)), plan_device(cpu(8), peers_on_machine=3)
    assert (alone.threads, shared.threads, plan_device(cpu(2), peers_on_machine=3).threads) == (8, 2, 1)
    small = plan_device(gpu("NVIDIA A100-SXM4-40GB", (8, 0), 42.0), ORIGINAL, peers_on_machine=4)
    assert small.batch_size == 4


def test_the_memory_estimate_is_near_what_autograd_keeps():
    config = DalleConfig(
        dim=64, depth=3, heads=2, dim_head=32, text_seq_len=16, num_text_tokens=100, image_fmap_size=8,
        num_image_tokens=100,
    )  # fmt: skip
    model = Dalle(config)
    own = {param.untyped_storage().data_ptr() for param in model.parameters()}
    kept: dict[int, tuple[int, torch.Tensor]] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            kept[storage.data_ptr()] = (storage.nbytes(), tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        model(torch.ones(4, 16, dtype=torch.int64), torch.zeros(4, 64, dtype=torch.int64))
    measured = sum(size for size, _ in kept.values()) / 4
    work = Workload(model.num_parameters(), 80, 64, 3, 16 * 116 + 64 * 100)
    assert 0.6 < (work.sample_bytes("fp32", False) + work.layer_bytes("fp32", False) / 4) / measured < 1.7


# kernels -------------------------------------------------------------------------------------------------------

KAGGLE = ["sm_70", "sm_75", "sm_80", "sm_86", "sm_90", "sm_100", "sm_120", "compute_120"]


@pytest.mark.parametrize(
    ("capability", "arch_list", "runs"),
    [
        ((6, 0), KAGGLE, False),  # Kaggle's P100
        ((6, 0), ["sm_50", "sm_60", "sm_70"], True),
        ((6, 1), ["sm_60"], True),  # later minor version
        ((6, 0), ["sm_61"], False),
        ((7, 5), KAGGLE, True),
        ((8, 9), KAGGLE, True),
        ((9, 0), KAGGLE, True),
        ((12, 1), KAGGLE, True),
        ((15, 0), KAGGLE, True),  # through PTX
        ((15, 0), KAGGLE[:-1], False),
        ((9, 0), ["sm_90a"], True),
        ((10, 0), ["sm_90a", "compute_90a"], False),
        ((10, 3), ["sm_100"], True),
        ((8, 0), [], False),
        ((8, 0), ["gfx90a", ""], False),
    ],
)
def test_kernels(capability, arch_list, runs):
    assert has_kernels(capability, arch_list) is runs


def stand_in_cuda(monkeypatch, cards, arch_list):
    """torch.cuda as on a machine with these cards: (name, capability, free GB)."""
    answers = {
        "is_available": lambda: True,
        "device_count": lambda: len(cards),
        "get_device_name": lambda index: cards[index][0],
        "get_device_capability": lambda index: cards[index][1],
        "mem_get_info": lambda index: (int(cards[index][2] * 1e9), int(16e9)),
        "get_arch_list": lambda: arch_list,
    }
    for name, answer in answers.items():
        monkeypatch.setattr(torch.cuda, name, answer)


def test_a_card_without_kernels_is_named_and_passed_over(monkeypatch):
    stand_in_cuda(monkeypatch, [("Tesla P100-PCIE-16GB", (6, 0), 15.5)], KAGGLE)
    device = detect_device()
    (problem,) = device.problems
    assert device.kind in ("cpu", "mps") and "sm_60" in problem and "  1. " in problem and "P100" in problem
    stand_in_cuda(monkeypatch, [("Tesla P100-PCIE-16GB", (6, 0), 15.5), ("Tesla T4", (7, 5), 14.5)], KAGGLE)
    device = detect_device()
    assert (device.kind, device.name, device.capability, device.count) == ("cuda", "Tesla T4", (7, 5), 1)
    assert len(device.problems) == 1 and device.free_gb == pytest.approx(14.5)


def test_two_equal_cards_are_counted(monkeypatch):
    stand_in_cuda(monkeypatch, [("Tesla T4", (7, 5), 14.5)] * 2, KAGGLE)
    assert detect_device().count == 2 and detect_device(prefer="cpu").kind == "cpu"


@pytest.mark.skipif(torch.cuda.is_available(), reason="CUDA works here")
def test_a_driver_without_cuda_in_torch_is_told(tmp_path):
    (tmp_path / "dev").mkdir()
    (tmp_path / "dev/nvidia0").touch()
    (problem,) = detect_device(root=tmp_path).problems
    assert "nvidia-smi" in problem


# this machine and others ---------------------------------------------------------------------------------------


def write(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root


MEMINFO = "MemTotal:       16000000 kB\nMemFree:  1000 kB\nMemAvailable:   12000000 kB\n"


def test_detection_on_this_machine():
    device = detect_device(prefer="cpu")
    assert device.kind == "cpu" and 1 <= device.cores <= os.cpu_count()
    assert 0 < device.free_gb <= device.memory_gb and device.problems == ()
    assert plan_device(device).threads == device.cores


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="no affinity on this system")
def test_affinity_counts():
    before = os.sched_getaffinity(0)
    try:
        os.sched_setaffinity(0, {min(before)})
        assert usable_cores() == 1
    finally:
        os.sched_setaffinity(0, before)


@pytest.mark.parametrize(
    ("files", "cores"),
    [
        ({}, 8),
        ({"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/cpu.max": "max 100000\n"}, 8),
        ({"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/cpu.max": "200000 100000\n"}, 2),
        ({"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/cpu.max": "50000 100000\n"}, 1),
        ({"proc/self/cgroup": "0::/a/b\n", "sys/fs/cgroup/a/b/x": "", "sys/fs/cgroup/a/cpu.max": "350000 100000"}, 3),
        ({"proc/self/cgroup": "0::/not/mounted\n", "sys/fs/cgroup/cpu.max": "400000 100000"}, 4),
        (
            {
                "proc/self/cgroup": "5:cpuacct,cpu:/docker/1\n4:memory:/\n",
                "sys/fs/cgroup/cpu/cpu.cfs_quota_us": "200000",
                "sys/fs/cgroup/cpu/cpu.cfs_period_us": "100000",
            },
            2,
        ),
        (
            {
                "proc/self/cgroup": "1:cpu:/\n",
                "sys/fs/cgroup/cpu/cpu.cfs_quota_us": "-1",
                "sys/fs/cgroup/cpu/cpu.cfs_period_us": "100000",
            },
            8,
        ),
        ({"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/cpu.max": "nonsense"}, 8),
    ],
)
def test_cores_by_container_quota(tmp_path, monkeypatch, files, cores):
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(8)), raising=False)
    assert usable_cores(write(tmp_path, files)) == cores


GB = 2**30


@pytest.mark.parametrize(
    ("files", "total", "free"),
    [
        ({}, 16_000_000 * 1024, 12_000_000 * 1024),
        (
            {
                "proc/self/cgroup": "0::/pod\n",
                "sys/fs/cgroup/pod/memory.max": f"{4 * GB}",
                "sys/fs/cgroup/pod/memory.current": f"{3 * GB}",
                "sys/fs/cgroup/pod/memory.stat": f"anon 5\ninactive_file {GB}\n",
            },
            4 * GB,
            2 * GB,
        ),
        (
            {
                "proc/self/cgroup": "4:memory:/docker/1\n",
                "sys/fs/cgroup/memory/memory.limit_in_bytes": f"{2 * GB}",
                "sys/fs/cgroup/memory/memory.usage_in_bytes": f"{2 * GB + 5}",
            },
            2 * GB,
            0,
        ),
        (
            {
                "proc/self/cgroup": "0::/\n",
                "sys/fs/cgroup/memory.max": "max",
                "sys/fs/cgroup/memory.current": "1",
            },
            16_000_000 * 1024,
            12_000_000 * 1024,
        ),
    ],
)
def test_memory_by_container_limit(tmp_path, files, total, free):
    assert usable_memory(write(tmp_path, {"proc/meminfo": MEMINFO, **files})) == (total, free)


def test_memory_where_there_is_no_proc(tmp_path):
    total, free = usable_memory(tmp_path)
    assert total == os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") and 0 < free < total


def test_the_command_prints_detection_and_plan():
    environment = {**os.environ, "PYTHONPATH": str(Path(device_module.__file__).parents[1])}
    command = [sys.executable, "-m", "volunteer_kit.device"]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=60, check=True)
    for words in ("Device ", "usable CPU cores", "Plan for the demo's model: batch", "125.9 M", "because: "):
        assert words in done.stdout
