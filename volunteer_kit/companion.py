"""A second volunteer on this machine, so that a run that nobody is in yet is a swarm all the same."""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from volunteer_kit.addressing import free_port, loopback_maddr
from volunteer_kit.home import Home
from volunteer_kit.supervisor import Supervisor
from volunteer_kit.training.protocol import WorkerSpec

if TYPE_CHECKING:
    from volunteer_kit.runs import RunConfig

STARTUP = 120.0  # s
LATE = "it did not answer within two minutes"


class Companion:
    """The first peer of a swarm that stays on this machine; it trains too. It pauses and comes back as often as asked.

    :param hf_token: the volunteer's, whose second peer it is
    :ivar maddrs: where the volunteer's worker finds it; [] until it is up
    :ivar error: why it is not there, or no more; "" while all is well
    """

    def __init__(
        self,
        config: RunConfig,
        home: Home,
        hf_token: str | None = None,
        make_worker: Callable[..., Supervisor] = Supervisor,
    ):
        self._spec = WorkerSpec(
            run=config.dumped_for_worker() | {"captions": []},  # the volunteer's own worker draws
            name="companion",
            host_maddrs=[loopback_maddr(free_port())],  # kept over a restart: others know it
            client_mode=False,
            home=str(home.path),
            checkpoint_dir=str(home.checkpoints),
            peers_on_machine=2,
            finish_at=config.optimizer.total_epochs,
            hf_token=hf_token,
            peer_seed=secrets.randbits(31),
        )
        self._home, self._make_worker = home, make_worker
        self._worker = self._new_worker()
        self._is_closed = False
        self._late_at = 0.0
        self.error = ""
        self.maddrs: list[str] = []

    @property
    def running(self) -> bool:
        return self._worker.running

    def start(self) -> None:
        """For the first time, or after begin_leave(); drain() tells when it is up. Nothing after close()."""
        if self._is_closed:
            return
        if self._late_at:
            self._worker = self._new_worker()
        self.maddrs, self.error, self._late_at = [], "", time.monotonic() + STARTUP
        self._worker.start()
        if self._is_closed:  # by another thread meanwhile, which saw nothing to end yet
            self._worker.close()

    def drain(self) -> None:
        """Take what it tells; of interest are its address, and why it gave up."""
        has_ended = not self._worker.running  # looked at first: its reason may come at the same moment as its end
        while (event := self._worker.next_event(timeout=0.0)) is not None:
            if event["event"] == "connected" and not self.maddrs:
                self.maddrs = [str(maddr) for maddr in event["maddrs"]]
            elif event["event"] == "gave_up":
                self.error = str(event["message"]).partition("\n")[0]
        if has_ended:
            self.error = self.error or "it has left"
        elif not self.maddrs and time.monotonic() >= self._late_at:
            self.error = self.error or LATE

    def begin_leave(self) -> None:
        """Say goodbye; at once, if it has met nobody yet."""
        self.drain()
        if self.maddrs:
            self._worker.begin_leave()
        else:
            self._worker.close()

    def leave(self) -> None:
        """As begin_leave(), and wait for it."""
        self.begin_leave()
        self._worker.leave()

    def give_up(self) -> None:
        """End it at once; start() would begin another one."""
        self._worker.close()

    def close(self) -> None:
        """End it at once, for good."""
        self._is_closed = True
        self._worker.close()

    def _new_worker(self) -> Supervisor:
        return self._make_worker(self._spec, log_path=self._home.log)


def swarm_of_two(config: RunConfig, home: Home, spec: WorkerSpec) -> tuple[Companion, WorkerSpec]:
    """A companion for the volunteer whose home and spec these are, and what that changes in the spec."""
    folder = spec.checkpoint_dir or str(home.checkpoints)
    changes = {"host_maddrs": [loopback_maddr()], "checkpoint_dir": folder, "peers_on_machine": 2}
    companion = Companion(config, Home(home.path / "companion"), spec.hf_token)
    return companion, spec.model_copy(update=changes)
