"""Can this machine make the processes of a peer? They are forked, whatever start method Python has by default."""

from __future__ import annotations

import multiprocessing
import subprocess
from multiprocessing.synchronize import Semaphore

from volunteer_kit.doctor import looks
from volunteer_kit.doctor.finding import Finding

NAME = "start method"
TRIED_WITHIN = 15.0  # s for one process that does nothing


def try_fork() -> dict[str, str]:
    """In the probe's process: make one as a peer's are made, with a lock that was there before it.

    :returns: `default`: Python's start method here; `error`: why the process did not run, "" if it did
    """
    from volunteer_kit.swarm.net.fork_context import FORK

    default = multiprocessing.get_start_method(allow_none=True) or multiprocessing.get_all_start_methods()[0]
    try:
        shared = FORK.Semaphore(0)
        process = FORK.Process(target=_release, args=(shared,), daemon=True)
        process.start()
    except OSError as error:
        return {"default": default, "error": error.strerror or str(error)}
    process.join(TRIED_WITHIN)  # before the lock, whose own patience a jump of the clock would end
    is_shared = shared.acquire(block=False)
    return {"default": default, "error": "" if is_shared else "it did not release the lock that it shares"}


def _release(shared: Semaphore) -> None:
    shared.release()


def start_method(within: float) -> Finding:
    try:
        found = looks.probe(["fork"], within)
    except subprocess.TimeoutExpired:
        return Finding(NAME, "warning", f"no process could be tried within {within:.0f} s", "Run it again.")
    return verdict(found["default"], found["error"])


def verdict(default: str, error: str) -> Finding:
    """:param default: Python's start method
    :param error: why a forked process did not run; "" if it did"""
    if error:
        text = f"a peer needs processes of its own, and one could not be forked: {error}"
        way_out = (
            "ulimit -u; df -h /dev/shm   show how many processes and how much shared memory there may be\n"
            "In Docker: docker run --pids-limit=-1 --shm-size=1g ..."
        )
        return Finding(NAME, "problem", text, way_out)
    text = "fork, as the kit needs it" if default == "fork" else f"{default} by default; the kit forks its own"
    return Finding(NAME, "ok", f"{text} (tried, and it works)")
