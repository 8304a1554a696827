"""The demo's processes: a first peer, volunteers under supervision, and the two mishaps."""

from __future__ import annotations

import json
import os
import queue
import secrets
import subprocess
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path

from volunteer_kit.addressing import loopback_maddr
from volunteer_kit.checkpoint import Checkpoint, CheckpointError, latest_checkpoint, load_checkpoint
from volunteer_kit.demo.state import DemoState
from volunteer_kit.home import cut_log
from volunteer_kit.packages import with_kit_path
from volunteer_kit.process_group import kill_all, note_leader
from volunteer_kit.runs import RunConfig
from volunteer_kit.storage.socket_folders import remove_stale_folders
from volunteer_kit.supervisor import Supervisor
from volunteer_kit.training.protocol import WorkerSpec

BOOTSTRAP_TIMEOUT = 120.0  # s
LEAVE_TIMEOUT = 20.0  # s for a volunteer to say goodbye


class DemoError(RuntimeError):
    """The demo cannot go on; the message says why and what to do."""


class DemoSwarm:
    """A bootstrap peer and volunteers, each a process tree of its own; close() leaves none of them behind.

    :param scratch: a folder for identities and checkpoints, deleted by the caller
    :param logs: a folder for one log a process
    :param batch_size: each volunteer's microbatch; None: what its device plan says
    """

    def __init__(
        self, config: RunConfig, state: DemoState, scratch: Path, logs: Path, *, batch_size: int | None, threads: int
    ) -> None:
        self.config, self.state, self.scratch, self.logs = config, state, scratch, logs
        self.batch_size, self.threads = batch_size, threads
        self.supervisors: dict[str, Supervisor] = {}
        self.killed: str | None = None
        self.late: str | None = None
        self._bootstrap: subprocess.Popen[bytes] | None = None
        self._mark = f"VOLUNTEER_KIT_DEMO={secrets.token_hex(16)}"
        self._maddrs: list[str] = []

    @property
    def names(self) -> list[str]:
        return list(self.supervisors)

    @property
    def newest_epoch(self) -> int:
        """The newest epoch that any volunteer has told of."""
        return max((v.epoch for v in self.state.volunteers.values()), default=0)

    @property
    def is_back(self) -> bool:
        """The killed volunteer's work has entered epochs again."""
        return self.killed is not None and self.state.volunteers[self.killed].returned

    @property
    def is_late_one_in(self) -> bool:
        """The late joiner's work has entered epochs."""
        return self.late is not None and self.state.volunteers[self.late].samples > 0

    def start(self, volunteers: int) -> None:
        """The first peer, then all volunteers at once. Raises DemoError if the first peer does not start."""
        self._maddrs = self._start_bootstrap()
        for _ in range(volunteers):
            self._add()

    def kill(self) -> None:
        """SIGKILL the last of the first volunteers, without a word to anybody."""
        self.killed = self.names[-1] if self.late is None else self.names[-2]
        self.supervisors[self.killed].kill()
        self.state.killed(self.killed, time.time())

    def add_late(self) -> None:
        """One more volunteer, of whom nobody has heard."""
        self.late = self._add(late=True)
        self.state.news.append(f"{self.late} is new and joins in the middle of the training.")

    def finish_at(self, epoch: int) -> None:
        for supervisor in self.supervisors.values():
            supervisor.finish_at(epoch)

    def take_events(self) -> None:
        """Everything that the volunteers have said since the last call, into the state and logs/events.jsonl."""
        lines = []
        for name, supervisor in self.supervisors.items():
            while (event := supervisor.next_event(timeout=0)) is not None:
                self.state.apply(name, event)
                lines.append(json.dumps({"volunteer": name, **event}) + "\n")
        if lines:
            with open(self.logs / "events.jsonl", "a", encoding="utf-8") as file:
                file.writelines(lines)
            for name in ("events.jsonl", "first-peer.log"):
                with suppress(OSError):
                    cut_log(self.logs / name)

    def final_checkpoints(self) -> dict[str, Checkpoint]:
        """What every volunteer that finished has saved at the end, verified. Raises CheckpointError."""
        found = {}
        for name, volunteer in self.state.volunteers.items():
            if volunteer.finished_epoch is not None and volunteer.checkpoint:
                found[name] = load_checkpoint(volunteer.checkpoint, fingerprint=self.config.fingerprint)
        return found

    def newest_saved(self) -> Checkpoint | None:
        """The newest good checkpoint of anybody: what an interrupted demo leaves."""
        found = []
        for number in range(1, len(self.names) + 1):
            try:
                saved = latest_checkpoint(self._home(number) / "checkpoints", fingerprint=self.config.fingerprint)
            except CheckpointError:
                continue
            found += [saved] if saved else []
        return max(found, key=lambda checkpoint: checkpoint.epoch, default=None)

    def leave(self) -> None:
        """All volunteers say goodbye, at the same time; returns when they are gone."""
        for supervisor in self.supervisors.values():
            supervisor.begin_leave(LEAVE_TIMEOUT)
        while any(supervisor.running for supervisor in self.supervisors.values()):
            self.take_events()
            time.sleep(0.05)
        self.take_events()
        process = self._bootstrap
        if process is not None:
            process.stdin.close()  # it leaves when this ends
            try:
                process.wait(timeout=5)
            except subprocess.TimeoutExpired:
                pass

    def close(self) -> None:
        """Everything still there ends at once. May be called again and again."""
        for supervisor in self.supervisors.values():
            supervisor.close()
        process, self._bootstrap = self._bootstrap, None
        if process is not None:
            kill_all(process.pid, self._mark)
            process.wait()
            remove_stale_folders()

    def _add(self, late: bool = False) -> str:
        index = len(self.supervisors) + 1
        name = f"volunteer {index}"
        home = self._home(index)
        home.mkdir(parents=True)
        spec = WorkerSpec(
            run=self.config.dumped_for_worker() | {"captions": []},  # drawn once, at the end
            name=name,
            initial_peers=self._maddrs,
            host_maddrs=[loopback_maddr()],
            client_mode=False,
            checkpoint_dir=str(home / "checkpoints"),
            home=str(home),
            batch_size=self.batch_size,
            threads=self.threads,
            peer_seed=index,
        )
        self.state.add(name, late=late)
        self.supervisors[name] = Supervisor(spec, log_path=self.logs / f"volunteer-{index}.log")
        self.supervisors[name].start()
        return name

    def _home(self, index: int) -> Path:
        return self.scratch / f"volunteer-{index}"

    def _start_bootstrap(self) -> list[str]:
        name, _, value = self._mark.partition("=")
        with open(self.logs / "first-peer.log", "ab") as log:
            self._bootstrap = subprocess.Popen(
                [sys.executable, "-m", "volunteer_kit.demo.bootstrap"],
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log,
                env={**with_kit_path(os.environ), name: value}, start_new_session=True,
            )  # fmt: skip
            note_leader(self._bootstrap.pid, self._mark)
        answers: queue.SimpleQueue[bytes] = queue.SimpleQueue()
        stdout = self._bootstrap.stdout
        threading.Thread(target=lambda: answers.put(stdout.readline()), daemon=True).start()
        try:
            answer = json.loads(answers.get(timeout=BOOTSTRAP_TIMEOUT) or b"{}")
        except (queue.Empty, ValueError):
            answer = {}
        if not answer.get("maddrs"):
            reason = answer.get("error", f"it said nothing; its log: {self.logs / 'first-peer.log'}")
            raise DemoError(f"The swarm's first peer did not start: {reason}")
        return answer["maddrs"]
