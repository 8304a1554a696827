"""A second volunteer on this machine, so that a run that nobody is in yet is a swarm all the same."""

from __future__ import annotations

import secrets
import socket
import time
from typing import TYPE_CHECKING

from volunteer_kit.home import Home
from volunteer_kit.supervisor import Supervisor
from volunteer_kit.training.protocol import WorkerSpec

if TYPE_CHECKING:
    from volunteer_kit.runs import RunConfig

LOOPBACK = "/ip4/127.0.0.1/tcp"
STARTUP = 120.0  # s


class Companion:
    """The first peer of a swarm that stays on this machine; it trains too."""

    def __init__(self, config: RunConfig, home: Home):
        spec = WorkerSpec(
            run=config.model_dump(mode="json") | {"captions": []},  # the volunteer's own worker draws
            name="companion",
            host_maddrs=[f"{LOOPBACK}/{free_port()}"],  # kept over a restart: others know it
            client_mode=False,
            home=str(home.path),
            checkpoint_dir=str(home.checkpoints),
            peers_on_machine=2,
            finish_at=config.optimizer.total_epochs,
            peer_seed=secrets.randbits(31),
        )
        self.supervisor = Supervisor(spec, log_path=home.log)
        self.error = ""
        self._maddrs: list[str] = []

    def start(self) -> None:
        self.supervisor.start()

    def address(self) -> list[str]:
        """Where the volunteer's worker finds it, waiting until it is up; [] if it does not come up."""
        deadline = time.monotonic() + STARTUP
        while not self._maddrs and not self.error and time.monotonic() < deadline:
            self.drain(timeout=0.5)
        return self._maddrs

    def drain(self, timeout: float = 0.0) -> None:
        """Take what it tells; of interest are its address, and why it gave up."""
        while (event := self.supervisor.next_event(timeout=timeout)) is not None:
            if event["event"] == "connected" and not self._maddrs:
                self._maddrs = [str(maddr) for maddr in event["maddrs"]]
            elif event["event"] == "gave_up":
                self.error = str(event["message"])
            timeout = 0.0
        if not self.supervisor.running:
            self.error = self.error or "The second volunteer has left."


def free_port() -> int:
    """A TCP port of this machine that nobody listens on now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]
