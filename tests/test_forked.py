"""Forked processes do not hold on to what their parent rewrites, and do to what they are at."""

from __future__ import annotations

import asyncio
import gc
import json
import multiprocessing as mp
import os
import struct
import subprocess
import sys
import threading
import weakref
from concurrent.futures import TimeoutError
from functools import partial
from multiprocessing.connection import Listener, rebuild_connection, wait
from multiprocessing.reduction import ForkingPickler
from multiprocessing.resource_sharer import DupFd
from pathlib import Path

import psutil
import pytest
import torch
from hivemind.utils import MPFuture

from volunteer_kit.swarm.net.fork_safety import Inbox, Outbox, forget_inherited_tensors

MB, LONG = 2**20, 40_000


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
    one_thread = {**os.environ, "OMP_NUM_THREADS": "1"}  # a fork has none of its parent's, and would wait for them
    done = subprocess.run([sys.executable, __file__], capture_output=True, text=True, timeout=240, env=one_thread)
    found = json.loads(done.stdout)
    assert found.pop("own") < 120 * MB  # the Python in it takes 60; kept tensors would add 160
    assert found == {"shared": 8 * MB, "small": 100, "shape": [8 * MB], "exitcode": 0, "kept": True}


START = """
import multiprocessing, sys
for method in sys.argv[1:]:
    multiprocessing.set_start_method(method, force=True)
    from volunteer_kit.swarm.net.peer import PeerConfig, start_peer
    peer = start_peer(PeerConfig(host_maddrs=["/ip4/127.0.0.1/tcp/0"], client_mode=False))
    print(method, len(peer.visible_maddrs()), multiprocessing.get_start_method())
    peer.shutdown()
"""


def test_a_program_may_choose_any_start_method():
    """A script may set "spawn", Python 3.14 begins with "forkserver": a peer's processes are forked all the same, and
    what the program chose stays."""
    command = [sys.executable, "-c", START, "spawn", "forkserver"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=280, cwd=Path(__file__).parents[1])
    assert done.stdout.splitlines() == ["spawn 1 spawn", "forkserver 1 forkserver"], done.stderr[-2000:]


awaited: list[weakref.ref[asyncio.Future]] = []  # in the DHT's process


async def await_what_nobody_holds(dht, node) -> str:
    """As a connection's reader, which its own protocol knows weakly only."""
    answer = asyncio.get_running_loop().create_future()
    awaited.append(weakref.ref(answer))
    return await answer


async def collect_and_answer(dht, node) -> None:
    gc.collect()
    answer = awaited.pop()()
    if answer is not None:
        answer.set_result("it came")


def test_the_collector_takes_no_task_that_waits(peer):
    """One that is taken leaves who asked for it waiting for ever."""
    asked = peer.dht.run_coroutine(await_what_nobody_holds, return_future=True)
    peer.dht.run_coroutine(collect_and_answer)
    assert asked.result(timeout=120) == "it came"


def have_ended() -> None:
    raise ConnectionResetError("who asked is no longer there")


class OfOneWhoEnded:
    """In the DHT's pipe: what somebody had asked before its process ended."""

    def __reduce__(self):
        return have_ended, ()


def test_a_question_of_one_who_has_ended_stops_nobody(peer):
    """hivemind's DHT then stands still for 5 s; one that should end is killed meanwhile. After so many questions it
    would for longer than is waited here."""
    for _ in range(60):
        peer.dht._outer_pipe.send(("_get", [], {"future": OfOneWhoEnded()}))
    assert peer.dht.run_coroutine(count_tasks, return_future=True).result(timeout=60.0) > 0


class Handed:
    """An order's pipe for the answer, as its owner hands it over: at this address, when it is asked."""

    def __init__(self, address: str):
        self.file = DupFd.__new__(DupFd)
        self.file._id = (address, 1)

    def __reduce__(self):
        return rebuild_connection, (self.file, True, True)


def test_a_question_of_one_who_ends_while_it_hands_over_its_pipe_ends_nobody(peer):
    """The DHT's process died of it, and whoever came next waited for ever to be told its address."""
    with Listener() as owner:
        ends = threading.Thread(target=lambda: owner.accept().close())
        ends.start()
        peer.dht._outer_pipe.send(("_get", [], {"future": Handed(owner.address)}))
        ends.join(60)
        assert peer.dht.run_coroutine(count_tasks, return_future=True).result(timeout=60.0) > 0


async def count_tasks(dht, node) -> int:
    return len(asyncio.all_tasks())


async def measure(dht, node, *, what: bytes) -> int:
    return len(what)


def test_an_order_that_comes_in_two_pieces_is_read_whole(peer):
    """As all of more than 16 KB do: on busy cores the second is not there yet when the first is read."""
    measured = MPFuture()
    pipe = peer.dht._outer_pipe
    what = {"coro": partial(measure, what=b"." * LONG), "future": measured}
    order = ForkingPickler.dumps(("_run_coroutine", [], what))
    os.write(pipe.fileno(), struct.pack("!i", len(order)))
    with pytest.raises(TimeoutError):
        measured.result(timeout=0.5)  # the first piece has been read long ago
    os.write(pipe.fileno(), order)
    assert measured.result(timeout=60) == LONG


is_handed_over = threading.Event()


def wait_for_owner() -> str:
    is_handed_over.wait()
    return "handed over"


class SlowToFetch:
    """In an order: an answer's pipe whose owner has no time to hand it over."""

    def __reduce__(self):
        return wait_for_owner, ()


def test_an_order_whose_sender_is_busy_does_not_stop_the_process_that_reads():
    here, there = mp.Pipe(duplex=False)
    inbox = Inbox(here)
    there.send_bytes(b"cno.such.module\nfunction\n.")  # a pickle that names what this process does not know
    there.send(("_get", [SlowToFetch()], {}))
    there.send(("_store", [], {}))
    assert not inbox.poll(), "and it did not wait"
    is_handed_over.set()
    assert wait([inbox], timeout=60)
    assert inbox.recv() == ("_get", ["handed over"], {})
    assert wait([inbox], timeout=60)
    assert inbox.recv() == ("_store", [], {}), "in their order"
    assert not inbox.poll()


def test_long_orders_of_two_threads_are_not_mixed():
    here, there = mp.Pipe(duplex=False)
    outbox, orders = Outbox(there), [("measure", [letter * LONG], {}) for letter in (b"a", b"b")]
    threads = [threading.Thread(target=lambda order=order: [outbox.send(order) for _ in range(50)]) for order in orders]
    for thread in threads:
        thread.start()
    assert all(here.recv() in orders for _ in range(100))
    for thread in threads:
        thread.join()


def test_who_is_killed_leaves_no_process_behind(tmp_path):
    """As the system does when memory runs out: this one process, not its group."""
    from tests.local_swarm import LocalPeer  # not where this file is run as a program

    peer, alive = LocalPeer(tmp_path / "peer.log"), []
    try:
        peer.wait_epoch(1)
        processes = psutil.Process(peer.process.pid).children(recursive=True)
        peer.process.kill()
        _, alive = psutil.wait_procs(processes, timeout=120)
        names = [process.cmdline() for process in alive]
        assert len(processes) >= 4 and not any("swarm_peer" in str(name) or "p2pd" in str(name) for name in names)
    finally:
        for process in alive:
            process.kill()
        peer.kill()


if __name__ == "__main__":
    print(json.dumps(rewrite_what_a_fork_inherited()))
