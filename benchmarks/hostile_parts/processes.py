"""The processes of an honest peer, seen from outside: who they are, whether they live, what memory they hold."""

from __future__ import annotations

import contextlib
import os
import resource
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import psutil
from hivemind.p2p import PeerID

PAGE = 4096  # bytes
NICE = 5  # of training: three devices share two cores, which their other processes and the attackers need as well
OPEN_FILES = 2048  # that a process may have, however many it asks for; some systems allow no more
DHT, DAEMON, MAIN, NODE = "DHT", "p2pd", "main", "node"
NODE_MODULE = "volunteer_kit.swarm.node"


class One(NamedTuple):
    """A process; `began` tells it from a later one with the same pid."""

    pid: int
    began: float


@dataclass
class HonestPeer:
    """
    :param root: pid of its main process now; None: there is none
    :param identity: file of its key
    :param has_node: whether it takes part in rounds
    """

    name: str
    root: Callable[[], int | None]
    identity: Path
    has_node: bool = False
    watched: dict[str, One] = field(default_factory=dict)  # by role

    @property
    def peer_id(self) -> str:
        return str(PeerID.from_identity(self.identity.read_bytes()))

    def look(self) -> dict[str, One]:
        """Its processes by role: main, DHT, p2pd, node. Not those that come and go."""
        pid = self.root()
        if pid is None:
            return {}
        with contextlib.suppress(psutil.Error):
            main = psutil.Process(pid)
            found = {MAIN: main}
            for child in main.children():
                with contextlib.suppress(psutil.Error):
                    daemons = [each for each in child.children() if each.name() == DAEMON]
                    if daemons:
                        found |= {DHT: child, DAEMON: daemons[0]}
                    elif NODE_MODULE in child.cmdline():
                        found[NODE] = child
            return {role: One(each.pid, each.create_time()) for role, each in found.items()}
        return {}

    @property
    def is_whole(self) -> bool:
        return len(self.look()) == 3 + self.has_node

    def watch(self) -> None:
        """The present processes are those that must live on."""
        self.watched = self.look()

    def ended(self) -> list[str]:
        """Of the watched ones, those that live no more."""
        return [f"{self.name}: {role}" for role, one in self.watched.items() if not is_alive(one)]

    def memory(self) -> dict[str, float]:
        """MB of each watched process, by role."""
        return {role: resident(one.pid) for role, one in self.watched.items()}

    def maddr(self) -> str | None:
        """Where its p2pd listens on this machine."""
        one = self.look().get(DAEMON)
        if one is None:
            return None
        with contextlib.suppress(psutil.Error):
            for connection in psutil.Process(one.pid).net_connections("tcp4"):
                if connection.status == psutil.CONN_LISTEN:
                    return f"/ip4/127.0.0.1/tcp/{connection.laddr.port}/p2p/{self.peer_id}"
        return None


def is_alive(one: One) -> bool:
    try:
        process = psutil.Process(one.pid)
        return process.create_time() == one.began and process.status() != psutil.STATUS_ZOMBIE
    except psutil.Error:
        return False


def resident(pid: int) -> float:
    """MB of its own that it holds, without mapped files. What a fork shares counts in both, and its growth once."""
    try:
        _, whole, files, *_ = Path(f"/proc/{pid}/statm").read_text().split()
        return (int(whole) - int(files)) * PAGE / 1e6
    except (OSError, ValueError):
        return 0.0


def make_nicer(pid: int) -> None:
    """Its main thread; processes that it has started stay as they are."""
    with contextlib.suppress(OSError):
        os.setpriority(os.PRIO_PROCESS, pid, NICE)


def limit_files(pid: int) -> None:
    """For it and those that it will start."""
    with contextlib.suppress(OSError):
        resource.prlimit(pid, resource.RLIMIT_NOFILE, (OPEN_FILES, OPEN_FILES))


def sockets_of(pid: int) -> list[Path]:
    """Files of the sockets that a process listens at."""
    with contextlib.suppress(psutil.Error):
        found = {each.laddr for each in psutil.Process(pid).net_connections("unix")}
        return [Path(address) for address in found if isinstance(address, str) and address.startswith("/")]
    return []
