"""The machine: device, versions, and whether each thing that the other parts build on works at all."""

from __future__ import annotations

import importlib.metadata
import multiprocessing
import platform
import shutil
import time
from pathlib import Path

import torch

from benchmarks.gpu_parts.part import Setting, Tell

PACKAGES = (
    "torch", "numpy", "numba", "hivemind", "protobuf", "pydantic", "transformers", "peft", "accelerate", "bitsandbytes",
    "triton",
)  # fmt: skip


def measure(setting: Setting, tell: Tell) -> None:
    """Each check is told for itself: "ok", or what went wrong."""
    tell(python=platform.python_version(), **{name: version_of(name) for name in PACKAGES})
    shared = Path("/dev/shm")  # where peers share tensors with their averagers: 2 GB each for the original's model
    tell(shm_gb=shutil.disk_usage(shared).free / 1e9 if shared.exists() else 0.0)
    name = "CPU"
    if setting.device == "cuda":
        about = torch.cuda.get_device_properties(0)
        name = about.name
        tell(memory_gb=about.total_memory / 1e9, cuda=torch.version.cuda, archs=" ".join(torch.cuda.get_arch_list()))
        tell(copy_gb_per_s=copy_speed(), to_cpu_gb_per_s=copy_speed("cpu"))
    tell(device=name)
    checks = (in_autocast, kernels_of_the_step, forks_beside_the_device, codecs, four_bits, plan)
    for check in checks:
        try:
            found = check(setting.device)
        except Exception as error:
            found = f"{type(error).__name__}: {error}"[:500]
        tell(**{check.__name__: found})
    tell.summary(f"{name}, torch {torch.__version__}, Python {platform.python_version()}")


def version_of(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def copy_speed(target: str = "cuda") -> float:
    """GB/s, bytes read, from the card to itself or to the CPU's memory (pageable, as gradients go)."""
    source, times = torch.ones(2**27, device="cuda"), []
    kept = torch.empty(2**27, device=target)
    for _ in range(3):
        torch.cuda.synchronize()
        started = time.perf_counter()
        kept.copy_(source)
        torch.cuda.synchronize()
        times.append(time.perf_counter() - started)
    return source.nbytes / min(times) / 1e9


def in_autocast(device: str) -> str:
    """The kit's model, forward and backward, in each precision, with and without recomputing."""
    from benchmarks.model import config
    from volunteer_kit.model.dalle import Dalle

    model = Dalle(config("tiny", True)).to(device)
    c = model.config
    text = torch.randint(1, 400, (2, c.text_seq_len), device=device)
    codes = torch.randint(c.num_image_tokens, (2, c.image_seq_len), device=device)
    for dtype in (torch.float16, torch.bfloat16):
        for model.checkpointing in (False, True):
            model.zero_grad()
            with torch.autocast(device, dtype=dtype):
                loss = model(text, codes).loss
            (loss * 128).backward()
            if not all(torch.isfinite(p.grad).all() for p in model.parameters()):
                raise ValueError(f"a gradient is not finite in {dtype}")
    return "ok"


def kernels_of_the_step(device: str) -> str:
    """8-bit LAMB, which numba compiles at its first import: later parts find it in the cache."""
    from volunteer_kit.optim import Lamb8bit

    parameter = torch.randn(2**17).requires_grad_()
    parameter.grad = torch.randn(2**17)
    before = parameter.detach().clone()
    Lamb8bit([{"params": [parameter], "weight_decay": 0.0}], lr=1e-3).step()
    return "ok" if 0 < (parameter - before).abs().max() < 1 else "the step did nothing"


def _child(pipe) -> None:
    values = torch.randn(1000)
    values.requires_grad_()
    pipe.send(float((values.detach() * 2).norm()))


def forks_beside_the_device(device: str) -> str:
    """hivemind forks processes when the device is in use already; they compute on the CPU."""
    held = torch.randn(1000, 1000, device=device, requires_grad=True)
    (held @ held).sum().backward()
    context = multiprocessing.get_context("fork")
    ours, theirs = context.Pipe()
    process = context.Process(target=_child, args=(theirs,))
    process.start()
    try:
        return "ok" if ours.poll(30) and ours.recv() > 0 else "a forked process does not answer"
    finally:
        process.kill()
        process.join()


def codecs(device: str) -> str:
    from volunteer_kit.swarm.codecs.registry import check_codecs

    check_codecs()
    return "ok"


def four_bits(device: str) -> str:
    """A linear layer of bitsandbytes in 4 bits, as a QLoRA's base has, beside the same in full."""
    import bitsandbytes

    torch.manual_seed(0)
    plain = torch.nn.Linear(256, 256, bias=False)
    layer = bitsandbytes.nn.Linear4bit(256, 256, bias=False, quant_type="nf4", compute_dtype=torch.float32)
    layer.load_state_dict(plain.state_dict())
    layer, x = layer.to(device), torch.randn(8, 256)
    gap = (layer(x.to(device)).cpu() - plain(x)).norm() / plain(x).norm()
    return "ok" if gap < 0.2 else f"4 bits are off by {gap:.0%}"


def plan(device: str) -> str:
    """The plan that the kit makes of this machine for the original's model."""
    from volunteer_kit.device import ORIGINAL, detect_device, plan_device

    return plan_device(detect_device("auto" if device == "cuda" else "cpu"), ORIGINAL, target_batch_size=4096).why
