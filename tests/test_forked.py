"""Forked processes do not hold on to what their parent rewrites."""

from __future__ import annotations

import multiprocessing as mp

import psutil
import torch

from volunteer_kit.swarm.forked import forget_inherited_tensors

MB = 2**20


def test_a_fork_gives_back_all_large_tensors_but_the_shared_ones():
    context = mp.get_context("fork")
    model = torch.nn.Linear(4096, 4096)  # 64 MB
    private = [torch.ones(8 * MB) for _ in range(3)]  # 32 MB each
    shared, small = torch.ones(4 * MB).share_memory_(), torch.ones(100)
    answers, order = context.SimpleQueue(), context.SimpleQueue()

    def child() -> None:
        forget_inherited_tensors()
        order.get()  # until then the parent rewrites its own
        memory = psutil.Process().memory_full_info()
        answers.put((memory.uss, shared.sum().item(), small.sum().item(), private[0].shape))

    process = context.Process(target=child)
    process.start()
    for tensor in (*private, model.weight.data):
        tensor.add_(1)
    shared.add_(1)
    order.put("look")
    own_memory, shared_sum, small_sum, shape = answers.get()
    process.join()
    # a page that the parent writes stays with a fork that still has it; Python itself takes 60 MB
    assert own_memory < 120 * MB
    assert (shared_sum, small_sum, shape) == (8 * MB, 100, (8 * MB,))
    assert all(tensor.eq(2).all() for tensor in private) and process.exitcode == 0
