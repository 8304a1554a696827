"""A run that is attacked: its host, three volunteers who train, and a prober that asks all of them."""

from __future__ import annotations

import contextlib
import json
import os
import queue
import secrets
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.hostile_parts.host import Host
from benchmarks.hostile_parts.processes import MAIN, HonestPeer, make_nicer
from benchmarks.hostile_parts.volunteer import Volunteer
from tests.hub import Hub
from tests.local_authority import add_person
from volunteer_kit.auth.access_token import Trust
from volunteer_kit.auth.authorizer import Authorizer
from volunteer_kit.process_group import kill_all
from volunteer_kit.run_reader import find_run_file
from volunteer_kit.runs import load_run, run_key_of
from volunteer_kit.swarm.net.identity import ensure_identity

VOLUNTEERS = 3
START = 240.0  # s until all train, on two busy cores
SAMPLE_EVERY = 0.3  # s between two looks at everybody's memory
ROOT = Path(__file__).parents[2]


class Probe(NamedTuple):
    target: str
    since: float  # s, monotonic: the first question in vain before this answer, or the question itself
    at: float
    ok: bool


class Helper:
    """A process of ours that takes orders and tells events, a line of JSON each."""

    def __init__(self, module: str, log: Path, *arguments: str):
        self.log = log
        self._mark = f"VOLUNTEER_KIT_HOSTILE_HELPER={secrets.token_hex(8)}"
        name, _, value = self._mark.partition("=")
        self.process = subprocess.Popen(
            [sys.executable, "-u", "-m", module, *arguments], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
            stderr=log.open("w"), text=True, cwd=ROOT, start_new_session=True, env={**os.environ, name: value},
        )  # fmt: skip
        self.events: queue.SimpleQueue[dict[str, Any] | None] = queue.SimpleQueue()
        self.probes: list[Probe] = []
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        for line in self.process.stdout:
            with contextlib.suppress(ValueError):
                event = json.loads(line)
                if event["event"] == "probe":
                    self.probes.append(Probe(event["target"], event["since"], event["at"], event["ok"]))
                else:
                    self.events.put(event)
        self.events.put(None)

    def __enter__(self) -> Helper:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def order(self, **order: Any) -> None:
        self.process.stdin.write(json.dumps(order) + "\n")
        self.process.stdin.flush()

    def wait(self, timeout: float, *names: str) -> dict[str, Any]:
        """The next event of these names. Raises TimeoutError, RuntimeError (it ended)."""
        deadline = time.monotonic() + timeout
        while True:
            try:
                event = self.events.get(timeout=max(0.01, deadline - time.monotonic()))
            except queue.Empty:
                raise TimeoutError(f"{self.log.name}: none of {names} within {timeout:.0f} s") from None
            if event is None:
                raise RuntimeError(f"{self.log.name} ended: {self.log.read_text()[-2000:]}")
            if event["event"] in names:
                return event

    def close(self) -> None:
        kill_all(self.process.pid, self._mark)
        self.process.wait()


class SwarmRun:
    """One run, from its start to its end. A context manager.

    :param kind: "hosted" or "open"
    :param folder: of its own
    """

    def __init__(self, kind: str, folder: Path, hub: Hub):
        self.kind, self.folder, self.hub = kind, folder, hub
        self.volunteers: list[Volunteer] = []
        self.host: Host | None = None
        self.prober: Helper | None = None
        self.protocol = ""
        self.baseline: dict[str, dict[str, float]] = {}  # MB of each honest peer in the quiet time, by role
        self.peaks: dict[str, float] = {}  # MB, since it was last asked
        self._over = threading.Event()
        self._members: list[Authorizer] = []
        self._people = 0

    # --- start and end ---

    def __enter__(self) -> SwarmRun:
        try:
            self._start()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _start(self) -> None:
        self.folder.mkdir(parents=True)
        self.host = Host(self.folder, self._write_run_file(), dict(os.environ), self.kind == "hosted")
        self.host.wait_until_up()
        self.config = load_run(str(self.host.run_file if self.kind == "hosted" else self.folder / "run.yaml"))
        self.prefix = run_key_of(self.config)
        peers = list(self.config.initial_peers) or [self.host.address()]
        for number in range(1, VOLUNTEERS + 1):
            token = add_person(self.hub, f"volunteer{number}") if self.kind == "hosted" else None
            one = Volunteer(number, self.folder, self.config.model_dump(mode="json"), peers, token)
            self.volunteers.append(one)
            one.start()
        self.honest = [each.honest for each in self.volunteers] + self.host.honest()
        self.wait_for_steps(0.0, START)
        if not all(peer.is_whole for peer in self.honest):
            raise RuntimeError(f"processes are missing: {[(peer.name, peer.look()) for peer in self.honest]}")
        for peer in self.honest:
            peer.watch()
        for one in self.volunteers:
            make_nicer(one.honest.watched[MAIN].pid)
        self._start_prober()
        threading.Thread(target=self._sample, daemon=True).start()

    def _write_run_file(self) -> Path:
        text = find_run_file("demo").read_text().replace("run_id: demo", f"run_id: {self.kind}")
        assert "total_epochs: 560" in text
        text = text.replace("total_epochs: 560", "total_epochs: 100000")
        if self.kind == "hosted":
            text += "\nauthority: {url: 'http://127.0.0.1', open: true, moderators: [mona], public_key: ''}\n"
        path = self.folder / "run.yaml"
        path.write_text(text)
        return path

    def _start_prober(self) -> None:
        identity, token = self.person(keeps=True)
        targets = [each for peer in self.honest if (each := self.target(peer)) is not None]
        http = {"authority": f"{self.host.url}/run.yaml", "dashboard": f"{self.host.dashboard}/"}
        settings = {
            "targets": targets, "prefix": self.prefix, "protocol": "", "identity": str(identity), "token": token.hex(),
            "http": http if self.kind == "hosted" else {},
        }  # fmt: skip
        module = "benchmarks.hostile_parts.prober"
        self.prober = Helper(module, self.folder / "prober.log", json.dumps(settings))
        self.protocol = self.prober.wait(90.0, "ready")["protocol"]

    def _renew(self, envelope: bytes) -> None:
        """The prober's token ends after a quarter of an hour."""
        if self.prober is not None:
            with contextlib.suppress(OSError):
                self.prober.order(do="token", token=envelope.hex())

    def close(self) -> None:
        self._over.set()
        for member in self._members:
            member.stop()
        if self.prober is not None:
            self.prober.close()
        closing = [threading.Thread(target=each.close) for each in self.volunteers]
        for thread in closing:
            thread.start()
        for thread in closing:
            thread.join()
        if self.host is not None:
            self.host.close()

    # --- who is there ---

    def peer(self, name: str) -> HonestPeer:
        return next(peer for peer in self.honest if peer.name == name)

    def target(self, peer: HonestPeer) -> dict[str, Any] | None:
        maddr = peer.maddr()
        if maddr is None:
            return None
        return {"name": peer.name, "peer": peer.peer_id, "maddr": maddr, "node": peer.has_node}

    def targets(self) -> list[dict[str, Any]]:
        """All that attackers know of, a volunteer first."""
        return [each for peer in self.honest if (each := self.target(peer)) is not None]

    def person(self, is_member: bool = True, keeps: bool = False) -> tuple[Path, bytes]:
        """Somebody new.

        :param keeps: the token is renewed before it ends
        :returns: the file of its key, and its token from the authority; empty for a stranger
        """
        self._people += 1
        name = f"person{self._people}"
        identity = self.folder / f"{name}.key"
        key = ensure_identity(identity)
        if self.kind == "open" or not is_member:
            return identity, b""
        held: list[bytes] = []

        def take(envelope: bytes) -> None:
            held.append(envelope)
            if keeps:
                self._renew(envelope)

        trust = Trust.of(self.config.run_id, self.config.authority.public_key)
        login = add_person(self.hub, name)
        member = Authorizer(self.host.url, trust, self.config.run_id, key, login, on_token=take)
        member.join()
        if keeps:
            member.start()
            self._members.append(member)
        return identity, held[-1]

    # --- what is measured ---

    def wait_for_steps(self, since: float, timeout: float) -> list[str]:
        """Until each volunteer has made a step since then. :returns: those that have not, when the time is over or a
        process has ended"""
        deadline = time.monotonic() + timeout
        while True:
            waiting = [each.name for each in self.volunteers if not each.steps_since(since)]
            has_given_up = any(not each.supervisor.running for each in self.volunteers)
            if not waiting or time.monotonic() > deadline or self.ended() or has_given_up:
                break
            time.sleep(0.1)
        if waiting and since == 0.0:
            stories = "\n".join(each.supervisor.log_path.read_text()[-1500:] for each in self.volunteers)
            raise RuntimeError(f"{waiting} do not train after {timeout:.0f} s\n{stories}")
        return waiting

    def ended(self) -> list[str]:
        """Processes of honest peers that live no more."""
        return [each for peer in self.honest for each in peer.ended()]

    def pauses(self, since: float, until: float | None = None) -> dict[str, float]:
        """s of the longest time in which each target gave no answer, of those that ended since then."""
        found: dict[str, float] = {}
        for probe in reversed(self.prober.probes[:]):
            if probe.at < since:
                break
            if until is None or probe.at <= until:
                seconds = probe.at - max(probe.since, since)
                found[probe.target] = max(found.get(probe.target, 0.0), seconds)
        return found

    def wait_for_answers(self, since: float, timeout: float, of: str = "") -> list[str]:
        """Until each target, whose name begins so, has answered since. :returns: those that have not"""
        deadline = time.monotonic() + timeout
        names = {probe.target for probe in self.prober.probes if probe.target.startswith(of)}
        while True:
            recent = self.prober.probes[-2000:]
            answered = {probe.target for probe in recent if probe.ok and probe.at > since}
            if names <= answered or time.monotonic() > deadline:
                return sorted(names - answered)
            time.sleep(0.1)

    def _sample(self) -> None:
        while not self._over.wait(SAMPLE_EVERY):
            for peer in self.honest:
                self.peaks[peer.name] = max(self.peaks.get(peer.name, 0.0), sum(self._grown(peer).values()))

    def take_baseline(self) -> None:
        self.baseline = {peer.name: peer.memory() for peer in self.honest}
        self.peaks.clear()

    def _grown(self, peer: HonestPeer) -> dict[str, float]:
        """MB since the quiet time, by role, of the processes that are there."""
        before = self.baseline.get(peer.name, {})
        return {role: now - before.get(role, now) for role, now in peer.memory().items() if now}

    def growth(self) -> tuple[float, str]:
        """MB of the peer that has grown most since the quiet time, and which of its processes did."""
        found = {peer.name: self._grown(peer) for peer in self.honest}
        worst = max(found, key=lambda name: sum(found[name].values()))
        role = max(found[worst], key=found[worst].__getitem__, default="")
        return sum(found[worst].values()), f"{worst}: {role} {found[worst].get(role, 0.0):+.0f}"

    def newcomer(self) -> str:
        """Let a peer that nobody knows connect to all. :returns: whom it could not reach; empty if it could"""
        try:
            identity, token = self.person()
        except Exception as error:  # an authority that is shut lets nobody in
            return f"authority: {type(error).__name__}"
        self.prober.order(do="newcomer", identity=str(identity), token=token.hex())
        try:
            return ", ".join(self.prober.wait(120.0, "newcomer")["lost"])
        except TimeoutError:
            return "everybody"
