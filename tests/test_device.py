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
    memory_kills,
    memory_limit,
    memory_meter,
    plan_device,
    tuner_for,
    usable_cores,
    usable_memory,
    with_batch_size,
)
from volunteer_kit.device.memory import CudaMemory, HostMemory
from volunteer_kit.device.table import TPUS, row_for
from volunteer_kit.device.tpu import find_tpu
from volunteer_kit.model.dalle import PRESETS, Dalle, DalleConfig


@pytest.fixture(autouse=True)
def no_tpu(monkeypatch):
    """None on this machine, whatever it is."""
    for name in ("PJRT_DEVICE", "TPU_ACCELERATOR_TYPE", "COLAB_TPU_ADDR"):
        monkeypatch.delenv(name, raising=False)


ROOT = Path(device_module.__file__).parents[2]


def gpu(name: str, capability: tuple[int, int], memory_gb: float = 16.0, cores: int = 4) -> Device:
    return Device("cuda", name, memory_gb, memory_gb - 0.5, capability, 1, cores, 12.0)


def cpu(cores: int, ram_gb: float = 12.0) -> Device:
    return Device("cpu", f"CPU ({cores} cores)", ram_gb, ram_gb, None, 1, cores, ram_gb)


APPLE = Device("mps", "Apple GPU (Metal)", 10.0, 5.0, None, 1, 8, 8.0)

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


def tpu(name: str, cores: int, memory_gb: float) -> Device:
    return Device("tpu", f"TPU {name}", memory_gb, memory_gb, None, cores, 96, 300.0)


def test_every_row_of_the_table_is_reached():
    others = [tpu(f"{generation}-8", 8, 16.0) for generation in TPUS] + [APPLE, cpu(2)]
    devices = [gpu(*card[:2]) for card in CARDS] + others
    reached = {TABLE.index(row_for(device.kind, device.name, device.capability)) for device in devices}
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
    assert (plan_device(APPLE).precision, plan_device(APPLE).batch_size) == ("fp32", 32)


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


@pytest.mark.parametrize(
    ("target", "batch"), [(None, 64), (4096, 64), (256, 32), (64, 8), (8, 1), (1, 1)], ids=lambda value: str(value)
)
def test_a_microbatch_is_a_small_part_of_the_swarms_batch(target, batch):
    plan = plan_device(gpu("Tesla T4", (7, 5)), target_batch_size=target)
    assert plan.batch_size == batch and (f"the swarm's {target}" in plan.why) == (batch < 64)


def two(name: str, capability: tuple[int, int], free: tuple[float, ...]) -> Device:
    return Device("cuda", name, 16, max(free), capability, len(free), 4, 28.0, (), tuple(range(len(free))), free)


def test_kaggles_two_cards_share_a_microbatch():
    one, both = (plan_device(two("Tesla T4", (7, 5), (15.0,) * n), ORIGINAL) for n in (1, 2))
    assert (one.devices, one.count) == (("cuda:0",), 1)
    assert (both.devices, both.count, both.precision) == (("cuda:0", "cuda:1"), 2, "fp16")
    assert both.batch_size == 2 * one.batch_size and "2 of 2 equal cards" in both.why


def test_a_card_that_somebody_uses_is_left_to_him():
    plan = plan_device(two("NVIDIA L4", (8, 9), (3.0, 21.0, 22.0)))
    assert plan.devices == ("cuda:1", "cuda:2") and "2 of 3 equal cards, the others are in use" in plan.why
    plan = plan_device(two("NVIDIA L4", (8, 9), (3.0, 21.0, 22.0)), peers_on_machine=2)
    assert plan.devices == ("cuda:2",), "several volunteers do not share several cards"


def test_the_plans_devices_are_the_cards_that_work():
    """A P100 without kernels is number 0, and the T4 number 1."""
    plan = plan_device(Device("cuda", "Tesla T4", 16, 15, (7, 5), 1, 4, 12.0, ("a P100",), (1,), (15.0,)))
    assert plan.devices == ("cuda:1",)


def test_a_small_swarm_does_not_need_all_cards():
    plan = plan_device(two("Tesla T4", (7, 5), (15.0, 15.0)), target_batch_size=8)
    assert (plan.batch_size, plan.count, plan.devices) == (1, 1, ("cuda:0",))


@pytest.mark.parametrize(
    ("name", "cores", "memory_gb", "original"),  # samples of the original's model on a core, recomputing, parts
    [
        ("v2-8", 8, 8.0, (2, True, 1)),
        ("v3-8", 8, 16.0, (4, True, 1)),
        ("v5e-1", 1, 16.0, (16, True, 1)),
        ("v6e-1", 1, 32.0, (64, True, 1)),
    ],
)
def test_plans_of_tpus(name, cores, memory_gb, original):
    for workload, expected in ((None, None), (ORIGINAL, original)):
        plan = plan_device(tpu(name, cores, memory_gb), workload)
        assert (plan.precision, plan.devices, plan.count) == ("bf16", ("xla",), cores)
        assert plan.batch_size % (cores * plan.parts) == 0
        assert not plan.warning and name in plan.why and "matrix units" in plan.why
        if expected is None:
            assert (plan.checkpointing, plan.parts) == (False, 1) and plan.batch_size >= 32 * cores
        else:
            assert (plan.batch_size // cores, plan.checkpointing, plan.parts) == expected
            assert "for a larger batch to each transfer of gradients" in plan.why


@pytest.mark.parametrize(
    ("memory_gb", "target", "batch", "parts"),
    [(16.0, None, 16, 1), (6.0, None, 16, 2), (5.0, None, 16, 4), (5.0, 96, 12, 3), (5.0, 24, 3, 1), (5.0, 8, 1, 1)],
)
def test_a_tpu_sums_the_gradients_of_what_does_not_fit_at_once(memory_gb, target, batch, parts):
    plan = plan_device(tpu("v5e-1", 1, memory_gb), ORIGINAL, target_batch_size=target)
    assert (plan.batch_size, plan.parts) == (batch, parts)
    assert (f"in {parts} parts, whose gradients are summed on the device" in plan.why) == (parts > 1)
    assert plan.batch_size % plan.parts == 0


@pytest.mark.parametrize(
    ("asked", "batch", "parts"), [(1, 1, 1), (3, 3, 1), (4, 4, 1), (6, 4, 1), (9, 8, 2), (63, 60, 15), (64, 64, 16)]
)
def test_a_tpu_computes_the_size_that_somebody_chose_in_parts_that_fit(asked, batch, parts):
    """It has no tuner that takes less when memory runs out."""
    planned = plan_device(tpu("v5e-1", 1, 5.0), ORIGINAL, target_batch_size=96)
    assert planned.fits == 4
    plan = with_batch_size(planned, asked)
    assert (plan.batch_size, plan.parts) == (batch, parts)
    said = f"a batch of {batch}, " + ("as you chose" if batch == asked else f"not {asked}: a multiple of the 4 that")
    assert said in plan.why
    assert plan.why.count("in parts") == 0 and plan.why.count("whose gradients are summed") == (parts > 1)
    assert (f"computed in {parts} parts" in plan.why) == (parts > 1)


@pytest.mark.parametrize(("asked", "batch", "parts"), [(63, 32, 1), (64, 64, 2), (30, 24, 1), (7, 4, 1), (3, 3, 1)])
def test_on_several_cores_it_is_a_multiple_that_they_share(asked, batch, parts):
    planned = plan_device(tpu("v3-8", 8, 16.0), ORIGINAL)
    assert (planned.fits, planned.count) == (4, 8)
    plan = with_batch_size(planned, asked)
    assert (plan.batch_size, plan.parts) == (batch, parts)


def test_what_fits_is_more_than_what_the_swarm_wants():
    """Only what fits cuts a size that somebody chose."""
    planned = plan_device(tpu("v5e-1", 1, 16.0), ORIGINAL, target_batch_size=24)
    assert planned.batch_size == 3
    assert with_batch_size(planned, 9).batch_size == 9


def test_a_tpu_recomputes_nothing_for_samples_that_the_swarm_does_not_want():
    assert plan_device(tpu("v5e-1", 1, 16.0), ORIGINAL, target_batch_size=256).checkpointing
    assert not plan_device(tpu("v5e-1", 1, 16.0), ORIGINAL, target_batch_size=8).checkpointing


def test_a_gpu_sums_nothing_on_the_device_beside():
    assert all(plan_device(gpu("Tesla T4", (7, 5), free), ORIGINAL).parts == 1 for free in (3.0, 15.0))


def test_the_demos_workload_is_that_of_its_model():
    config = PRESETS["tiny"]
    assert DEMO.parameters == Dalle(config).num_parameters()
    assert (DEMO.dim, DEMO.depth, DEMO.tokens) == (config.dim, config.depth, config.text_seq_len + config.image_seq_len)


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
    device = detect_device()
    assert (device.count, device.indices, device.free_each_gb) == (2, (0, 1), (14.5, 14.5))
    assert detect_device(prefer="cpu").kind == "cpu" and plan_device(device).count == 2


def test_cards_of_another_kind_do_not_count(monkeypatch):
    cards = [("Tesla T4", (7, 5), 3.0), ("NVIDIA L4", (8, 9), 22.0), ("Tesla T4", (7, 5), 14.5)]
    stand_in_cuda(monkeypatch, cards, KAGGLE)
    device = detect_device()
    assert (device.name, device.indices, device.free_gb) == ("Tesla T4", (0, 2), 14.5)
    assert plan_device(device).devices == ("cuda:2",)


@pytest.mark.skipif(torch.cuda.is_available(), reason="CUDA works here")
def test_a_driver_without_cuda_in_torch_is_told(tmp_path):
    (tmp_path / "dev").mkdir()
    (tmp_path / "dev/nvidia0").touch()
    (problem,) = detect_device(root=tmp_path).problems
    assert "nvidia-smi" in problem


# TPUs ----------------------------------------------------------------------------------------------------------


def pci(root: Path, *devices: tuple[str, str]) -> Path:
    for number, (vendor, device) in enumerate(devices):
        folder = f"sys/bus/pci/devices/0000:00:0{number}.0"
        write(root, {f"{folder}/vendor": f"{vendor}\n", f"{folder}/device": f"{device}\n"})
    return root


@pytest.mark.parametrize(
    ("environment", "devices", "name", "cores", "memory_gb"),
    [
        ({"TPU_ACCELERATOR_TYPE": "v2-8"}, [], "TPU v2-8", 8, 8),
        ({"TPU_ACCELERATOR_TYPE": "v3-8", "PJRT_DEVICE": "TPU"}, [], "TPU v3-8", 8, 16),
        ({"TPU_ACCELERATOR_TYPE": "v5litepod-1"}, [], "TPU v5e-1", 1, 16),
        ({"TPU_ACCELERATOR_TYPE": "v5e-8"}, [], "TPU v5e-8", 8, 16),
        ({"TPU_ACCELERATOR_TYPE": "v6e-1"}, [], "TPU v6e-1", 1, 32),
        ({"TPU_ACCELERATOR_TYPE": "v3-32"}, [], "TPU v3-32", 8, 16),  # a slice of four machines
        ({"TPU_ACCELERATOR_TYPE": "v4-8"}, [], "TPU v4-8", 4, 32),
        ({}, [("0x1ae0", "0x0063")], "TPU v5e-1", 1, 16),
        ({}, [("0x1ae0", "0x006f"), ("0x8086", "0x1237")], "TPU v6e-1", 1, 32),
        ({"PJRT_DEVICE": "TPU"}, [("0x1ae0", "0x0027")] * 4, "TPU v3-8", 8, 16),
    ],
)
def test_which_tpu_is_here(tmp_path, monkeypatch, environment, devices, name, cores, memory_gb):
    monkeypatch.setattr("importlib.util.find_spec", lambda package: object())
    for key, value in environment.items():
        monkeypatch.setenv(key, value)
    device = detect_device(root=pci(tmp_path, *devices))
    assert (device.kind, device.name, device.count, device.memory_gb) == ("tpu", name, cores, memory_gb)
    assert detect_device(prefer="cpu", root=tmp_path).kind == "cpu"


@pytest.mark.parametrize(
    ("environment", "devices"),
    [
        ({}, []),
        ({"PJRT_DEVICE": "CPU", "TPU_ACCELERATOR_TYPE": "v3-8"}, []),  # somebody does not want it
        ({"PJRT_DEVICE": "CUDA"}, [("0x1ae0", "0x0063")]),
        ({}, [("0x1ae0", "0x0042")]),  # Google's network card
        ({}, [("0x10de", "0x0063")]),  # NVIDIA's
    ],
)
def test_where_no_tpu_is_meant(tmp_path, environment, devices):
    (tmp_path / "dev/vfio").mkdir(parents=True)  # any device that is passed through
    assert find_tpu(pci(tmp_path, *devices), environment) == (None, [])


def test_a_tpu_without_torch_xla_is_told(tmp_path, monkeypatch):
    monkeypatch.setenv("TPU_ACCELERATOR_TYPE", "v5e-1")
    monkeypatch.setattr("importlib.util.find_spec", lambda package: None)
    device = detect_device(root=tmp_path)
    (problem,) = device.problems
    assert device.kind == "cpu" and "TPU v5e-1" in problem and "volunteer-kit setup tpu" in problem
    assert "  1. " in problem


@pytest.mark.parametrize("told", ["v9-8", "", "v3", "../../etc"])
def test_a_tpu_of_an_unknown_kind_is_told(tmp_path, told):
    (tmp_path / "dev").mkdir()
    (tmp_path / "dev/accel0").touch()
    found, (problem,) = find_tpu(tmp_path, {"TPU_ACCELERATOR_TYPE": told})
    assert found is None and "TPU_ACCELERATOR_TYPE" in problem and "  1. " in problem


def test_looking_for_a_tpu_does_not_import_torch_xla():
    code = (
        "import sys; from volunteer_kit.device import detect_device, plan_device; assert 'torch' not in sys.modules;"
        "plan_device(detect_device()); assert 'torch_xla' not in sys.modules"
    )
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "TPU_ACCELERATOR_TYPE": "v3-8"}
    subprocess.run([sys.executable, "-c", code], env=environment, timeout=180, check=True)


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


@pytest.mark.parametrize(
    ("files", "limit", "kills"),
    [
        ({}, None, None),
        ({"proc/vmstat": "nr_free 1\noom_kill 7\n"}, None, 7),
        (
            {
                "proc/self/cgroup": "0::/pod/box\n",
                "sys/fs/cgroup/pod/memory.max": f"{4 * GB}",
                "sys/fs/cgroup/pod/box/memory.max": "max",
                "sys/fs/cgroup/pod/box/memory.events": "low 0\noom 5\noom_kill 3\noom_group_kill 0\n",
                "proc/vmstat": "oom_kill 7\n",
            },
            4 * GB,
            3,
        ),
        (
            {
                "proc/self/cgroup": "4:memory:/docker/1\n",
                "sys/fs/cgroup/memory/memory.limit_in_bytes": f"{2 * GB}",
                "sys/fs/cgroup/memory/memory.oom_control": "oom_kill_disable 0\nunder_oom 0\noom_kill 2\n",
            },
            2 * GB,
            2,
        ),
        (
            {
                "proc/self/cgroup": "4:memory:/\n",
                "sys/fs/cgroup/memory/memory.limit_in_bytes": "9223372036854771712",
                "sys/fs/cgroup/memory/memory.oom_control": "oom_kill_disable 0\nunder_oom 0\n",
                "proc/vmstat": "oom_kill 1\n",
            },
            None,
            1,
        ),
    ],
)
def test_what_a_container_limits_and_whom_the_kernel_has_killed(tmp_path, files, limit, kills):
    machine = write(tmp_path, {"proc/meminfo": MEMINFO, **files})
    assert (memory_limit(machine), memory_kills(machine)) == (limit, kills)


def test_memory_where_there_is_no_proc(tmp_path):
    total, free = usable_memory(tmp_path)
    assert total == os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") and 0 < free < total


def test_the_command_prints_detection_and_plan():
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "volunteer_kit.device"]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=180, check=True)
    for words in ("Device ", "usable CPU cores", "Plan for the demo's model: batch", "125.9 M", "because "):
        assert words in done.stdout
    assert "RuntimeWarning" not in done.stderr


# memory --------------------------------------------------------------------------------------------------------


def test_the_peak_of_this_process_is_seen_and_forgotten():
    memory, size = HostMemory(), 200_000_000
    memory.begin()
    before = memory.peak_bytes()
    assert before < memory.limit_bytes() < before + usable_memory()[0]
    block = torch.ones(size // 4)
    del block
    assert memory.peak_bytes() - before == pytest.approx(size, rel=0.1)
    memory.begin()
    assert memory.peak_bytes() - before < 0.5 * size


def test_of_the_free_ram_a_part_stays_free(tmp_path):
    write(tmp_path, {"status": "VmHWM:\t   3000 kB\nVmRSS:\t   2000 kB\n"})
    memory = HostMemory(proc=tmp_path, usable=lambda: (10**9, 10**8))
    assert (memory.peak_bytes(), memory.limit_bytes()) == (3_072_000, 2_048_000 + 0.8 * 10**8)
    (tmp_path / "status").write_text("Name: some sandbox that does not tell\n")
    assert memory.peak_bytes() > 50e6, "this process's, and in bytes"


def test_the_fullest_card_counts(monkeypatch):
    reserved, free, story = [3e9, 5e9], [9e9, 2e9], []
    answers = {
        "empty_cache": lambda: story.append("empty"),
        "reset_peak_memory_stats": story.append,
        "max_memory_reserved": lambda index: reserved[index],
        "memory_reserved": lambda index: reserved[index],
        "mem_get_info": lambda index: (free[index], 16e9),
        "get_per_process_memory_fraction": lambda index: 0.5,
        "is_initialized": lambda: True,
    }
    for name, answer in answers.items():
        monkeypatch.setattr(torch.cuda, name, answer)
    memory = memory_meter(("cuda:0", "cuda:1"))
    memory.begin()
    assert isinstance(memory, CudaMemory) and story == ["empty", 0, 1]
    assert (memory.peak_bytes(), memory.limit_bytes()) == (5e9, 7e9)
    assert memory_meter(("xla",)) is None and isinstance(memory_meter(("cpu",)), HostMemory)
    assert CudaMemory([0]).limit_bytes() == 8e9, "a share that somebody has set is a limit as well"
    assert CudaMemory([1], peers_on_machine=2).limit_bytes() == 6e9, "the others want of what is free as well"
    one, two = (memory_meter(("cpu",), peers).limit_bytes() for peers in (1, 2))
    taken = HostMemory(share=0.0).limit_bytes()
    assert two - taken == pytest.approx((one - taken) / 2, rel=0.1)


def test_a_tuner_for_this_machine_starts_at_the_plan(tmp_path):
    device = detect_device(prefer="cpu")
    plan = plan_device(device, DEMO, target_batch_size=256)
    tuner = tuner_for(device, plan, DEMO, memory_meter(plan.devices), target_batch_size=256, folder=tmp_path)
    assert tuner.next() == (16, False) and not tuner.settled
