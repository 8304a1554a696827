"""The model of a running swarm, as a checkpoint: ask a peer for its parameters, take no part in the training.

    path = fetch_checkpoint("demo", initial_peers=["/ip4/..."])

What meets the swarm is a process of its own, `python -m volunteer_kit.fetch`: hivemind needs a main thread and takes
SIGINT from the process it runs in, which a notebook's kernel must keep.
"""

from __future__ import annotations

import json
import secrets
import subprocess
import tempfile
import threading
from collections.abc import Callable, Sequence
from pathlib import Path

from pydantic import BaseModel, ConfigDict

from volunteer_kit import output
from volunteer_kit.home import Home
from volunteer_kit.process_group import kill_all, start, wait_for_exit
from volunteer_kit.run_reader import RunError
from volunteer_kit.runs import RunConfig, load_run
from volunteer_kit.swarm.errors import SwarmError

MARGIN = 120.0  # s beside the download: start, first contact, writing
LINE_LIMIT = 2**16  # characters of one line that our own process says


class Wanted(BaseModel):
    """What the process is told, in one line on its stdin."""

    model_config = ConfigDict(extra="forbid")

    run: dict
    initial_peers: list[str]
    out: str
    timeout: float  # s for the download


def fetch_checkpoint(
    run: str | Path | RunConfig,
    *,
    initial_peers: Sequence[str] = (),
    out: str | Path = "fetched",
    timeout: float | None = None,
    say: Callable[[str], None] = output.say,
) -> Path:
    """Download the parameters that the swarm holds now and save them as a checkpoint in the folder `out`.

    Without `initial_peers` those of the run's file are asked, then those that this machine has met in the run before.
    `timeout` is in s (None: what the run gives a newcomer). Optimizer statistics are not fetched: one can draw with the
    checkpoint, not go on training. Raises RunError, SwarmError.

    :returns: the checkpoint's folder
    """
    config = run if isinstance(run, RunConfig) else load_run(run)
    peers = [*initial_peers, *config.initial_peers]
    peers = peers or Home(None, config.run_id, config.fingerprint).known_peers()
    if not peers:
        raise RunError(
            f"No peer of the run {config.run_id!r} is known, so there is nobody to ask for its model.\n"
            "1. Ask the run's host for an address like /ip4/ADDRESS/tcp/PORT/p2p/PEER_ID and give it as initial peer.\n"
            f"2. Or join the run on this machine first, and leave it running: volunteer-kit join {config.run_id}\n"
            "3. Or name a checkpoint that you have."
        )
    patience = timeout or config.swarm.load_state_timeout
    wanted = Wanted(run=config.dumped_for_worker(), initial_peers=peers, out=str(out), timeout=patience)
    return _read(wanted, patience + MARGIN, say)


def _read(wanted: Wanted, deadline: float, say: Callable[[str], None], module: str = "volunteer_kit.fetch") -> Path:
    """Start the process, pass on what it says, and leave nothing of it behind.

    The processes of its peer hold its stdout too: whenever it ends, by itself, killed, or by the deadline (s), so must
    they, or there would be no end of what can be read.
    """
    mark = f"VOLUNTEER_KIT_FETCH={secrets.token_hex(16)}"
    with tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace") as log:
        process = start(module, mark, stderr=log, text=True)
        alarm = threading.Timer(deadline, kill_all, (process.pid, mark))
        watch = threading.Thread(target=_kill_the_rest, args=(process, mark), name="fetch", daemon=True)
        alarm.start()
        watch.start()
        try:
            with process.stdin as stdin:
                stdin.write(wanted.model_dump_json() + "\n")
            while line := process.stdout.readline(LINE_LIMIT):
                told = json.loads(line)
                if "path" in told:
                    return Path(told["path"])
                if "error" in told:
                    raise SwarmError(told["error"], kind=told["kind"])
                say(told["say"])
        except (BrokenPipeError, ValueError):
            pass  # it ended in the middle; its log says more
        finally:
            alarm.cancel()
            kill_all(process.pid, mark)
            for thread in (alarm, watch):  # its pid is another's once it has been waited for
                thread.join()
            process.wait()
            process.stdout.close()
        log.seek(0)
        end = "".join(f"  | {line[:200]}\n" for line in log.read().splitlines()[-5:])
    raise SwarmError(
        f"The process that asks the swarm ended without an answer (exit code {process.returncode}).\n"
        f"1. Try again; the swarm or this machine may have been busy.\nIts log ends with:\n{end}",
        kind="fetch",
    )


def _kill_the_rest(process: subprocess.Popen, mark: str) -> None:
    wait_for_exit(process)
    kill_all(process.pid, mark)
