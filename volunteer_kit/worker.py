"""The process that trains: `python -m volunteer_kit.worker`, started and read by a supervisor.

It is a process of its own because hivemind ignores Ctrl-C where it builds an Optimizer, needs the main thread, and
grows in memory over hours. stdin: a WorkerSpec, then commands. stdout: events, one a line. stderr: logs.
Exit codes are in training/protocol.py.
"""

from __future__ import annotations

import io
import os
import signal
import sys
import threading
import traceback
from contextlib import suppress
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from volunteer_kit import output, packages
from volunteer_kit.storage.places import keep_others_out
from volunteer_kit.training.protocol import (
    BROKEN,
    OFFLINE,
    REFUSED,
    RENEW,
    FinishAt,
    Leave,
    WorkerSpec,
    dump_event,
    parse_command,
)

# kinds of trouble: nobody of the swarm, or no authority, answers; the clock is wrong
MAY_PASS = ("dead_peers", "away", "down", "limit", "clock")
OOM_SCORE = "500"  # of 1000
PATIENCE = 45.0  # s for the worker of a kernel that was killed to say goodbye


class Voice:
    """Events to the supervisor. What libraries print must not land among them, so stdout is theirs no longer."""

    def __init__(self):
        self._out = os.fdopen(os.dup(sys.stdout.fileno()), "w", buffering=1, encoding="utf-8")
        os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
        self._lock = threading.Lock()

    def __call__(self, event: str, **fields: Any) -> None:
        line = dump_event(event, **fields)
        with self._lock:
            try:
                print(line, file=self._out)
            except BrokenPipeError:  # the supervisor is gone; stdin has ended too, and says so
                pass


def own_stdin() -> io.FileIO:
    """stdin without Python's buffer: a thread that waits in the buffer holds its lock, and every process forked
    meanwhile (hivemind's) would wait for that lock for ever."""
    raw = os.fdopen(os.dup(0), "rb", buffering=0)
    sys.stdin = open(os.devnull, encoding="utf-8")
    return raw


class Orders:
    """What the supervisor wants: read from stdin by a thread; SIGTERM and the end of stdin mean leave."""

    def __init__(self, stdin: io.FileIO):
        self._stdin = stdin
        self.finish_at: int | None = None
        self.leave = threading.Event()
        signal.signal(signal.SIGTERM, lambda *_: self.leave.set())
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        for line in self._stdin:
            try:
                command = parse_command(line)
            except ValueError:
                print(f"not a command: {line[:200]!r}", file=sys.stderr)
                continue
            if isinstance(command, Leave):
                break
            if isinstance(command, FinishAt):
                self.finish_at = command.epoch
        self.leave.set()


def main() -> int:
    """Read the spec, train until told otherwise. :returns: the exit code."""
    output.keep_up()
    keep_others_out()
    voice, stdin = Voice(), own_stdin()
    with suppress(OSError):  # where memory runs out, the kernel shall take this process, and not a terminal or a kernel
        Path("/proc/self/oom_score_adj").write_text(OOM_SCORE)
    from volunteer_kit.swarm.node.link import launch_node

    launched = launch_node()  # it loads its libraries while this process loads its own
    try:  # takes seconds, in which the volunteer may still be reading what it is all about
        from volunteer_kit.auth.process_token import keep_token
        from volunteer_kit.data.errors import DataError
        from volunteer_kit.home import Home
        from volunteer_kit.http_client import ask_loopback_directly
        from volunteer_kit.run_reader import RunError
        from volunteer_kit.session import Left, Renew, SentAway, Session
        from volunteer_kit.swarm.net.children import BROKEN as IS_BROKEN
        from volunteer_kit.swarm.net.children import end_program
    except ImportError as e:
        told = packages.explained(e) if isinstance(e, ModuleNotFoundError) else None
        voice("error", kind="install", message=told or f"The kit cannot be used here: {e}\n1. volunteer-kit doctor")
        return REFUSED
    line = stdin.readline()
    if not line:  # the volunteer thought better of it
        return 0
    try:
        spec = WorkerSpec.model_validate_json(line)
    except ValueError as e:
        count = e.error_count() if isinstance(e, ValidationError) else 1  # its text would repeat the token
        voice("error", kind="spec", message=f"The worker was started with a specification it cannot read ({count}).")
        return REFUSED
    voice("starting", pid=os.getpid(), name=spec.name)
    orders = Orders(stdin)
    keep_token(spec.hf_token)
    ask_loopback_directly()
    home = Home(spec.home) if spec.home else None
    if home and not home.lock("worker", patience=PATIENCE):
        way_out = home.who_holds("worker") or "See which: ps x"
        voice("error", kind="home", message=f"Another worker holds {home.path}, and does not end.\n1. {way_out}")
        return REFUSED

    def end_broken(why: str) -> None:
        end_program(lambda: voice("broken", message=f"{why}."), BROKEN)

    try:
        session = Session(spec, voice, end_broken, orders.leave, launched)
    except Left:
        return 0
    except (RunError, OSError, ImportError) as e:
        # these say in plain words what to do; OSError includes SwarmError, DataError and CheckpointError
        traceback.print_exc()
        kind = getattr(e, "kind", type(e).__name__)
        if kind == IS_BROKEN:
            voice("broken", message=str(e))
            return BROKEN
        voice("error", kind=kind, message=str(e))
        return OFFLINE if isinstance(e, DataError) or kind in MAY_PASS else REFUSED
    try:
        session.train(orders)
        return 0
    except Left:
        return 0
    except Renew:
        return RENEW
    except SentAway as e:
        voice("error", kind=e.kind, message=str(e))
        return REFUSED
    except OSError as e:  # what was there an hour ago can come back: the supervisor starts us again, with patience
        traceback.print_exc()
        if getattr(e, "kind", None) == IS_BROKEN:
            voice("broken", message=str(e))
            return BROKEN
        is_line = isinstance(e, (DataError, ConnectionError))
        voice("error" if is_line else "warning", kind=getattr(e, "kind", type(e).__name__), message=str(e))
        return OFFLINE if is_line else 1
    finally:
        session.close()


if __name__ == "__main__":
    sys.exit(main())
