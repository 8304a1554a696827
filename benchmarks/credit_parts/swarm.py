"""Machines, a monitor and a bootstrap peer on loopback, each a process group of its own."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import time
from pathlib import Path

from hivemind.p2p import P2P, PeerID

from credit_parts.truth import Truth, judge
from volunteer_kit.process_group import kill_all
from volunteer_kit.swarm.credit.ledger import CreditLedger
from volunteer_kit.swarm.net.peer import PeerConfig, start_peer

BENCHMARKS = Path(__file__).parents[1]
START = 120.0  # s, on two cores
LEAVE = 60.0
KEYS = 8  # of a machine


class Process:
    """`python -m MODULE SETTINGS`, whose stdout is kept in a file."""

    def __init__(self, module: str, settings: dict, log: Path):
        self.module, self.settings, self.log = module, settings, log
        self.process: subprocess.Popen | None = None

    def start(self) -> None:
        path = os.pathsep.join([str(BENCHMARKS), str(BENCHMARKS.parent)])
        self.process = subprocess.Popen(
            [sys.executable, "-m", self.module, json.dumps(self.settings)],
            stdin=subprocess.PIPE,
            stdout=self.log.open("a"),
            stderr=self.log.with_suffix(".err").open("a"),
            env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"},
            start_new_session=True,
        )

    def lines(self) -> list[dict]:
        return [json.loads(line) for line in self.log.read_text().splitlines() if line.endswith("}")]

    def kill(self) -> None:
        """SIGKILL, as a lost VM."""
        if self.process is not None:
            kill_all(self.process.pid)
            self.process.wait(20)

    def leave(self) -> None:
        """As it should."""
        self.ask_to_leave()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(LEAVE)
        self.kill()

    def ask_to_leave(self) -> None:
        with contextlib.suppress(OSError):
            self.process.stdin.write(b"leave\n")
            self.process.stdin.flush()


class Machine(Process):
    """:ivar keys: those that it takes one after another: who has said goodbye never votes again under the same one"""

    def __init__(self, slot: int, account: str, settings: dict, folder: Path):
        self.slot, self.account = slot, account
        self.keys, self.book = [folder / f"{slot}-{number}.key" for number in range(KEYS)], folder / f"{slot}.jsonl"
        for key in self.keys:
            P2P.generate_identity(str(key))
        self.book.touch()
        super().__init__("credit_parts.peer", settings | {"slot": slot, "book": str(self.book)}, folder / f"{slot}.log")
        self._take(self.keys[0])

    def _take(self, key: Path) -> None:
        self.settings |= {"identity": str(key), "folder": str(key.with_suffix(""))}

    def leave(self) -> None:
        super().leave()
        now = self.keys.index(Path(self.settings["identity"]))
        self._take(self.keys[min(now + 1, KEYS - 1)])

    @property
    def peer_ids(self) -> list[str]:
        """Return the peer ids of all its keys."""
        return [PeerID.from_identity(key.read_bytes()).to_base58() for key in self.keys]


class Swarm:
    def __init__(self, scenario, folder: Path, target: int, pause: float):
        self.folder, self.ledger = folder, folder / "credit.sqlite"
        self.bootstrap = start_peer(PeerConfig(host_maddrs=["/ip4/127.0.0.1/tcp/0"]))
        fair = target / len(scenario.accounts)
        settings = {"initial_peers": self.bootstrap.visible_maddrs(), "target_batch_size": target, "pause": pause}
        self.machines = [
            Machine(slot, account, settings | {"fair": fair} | scenario.attacks.get(slot, {}), folder)
            for slot, account in enumerate(scenario.accounts)
        ]
        self.accounts = {peer: machine.account for machine in self.machines for peer in machine.peer_ids}
        for ghost in scenario.ghosts:
            P2P.generate_identity(str(folder / f"{ghost}.key"))
            self.accounts[PeerID.from_identity((folder / f"{ghost}.key").read_bytes()).to_base58()] = ghost
        for machine in self.machines:
            machine.settings["accounts"] = self.accounts
        more = {"ledger": str(self.ledger), "accounts": self.accounts}
        more |= {"identity": str(folder / "monitor.key"), "folder": str(folder / "monitor")}
        P2P.generate_identity(more["identity"])
        self.monitor = Process("credit_parts.monitor", settings | more, folder / "monitor.log")

    def start(self) -> None:
        for process in (*self.machines, self.monitor):
            process.start()
        ends = time.monotonic() + START
        while not all(any(line.get("group", 0) > 1 for line in machine.lines()) for machine in self.machines):
            if time.monotonic() > ends:
                logs = [machine.log.with_suffix(".err").read_text()[-1500:] for machine in self.machines]
                raise RuntimeError("The swarm did not start:\n" + "\n".join(logs))
            time.sleep(1)

    def wait(self, until: float) -> None:
        time.sleep(max(0.0, until - time.monotonic()))

    def end(self) -> None:
        """All leave at once, and the monitor when it has collected the rest."""
        for machine in self.machines:
            machine.ask_to_leave()
        for process in (*self.machines, self.monitor):
            process.leave()

    def kill(self) -> None:
        for process in (*self.machines, self.monitor):
            process.kill()
        self.bootstrap.shutdown()

    def judge(self) -> tuple[Truth, dict[str, int]]:
        """Return what the machines gave, and the samples that each account was credited."""
        ledger = CreditLedger(self.ledger, read_only=True)
        totals = {total.username: total for total in ledger.totals()}
        ledger.close()
        truth = judge({machine.slot: machine.book for machine in self.machines})
        return truth, {name: total.samples for name, total in totals.items()}
