"""Processes still read and write their shared memory after one of them was killed with the lock."""

from __future__ import annotations

import ctypes
import multiprocessing as mp
import os
import signal

from volunteer_kit.swarm.net.surviving_lock import SurvivingLock


def shared_array() -> ctypes.Array:
    return mp.Array(ctypes.c_int64, 2, lock=SurvivingLock())


def count(array: ctypes.Array, times: int) -> None:
    for _ in range(times):
        with array.get_lock():
            array[0] += 1


def test_what_a_killed_process_held_is_taken_over():
    array, came = shared_array(), mp.Event()

    def hold() -> None:
        with array.get_lock():
            came.set()
            signal.pause()

    holder = mp.get_context("fork").Process(target=hold)
    holder.start()
    assert came.wait(120)
    assert not array.get_lock().acquire(timeout=0.01), "it lives"
    os.kill(holder.pid, signal.SIGKILL)
    holder.join()
    count(array, 3)
    assert array[:] == [3, 0]
    others = mp.get_context("fork").Process(target=count, args=(array, 2))
    others.start()
    others.join()
    assert array[0] == 5, "and it is a lock as before"
    assert array.get_lock().acquire(block=False)


def test_only_one_at_a_time():
    array = shared_array()
    processes = [mp.get_context("fork").Process(target=count, args=(array, 5000)) for _ in range(3)]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    assert array[0] == 15_000


def test_the_same_thread_may_take_it_again_but_not_its_fork():
    array = shared_array()
    with array.get_lock(), array.get_lock():
        fork = mp.get_context("fork").Process(target=lambda: os._exit(int(array.get_lock().acquire(block=False))))
        fork.start()
        fork.join()
        assert fork.exitcode == 0
        array[1] = 7
    assert array.get_lock().acquire(block=False)
