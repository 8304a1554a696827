"""8-bit gradients of the original's size: the kit's codec on the CPU, bitsandbytes on the CPU and on the card.

The kit's averagers are processes of their own that hold gradients in the CPU's memory; a codec on the card would save
the transfer of three quarters of the bytes, and gradients would have to be averaged from what was rounded.
"""

from __future__ import annotations

import time
from statistics import median

import torch

from benchmarks.gpu_parts.part import Setting, Tell, synchronize

BLOCK = 1024  # values that share a scale, in the kit's codec


def measure(setting: Setting, tell: Tell) -> None:
    from bitsandbytes.functional import dequantize_blockwise, quantize_blockwise
    from hivemind.compression import CompressionInfo

    from volunteer_kit.swarm.codecs.registry import CODECS

    count = 2**18 if setting.tiny else 125_900_000
    gradient = torch.randn(count, device=setting.device) * 1e-3
    on_cpu = gradient.cpu()
    codec, info = CODECS["blockwise8"], CompressionInfo.from_tensor(on_cpu)

    def of_the_kit() -> torch.Tensor:
        return codec.extract(codec.compress(gradient.cpu(), info))

    def on_the_cpu() -> torch.Tensor:
        codes, scale = quantize_blockwise(gradient.cpu(), blocksize=BLOCK)
        return dequantize_blockwise(codes, scale)

    def on_the_card() -> torch.Tensor:
        codes, scale = quantize_blockwise(gradient, blocksize=BLOCK)
        codes.cpu(), scale.absmax.cpu()
        return dequantize_blockwise(codes, scale)

    ways = {"kit": of_the_kit, "bitsandbytes": on_the_cpu}
    if setting.device == "cuda":
        ways["bitsandbytes_cuda"] = on_the_card
    seconds = {name: timed(way, setting) for name, way in ways.items()}
    tell(values=count, copy_s=timed(lambda: gradient.cpu(), setting), **{f"{k}_s": s for k, s in seconds.items()})
    tell(**{f"{name}_error": error(way(), on_cpu) for name, way in ways.items()})
    tell(bitsandbytes_to_kit=seconds["bitsandbytes"] / seconds["kit"])
    tell.summary("there and back: " + ", ".join(f"{name} {taken:.3f} s" for name, taken in seconds.items()))


def timed(way, setting: Setting) -> float:
    times = []
    for _ in range(3):
        synchronize(setting.device)
        started = time.perf_counter()
        way()
        synchronize(setting.device)
        times.append(time.perf_counter() - started)
    return median(times)


def error(found: torch.Tensor, values: torch.Tensor) -> float:
    """Root mean square, relative."""
    return ((found.cpu() - values).norm() / values.norm()).item()
