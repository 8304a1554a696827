"""A run on one machine: first peer, authority, monitor, dashboard; started, watched, ended in order."""

from __future__ import annotations

import json
import queue
import shlex
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path

from volunteer_kit import output, packages
from volunteer_kit.addressing import LISTEN, loopback
from volunteer_kit.host import parts
from volunteer_kit.host.folder import HostFolder
from volunteer_kit.host.line import proxy_troubles
from volunteer_kit.host.plain import host_peer_only
from volunteer_kit.host.ports import CLOSING, choose, gets_free
from volunteer_kit.host.settings import (
    AUTHORITY_PORT,
    DASHBOARD_PORT,
    PEER_PORT,
    HostError,
    HostSettings,
    authority_url,
    dashboard_address,
    is_for_others,
    is_loopback,
    listening_port,
    require_help_url,
)
from volunteer_kit.host.watch import News, Part, Watch
from volunteer_kit.host.way_in import make_offer
from volunteer_kit.host.words import welcome
from volunteer_kit.process_group import stops_as_one
from volunteer_kit.storage import write_once, write_whole
from volunteer_kit.storage.places import adopt_home, keep_others_out
from volunteer_kit.ways_in import read_offer

STAGES = (5.0, 7.0, 13.0)  # s since the order to stop: when the next ones are told, and at the end killed


def host_run(
    run: str | Path,
    *,
    folder: str | Path | None = None,
    authority: bool = True,
    settings: HostSettings | None = None,
    identity_path: str | Path | None = None,
    host_maddrs: Sequence[str] = (),
    announce_maddrs: Sequence[str] = (),
    initial_peers: Sequence[str] = (),
    stop: threading.Event | None = None,
    say: Callable[[str], None] = output.say,
) -> None:
    """Keep a run up until Ctrl-C, SIGTERM or `stop`; says how to join and what happens. SIGKILL leaves nothing behind,
    and the next start goes on with the same addresses, keys, state and members.

    :param run: a run file; the volunteers' own, with addresses and key, is made of it
    :param folder: of all that is kept; default: ./RUN_ID-host
    :param authority: False: only the first peer, and whoever knows its address takes part
    :param settings: beside the addresses that are given here
    :param identity_path: key of the first peer, copied into the folder at the first start
    :param host_maddrs: where the first peer listens; default: all addresses, a port that stays the same
    :param announce_maddrs: what others dial instead, behind a router
    Raises MissingDependency, RunError, SwarmError, HostError, KeysError.
    """
    adopt_home(folder or ".")
    keep_others_out()
    inbox: queue.SimpleQueue[News] = queue.SimpleQueue()  # written in C: a signal handler may put into it at any time
    stopped = stop.is_set if stop else lambda: False
    if not authority:
        with _signals(inbox, wait=True) as listen:
            host_peer_only(
                run, identity_path=identity_path, host_maddrs=host_maddrs or LISTEN,
                announce_maddrs=announce_maddrs, initial_peers=initial_peers, say=say, on_start=listen,
                stopped=lambda: stopped() or not inbox.empty(),
            )  # fmt: skip
        return
    given = replace(
        settings or HostSettings(),
        host_maddrs=tuple(host_maddrs), announce_maddrs=tuple(announce_maddrs), initial_peers=tuple(initial_peers),
    )  # fmt: skip
    host = Host(run, folder, given, inbox, say)
    try:
        with _signals(inbox), stops_as_one(say, "the run"):
            host.prepare(identity_path)
            host.keep_up(stopped)
    finally:
        host.folder.unlock()


@contextmanager
def _signals(inbox: queue.SimpleQueue[News], wait: bool = False) -> Iterator[Callable[[], None]]:
    """SIGINT, SIGTERM and SIGHUP (unless it is ignored, as under nohup) become news, from the moment that what is given
    is called; at once unless `wait`."""
    before: dict[int, object] = {}

    def listen() -> None:
        if threading.current_thread() is threading.main_thread():
            hang_up = [signal.SIGHUP] if signal.getsignal(signal.SIGHUP) == signal.SIG_DFL else []
            for number in (signal.SIGINT, signal.SIGTERM, *hang_up):
                before[number] = signal.signal(number, lambda *_: inbox.put(News("stop")))

    try:
        if not wait:
            listen()
        yield listen
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


class Host:
    """What host_run keeps up."""

    def __init__(
        self,
        run: str | Path,
        folder: str | Path | None,
        given: HostSettings,
        inbox: queue.SimpleQueue[News],
        say: Callable[[str], None],
    ):
        from volunteer_kit.run_reader import find_run_file

        packages.require("host")
        from volunteer_kit.runs import load_run  # torch: seconds, and nothing for a process on a leash

        self._source = find_run_file(str(run))
        self._run_id = run_id_of(self._source)
        self._load_run = load_run
        self.folder = HostFolder(folder or f"{self._run_id}-host")
        self._given, self._inbox, self._say = given, inbox, say
        self._watches: dict[str, Watch] = {}
        self._up: set[str] = set()  # by the news taken so far; a watch may be ahead of them
        self._failing: set[str] = set()
        self._addresses: list[str] = []
        self._given_out: list[str] = []
        self._invited = False

    # --- before anything starts ---

    def prepare(self, identity_path: str | Path | None = None) -> None:
        """Lock, keys, ports, run file. Raises HostError, KeysError, RunError, SwarmError (bad_address)."""
        from volunteer_kit.auth.access_token import KeyFolder
        from volunteer_kit.auth.keys import NO_KEY
        from volunteer_kit.host.run_file import read_given
        from volunteer_kit.swarm.net.peer import PeerConfig, check_addresses

        saved = self.folder.read()
        if saved.get("run_id", self._run_id) != self._run_id:
            raise HostError(
                f"The folder {self.folder.path} is of the run {saved['run_id']!r}, not {self._run_id!r}.\n"
                "1. Name another folder: --folder PATH\n2. Or give the run file of that run."
            )
        remembered = HostSettings.remembered(saved)
        settings = self._given.over(remembered)
        _, config = read_given(self._source, authority_url(settings), NO_KEY)  # before anything is made
        dashboard_address(settings)
        require_help_url(config.help_url)
        packages.require("host", "train" if config.draws else "finetune")
        if settings.tracker:
            packages.require_tracker(settings.tracker)
        maddrs = {"host_maddrs": [*settings.host_maddrs], "announce_maddrs": [*settings.announce_maddrs]}
        check_addresses(PeerConfig(**maddrs))
        self.folder.lock()
        leftovers = self.folder.end_leftovers()
        if leftovers:
            self._say("What an earlier host left behind has ended.")
        known = listening_port(remembered.host_maddrs)
        self._settings = self._with_ports(settings, known, CLOSING if leftovers else 0.0)
        self._url = authority_url(self._settings)
        self._public_key = KeyFolder(self.folder.keys).create(self._run_id)
        for role, days in KeyFolder(self.folder.keys).running_out().items():
            self._say(
                f"The certificate of the {role} ends in {days:.0f} days, and root.pem, which makes new ones, is away. "
                f"Put it back into {self.folder.keys} for a minute."
            )
        self._text, config = read_given(self._source, self._url, self._public_key)
        self._authority = config.authority
        self._others = [peer for peer in config.initial_peers if peer.rpartition("/")[2] != saved.get("peer_id")]
        self._given_out = self._addresses_given_out(saved.get("peer_id"))
        self._adopt(identity_path)
        self._require_identity(saved.get("peer_id"))
        self._save(saved.get("peer_id"))
        self._write_run_file(self._others)
        self._offer = make_offer(self.folder.path, self._url, self._settings, config)
        for line in proxy_troubles(self._url, self._offer.dashboard_url):
            self._say(line)

    def _with_ports(self, settings: HostSettings, known: int | None, patience: float) -> HostSettings:
        """Ports for ever, chosen at the first start; those that somebody has are told before anything starts.

        :param known: the first peer's, since an earlier start; "any" is that one then
        :param patience: s for those of a host that has just been ended
        """
        here = loopback()
        outside = "" if settings.tls_cert else here
        taken: set[int] = set()
        port = settings.port or choose(AUTHORITY_PORT, taken, outside)
        dashboard = settings.dashboard_port or choose(DASHBOARD_PORT, {port}, here)
        maddrs = settings.host_maddrs or LISTEN
        peer_port = listening_port(maddrs) or known or choose(PEER_PORT, {port, dashboard})
        maddrs = tuple(_with_port(maddr, peer_port) for maddr in maddrs)
        wanted = {
            "--port": (port, outside),
            "--dashboard-port": (dashboard, here),
            "--host-maddrs": (peer_port, ""),
        }
        for option, (number, address) in wanted.items():
            if not gets_free(number, address, patience):
                raise HostError(
                    f"Port {number} ({option}) is taken by another program.\n"
                    f"1. See which one: ss -ltnp 'sport = :{number}'\n"
                    f"2. End it, or choose another port with {option}; volunteers then need the run file again."
                )
        return replace(settings, port=port, dashboard_port=dashboard, host_maddrs=maddrs)

    def _adopt(self, identity_path: str | Path | None) -> None:
        if identity_path and Path(identity_path).is_file() and not self.folder.identity.exists():
            write_once(self.folder.identity, Path(identity_path).read_bytes(), mode=0o400)

    def _require_identity(self, peer_id: str | None) -> None:
        """Volunteers know the run by the peer id of this key: a damaged one is not replaced without a word. Raises
        HostError."""
        from volunteer_kit.swarm.errors import SwarmError
        from volunteer_kit.swarm.net.identity import ensure_identity

        path = self.folder.identity
        if peer_id and path.exists():
            try:
                ensure_identity(path, may_be_new=False)
            except SwarmError:
                file = shlex.quote(str(path))
                raise HostError(
                    f"{path} is damaged. Volunteers know this run by its peer id, {peer_id}.\n"
                    "1. Put back its backup: then nobody notices.\n"
                    f"2. Without one, move it away, and a new one is made: mv {file} {file}.damaged\n"
                    "   Volunteers then need the new run file."
                ) from None

    def _addresses_given_out(self, peer_id: str | None) -> list[str]:
        """By which volunteers know our first peer since an earlier start; they stand in the run file."""
        from volunteer_kit.run_reader import RunError, read_small, read_yaml

        file = self.folder.run_file
        try:
            peers = read_yaml(read_small(file), str(file)).values.get("initial_peers") if file.is_file() else None
        except (OSError, RunError):  # damaged; it is made anew
            peers = None
        known = [str(peer) for peer in peers] if isinstance(peers, list) else []
        return [peer for peer in known if peer_id and peer.endswith(f"/p2p/{peer_id}")]

    def _save(self, peer_id: str | None) -> None:
        self.folder.save({"run_id": self._run_id, "peer_id": peer_id, **asdict(self._settings)})

    def _write_run_file(self, peers: Sequence[str]) -> None:
        """Raises RunError if it is not as good as what it was made of."""
        from volunteer_kit.host.run_file import filled_in

        write_whole(self.folder.run_file, filled_in(self._text, self._url, self._public_key, peers))
        self._load_run(self.folder.run_file)

    # --- while it runs ---

    def keep_up(self, stopped: Callable[[], bool]) -> None:
        """Until told to stop. Raises HostError when its first peer does not start, for there is nothing to host, and
        when another machine has a first peer under the same key."""
        self._say(f"Starting the run {self._run_id} in {self.folder.path}")
        try:
            others = [*self._settings.initial_peers, *self._others]
            self._watch(parts.first_peer(self.folder, self._settings, others, self._given_out))
            while not stopped():
                try:
                    news = self._inbox.get(timeout=0.5)
                except queue.Empty:
                    continue
                if news.kind == "stop":
                    break
                self._take(news)
            self._say("Stopping.")
        finally:
            self._stop()

    def _watch(self, part: Part) -> None:
        self._watches[part.name] = Watch(part, self.folder.log(part.name), self.folder.mark, self._inbox.put)
        self._watches[part.name].start()

    def _take(self, news: News) -> None:
        if news.kind == "ready":
            self._failing.discard(news.name)
            self._up.add(news.name)
            if news.name == parts.PEER and not self._addresses:
                self._first_peer_is_up()
            elif self._invited:
                self._say(f"{news.name} is up again.")
        elif news.kind == "restarting":
            self._up.discard(news.name)
            self._say(news.text)
        elif news.kind == "warning":
            self._say(f"{news.name}: {news.text}")
        elif news.kind == "said":
            self._say(news.text)
        elif news.kind == "over":
            raise HostError(news.text)
        elif news.kind == "failing":
            self._failing.add(news.name)
            self._up.discard(news.name)
            if news.name == parts.PEER and not self._addresses:
                raise HostError(news.text)
            self._say(f"{news.text}\nThe rest goes on. When that is mended, it comes back by itself.")
        self._invite_when_all_are_up()

    def _first_peer_is_up(self) -> None:
        ready = self._watches[parts.PEER].ready
        peer_id, maddrs = str(ready.get("peer_id", "")), [str(maddr) for maddr in ready.get("maddrs", ())]
        before = self.folder.read().get("peer_id")
        if before and before != peer_id:
            self._say(f"The peer id has changed from {before} to {peer_id}: was {self.folder.identity} replaced?")
        self._addresses = to_give_out(maddrs, self._url)
        self._save(peer_id)
        self._write_run_file([*self._addresses, *self._others])
        for part in parts.other_parts(self.folder, self._settings, self._addresses):
            self._watch(part)

    def _invite_when_all_are_up(self) -> None:
        if self._invited or not self._addresses:
            return
        if self._watches.keys() <= self._up | self._failing:
            self._invited = True
            for line in welcome(
                self._run_id,
                read_offer(self.folder.path) or self._offer,
                self._settings,
                self.folder,
                self._addresses,
                sorted(self._failing),
                self._authority,
            ):
                self._say(line)

    def _stop(self) -> None:
        """In order, within 15 s. A second order kills at once."""
        began = time.monotonic()
        for names, until in zip(parts.STOP_ORDER, STAGES, strict=True):
            watches = [self._watches[name] for name in names if name in self._watches]
            for watch in watches:
                watch.begin_stop()
            while any(watch.running for watch in watches) and time.monotonic() - began < until:
                if self._told_again():
                    began = float("-inf")
                time.sleep(0.05)
        for watch in self._watches.values():
            if watch.running:
                watch.kill()
        for watch in self._watches.values():
            watch.join(timeout=8.0)

    def _told_again(self) -> bool:
        try:
            return self._inbox.get(block=False).kind == "stop"
        except queue.Empty:
            return False


def run_id_of(path: Path) -> str:
    """Raises RunError: no run file at all. What else is wrong with it is told later, with its lines."""
    from volunteer_kit.run_reader import RunError, read_small, read_yaml

    run = read_yaml(read_small(path), str(path))
    run_id = run.values.get("run_id")
    if not isinstance(run_id, str) or not run_id or "/" in run_id or run_id.startswith("."):
        raise RunError(f"{path}: 'run_id' is missing, or no name.\n  Fix: add a line `run_id: my-run`.")
    return run_id


def to_give_out(maddrs: Sequence[str], url: str) -> list[str]:
    """Which of the first peer's addresses belong into the run file: where only this machine can reach the authority,
    those of this machine; else the others."""
    from urllib.parse import urlsplit

    local = is_loopback(urlsplit(url).hostname or "")
    fitting = [maddr for maddr in maddrs if is_for_others(maddr) is not local]
    return fitting or list(maddrs)


def _with_port(maddr: str, port: int) -> str:
    return maddr.replace("/tcp/0", f"/tcp/{port}", 1) if "/tcp/0/" in f"{maddr}/" else maddr


def ready_line(**addresses: object) -> str:
    """What a part prints on stdout when it serves."""
    return json.dumps({"ready": addresses})
