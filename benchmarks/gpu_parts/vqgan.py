"""Images to codes by the published VQGAN's layers (random weights): the network alone, and the verb `encode`."""

from __future__ import annotations

import os
import time
from statistics import median

import torch

from benchmarks.gpu_parts.material import image_shards, original
from benchmarks.gpu_parts.part import Setting, Tell, gigabytes_peak, synchronize
from volunteer_kit.model import vqgan
from volunteer_kit.model.image_tokenizer import load_image_tokenizer
from volunteer_kit.model.vqgan import Vqgan
from volunteer_kit.runs import RunConfig

ALIKE = 4  # images that the CPU encodes too


def measure(setting: Setting, tell: Tell) -> None:
    os.environ["VOLUNTEER_KIT_HOME"] = str(setting.folder)
    run = original(setting.tiny, setting.folder)
    network = load_image_tokenizer(run.image_tokenizer)
    torch.backends.cudnn.allow_tf32 = False  # as `encode` has it: a GPU's codes shall be a CPU's
    images = torch.rand(2 if setting.tiny else 128, 3, network.config.image_size, network.config.image_size)
    on_cpu = network.encode(images[:ALIKE])
    network.to(setting.device)
    speed = speed_of(network, images, setting)
    same = (network.encode(images[:ALIKE].to(setting.device)).cpu() == on_cpu).float().mean().item()
    tell(images_per_s=speed, codes_as_on_the_cpu=same, peak_gb=gigabytes_peak(setting.device))
    kept, vqgan.PIXELS_AT_ONCE = vqgan.PIXELS_AT_ONCE, 8 * vqgan.PIXELS_AT_ONCE
    tell(images_per_s_32_at_once=speed_of(network, images, setting), peak_gb_32_at_once=gigabytes_peak(setting.device))
    vqgan.PIXELS_AT_ONCE = kept
    if setting.device == "cuda":
        torch.backends.cudnn.allow_tf32 = torch.backends.cuda.matmul.allow_tf32 = True
        faster = speed_of(network, images, setting)
        agree = (network.encode(images[:ALIKE].to(setting.device)).cpu() == on_cpu).float().mean().item()
        tell(images_per_s_tf32=faster, codes_as_on_the_cpu_tf32=agree)
    del network
    verb = encode_speed(setting, run)
    tell(encode_images_per_s=verb)
    tell.summary(
        f"{speed:.1f} images/s, {same:.2%} of the codes as on the CPU; `encode` with decoding {verb or 0:.1f}/s"
    )


def speed_of(network: Vqgan, images: torch.Tensor, setting: Setting) -> float:
    """Images a second, from the CPU's memory to codes in it."""
    times = []
    for _ in range(2 if setting.tiny else 4):
        synchronize(setting.device)
        started = time.perf_counter()
        network.encode(images.to(setting.device)).cpu()
        times.append(time.perf_counter() - started)
    return len(images) / median(times[1:])


def encode_speed(setting: Setting, run: RunConfig) -> float | None:
    """Images a second of `volunteer-kit encode`, less the time in which its worker loads; None where the loading took
    most of the time, as with tiny sizes."""
    from volunteer_kit.encode.door import encode

    each = (2, 6) if setting.tiny else (32, 432)
    took = []
    for number, count in enumerate(each):
        shards = image_shards(setting.folder / f"images-{number}", count, count)
        started = time.perf_counter()
        encode([str(shard) for shard in shards], setting.folder / f"codes-{number}", run=run, workers=1, say=str)
        took.append(time.perf_counter() - started)
    seconds = took[1] - took[0]
    return (each[1] - each[0]) / seconds if seconds > 0.1 * took[0] else None
