"""Several GPUs in one machine, such as Kaggle's two T4, and a Trainer, whose peer trains on one.

`transformers` spreads each batch over all GPUs that a process sees (DataParallel), which a peer cannot share. So this
process sees one only, where CUDA has not begun; else the Trainer is told which one it has.
"""

from __future__ import annotations

import os
import subprocess
from typing import NamedTuple

import torch
from transformers import TrainingArguments

from volunteer_kit import output

LAUNCHED = ("LOCAL_RANK", "WORLD_SIZE", "RANK")  # a launcher has given this process its GPU
VISIBLE = "CUDA_VISIBLE_DEVICES"


class Gpu(NamedTuple):
    """As nvidia-smi names it. Its index there is no name: CUDA counts in another order (CUDA_DEVICE_ORDER)."""

    uuid: str
    free: int  # MiB


def see_one_gpu() -> int | None:
    """Let this process see the emptiest of several GPUs, and say so, and how to use the others.

    Where CUDA_VISIBLE_DEVICES is set already, somebody has decided: a model may be spread over these GPUs. Where a
    model can lie on a GPU already, the choice is made as well.

    :returns: None, or CUDA's index of that GPU, where CUDA no longer heeds CUDA_VISIBLE_DEVICES: for `use_one_gpu`
    """
    if torch.cuda.is_initialized() or any(name in os.environ for name in (*LAUNCHED, VISIBLE)):
        return None
    if torch.cuda.device_count() < 2:  # asks NVML, and does not begin CUDA
        return None
    gpus = _gpus()
    if len(gpus) < 2:
        return None
    taken = max(gpus, key=lambda gpu: gpu.free)  # the first of equal ones
    os.environ[VISIBLE] = taken.uuid
    # CUDA reads the variable once, and torch.cuda.is_available() is enough for that; is_initialized() stays False then.
    if counted_by_cuda() == 1:
        output.say(_words(len(gpus), taken.uuid, next(gpu.uuid for gpu in gpus if gpu is not taken)))
        return None
    del os.environ[VISIBLE]
    uuids = uuids_of_cuda()
    return uuids.index(taken.uuid) if taken.uuid in uuids else None


def use_one_gpu(args: TrainingArguments, index: int | None = None) -> bool:
    """Whether `args` counted several GPUs for one process. It counts one now, and that is said.

    :param index: CUDA's, of the one to take; only before a Trainer is made with `args`. None: the one that `args` names
    """
    if args.n_gpu < 2 or args.world_size > 1:
        return False
    if index is not None:
        _move(args, torch.device("cuda", index))
    here = args.device.index or 0
    names = uuids_of_cuda() or [str(number) for number in range(args.n_gpu)]
    others = [name for number, name in enumerate(names) if number != here]
    output.say(_words(args.n_gpu, f"{args.device} ({names[here]})", others[0]))
    args._n_gpu = 1
    return True


def counted_by_cuda() -> int:
    """GPUs that CUDA itself gives to this process; torch.cuda.device_count() asks NVML, which heeds the variable."""
    return torch._C._cuda_getDeviceCount()


def uuids_of_cuda() -> list[str]:
    """List the GPUs that this process sees, in CUDA's order and as CUDA_VISIBLE_DEVICES takes them. Begins CUDA.
    [] where PyTorch does not tell."""
    if torch.version.cuda is None:
        return []
    found = [getattr(torch.cuda.get_device_properties(number), "uuid", None) for number in range(counted_by_cuda())]
    return [] if None in found else [f"GPU-{str(uuid).removeprefix('GPU-')}" for uuid in found]


def _move(args: TrainingArguments, device: torch.device) -> None:
    """transformers always names cuda:0, and accelerate the current GPU: both, and PyTorch, get the same one."""
    torch.cuda.set_device(device)
    vars(args)["_setup_devices"] = device  # the cached property that args.device reads
    if args.distributed_state is not None:
        args.distributed_state.device = device


def _words(count: int, taken: str, other: str) -> str:
    return (
        f"{count} GPUs are here. A peer trains on one, and this one takes {taken}.\n"
        f"For another, start a second peer: {VISIBLE}={other} python train.py, with this one's initial_peers."
    )


def _gpus() -> list[Gpu]:
    command = ["nvidia-smi", "--query-gpu=uuid,memory.free", "--format=csv,noheader,nounits"]
    try:
        found = subprocess.run(command, capture_output=True, text=True, timeout=30, check=True).stdout
        rows = [line.split(", ") for line in found.splitlines() if line.strip()]
        return [Gpu(uuid, int(free)) for uuid, free in rows]
    except (OSError, subprocess.SubprocessError, ValueError):
        return []
