"""A volunteer who joins: `newcomer.py RUN HOME`. His token comes by stdin when the screen asks for it; stdout gets one
line of JSON when his first sample is in a global step. Ctrl-C and SIGTERM leave."""

from __future__ import annotations

import json
import sys
import time

BEGAN = time.monotonic()


class Screen:
    """A surface that does at once what it is asked for, and counts that: each text typed, each button pressed. The
    click that ran the cell comes before."""

    has_events = False

    def __init__(self) -> None:
        self.interactions = 0
        self.stages: dict[str, float] = {}
        self._is_told = False

    def welcome(self, terms, login) -> None:
        self._reach("terms")
        if login is not None and login.name is None:
            login.check(sys.stdin.readline().strip())
            self.interactions += 1
        self.interactions += 1  # the button
        self._reach("logged in")

    def show(self, progress) -> None:
        self._reach(progress.state)
        if progress.my_samples and not self._is_told:
            self._is_told = True
            self._reach("counted")
            told = {"samples": progress.my_samples, "interactions": self.interactions, "stages": self.stages}
            print(json.dumps(told), flush=True)

    def pump(self, seconds: float = 0.0) -> list[str]:
        time.sleep(min(seconds, 0.05))
        return []

    def say(self, line: str) -> None:
        print(line, flush=True)

    def close(self, progress=None) -> None:
        pass

    def _reach(self, stage: str) -> None:
        self.stages.setdefault(stage, round(time.monotonic() - BEGAN, 2))


if __name__ == "__main__":
    from volunteer_kit import join_swarm

    join_swarm(sys.argv[1], home=sys.argv[2], surface=Screen(), host_maddrs=["/ip4/127.0.0.1/tcp/0"])
