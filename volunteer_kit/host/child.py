"""A host's process on a leash: `python -m volunteer_kit.host.child MODULE ...` is `python -m MODULE ...` that ends when
the host is gone.

The host holds the other end of stdin. However the host ends, by SIGKILL too, the system closes it; a watcher process
or prctl(PR_SET_PDEATHSIG), which is of Linux only and follows the thread that started us, would not be as sure.
"""

from __future__ import annotations

import os
import runpy
import signal
import sys
import threading
import time
from contextlib import suppress

from volunteer_kit import output, packages
from volunteer_kit.storage.places import keep_others_out

GRACE = 10.0  # s between SIGTERM and SIGKILL


def main() -> None:
    output.keep_up()
    keep_others_out()
    module, *arguments = sys.argv[1:]
    leash = os.dup(0)
    os.set_inheritable(leash, False)
    with open(os.devnull, "rb") as nothing:  # whoever reads stdin in there must not take what is meant for us
        os.dup2(nothing.fileno(), 0)
    threading.Thread(target=_follow, args=(leash,), name="leash", daemon=True).start()
    sys.argv = [module, *arguments]
    try:
        from volunteer_kit.http_client import ask_loopback_directly

        ask_loopback_directly()
        runpy.run_module(module, run_name="__main__", alter_sys=True)
    except ImportError as error:
        text = str(error) if isinstance(error, packages.MissingDependency) else packages.explained(error)
        if text is None:
            raise
        print(text, file=sys.stderr, flush=True)
        sys.exit(packages.EXIT_CODE)


def _follow(leash: int) -> None:
    """Reads without Python's buffer: its lock would be taken for ever in each process that hivemind forks meanwhile."""
    while os.read(leash, 4096):
        pass
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(GRACE)
    if os.getpgrp() == os.getpid():
        with suppress(ProcessLookupError):
            os.killpg(os.getpid(), signal.SIGKILL)
    os._exit(1)


if __name__ == "__main__":
    main()
