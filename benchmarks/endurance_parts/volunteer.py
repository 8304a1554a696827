"""A volunteer who is to be plagued: `volunteer.py RUN HOME ADDRESS`, the real join_swarm() in a process of its own.

stdout: a JSON line a second of what he is shown. HOME/events.jsonl: every event of his worker; HOME/ledger.jsonl: its
models and counted steps. Ctrl-C leaves.
"""

from __future__ import annotations

import json
import os
import sys
import time
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from endurance_parts.ledger import WHERE

from volunteer_kit import volunteer
from volunteer_kit.stay import Stay
from volunteer_kit.story import Story
from volunteer_kit.supervisor import Supervisor


class Screen:
    """Shows nothing and writes it down."""

    has_events = False

    def __init__(self) -> None:
        self._told_at = float("-inf")

    def welcome(self, terms, login) -> None:
        pass

    def show(self, progress) -> None:
        if time.monotonic() - self._told_at >= 1:
            self._told_at = time.monotonic()
            shown = {"state": progress.state, "detail": progress.detail, "samples": progress.my_samples}
            print(json.dumps({**shown, "epoch": progress.epoch, "pid": volunteer._stay.worker_pid}), flush=True)

    def pump(self, seconds: float = 0.0) -> list[str]:
        time.sleep(seconds)
        return []

    def say(self, line: str) -> None:
        print(line, file=sys.stderr, flush=True)

    def close(self, progress=None) -> None:
        if progress is not None and progress.message:
            self.say(progress.message)


def write_down(home: Path) -> None:
    """Every event as it is taken, with the time."""
    take, log = Story.take, (home / "events.jsonl").open("a", buffering=1)

    def written(self, event):
        print(json.dumps({"at": time.time(), **event}), file=log)
        take(self, event)

    Story.take = written


if __name__ == "__main__":
    run, home, address = sys.argv[1], Path(sys.argv[2]), sys.argv[3]
    home.mkdir(parents=True, exist_ok=True)
    write_down(home)
    os.environ[WHERE] = str(home / "ledger.jsonl")
    volunteer.Stay = partial(Stay, make_worker=partial(Supervisor, module="endurance_parts.faulty_worker"))
    volunteer.join_swarm(run, home=home, surface=Screen(), host_maddrs=[f"/ip4/{address}/tcp/0"])
