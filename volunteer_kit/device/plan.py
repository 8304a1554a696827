"""How a machine starts to train, each choice with its reason; the tuner goes on from there."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from volunteer_kit.device.detect import Device
from volunteer_kit.device.table import Precision, Row, row_for
from volunteer_kit.device.workload import DEMO, Workload

MICROBATCH_SECONDS = 2.0  # longer ones delay leaving and overshoot the epoch; shorter ones gain nothing
SHARE_OF_TARGET = 1 / 8  # of the swarm's samples an epoch, in one microbatch at most: half of one overshoots it
SAFE_SHARE = 0.8  # of the free memory; the rest is for fragments and for what other programs take
BUSY_TOKENS = 2048  # in a microbatch keep a device busy; to recompute activations for more of them gains nothing
BASE_MEMORY = 1.5e9  # bytes; Python, torch and hivemind's processes, measured with the demo's model
BYTES_PER_PARAMETER = 55  # all processes of a peer; benchmarks/full_size.py: 8.2 GB for 125.9 M
IN_USE = 0.6  # of the memory free on the emptiest card; an equal one with less is somebody else's


@dataclass(frozen=True)
class DevicePlan:
    """How this machine trains; nobody else needs to know or agree."""

    batch_size: int  # samples in a microbatch, of all devices together
    precision: Precision
    checkpointing: bool  # the model's: recompute activations in backward, a third slower, far less memory
    threads: int  # for torch on the CPU
    why: str
    warning: str = ""
    devices: tuple[str, ...] = ("cpu",)  # PyTorch's names; a TPU's cores are one "xla"
    count: int = 1  # devices that share a microbatch: cards, or a TPU's cores
    parts: int = 1  # of a microbatch, one after another, whose gradients are summed on the device; more than 1 on a TPU
    fits: int = 1  # samples that each device has room for at once, as far as the plan has to know


def largest_batch(target_batch_size: int | None) -> int:
    """Samples that a microbatch may have at most, in a swarm with so many an epoch."""
    return 2**16 if target_batch_size is None else max(1, int(target_batch_size * SHARE_OF_TARGET))


def plan_device(
    device: Device,
    workload: Workload | None = None,
    *,
    peers_on_machine: int = 1,
    target_batch_size: int | None = None,
) -> DevicePlan:
    """A plan to start with, from the table's first row that fits.

    :param workload: of the run's model; None: small enough that memory does not matter.
    :param peers_on_machine: volunteers that share this machine's cores and memory.
    :param target_batch_size: samples of an epoch, swarm-wide; a microbatch is a small part of them.
    """
    row = row_for(device.kind, device.name, device.capability)
    peers, work = max(1, peers_on_machine), workload or DEMO
    threads = max(1, device.cores // peers)
    names, count, free, where = _places(device, peers)
    reasons = [f"{device.name}: {row.why}", *where]
    batch, why = _by_speed(row, work, threads, peers)
    reasons += why
    # On a GPU: weights, gradients, accumulators. On the CPU also the optimizer and the gradients' slots. On a TPU the
    # gradients once more as one row of numbers, and the zeros that their sum over parts begins with.
    fixed = work.parameters * {"cpu": 28, "tpu": 20}.get(device.kind, 12)
    room = free * 1e9 / peers * SAFE_SHARE - fixed
    wanted = batch
    most = max(1, largest_batch(target_batch_size) // count)
    enough = min(batch, most if device.kind == "tpu" else math.ceil(BUSY_TOKENS / work.tokens))
    batch, checkpointing, fits, why = _by_memory(batch, enough, work, row, room, free)
    reasons += why
    warning = ""
    if not fits:
        needed = (fixed + work.sample_bytes(row.precision, checkpointing)) / SAFE_SHARE / 1e9
        warning = _TOO_SMALL.format(needed=needed, name=device.name, free=free / peers)
    part, batch = batch, wanted if device.kind == "tpu" else batch
    batch, count, why = _by_target(batch, count, target_batch_size)
    reasons += why
    batch, parts, why = _in_parts(batch, part)
    reasons += why
    names = names[:count] if device.kind == "cuda" else names
    if device.kind == "cpu":
        reasons.append(f"{threads} thread{'s' if threads > 1 else ''}")
    why = "; ".join(reasons)
    return DevicePlan(batch * count, row.precision, checkpointing, threads, why, warning, names, count, parts, part)


def with_batch_size(plan: DevicePlan, asked: int) -> DevicePlan:
    """A TPU's plan with a size that somebody chose, rounded down to what its cores compute evenly: a TPU has no tuner
    that takes less when memory runs out. The reasons say so.

    :param asked: samples in a microbatch, 1 or more
    """
    at_once = plan.fits * plan.count
    steps = (
        (at_once, f"{at_once} that fit at once"),
        (plan.count, f"{plan.count} cores"),
        (plan.fits, f"{plan.fits} that fit on a core"),
        (1, ""),
    )
    step, of = next((step, of) for step, of in steps if step <= asked)
    taken = asked // step * step
    why = plan.why.removesuffix("; " + _parts_words(plan.parts))
    why += f"; a batch of {taken}, " + ("as you chose" if taken == asked else f"not {asked}: a multiple of the {of}")
    parts = max(1, taken // at_once)
    if parts > 1:
        why += f"; {_parts_words(parts)}"
    return replace(plan, batch_size=taken, parts=parts, why=why)


def _places(device: Device, peers: int) -> tuple[tuple[str, ...], int, float, list[str]]:
    """(PyTorch's names, how many devices share a microbatch, GB free on each of them, why)."""
    if device.kind == "tpu":
        return ("xla",), device.count, device.free_gb, [f"{device.count} cores"] if device.count > 1 else []
    if device.kind != "cuda":
        return (device.kind,), 1, device.free_gb, []
    free = dict(zip(device.indices, device.free_each_gb, strict=False)) or {device.indices[0]: device.free_gb}
    chosen = [index for index, gb in free.items() if gb >= IN_USE * max(free.values())]
    why = []
    if peers > 1:  # each takes the emptiest; to share several with each other would gain nothing
        chosen = [max(free, key=free.__getitem__)]
    elif len(free) > 1:
        others = ", the others are in use" if len(chosen) < len(free) else ""
        why.append(f"{len(chosen)} of {len(free)} equal cards{others}")
    return tuple(f"cuda:{index}" for index in chosen), len(chosen), min(free[index] for index in chosen), why


def _by_speed(row: Row, work: Workload, threads: int, peers: int) -> tuple[int, list[str]]:
    """(samples that a device gets through in time, why)."""
    tflops = row.tflops * (threads if row.kind == "cpu" else 1 / peers)
    batch = _power_of_two(min(row.max_batch, MICROBATCH_SECONDS * tflops * 1e12 / work.flops))
    if batch == row.max_batch:
        return batch, []
    return batch, [f"a microbatch takes about {max(1, round(batch * work.flops / tflops / 1e12))} s"]


def _by_memory(
    batch: int, enough: int, work: Workload, row: Row, room: float, free_gb: float
) -> tuple[int, bool, bool, list[str]]:
    """(samples that a device has room for, whether it recomputes, whether a sample fits at all, why).

    :param enough: samples for which activations are recomputed if they do not fit otherwise. They keep a GPU busy, and
        more gain nothing; on a TPU they are all, since every gradient crosses to the CPU with each microbatch
    """
    why, precision = [], row.precision
    room_without = room - work.layer_bytes(precision, False)
    checkpointing = enough * work.sample_bytes(precision, False) > room_without
    if checkpointing:
        gain = ", for a larger batch to each transfer of gradients" if row.kind == "tpu" else " to save memory"
        why.append(f"recomputes activations{gain}")
    else:
        room = room_without
    size = work.sample_bytes(precision, checkpointing)
    if _power_of_two(room / size) < batch:
        batch = _power_of_two(room / size)
        why.append(f"batch of {batch} by {free_gb:.1f} GB of free memory")
    return batch, checkpointing, size <= room, why


def _by_target(batch: int, count: int, target_batch_size: int | None) -> tuple[int, int, list[str]]:
    """(samples on each of so many devices, devices, why): together a small part of the swarm's batch."""
    most, why = largest_batch(target_batch_size), []
    small = batch * count <= most
    if not small:
        batch, count = max(1, most // count), min(count, most)
    if count > 1:
        why.append(f"{batch} on each, {batch * count} together")
    if not small:
        why.append(f"no more, to be a small part of the swarm's {target_batch_size} an epoch")
    return batch, count, why


def _in_parts(batch: int, part: int) -> tuple[int, int, list[str]]:
    """(samples on each device, how many parts they are computed in, why), where `part` is what fits at once."""
    if batch <= part:
        return batch, 1, []
    parts = batch // part
    return parts * part, parts, [_parts_words(parts)]


def _parts_words(parts: int) -> str:
    return f"computed in {parts} parts, whose gradients are summed on the device"


def _power_of_two(limit: float) -> int:
    return 2 ** int(math.log2(limit)) if limit >= 1 else 1


def smaller_plan(plan: DevicePlan, most: int, checkpointing: bool) -> DevicePlan:
    """The plan after memory ran out. The reasons say so.

    :param most: samples in a microbatch, 1 or more
    :param checkpointing: recompute activations in any case
    """
    batch = max(plan.count, min(plan.batch_size, most))
    recomputes = plan.checkpointing or checkpointing
    how = f"batches of {batch}" + (", recomputing activations" if recomputes else "")
    return replace(plan, batch_size=batch, checkpointing=recomputes, why=f"{plan.why}; {how}: memory is short")


def least_memory(parameters: int) -> float:
    """Bytes of RAM, about, that all processes of a peer take beside what its batches take."""
    return BASE_MEMORY + BYTES_PER_PARAMETER * parameters


def memory_needed(work: Workload, kind: str, precision: Precision, batch_size: int, checkpointing: bool) -> float:
    """Bytes of RAM, about, that all processes of a peer take with this plan; on a GPU or TPU the activations take none.

    :param kind: the device's
    """
    fixed = least_memory(work.parameters)
    if kind != "cpu":
        return fixed
    one = work.sample_bytes(precision, checkpointing)
    return fixed + work.layer_bytes(precision, checkpointing) + batch_size * one


_TOO_SMALL = (
    "This model needs about {needed:.1f} GB on {name}; {free:.1f} GB are free.\n"
    "  1. Close other programs or notebooks that use its memory.\n  2. Or join a run with a smaller model."
)
