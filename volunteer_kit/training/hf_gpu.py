"""Several GPUs in one machine, such as Kaggle's two T4, and a Trainer, whose peer trains on one.

`transformers` spreads each batch over all GPUs that a process sees (DataParallel), which a peer cannot share. So this
process sees one only, where CUDA has not begun; else the Trainer is told that there is one.
"""

from __future__ import annotations

import os
import subprocess
from typing import NamedTuple

import torch
from transformers import TrainingArguments

LAUNCHED = ("LOCAL_RANK", "WORLD_SIZE", "RANK")  # a launcher has given this process its GPU


class Gpu(NamedTuple):
    """As nvidia-smi names it."""

    index: str
    uuid: str
    free: int  # MiB


def see_one_gpu() -> None:
    """Let this process see the emptiest of several GPUs, if CUDA has not begun; and say so, and how to use the others.

    Where CUDA_VISIBLE_DEVICES is set already, somebody has decided: a model may be spread over these GPUs.
    """
    if torch.cuda.is_initialized() or any(name in os.environ for name in (*LAUNCHED, "CUDA_VISIBLE_DEVICES")):
        return
    if torch.cuda.device_count() < 2:  # asks NVML, and does not begin CUDA
        return
    gpus = _gpus()
    if len(gpus) < 2:
        return
    taken = max(gpus, key=lambda gpu: gpu.free)  # the first of equal ones
    os.environ["CUDA_VISIBLE_DEVICES"] = taken.uuid
    print(_words(len(gpus), f"GPU {taken.index}", next(gpu.index for gpu in gpus if gpu is not taken)), flush=True)


def use_one_gpu(args: TrainingArguments) -> bool:
    """Whether `args` counted several GPUs for one process. It counts one now, the one that the Trainer puts its model
    on; that is said."""
    if args.n_gpu < 2 or args.world_size > 1:
        return False
    print(_words(args.n_gpu, str(args.device), "1"), flush=True)
    args._n_gpu = 1
    return True


def _words(count: int, taken: str, other: str) -> str:
    return (
        f"{count} GPUs are here. A peer trains on one, and this one takes {taken}.\n"
        f"For another, start a second peer: CUDA_VISIBLE_DEVICES={other} python train.py, with this one's "
        "initial_peers."
    )


def _gpus() -> list[Gpu]:
    command = ["nvidia-smi", "--query-gpu=index,uuid,memory.free", "--format=csv,noheader,nounits"]
    try:
        found = subprocess.run(command, capture_output=True, text=True, timeout=30, check=True).stdout
        rows = [line.split(", ") for line in found.splitlines() if line.strip()]
        return [Gpu(index, uuid, int(free)) for index, uuid, free in rows]
    except (OSError, subprocess.SubprocessError, ValueError):
        return []
