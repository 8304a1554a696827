"""The tuner on a card whose memory is limited, as a small card's is: what it settles on, beside its neighbours."""

from __future__ import annotations

from dataclasses import replace
from statistics import median

import torch

from benchmarks.gpu_parts.part import Setting, Tell, gigabytes_peak
from benchmarks.tuner_parts.real import Bench
from volunteer_kit.device import MICROBATCH_SECONDS, detect_device, largest_batch
from volunteer_kit.device import Setting as Choice
from volunteer_kit.device.measurements import HEADROOM, PATIENCE
from volunteer_kit.model.dalle import PRESETS

TARGET = 4096  # samples an epoch of the original's swarm
RESERVE = 8.0  # s that are left for the end


def measure(setting: Setting, tell: Tell, limit_gb: float) -> None:
    if setting.device == "cuda":
        total = torch.cuda.get_device_properties(0).total_memory
        torch.cuda.set_per_process_memory_fraction(min(1.0, limit_gb * 1e9 / total), 0)
    found = detect_device("auto" if setting.device == "cuda" else "cpu")
    one = replace(found, count=1, indices=found.indices[:1], free_each_gb=found.free_each_gb[:1])
    bench = Bench(PRESETS["tiny" if setting.tiny else "original"], one, 64 if setting.tiny else TARGET)
    tell(limit_gb=limit_gb, free_gb=found.free_gb, plan=bench.plan.why, precision=bench.plan.precision)
    chosen, seconds, ooms, why = bench.tune()
    tell(
        batch_size=chosen.batch_size, checkpointing=chosen.checkpointing, settled_s=seconds, out_of_memory=ooms,
        why=why, peak_gb=gigabytes_peak(setting.device),
    )  # fmt: skip
    speeds = beside(bench, chosen, setting)
    best = max(speeds, key=speeds.__getitem__)
    gap = 1 - speeds[chosen] / speeds[best]
    tell(samples_per_s=speeds[chosen], gap=gap, best=str(best), all={str(one): speed for one, speed in speeds.items()})
    tell.summary(
        f"{chosen} after {seconds:.0f} s, {ooms} times out of memory; {speeds[chosen]:.3g} samples/s, "
        f"{gap:.1%} less than the best of {len(speeds)} settings beside it ({best})"
    )
    bench.close()


def beside(bench: Bench, chosen: Choice, setting: Setting) -> dict[Choice, float]:
    """Samples a second of the chosen setting and of those around it that the tuner might have taken, as far as time
    goes; each is run together with the chosen one, so that both meet the same noise."""
    sizes = [round(chosen.batch_size * share) for share in (1, 1.5, 0.75, 2, 0.5, 1.25, 3)]
    tries = [Choice(size, mode) for size in sizes for mode in (chosen.checkpointing, not chosen.checkpointing)]
    times: dict[Choice, list[float]] = {chosen: bench.run(chosen, 3)}
    speeds = {chosen: chosen.batch_size / median(times[chosen])}
    most = largest_batch(bench.target)
    for one in dict.fromkeys(tries):
        expected = 10 * one.batch_size / speeds[chosen]  # s of both, with what warms up
        if one == chosen or not 1 <= one.batch_size <= most or setting.left() < RESERVE + 2 * expected:
            continue
        theirs = bench.run(one, 3)
        is_full = bench.memory.peak_bytes() > (1 - HEADROOM) * bench.memory.limit_bytes()
        if not theirs or is_full or (one.batch_size > 1 and median(theirs) > PATIENCE * MICROBATCH_SECONDS):
            continue
        times[chosen] += bench.run(chosen, 3)
        speeds[one] = one.batch_size / median(theirs)
    speeds[chosen] = chosen.batch_size / median(times[chosen])
    return speeds
