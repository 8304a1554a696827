"""Forked processes do not hold on to what their parent rewrites."""

from __future__ import annotations

import json
import multiprocessing as mp
import subprocess
import sys

import psutil
import torch

from volunteer_kit.swarm.forked import forget_inherited_tensors

MB = 2**20


def rewrite_what_a_fork_inherited() -> dict:
    """Memory of a fork's own after its parent has rewritten 160 MB, and what it still sees."""
    context = mp.get_context("fork")
    model = torch.nn.Linear(4096, 4096)  # 64 MB
    private = [torch.ones(8 * MB) for _ in range(3)]  # 32 MB each
    shared, small = torch.ones(4 * MB).share_memory_(), torch.ones(100)
    answers, order = context.SimpleQueue(), context.SimpleQueue()

    def child() -> None:
        forget_inherited_tensors()
        order.get()  # until then the parent rewrites its own
        own = psutil.Process().memory_full_info().uss
        answers.put(dict(own=own, shared=shared.sum().item(), small=small.sum().item(), shape=list(private[0].shape)))

    process = context.Process(target=child)
    process.start()
    for tensor in (*private, model.weight.data):
        tensor.add_(1)
    shared.add_(1)
    order.put("look")
    found = answers.get()
    process.join()
    return {**found, "exitcode": process.exitcode, "kept": all(tensor.eq(2).all().item() for tensor in private)}


def test_a_fork_gives_back_all_large_tensors_but_the_shared_ones():
    """In a process of its own: a fork of pytest would have all that other tests have left."""
    done = subprocess.run([sys.executable, __file__], capture_output=True, text=True, timeout=120)
    found = json.loads(done.stdout)
    assert found.pop("own") < 120 * MB  # the Python in it takes 60; kept tensors would add 160
    assert found == {"shared": 8 * MB, "small": 100, "shape": [8 * MB], "exitcode": 0, "kept": True}


if __name__ == "__main__":
    print(json.dumps(rewrite_what_a_fork_inherited()))
