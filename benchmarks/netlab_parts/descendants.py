"""All processes that a test or benchmark has started end with it, however it ends: by SIGKILL too.

    end_descendants_with_us()  # once, before the first of them is started

They are known by a mark in their environment, which they inherit and pass on, so it does not matter how each was
started. A process of its own waits for the end of this one and kills whatever carries the mark. A pipe on stdin would
reach direct children that read it; PR_SET_PDEATHSIG follows the thread that started a process, and direct children too.
"""

from __future__ import annotations

import os
import secrets
import subprocess
import sys
import time
from pathlib import Path

from volunteer_kit.process_group import kill_all

NAME = "VOLUNTEER_KIT_STARTED_BY"
LOOK_EVERY = 0.2  # s
NO_GROUP = 2**22 + 1  # no process has this id: those with the mark alone are meant


def end_descendants_with_us() -> None:
    """From now on; a process that is itself marked gives its own descendants a mark of their own."""
    mark = f"{os.getpid()}-{secrets.token_hex(8)}"
    subprocess.Popen(
        [sys.executable, "-m", "benchmarks.netlab_parts.descendants", str(os.getpid()), mark],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,  # who reads our output waits until all have closed it
        stderr=subprocess.DEVNULL,
        env=without_mark(),
        cwd=Path(__file__).parents[2],
        start_new_session=True,  # Ctrl-C is not for it
    )
    os.environ[NAME] = mark


def without_mark() -> dict[str, str]:
    """The environment for a process that is to outlive us."""
    return {name: value for name, value in os.environ.items() if name != NAME}


def main() -> None:
    parent, mark = int(sys.argv[1]), sys.argv[2]
    while os.getppid() == parent:
        time.sleep(LOOK_EVERY)
    kill_all(NO_GROUP, f"{NAME}={mark}")


if __name__ == "__main__":
    main()
